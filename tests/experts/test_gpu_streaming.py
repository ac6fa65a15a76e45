"""How experts travel to a GPU: every layout in memory, every order of use, bytes and copies counted."""

import itertools
import mmap
import warnings

import pytest
import torch
from expertmoe import pack_int4
from gpuexperts import Breaking
from hypothesis import given
from hypothesis import strategies as st

from ktbridge.experts.gpu import copying, probe
from ktbridge.experts.gpu.copying import (
    HostCopier,
    Registration,
    are_expert_pages,
    page_regions,
    subtract_regions,
)
from ktbridge.experts.gpu.layer_math import BorderedMatrices
from ktbridge.experts.gpu.layout import CopySpan, Group, dequantize, group_experts, unpack_group
from ktbridge.experts.gpu.ring import Processes, Ring
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights

HIDDEN, INNER = 40, 24


class Shards:
    """Memory in several pieces, filled from the front, as a checkpoint's files are."""

    def __init__(self, count):
        self.memory = [torch.full((1 << 17,), 0xEE, dtype=torch.uint8) for _ in range(count)]
        self.used = [memory.data_ptr() % 2 for memory in self.memory]

    def place(self, tensor, shard, gap):
        """A copy of ``tensor`` in a shard, ``gap`` bytes behind what is there; aligned to its elements."""
        size, bytes_ = tensor.element_size(), tensor.numel() * tensor.element_size()
        start = -(-(self.used[shard] + gap) // size) * size
        self.used[shard] = start + bytes_
        home = self.memory[shard][start : start + bytes_].view(tensor.dtype).view(tensor.shape)
        return home.copy_(tensor)

    def holds(self, span):
        return any(
            memory.data_ptr() <= span.address and span.address + span.bytes <= memory.data_ptr() + len(memory)
            for memory in self.memory
        )


@st.composite
def layers(draw):
    """A layer's weights in some format, spread over memory in some order, what they mean, and the memory."""
    experts = draw(st.integers(1, 7), "experts")
    storage = draw(st.sampled_from(["bf16", "fp8", "int8", "int4"]), "storage")
    random = torch.Generator().manual_seed(draw(st.integers(0, 99), "seed"))
    parts, plain = {}, {}
    for name, (rows, columns) in zip(
        PROJECTIONS, [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)], strict=True
    ):
        groups = {"fp8": (1, 1), "int8": (rows, 1), "int4": (rows, -(-columns // 32))}
        for expert in range(experts):
            value = torch.randint(-8, 8, (rows, columns), generator=random)
            if storage == "bf16":
                parts[name, expert] = plain[name, expert] = value.bfloat16()
                continue
            scale = torch.rand(groups[storage], generator=random)
            wide = scale if storage != "int4" else scale.repeat_interleave(32, 1)[:, :columns]
            plain[name, expert] = (value.float() * wide).bfloat16()
            kept = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(storage)
            parts[name, expert] = pack_int4(value) if kept is None else value.float().to(kept)
            parts[f"{name}.scale", expert] = scale
    if draw(st.booleans(), "shuffled"):
        order = draw(st.permutations(list(parts)), "order")
    else:
        by_expert = draw(st.booleans(), "expert by expert")
        order = sorted(parts, key=lambda key: (key[1], key[0]) if by_expert else key)
    shards = Shards(draw(st.integers(1, 3), "shards"))
    gaps = st.sampled_from([0, 0, 0, 1, 4, 60, 70, 1000])
    cuts = draw(st.lists(st.integers(0, len(order)), max_size=2), "cuts")
    for number, key in enumerate(order):
        shard = sum(number >= cut for cut in cuts) % len(shards.memory)
        parts[key] = shards.place(parts[key], shard, draw(gaps))

    def stack(kind):
        return [parts[kind, expert] for expert in range(experts)]

    def scaled(name):
        return () if storage == "bf16" else (stack(f"{name}.scale"),)

    size = (32,) if storage == "int4" else ()
    make = getattr(ExpertWeights, storage)
    weights = [make(stack(name), *scaled(name), *size) for name in PROJECTIONS]
    return weights, plain, shards


@given(layer=layers(), fill=st.floats(1, 4))
def test_groups_bring_every_tensor_from_wherever_it_lies(layer, fill):
    weights, plain, shards = layer
    experts = weights[0].count
    tensors = {
        kind: stack
        for name, stored in zip(PROJECTIONS, weights, strict=True)
        for kind, stack in ((name, stored.weight), (f"{name}.scale", stored.scale))
        if stack is not None
    }
    one = sum(-(-stack[0].numel() * stack[0].element_size() // 256) * 256 for stack in tensors.values())
    slot_bytes = int((one + 512) * fill)
    groups = group_experts(weights, slot_bytes)
    assert sorted(itertools.chain(*(group.experts for group in groups))) == list(range(experts))
    for group in groups:
        assert group.bytes <= slot_bytes
        raw = torch.full((slot_bytes // 256 * 256,), 0x77, dtype=torch.uint8)
        HostCopier().start(group, raw, None)
        last = 0
        for span in group.spans:
            assert shards.holds(span)
            assert span.offset % 256 == 0
            assert last <= span.offset <= span.offset + span.bytes <= group.bytes
            last = span.offset + span.bytes
        covered = sum(span.bytes for span in group.spans)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in group.kept)
        assert needed <= covered <= needed + 64 * len(group.kept)
        for kind, stack in tensors.items():
            for expert, place in zip(group.experts, group.places[kind], strict=True):
                assert place % stack[expert].element_size() == 0
                expected = stack[expert].flatten().view(torch.uint8)
                assert torch.equal(raw[place : place + len(expected)], expected)
        into = BorderedMatrices(
            torch.full((len(group.experts), 2 * INNER + 16, HIDDEN + 16), 7.0).bfloat16(),
            torch.full((len(group.experts), HIDDEN + 8, INNER + 8), 7.0).bfloat16(),
            HIDDEN,
            INNER,
            8,
        )
        unpack_group(group, raw, weights, into)
        for n, expert in enumerate(group.experts):
            above = torch.cat((plain["gate", expert], plain["up", expert]))
            assert torch.equal(into.gate_up[n, : 2 * INNER, :HIDDEN], above)
            assert torch.equal(into.down[n, :HIDDEN, :INNER], plain["down", expert])
        for border in (
            into.gate_up[:, 2 * INNER :],
            into.gate_up[:, :, HIDDEN:],
            into.down[:, HIDDEN:],
            into.down[:, :, INNER:],
        ):
            assert (border == 7).all()


def test_fused_tensors_cross_in_two_spans():
    gate_up = torch.randn(6, 2 * INNER, HIDDEN).bfloat16()
    down = torch.randn(6, HIDDEN, INNER).bfloat16()
    views = [gate_up[:, :INNER], gate_up[:, INNER:], down]
    (group,) = group_experts([ExpertWeights.bf16(view) for view in views], 1 << 20)
    assert len(group.spans) == 2


def test_every_e4m3_value_is_read_as_the_kernels_read_it():
    bits = torch.arange(256).to(torch.uint8).view(16, 16)
    weights = ExpertWeights.fp8([bits], [torch.ones(1, 1)])
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    dequantize(weights, bits, torch.ones(1, 1), out)
    expected = bits.view(torch.float8_e4m3fn).float()
    expected[7, 15], expected[15, 15] = 480, -480  # where e4m3 has its NaN
    assert torch.equal(out.float(), expected)


def numbered(count):
    """Groups of one span, whose bytes say which they are."""
    tensors = [torch.full((16,), number, dtype=torch.uint8) for number in range(count)]
    return [Group((0,), (CopySpan(t.data_ptr(), 0, 16),), {}, 16, (t,)) for t in tensors]


def visit(ring, index, forward, turns):
    assert (ring.take(index, forward, turns) == index).all()
    ring.give_back(index, forward, turns)


def whole_pass(ring, backward):
    """How many groups crossed for a pass."""
    before, count = ring.transfers, len(ring.groups)
    for index in range(count):
        visit(ring, index, True, backward)
    for index in reversed(range(count if backward else 0)):
        visit(ring, index, False, True)
    return ring.transfers - before


@given(data=st.data())
def test_a_slot_holds_what_was_asked_for_in_every_order(data):
    count, slots = data.draw(st.integers(1, 12), "N"), data.draw(st.integers(1, 14), "S")
    link = Breaking()
    ring = Ring(numbered(count), 16, slots, torch.device("cpu"), link)
    for _ in range(data.draw(st.integers(0, 5), "passes before")):
        kind = data.draw(st.sampled_from(["train", "forward", "aborted", "any order", "no link"]))
        if kind in ("train", "forward"):
            whole_pass(ring, kind == "train")
        elif kind == "no link":
            link.broken = True
            for index in data.draw(st.lists(st.integers(0, count - 1), max_size=4)):
                try:
                    visit(ring, index, True, True)
                except OSError:
                    continue
            link.broken = False
        elif kind == "any order":
            for index in data.draw(st.lists(st.integers(0, count - 1), max_size=9)):
                visit(ring, index, data.draw(st.booleans()), data.draw(st.booleans()))
        else:
            for index in range(data.draw(st.integers(0, count - 1))):
                visit(ring, index, True, True)
    missing = max(count - slots, 0)
    whole_pass(ring, True)
    assert [whole_pass(ring, True) for _ in range(3)] == [2 * missing] * 3
    # A forward pass alone finds at its start what its predecessor left there, and brings the rest.
    whole_pass(ring, False)
    assert whole_pass(ring, False) <= (count if missing else 0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(4096, 1)], [(4096, 4096)]),
        ([(4095, 2)], [(0, 8192)]),
        ([(9000, 100), (100, 100)], [(0, 4096), (8192, 4096)]),
        ([(100, 100), (300, 8000), (8192, 10)], [(0, 12288)]),
        ([(0, 20000), (5000, 10)], [(0, 20480)]),
        ([(0, 4096), (4096, 4096)], [(0, 8192)]),
    ],
)
def test_regions_are_whole_pages_that_cover_all_spans_once(spans, expected):
    assert page_regions([CopySpan(address, 0, size) for address, size in spans]) == expected


@given(
    wanted=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=3),
    there=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=3),
)
def test_what_is_registered_already_is_left_out(wanted, there):
    def numbers(regions):
        return {at + n for at, size in regions for n in range(size)}

    apart = [(40 * n + at, size) for n, (at, size) in enumerate(wanted)]
    known = [(40 * n + at, size) for n, (at, size) in enumerate(there)]
    left = subtract_regions(apart, known)
    assert numbers(left) == numbers(apart) - numbers(known)
    assert sum(size for _, size in left) == len(numbers(left))


class Sharing(Processes):
    """One of several processes, whose parts are put together by the test."""

    sharing = True

    def __init__(self, place, count):
        self.place, self.count = place, count

    def gather(self, parts):
        self.parts = parts


@given(layer=layers(), count=st.integers(2, 5))
def test_processes_that_share_bring_together_what_one_brings(layer, count):
    weights, _, _ = layer
    for group in group_experts(weights, 1 << 20):
        size = -(-group.bytes // 256) * 256

        def bring(processes, group=group, size=size):
            copier, slot = HostCopier(), torch.full((size,), 0x77, dtype=torch.uint8)
            copier.processes = processes
            copier.start(group, slot, None)
            return slot

        whole, together = bring(Processes()), torch.zeros(size, dtype=torch.uint8)
        for place in range(count):
            process = Sharing(place, count)
            slot, share = bring(process), len(process.parts) // count
            own = slice(place * share, (place + 1) * share)
            together[own] = slot[own]
            others = [each for each in range(count) if each != place]
            assert (process.parts.view(count, -1)[others] == 0x77).all()
            together[count * share :] = slot[count * share :]  # what is left is everyone's
        assert size - count * share < 256 * (count + 1)
        assert torch.equal(together, whole)


def test_copies_end_where_registrations_meet():
    memory = torch.arange(100, dtype=torch.uint8)
    group = Group((0,), (CopySpan(memory.data_ptr() + 10, 7, 80),), {}, 256, (memory,))
    found = copying._Sources([memory.data_ptr() + at for at in (0, 30, 31, 90, 95)]).of(group, Processes())
    assert [(at, len(source)) for source, at in found] == [(7, 20), (27, 1), (28, 59)]
    assert torch.equal(torch.cat([source for source, _ in found]), memory[10:90])


def test_only_pages_that_hold_nothing_else_are_registered(tmp_path):
    """CUDA refuses any copy, torch's too, that is registered in part: neighbors on a page would be hit."""
    (tmp_path / "shard").write_bytes(bytes(20_000))
    with open(tmp_path / "shard", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not writable
        of_file = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    own = mmap.mmap(-1, 3 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = torch.frombuffer(own, dtype=torch.uint8).data_ptr()
    heap = torch.zeros(50_000, dtype=torch.uint8).data_ptr()
    assert are_expert_pages([CopySpan(of_file + 1000, 0, 15_000)])
    assert are_expert_pages([CopySpan(pages, 0, 8192), CopySpan(pages + 8192, 8192, 4096)])
    assert not are_expert_pages([CopySpan(pages + 8, 0, 8184)])
    assert not are_expert_pages([CopySpan(of_file, 0, 20_000), CopySpan(heap, 20_224, 40_000)])


@pytest.mark.parametrize("answer", [Registration(), "not permitted"])
def test_what_doctor_has_registered_is_a_mapped_file(answer, monkeypatch):
    def register(groups):
        (span,) = (span for group in groups for span in group.spans)
        assert are_expert_pages([span])
        assert (copying.view_host_memory(span.address, span.bytes) == ord("x")).all()
        return answer

    monkeypatch.setattr(copying, "register", register)
    assert probe.in_place_obstacle() == ("" if isinstance(answer, Registration) else answer)
