"""The GPU's executor of experts, on the CPU: against float32 autograd, in every order of use."""

import copy

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
from gpuexperts import Breaking, chain, give, slot_for

from ktbridge.errors import UsageError
from ktbridge.experts.gpu import executor
from ktbridge.experts.gpu.copying import InPlace

TOLERANCE = 0.008  # as the CPU kernels'
SHAPES = [
    Shape(8, 2, 64, 32, 70),
    Shape(5, 3, 70, 45, 33),
    Shape(4, 1, 33, 31, 1),
    Shape(6, 2, 136, 168, 130),
    Shape(3, 3, 64, 96, 5),
]
SMALL = SHAPES[0]


@pytest.mark.parametrize("storage", FORMATS)
def test_outputs_and_gradients_equal_float32_autograd(storage):
    for shape in SHAPES:
        layer, plain = make_layer(shape, storage)
        inputs = make_inputs(shape)
        exact, d_out = exact_outcome(layer, plain, inputs)
        for groups, resident in ((3, ()), (1, (0,))):
            experts = give([layer], groups=groups, resident=resident)
            found = outcome(layer, inputs, d_out)
            assert found.keys() == exact.keys()
            far = {name: error(found[name], exact[name]) for name in exact}
            assert max(far.values()) <= TOLERANCE, (str(shape), groups, far)
            assert (experts.ring.crossings > 0) == (not resident)


@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
def test_biases_gating_and_rows_that_take_turns(storage):
    for shape in SHAPES:
        layer, plain = make_layer(shape, storage, gating=GPT_OSS, taking_turns=True)
        inputs = make_inputs(shape)
        exact, d_out = exact_outcome(layer, plain, inputs)
        for groups, resident in ((3, ()), (1, (0,))):
            give([layer], groups=groups, resident=resident)
            found = outcome(layer, inputs, d_out)
            far = {name: error(found[name], exact[name]) for name in exact}
            assert not beyond(far, TOLERANCE), (str(shape), groups, far)


@pytest.mark.parametrize("rank", [0, 1, 8, 40])
def test_any_rank(rank):
    for shape in SHAPES[:3]:
        layer, plain = make_layer(shape, rank=rank)
        give([layer], groups=2)
        found = errors(layer, plain, make_inputs(shape))
        assert len(found) == (9 if rank else 3)
        assert max(found.values()) <= TOLERANCE, (str(shape), found)


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
    hidden, ids, routing = make_inputs(SMALL)
    for used in (ids % 3, torch.full_like(ids, 7)):  # the last: whole groups without rows
        inputs = hidden, used, routing
        exact, d_out = exact_outcome(layer, plain, inputs)
        found = outcome(layer, inputs, d_out)
        for name, expected in exact.items():
            if name.endswith(("_a", "_b")):
                idle = [expert for expert in range(8) if expert not in used]
                assert not found[name][idle].any()
            assert (found[name] - expected).norm() <= TOLERANCE * expected.norm(), name
    layer.zero_grad()
    nothing = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    out = layer(nothing, ids[:0], routing[:0])
    out.sum().backward()
    assert out.shape == nothing.grad.shape == (0, 64)
    assert not any(parameter.grad.any() for parameter in layer.parameters())
    with pytest.raises(IndexError, match="outside 0 to 7"):
        layer(hidden, ids + 1, routing)


def test_what_is_resident_how_many_slots_and_a_second_run_change_no_bit():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(4)]
    inputs, d_out, results = make_inputs(SMALL), some_d_out(SMALL), []
    for slots, groups, resident in ((1, 2, ()), (3, 2, (1,)), (99, 2, (0, 3)), (2, 2, range(4))):
        give(layers, groups=groups, slots=slots, resident=tuple(resident))
        results += [chain(layers, inputs, d_out) for _ in range(2)]
    assert same_bits(results)
    give(layers, groups=4, slots=2)  # smaller products, other sums
    coarse = chain(layers, inputs, d_out)
    for name, expected in results[0].items():
        assert (coarse[name].float() - expected.float()).norm() <= 0.03 * expected.float().norm()


def test_a_pass_moves_only_what_is_not_in_the_ring_at_its_turns():
    layers = [make_layer(SMALL, seed=n)[0] for n in range(4)]
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    for slots in (1, 3, 7, 20):
        experts = give(layers, groups=2, slots=slots)
        total = len(experts.ring.groups)
        assert total == 8
        moved = []
        for _ in range(3):
            before = experts.ring.crossings
            chain(layers, inputs, d_out)
            moved.append(experts.ring.crossings - before)
        slots = min(slots, total)
        assert moved == [2 * total - slots, *[2 * (total - slots)] * 2], slots
    with torch.no_grad():
        before = experts.ring.crossings
        layers[0](*inputs)
    assert experts.ring.crossings == before


def test_a_pass_that_breaks_off_leaves_the_next_one_whole(monkeypatch):
    layers = [make_layer(SMALL, seed=n)[0] for n in range(3)]
    copier = Breaking()
    give(layers, groups=2, slots=2, copier=copier)
    inputs, d_out = make_inputs(SMALL), some_d_out(SMALL)
    expected = chain(layers, inputs, d_out)
    unpack = executor.unpack
    for broken in (0, 3, 7, 10):
        left = [broken]

        def breaks(*args, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("full")
            unpack(*args)

        monkeypatch.setattr(executor, "unpack", breaks)
        with pytest.raises(MemoryError, match="full"):
            chain(layers, inputs, d_out)
        monkeypatch.setattr(executor, "unpack", unpack)
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
        assert outs[index].grad_fn.routing is None
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
            {0: layer.weights}, torch.device("cpu"), 8, slot_bytes=8192, slots=2, copier=InPlace()
        )
    with pytest.raises(UsageError, match="different sizes"):
        give([layer, other])
    assert slot_for(layer, 8) == 12288
