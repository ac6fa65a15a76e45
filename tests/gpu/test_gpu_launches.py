"""Experts on the GPU in every way that a run may have them: against float32, and how many launches they take.

``pytest -n0 -s tests/gpu/test_gpu_launches.py`` prints the launches and milliseconds of one layer.
"""

import time
from collections import Counter

import pytest
import torch
from expertmoe import (
    GPT_OSS,
    Shape,
    beyond,
    error,
    exact_outcome,
    make_inputs,
    make_layer,
    outcome,
    same_bits,
    some_d_out,
)
from gpuexperts import CPU, CUDA, chain, give, least_slot, mapped_layer, resize, take_back, there
from torch.utils.checkpoint import checkpoint

from ktbridge.experts import recompute
from ktbridge.experts.gpu.copying import DirectCopier, StagedCopier, make_copier
from ktbridge.experts.gpu.layout import group_experts

TOLERANCE = 0.008  # as the CPU kernels'
SHAPE = Shape(64, 6, 256, 128, 500)
ONE = Shape(64, 6, 2048, 1408, 2048)
"""DeepSeek-V2-Lite's experts."""
WAYS = {
    "resident": {"resident": (0,)},
    "kept": {"resident": (0,), "keep_gate_up": True},
    "in parts": {"resident": (0,), "keep_gate_up": True, "rows_at_once": 1000},
    "one group": {"groups": 1, "slots": 1},
    "4 groups": {"groups": 4, "slots": 2},
    "4 groups in parts": {"groups": 4, "slots": 2, "rows_at_once": 600},
}
LAYERS = {
    "bf16": {},
    "fp8": {"storage": "fp8"},
    "int8": {"storage": "int8"},
    "int4": {"storage": "int4-32"},
    "dropout": {"lora_dropout": 0.2},
    "gpt-oss": {"storage": "mxfp4", "gating": GPT_OSS, "taking_turns": True},
    "gpt-oss with dropout": {"gating": GPT_OSS, "lora_dropout": 0.2},
    "rank 0": {"rank": 0},
    "rank 40": {"rank": 40},
    "two projections": {"lora_targets": ("up", "down")},
}


@pytest.fixture
def copier():
    made = StagedCopier(CUDA, 2)
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_every_way_equals_float32_and_the_others_bit_by_bit(kind, copier):
    layer, plain = make_layer(SHAPE, accumulate_grad=True, **LAYERS[kind])
    inputs = make_inputs(SHAPE)
    torch.manual_seed(3)
    exact, d_out = exact_outcome(layer, plain, inputs)
    found = {}
    for masters in ("GPU", "host"):
        for way, options in WAYS.items():
            give([layer], CUDA, copier=copier, **options)
            if masters == "host":
                layer.move_lora(CPU)
            for _ in range(2):  # the second finds borders, pages and staging made
                torch.manual_seed(3)
                result = outcome(layer, there(inputs), d_out.to(CUDA))
                result = {name: value.cpu() for name, value in result.items()}
                far = {name: error(result[name], exact[name]) for name in exact}
                tolerance = TOLERANCE if LAYERS[kind].get("gating") is None else 0.02
                assert not beyond(far, tolerance), (kind, masters, way, far)
                found.setdefault(way, []).append(result)
            take_back(layer)
    for way, results in found.items():
        assert same_bits(results), (kind, way)
        assert same_bits([results[0], found["resident"][0]]), (kind, way)


def test_other_room_between_steps_and_gradients_that_add_up(copier):
    layers = [make_layer(SHAPE, accumulate_grad=True, seed=n)[0] for n in range(4)]
    inputs, d_out = there(make_inputs(SHAPE)), some_d_out(SHAPE).to(CUDA)
    experts = give(layers, CUDA, groups=3, slots=3, resident=(1, 2), copier=copier)
    experts.watch_link()
    expected = {name: value.clone() for name, value in chain(layers, inputs, d_out).items()}
    for slots, resident in ((1, ()), (2, (0, 1, 2, 3)), (4, (3,)), (2, (0, 3))):
        resize(experts, slots, resident, len(resident) % 2 == 0)
        before = experts.ring.transfers
        for _ in range(2):
            assert same_bits([expected, chain(layers, inputs, d_out)]), (slots, resident)
        assert (experts.ring.transfers > before) == (len(resident) < 4)
    torch.cuda.synchronize()
    size, seconds = experts.link()
    assert size > 0
    assert seconds > 0
    for layer in layers:
        layer(*inputs).backward(d_out)
        once = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        for _ in range(2):
            layer(*inputs).backward(d_out)
        for name, p in layer.named_parameters():
            assert p.grad.isfinite().all()
            assert once[name].any()


