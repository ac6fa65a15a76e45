"""The GPU's executor of experts, on the CPU: against float32 autograd, in every order of use."""

import copy
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from expertmoe import (
    FORMATS,
    GPT_OSS,
    Shape,
    beyond,
    error,
    errors,
    exact_outcome,
    make_inputs,
    make_layer,
    outcome,
    same_bits,
    some_d_out,
)
from gpuexperts import Breaking, chain, give, resize, slot_for
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ktbridge.errors import UsageError
from ktbridge.experts import recompute
from ktbridge.experts.gpu import executor, layer_math, masters, operations
from ktbridge.experts.gpu.copying import HostCopier
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.gpu.ring import Ring
from ktbridge.experts.weights import SILU, ExpertWeights

TOLERANCE = 0.008  # as the CPU kernels'
SHAPES = [
    Shape(8, 2, 64, 32, 70),
    Shape(5, 3, 70, 45, 33),
    Shape(4, 1, 33, 31, 1),
    Shape(6, 2, 136, 168, 130),
    Shape(3, 3, 64, 96, 5),
]
SMALL = SHAPES[0]


TURNS = {"gating": GPT_OSS, "taking_turns": True}


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        *((storage, {}) for storage in FORMATS),
        *((storage, TURNS) for storage in ("bf16", "mxfp4")),
        *((storage, {"lora_dropout": 0.5}) for storage in FORMATS[:2]),
        *(("bf16", {"rank": rank}) for rank in (0, 1, 40)),
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_float32_autograd(storage, options):
    # Formats differ in how a group is unpacked: whole and ragged matrices are enough of them.
    for shape in SHAPES if storage == "bf16" else SHAPES[1:4:2]:
        layer, plain = make_layer(shape, storage, **options)
        inputs = make_inputs(shape)
        torch.manual_seed(11)
        exact, d_out = exact_outcome(layer, plain, inputs)
        for groups, resident in ((3, ()), (1, (0,))):
            experts = give([layer], groups=groups, resident=resident)
            torch.manual_seed(11)
            found = outcome(layer, inputs, d_out)
            assert found.keys() == exact.keys()
            far = {name: error(found[name], exact[name]) for name in exact}
            limits = options.get("gating", SILU)
            assert not beyond(far, TOLERANCE, limits), (str(shape), groups, far)
            assert (experts.ring.transfers > 0) == (not resident)


def test_layers_that_stay_are_loaded_before_the_ring_takes_memory(monkeypatch):
    """Loading has a group as it is stored beside the layer: of a step of few tokens that is the most."""
    events = []

    class Noted(HostCopier):
        def start(self, group, slot, after):
            events.append("load")
            return super().start(group, slot, after)

    def ring(groups, slot_bytes, slots, *more):
        events.append(f"{slots} slots")
        return Ring(groups, slot_bytes, slots, *more)

    monkeypatch.setattr(executor, "Ring", ring)
    layers = [make_layer(SMALL)[0] for _ in range(3)]
    experts = give(layers, groups=2, slots=3, resident=(0, 2), copier=Noted())
    count = len(next(iter(experts._layers.values())).groups)
    assert events == ["0 slots", *["load"] * (2 * count), "3 slots"]


@pytest.mark.parametrize("resident", [(), (0, 1, 2, 3)])
def test_layers_with_lora_on_other_projections_share_an_executor(resident):
    targets = [("gate",), ("up", "down"), ("down",), ("gate", "up", "down")]
    made = [make_layer(SMALL, seed=n, lora_targets=t) for n, t in enumerate(targets)]
    layers = [layer for layer, _ in made]
    give(layers, groups=2, resident=resident)
    inputs = make_inputs(SMALL)
    for layer, plain in (made[3], *made, made[0]):
        found = errors(layer, plain, inputs)
        assert max(found.values()) <= TOLERANCE, (layer.lora_targets, found)
    for layer in layers:
        tuned, layer.lora_enabled = layer(*inputs), False
        base, layer.lora_enabled = layer(*inputs), True
        assert torch.equal(layer(*inputs), tuned)
        layer.reset_lora()
        assert torch.equal(layer(*inputs), base)
        assert not torch.equal(base, tuned)


