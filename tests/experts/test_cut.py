"""Which experts the CPU computes beside the GPU: the cut, and when it is made anew."""

from typing import Any

import pytest
import torch
from expertmoe import Shape, make_inputs, make_layer, some_d_out
from gpuexperts import CPU, chain, give, slot_for
from hypothesis import given
from hypothesis import strategies as st

from ktbridge.experts.gpu import hybrid
from ktbridge.experts.gpu.cut import Paces, Phase, coldest, layer_seconds
from ktbridge.experts.gpu.hybrid import Hybrid
from ktbridge.experts.gpu.measure import time_layer

SHAPE = Shape(8, 2, 64, 32, 70)
seconds = st.floats(0, 1e-2)
phases = st.builds(Phase, seconds, seconds, seconds, seconds)
paces = st.builds(Paces, phases, phases, seconds, st.floats(0, 20))


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=40), paces)
def test_no_other_number_of_experts_on_the_cpu_is_faster(counts: list[float], pace: Paces) -> None:
    taken = coldest(counts, pace)
    predicted = layer_seconds(counts, pace)
    assert len(predicted) == len(counts) + 1
    assert predicted[len(taken)] == min(predicted)
    others = [count for expert, count in enumerate(counts) if expert not in taken]
    assert not taken or max(counts[expert] for expert in taken) <= min(others, default=5000)
    assert Paces.of(pace.state()) == pace


def test_link_cpu_and_gpu_each_bound_the_cut() -> None:
    even = [10.0] * 8
    slow_link = Paces(Phase(1e-4, 0, 1e-3), Phase(1e-4, 0, 1e-3), crossing=1.0, kept=0)
    assert len(coldest(even, slow_link)) == 8
    slow_cpu = Paces(Phase(1.0, 1.0, 1e-3), Phase(1.0, 1.0, 1e-3), crossing=1e-3, kept=0)
    assert coldest(even, slow_cpu) == ()
    all_kept = Paces(Phase(1e-3, 0, 1e-6), Phase(1e-3, 0, 1e-6), crossing=1.0, kept=8)
    assert coldest(even, all_kept) == ()
    alike = Paces(Phase(1.0, 0, 0), Phase(1.0, 0, 0), crossing=1.0, kept=0)
    assert len(coldest(even, alike)) == 4  # both end together
    assert coldest([9, 1, 8, 2, 7, 3, 6, 4], alike) == (1, 3, 5, 7)
    assert coldest([9, 1, 8, 2, 7, 3, 6, 4], alike, 1) == (1,)


def test_the_choice_follows_the_counts_and_a_restored_one_goes_on_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(hybrid, "kernel_seconds", lambda: now[0] / 100)
    monkeypatch.setattr(hybrid, "perf_counter", lambda: now[0])
    made = [make_layer(SHAPE, seed=n)[0] for n in range(3)]
    hidden, ids, weights = make_inputs(SHAPE)
    inputs, d_out = (
        (hidden, ids.clamp(min=4), weights),
        some_d_out(SHAPE),
    )  # 0 to 3 are never asked for
    phase = Phase(1e-3, 1e-5, 0)

    def begin() -> tuple[Any, Hybrid]:
        experts = give(made, groups=4, slots=2)
        return experts, Hybrid(experts, Paces(phase, phase, crossing=1e-3, kept=1), 140.0)

    experts, chooser = begin()
    first = experts.cold
    assert set(first) == {0, 1, 2}
    assert chooser.cold == sum(map(len, first.values()))
    states = []
    for step in range(1, 9):
        chain(made, inputs, d_out)
        now[0] += 1 / step  # each step faster than the one before
        chooser.end_step(step)
        states.append(chooser.state())
    assert all({0, 1, 2, 3} <= set(cold) for cold in experts.cold.values())
    for from_step in (2, 3, 6):
        experts, again = begin()
        again.restore(states[from_step - 1])
        for step in range(from_step + 1, 9):
            chain(made, inputs, d_out)
            now[0] += 1 / step
            again.end_step(step)
            with again.aside(), torch.no_grad():  # as held-out rows are evaluated
                now[0] += 10
                for layer in made:
                    layer(*inputs)
            assert again.state()["cold"] == states[step - 1]["cold"], (from_step, step)
            assert again.state()["counts"] == states[step - 1]["counts"]


def test_a_layer_is_timed_by_some_of_its_experts_and_left_as_it_is() -> None:
    layer, _ = make_layer(SHAPE)
    before = {name: value.clone() for name, value in layer.named_parameters()}
    slot = slot_for(layer, 4)
    for slots in (1, None):
        found = time_layer(layer, CPU, slot, 2, 300, slots=slots, cold_threads=1)
        assert min(found.gpu, found.cpu, found.link) > 0
        assert found.forward.cold_expert + found.forward.cold_row > 0
        assert found.backward.cold_expert + found.backward.cold_row > 0
    assert layer.gpu is None
    for name, value in layer.named_parameters():
        assert torch.equal(value, before[name])
        assert value.grad is None


def test_slots_grow_in_number_as_what_crosses_shrinks() -> None:
    layers = [make_layer(SHAPE, seed=n)[0] for n in range(4)]
    inputs, d_out = make_inputs(SHAPE), some_d_out(SHAPE)
    experts = give(layers, groups=1, slots=2)
    whole = experts.ring.bytes
    expected = chain(layers, inputs, d_out)
    for cold in ((0, 1, 2, 3, 4), (), tuple(range(8))):
        experts.set_cold(dict.fromkeys(range(4), cold))
        assert experts.ring.count * experts.ring.slot_bytes <= whole
        assert experts.ring.count == (2 if len(cold) != 5 else 5)
        found = chain(layers, inputs, d_out)
        for name, value in expected.items():
            assert torch.allclose(found[name].float(), value.float(), rtol=0.1, atol=0.05), name