def test_layers_that_are_given_back_have_their_pages_registered_then(tmp_path):
    layers = [mapped_layer(tmp_path / str(n), SHAPE, seed=n)[0] for n in range(4)]
    inputs, d_out = there(make_inputs(SHAPE)), some_d_out(SHAPE).to(CUDA)
    streamed = [g for layer in layers[2:] for g in group_experts(layer.weights, least_slot(layer))]
    copier, how = make_copier(streamed, CUDA)
    if not isinstance(copier, DirectCopier):
        pytest.skip(how)
    loader = StagedCopier(CUDA, 2)
    experts = give(layers, CUDA, groups=3, slots=2, resident=(0, 1), copier=copier, loader=loader)
    loader.close()
    expected = {name: value.clone() for name, value in chain(layers, inputs, d_out).items()}
    for resident in ((1,), (), (0, 1, 2, 3), (3,)):
        resize(experts, 2, resident, False)
        assert same_bits([expected, chain(layers, inputs, d_out)])
    copier._refused.update(g for each in experts._layers.values() for g in each.groups)
    copier._staged = StagedCopier(CUDA, 2)  # as where the driver refuses
    resize(experts, 3, (), False)
    assert same_bits([expected, chain(layers, inputs, d_out)])
    copier.close()


def test_no_kernel_is_compiled_for_what_a_router_chooses(copier, monkeypatch):
    from triton import knobs

    layer, _ = make_layer(SHAPE, accumulate_grad=True)
    give([layer], CUDA, copier=copier, **WAYS["4 groups in parts"])
    hidden, ids, weights = there(make_inputs(SHAPE))
    d_out, compiled = some_d_out(SHAPE).to(CUDA), []
    for _ in range(2):  # the second adds to gradients
        layer(hidden, ids, weights).backward(d_out)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    for first in range(0, 57, 3):  # six experts have half of the rows; with fewer tokens all groups fit
        ids[: len(ids) // 2] = torch.arange(first, first + 6, device=CUDA)
        for tokens in (500, 499, 120, 37):
            layer(hidden[:tokens], ids[:tokens], weights[:tokens]).backward(d_out[:tokens])
    assert not compiled


def test_an_id_outside_is_an_error_by_the_next_step():
    layer, _ = make_layer(SHAPE, accumulate_grad=True)
    experts = give([layer], CUDA, resident=(0,), copier=StagedCopier(CUDA, 1))
    hidden, ids, weights = there(make_inputs(SHAPE))
    layer(hidden, ids, weights)
    experts.check()
    wrong = ids.clone()
    wrong[5, 1] = 64
    layer(hidden.requires_grad_(), wrong, weights).sum().backward()
    with pytest.raises(IndexError, match="outside 0 to 63"):
        torch.optim.AdamW(layer.parameters()).step()
    layer(hidden, ids, weights)
    experts.check()


@pytest.mark.parametrize("keep", [False, True])
def test_one_resident_layer_takes_at_most_30_launches(keep, capsys):
    layer, _ = make_layer(ONE, accumulate_grad=True)
    copier = StagedCopier(CUDA, 4)
    give([layer], CUDA, resident=(0,), copier=copier, keep_gate_up=keep)
    hidden, ids, weights = there(make_inputs(ONE))
    d_out = some_d_out(ONE).to(CUDA)
    hidden.requires_grad_()
    weights.requires_grad_()

    def both():
        out = checkpoint(layer, hidden, ids, weights, use_reentrant=False, context_fn=recompute.contexts)
        out.backward(d_out)

    for _ in range(5):
        both()
    torch.cuda.synchronize()
    took, queued = [], []
    for _ in range(10):
        began = time.perf_counter()
        both()
        queued.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("both"):
            both()
        torch.cuda.synchronize()
    on_host = torch.autograd.DeviceType.CPU
    on_gpu = [e for e in profile.events() if e.device_type != on_host and e.name != "both"]
    launches = Counter(event.name.partition("(")[0][-60:] for event in on_gpu)
    busy = sum(event.time_range.elapsed_us() for event in on_gpu) / 1000
    (asked,) = (
        each.time_range for each in profile.events() if each.name == "both" and each.device_type == on_host
    )
    waits = [
        each.name
        for each in profile.events()
        if "Synchronize" in each.name and each.time_range.start < asked.end
    ]
    with capsys.disabled():
        print(f"\nkeep_gate_up={keep}: {sum(launches.values())} launches, {busy:.2f} ms busy,")
        print(f"{1000 * min(queued):.2f} ms to queue, {1000 * min(took):.2f} ms in all")
        for name, count in launches.most_common():
            print(f"  {count:3d} {name}")
    copier.close()
    # Twice autograd's own sum of gradients of hidden and of weights, and what tells the host of wrong ids.
    assert sum(launches.values()) <= 30 + 2 + 4, launches
    assert not waits