def test_ids_that_repeat_experts_without_rows_and_no_tokens():
    layer, plain = make_layer(SMALL)
    give([layer], groups=4)
    hidden, ids, by_slot = make_inputs(SMALL)
    for used in (ids % 3, torch.full_like(ids, 7)):  # the last: whole groups without rows
        inputs = hidden, used, by_slot
        exact, d_out = exact_outcome(layer, plain, inputs)
        found = outcome(layer, inputs, d_out)
        for name, expected in exact.items():
            if name.endswith(("_a", "_b")):
                idle = [expert for expert in range(8) if expert not in used]
                assert not found[name][idle].any()
            assert (found[name] - expected).norm() <= TOLERANCE * expected.norm(), name
    layer.zero_grad()
    nothing = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(nothing, ids[:0], by_slot[:0])
    out.sum().backward()
    assert out.shape == nothing.grad.shape == (0, 64)
    assert not any(parameter.grad.any() for parameter in layer.parameters())
    with pytest.raises(IndexError, match="outside 0 to 7"):
        layer(hidden, ids + 1, by_slot)


def test_what_is_resident_how_many_slots_and_a_second_run_change_no_bit():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(3)]
    inputs, d_out, results = make_inputs(SMALL), some_d_out(SMALL), []
    for slots, resident in ((1, ()), (3, (1,)), (99, (0, 2)), (2, (0, 1, 2))):
        give(layers, groups=2, slots=slots, resident=resident)
        results += [chain(layers, inputs, d_out) for _ in range(2)]
    assert same_bits(results)
    give(layers, groups=4, slots=2)  # other products, of the same rows
    assert same_bits([results[0], chain(layers, inputs, d_out)])


def test_a_pass_that_breaks_off_leaves_the_next_one_whole(monkeypatch):
    layers = [make_layer(SMALL, seed=n)[0] for n in range(3)]
    copier = Breaking()
    give(layers, groups=2, slots=2, copier=copier)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    expected = chain(layers, inputs, d_out)
    unpack = executor.unpack_group
    for broken in (0, 3, 7, 10):
        left = [broken]

        def breaks(*args, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("full")
            unpack(*args)

        monkeypatch.setattr(executor, "unpack_group", breaks)
        with pytest.raises(MemoryError, match="full"):
            chain(layers, inputs, d_out)
        monkeypatch.setattr(executor, "unpack_group", unpack)
        copier.broken = True
        with pytest.raises(OSError, match="no link"):
            chain(layers, inputs, d_out)
        copier.broken = False
        assert same_bits([expected, chain(layers, inputs, d_out)])


def test_backward_in_any_order_twice_and_not_after_a_change():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(3)]
    give(layers, groups=2, slots=2)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    expected = [outcome(layer, inputs, d_out) for layer in layers]
    for layer in layers:
        layer.zero_grad()
    outs = [layer(*inputs) for layer in layers]
    for index in (1, 0, 2):
        outs[index].backward(d_out, retain_graph=True)
    for index in (2, 0, 1):
        outs[index].backward(d_out)
        with pytest.raises(RuntimeError, match="second time"):
            outs[index].backward(d_out)
        assert outs[index].grad_fn.left is None
    for layer, once in zip(layers, expected, strict=True):
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, 2 * once[name])
    out = layers[0](*inputs)
    with torch.no_grad():
        layers[0].gate_lora_a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(d_out)


@pytest.mark.parametrize("straight", [False, True])
def test_gradients_add_up_and_frozen_parameters_get_none(straight):
    layer, _ = make_layer(SMALL, accumulate_grad=straight)
    give([layer], groups=2)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    once = {name: value.clone() for name, value in outcome(layer, inputs, d_out).items()}
    layer(*inputs).backward(d_out)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name])
    layer.up_lora_b.requires_grad_(False).grad = None
    found = outcome(layer, inputs, d_out)
    assert found.pop("up_lora_b") is None
    assert same_bits([found, {name: once[name] for name in found}])


def test_other_room_between_steps_changes_no_bit_and_what_can_not_be_had_nothing():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(3)]
    inputs, d_out, copier = make_inputs(SMALL), some_d_out(SMALL), Breaking()
    experts = give(layers, groups=2, slots=3, resident=(1,), keep_gate_up=True, copier=copier)
    expected = chain(layers, inputs, d_out)
    for slots, resident in ((1, ()), (2, (0, 1, 2)), (4, (2,)), (2, (0, 2))):
        resize(experts, slots, resident, len(resident) % 2 == 0)
        assert experts.streamed == tuple(n for n in range(3) if n not in resident)
        before = experts.ring.transfers
        for _ in range(2):
            assert same_bits([expected, chain(layers, inputs, d_out)])
        assert (experts.ring.transfers > before) == (len(resident) < 3)
    copier.broken = True
    with pytest.raises(OSError, match="no link"):
        resize(experts, 1, (0, 1), False)
    copier.broken = False
    assert experts.streamed == (1, 2)  # what was to go has gone, and nothing came
    assert same_bits([expected, chain(layers, inputs, d_out)])


def test_a_layer_that_can_not_be_loaded_leaves_its_memory_to_the_ring(monkeypatch):
    layers, copier = [make_layer(SMALL, seed=n)[0] for n in range(3)], Breaking()
    experts, made, there = give(layers, groups=2, slots=3, copier=copier), [], []
    matrices = experts._bordered

    def bordered(count):
        there.append(sum(each() is not None for each in made))
        made.append(weakref.ref((found := matrices(count)).gate_up))
        return found

    monkeypatch.setattr(experts, "_bordered", bordered)
    copier.broken = True
    with pytest.raises(OSError, match="no link"):
        resize(experts, 2, (1,))
    assert there == [0, 0]  # for the layer, then for the groups that are streamed


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gate_and_up_that_are_kept_change_no_bit_and_go_with_backward(dropout, monkeypatch):
    """Nor do fewer rows at once, of a resident layer and of groups that are streamed."""
    layer, _ = make_layer(SMALL, lora_dropout=dropout, gating=GPT_OSS)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    found, products = [], []
    for keep, at_once in ((False, None), (True, None), (True, 64), (False, 64)):
        give([layer], resident=(0,), keep_gate_up=keep, rows_at_once=at_once)
        torch.manual_seed(0)
        found.append(outcome(layer, inputs, d_out))
        hidden = inputs[0].clone().requires_grad_()
        out = layer(hidden, *inputs[1:])
        left = out.grad_fn.left
        assert (left.kept is not None) == keep
        with counted_products(monkeypatch) as count:
            out.backward(d_out, retain_graph=True)
        products.append(len(count))
        assert (left.kept is not None) == keep
        out.backward(d_out)
        assert left.kept is None
    assert products[0] == products[1] + 1
    assert products[3] > products[2]
    assert same_bits(found)
    padded = (inputs[1].flatten().bincount(minlength=8) + 15) // 16 * 16
    results = []
    for most in (None, 16, 96):
        give([layer], groups=2, rows_at_once=most)
        torch.manual_seed(0)
        with counted_products(monkeypatch) as rows:
            results.append(outcome(layer, inputs, d_out))
        assert most is None or max(rows) <= max(most, int(padded.max()))
    assert same_bits(results)


@contextmanager
def counted_products(patch):
    """The rows of each grouped product within the block."""
    found, plain = [], layer_math.by_row

    def by_row(rows, *others):
        found.append(len(rows))
        return plain(rows, *others)

    patch.setattr(layer_math, "by_row", by_row)
    yield found
    patch.setattr(layer_math, "by_row", plain)


def test_borders_are_written_once_a_change_whoever_makes_it(monkeypatch):
    layer, _ = make_layer(SMALL, accumulate_grad=True)
    give([layer], resident=(0,))
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    written, plain = [], executor.operations.write_borders
    monkeypatch.setattr(executor.operations, "write_borders", lambda *args: (written.append(1), plain(*args)))
    before = outcome(layer, inputs, d_out)["out"]
    outcome(layer, inputs, d_out)
    assert len(written) == 1
    for options in ({"fused": True}, {"foreach": True}):
        torch.optim.AdamW(layer.parameters(), 0.1, **options).step()
        now = outcome(layer, inputs, d_out)["out"]
        assert not torch.equal(before, now)
        give([layer], resident=(0,))  # borders anew
        before = outcome(layer, inputs, d_out)["out"]
        assert torch.equal(before, now)
    written.clear()
    with torch.no_grad():
        layer.up_lora_b.zero_()
    assert not torch.equal(before, layer(*inputs))
    layer.lora_enabled = False
    base = layer(*inputs)
    layer.lora_enabled = True
    layer(*inputs)
    assert len(written) == 3
    assert not torch.equal(base, layer(*inputs))


@pytest.mark.parametrize(("keep", "most"), [(False, 24), (True, 23)])
def test_a_resident_layer_takes_at_most_30_launches_and_waits_for_none(keep, most, monkeypatch):
    """Forward, second forward and backward under checkpointing, in the first micro-batch and another."""
    layer, _ = make_layer(SMALL, accumulate_grad=True)
    give([layer], resident=(0,), keep_gate_up=keep)
    (hidden, ids, by_slot), d_out = make_inputs(SMALL), some_d_out(SMALL)
    found = []
    for _ in range(3):
        x, weights = hidden.clone().requires_grad_(), by_slot.clone().requires_grad_()
        with Launches(monkeypatch) as launches:
            region = checkpoint(layer, x, ids, weights, use_reentrant=False, context_fn=recompute.contexts)
            region.backward(d_out)
        assert not launches.waits
        found.append(sum(launches.found.values()))
        assert found[-1] <= most <= 30, launches.found
    assert found[1] == found[2] == found[0] - 1  # the borders


class Launches(TorchDispatchMode):
    """Counts what is launched on a GPU: torch's operations, and those of ``operations`` in Triton."""

    OWN: ClassVar = {"route": 3, "lora_gradients": 4}
    FREE: ClassVar = (
        "empty", "detach", "view", "slice", "split", "transpose", "alias", "as_strided", "select",
    )  # fmt: skip

    def __init__(self, patch):
        super().__init__()
        self.found, self.waits, self._patch, self._inside = Counter(), [], patch, False

    def __enter__(self):
        for name in (*self.OWN, "gather_thin", "gather_rows", "activation_thin", "combine", "write_borders",
                     "activation_backward_thin", "by_row"):  # fmt: skip
            self._patch.setattr(operations, name, self._counted(name, getattr(operations, name)))
        self._patch.setattr(layer_math, "by_row", operations.by_row)
        self._patch.setattr(executor.InvalidIds, "note", lambda *_, **__: None)  # a pass's, not a layer's
        return super().__enter__()

    def __exit__(self, *args):
        self._patch.undo()
        return super().__exit__(*args)

    def _counted(self, name, plain):
        def call(*args, **options):
            inside, self._inside = self._inside, True
            try:
                return plain(*args, **options)
            finally:
                self._inside = inside
                if not inside:
                    self.found[name] += self.OWN.get(name, 1)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._inside:
            name = func.overloadpacket.__name__
            if name in ("_local_scalar_dense", "item", "nonzero"):
                self.waits.append(name)
            elif not any(name.lstrip("_").replace("new_", "").startswith(free) for free in self.FREE):
                self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_the_link_is_watched_once_it_is_asked_for():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(2)]
    experts = give(layers, groups=2, slots=1)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    chain(layers, inputs, d_out)
    assert experts.link() == (0, 0.0)
    experts.watch_link()
    before = experts.ring.transfers
    chain(layers, inputs, d_out)
    size, seconds = experts.link()
    assert size == (experts.ring.transfers - before) * experts.ring.groups[0].bytes > 0
    assert seconds > 0
    chain(layers, inputs, d_out)
    assert experts.link() == (0, 0.0)


def test_masters_elsewhere_cross_as_bfloat16_once_a_change_and_gradients_come_home(monkeypatch):
    layer, _ = make_layer(SMALL, accumulate_grad=True)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    give([layer], groups=2)
    expected = outcome(layer, inputs, d_out)
    monkeypatch.setattr(masters, "is_there", lambda *_: False)
    for resident in ((), (0,)):
        experts = give([layer], groups=2, resident=resident)
        assert same_bits([expected, outcome(layer, inputs, d_out)])
        staging = experts.staging[0]
        assert staging._flat.dtype == torch.bfloat16
        staging._flat.zero_()  # it isn't made again
        found = layer(*inputs)
        assert torch.equal(found, expected["out"]) == bool(resident)
        torch.optim.AdamW(layer.parameters(), 0.0, fused=True).step()
        assert torch.equal(layer(*inputs), expected["out"])
        layer(*inputs).backward(d_out)
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, 2 * expected[name])


def test_the_norm_of_gradients_that_came_home_is_known_until_they_change(monkeypatch):
    layer, _ = make_layer(SMALL, accumulate_grad=True)
    give([layer], groups=2)
    monkeypatch.setattr(masters, "is_there", lambda *_: False)
    layer(*make_inputs(SMALL)).backward(some_d_out(SMALL))
    gradients = [each.grad for each in layer.parameters()]
    norm = float(masters.gradients_norm(gradients))
    assert norm == pytest.approx(float(torch.cat([each.flatten() for each in gradients]).norm()))
    gradients[0].data.zero_()  # unseen, so it isn't computed again
    assert float(masters.gradients_norm(gradients)) == norm
    gradients[0].mul_(1)
    assert float(masters.gradients_norm(gradients)) < norm


def test_a_layout_tells_in_which_order_experts_lie_in_memory():
    layer, _ = make_layer(SMALL)
    whole, halves = (give([layer], groups=groups).layout() for groups in (1, 2))
    assert whole != halves == give([layer], groups=2).layout()
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (0, 1, 2)):
        memory = torch.cat([layer.weights[place].weight.flatten() for place in order])
        parts = memory.split([layer.weights[place].weight.numel() for place in order])
        views = {p: part.view(layer.weights[p].weight.shape) for p, part in zip(order, parts, strict=True)}
        layer.weights = tuple(ExpertWeights.bf16(views[place]) for place in range(3))
        found.append(give([layer], groups=2).layout())
    assert found[0] == found[2] != found[1]


def test_a_copy_of_a_layer_shares_the_executor():
    layer, _ = make_layer(SMALL)
    give([layer], groups=2)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    other = copy.deepcopy(layer)
    assert other.gpu.experts is layer.gpu.experts
    assert same_bits([outcome(layer, inputs, d_out), outcome(other, inputs, d_out)])


def test_a_slot_too_small_for_an_expert_and_layers_of_two_sizes_are_refused():
    layer, _ = make_layer(SMALL)
    other, _ = make_layer(SHAPES[4])
    with pytest.raises(UsageError, match="one expert of layer 0 takes 12,288 bytes"):
        executor.GpuExperts(
            {0: layer.weights},
            torch.device("cpu"),
            8,
            Placement(0, slot_bytes=8192, slots=2),
            HostCopier(),
        )
    with pytest.raises(UsageError, match="different sizes"):
        give([layer, other])
    assert slot_for(layer, 8) == 12288
