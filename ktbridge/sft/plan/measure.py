"""A short measurement of this machine: expert layers as training runs them, the optimizer, a product.

The only part of a plan that needs torch.
"""

from __future__ import annotations

import math
import mmap
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ktbridge.experts.gpu.placement import Costs, Limits
from ktbridge.sft.placement import probe_tokens, times_cpu
from ktbridge.sft.plan.layer_bytes import Pass, host_bytes, saved_bytes
from ktbridge.sft.plan.memory import Setting

_SECONDS = 1.0
_ROOM = 3_000_000_000
_CACHES = 4  # how many times the last-level cache the layers take together
_CACHE = 32 << 20  # if the system doesn't report it
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "mxfp4": 4}


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds of one layer's experts in a micro-batch, forward and backward.

    ``first`` in an optimizer step, where the LoRA's gradients are made, ``next`` where they are added
    to; ``reference`` is the forwards that no backward follows, where the stage has any; ``update`` the
    optimizer's and clipping's seconds for one trained float32 on the CPU.
    """

    first: float
    next: float
    reference: float
    update: float
    how: str


def measure_experts(setting: Setting, tokens: int, room: int | None) -> ExpertTimes:
    """Several layers with weights and LoRA of their own: all forward, then all backward, as in training.

    So many that neither weights nor activations stay in the last-level cache, if the model has as many
    and ``room`` bytes allow. Where a layer is too large, fewer experts are measured, with as many tokens
    each. Weights are random and in 4 KB pages, as those of a mapped file are. Routing is uniform.
    """
    import torch

    from ktbridge.experts.layer import MoELoRAExperts
    from ktbridge.sft.model import threads_beside_python

    storage = setting.shape.expert_storage if setting.shape.mappable else "bf16"
    size, share, count = _fitting(setting, setting.expert_pass(tokens), storage, room)
    threads = setting.config.kt_config.kt_num_threads
    layers = [
        MoELoRAExperts.from_tensors(
            *_random_layer(storage, size, setting.shape.mappable),
            lora_rank=size.rank,
            threads=threads
            or threads_beside_python(torch.device("cuda" if setting.cuda else "cpu")),
            activation=setting.config.activation,
            accumulate_grad=True,
            lora_dropout=setting.config.expert_dropout,
        )
        for _ in range(count)
    ]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=random).bfloat16().requires_grad_()
    scores = torch.rand(size.tokens, size.experts, generator=random)
    weights, ids = scores.topk(min(size.top_k, size.experts))
    inputs = hidden, ids, weights
    first, following, update = _steps(layers, inputs, setting)
    scale, alone = 1 / (share * count), setting.config.forwards_alone
    part = "" if share == 1 else f", {size.experts} experts of {round(size.experts / share)}"
    return ExpertTimes(
        first=first * scale,
        next=following * scale,
        reference=_reference(layers, inputs) * scale * alone if alone else 0.0,
        update=update,
        how=f"{storage}, {layers[0].threads} threads, {count} layer{'s' * (count > 1)}{part}",
    )


def measure_costs(setting: Setting, limits: Limits) -> Costs | None:
    """What a step takes on this machine's GPU, by the probes of ``train``; None where it can't be timed.

    Weights are random and in this process's memory, registered with the driver as a mapped file's are.
    """
    import torch

    from ktbridge.experts.gpu.operations import has_tensor_cores
    from ktbridge.experts.gpu.timing import combine_costs, time_experts, time_update
    from ktbridge.experts.layer import MoELoRAExperts
    from ktbridge.sft.plan.outside import measure_outside

    if not torch.cuda.is_available() or not has_tensor_cores(torch.device("cuda")):
        return None
    device, config = torch.device("cuda"), setting.config
    most = probe_tokens(limits)
    outside = measure_outside(setting, most)
    if outside is None:
        return None
    storage = setting.shape.expert_storage if setting.shape.mappable else "bf16"
    size = setting.expert_pass(most)
    layer = MoELoRAExperts.from_tensors(
        *_random_layer(storage, size, setting.shape.mappable),
        lora_rank=size.rank,
        lora_dropout=config.expert_dropout,
    )
    short = times_cpu(setting, limits)
    experts = time_experts(layer, device, size.top_k, most, free=max(1, limits.free), cpu=short)
    update = time_update(device), time_update(torch.device("cpu"))
    return combine_costs(experts, outside, update, 1 + config.forwards_alone)


@dataclass(frozen=True)
class ProductRates:
    """FLOP/s of a linear module and of its input's gradient, and on what ("GPU" or "CPU")."""

    forward: float
    backward: float
    where: str


def measure_products(setting: Setting, tokens: int) -> ProductRates:
    """A linear [H, H] on ``tokens``, on the device that attention runs on and in its dtype.

    The two differ by more than ten where a CPU has no bfloat16 products: one reads its weights turned.
    """
    import torch

    hidden = setting.shape.config.hidden_size
    device = torch.device("cuda" if setting.cuda and torch.cuda.is_available() else "cpu")
    rows = min(tokens, 4096 if device.type == "cuda" else 256)
    dtype = torch.bfloat16 if setting.batch.width == 2 else torch.float32
    states = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, hidden, device=device).to(dtype)
    times = 16 if device.type == "cuda" else 1  # queued together, as in training

    def rate(product: Callable[[], object]) -> float:
        def once() -> None:
            for _ in range(times):
                product()
            if device.type == "cuda":
                torch.cuda.synchronize()

        (seconds,) = _medians(lambda: iter([_seconds(once)]), _SECONDS / 4)
        return times * 2 * rows * hidden**2 / seconds

    forward = rate(lambda: torch.nn.functional.linear(states, weight))
    return ProductRates(
        forward, rate(lambda: states @ weight), device.type.upper().replace("CUDA", "GPU")
    )


def _fitting(
    setting: Setting, size: Pass, storage: str, room: int | None
) -> tuple[Pass, float, int]:
    """Return what is measured: the pass, its share of a layer's work, and how many layers."""
    room = min(_ROOM, (room or _ROOM) // 4)
    one = 3 * size.hidden * size.inner * _BITS[storage] // 8
    one += (
        16 * 3 * size.rank * (size.hidden + size.inner)
    )  # float32 LoRA, gradient, two Adam states
    beside = round(host_bytes(size, setting.retain, setting.threads))
    fit = max(0, room - beside) // one
    experts = max(min(size.experts, fit), min(size.experts, size.top_k))
    if experts < size.experts:
        tokens = max(1, size.tokens * experts // size.experts)
        return replace(size, experts=experts, tokens=tokens), tokens / size.tokens, 1
    layer = one * experts + round(saved_bytes(size, setting.retain))
    wanted = max(2, -(-_CACHES * _last_level_cache() // layer))
    return size, 1.0, max(1, min(wanted, setting.shape.sparse_layers, (room - beside) // layer))


def _steps(
    layers: Sequence[Any], inputs: tuple[Any, ...], setting: Setting
) -> tuple[float, float, float]:
    """Seconds of the kernels over all layers, in a step's first micro-batch and in others; of an update."""
    import torch

    from ktbridge.experts.autograd import kernel_seconds

    trained = [parameter for layer in layers for parameter in layer.parameters()]
    if not trained:  # the experts have no LoRA: as many weights as others may have stand for these
        trained = [torch.nn.Parameter(torch.zeros(1 << 20))]
    optimizer = torch.optim.AdamW(trained, lr=1e-9, fused=True)
    several = setting.config.gradient_accumulation_steps > 1

    def passed() -> float:
        began = kernel_seconds()
        outs = [layer(*inputs) for layer in layers]
        while outs:
            out = outs.pop()
            out.backward(out.detach())
        return kernel_seconds() - began

    def update() -> None:
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    def step() -> Iterator[float]:
        optimizer.zero_grad()  # the gradients' memory goes, as in training
        yield passed()
        yield passed() if several else 0.0
        yield _seconds(update)

    first, following, updating = _medians(step, _SECONDS)
    return first, following, updating / sum(parameter.numel() for parameter in trained)


def _reference(layers: Sequence[Any], inputs: tuple[Any, ...]) -> float:
    import torch

    def once() -> None:
        with torch.no_grad():
            for layer in layers:
                layer(*inputs)

    for layer in layers:
        layer.lora_enabled = False
    (seconds,) = _medians(lambda: iter([_seconds(once)]), _SECONDS / 4)
    return seconds


def _random_layer(storage: str, size: Pass, mapped: bool) -> tuple[Any, Any, Any]:
    up = (size.inner, size.hidden)
    gate_up_down = up, up, (size.hidden, size.inner)
    gate, up_, down = (_random(storage, size.experts, *shape, mapped) for shape in gate_up_down)
    return gate, up_, down


def _random(storage: str, experts: int, out: int, inputs: int, mapped: bool) -> Any:
    """One projection of all experts: distinct memory, the same random values in each expert."""
    import torch

    from ktbridge.experts.weights import ExpertWeights

    def stacked(one: Any) -> Any:
        if not mapped:
            return one.expand(experts, *one.shape).contiguous()
        pages = mmap.mmap(-1, experts * one.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        made = torch.frombuffer(pages, dtype=torch.uint8).view(one.dtype)
        return made.view(experts, *one.shape).copy_(one)

    if storage == "bf16":
        return ExpertWeights.bf16(stacked((torch.randn(out, inputs) / inputs**0.5).bfloat16()))
    if storage == "fp8":
        weight = stacked(torch.randn(out, inputs).to(torch.float8_e4m3fn))
        scale = torch.full((experts, -(-out // 128), -(-inputs // 128)), inputs**-0.5)
        return ExpertWeights.fp8(weight, scale)
    if storage == "int8":
        weight = stacked(torch.randint(-127, 128, (out, inputs), dtype=torch.int8))
        return ExpertWeights.int8(weight, torch.full((experts, out), 0.01 * inputs**-0.5))
    if storage == "mxfp4":
        blocks = torch.randint(0, 256, (out, -(-inputs // 2)), dtype=torch.uint8)
        exponent = 125 - round(math.log2(inputs) / 2)  # values of about inputs**-0.5
        scales = torch.full((experts, out, -(-inputs // 32)), exponent, dtype=torch.uint8)
        return ExpertWeights.mxfp4(stacked(blocks), scales)
    words = torch.randint(-(2**31), 2**31 - 1, (out, -(-inputs // 8))).to(torch.int32)
    scale = torch.full((experts, out, -(-inputs // 32)), 0.2 * inputs**-0.5, dtype=torch.bfloat16)
    return ExpertWeights.int4(stacked(words), scale, 32)


def _last_level_cache() -> int:
    """Bytes of the largest cache of a CPU."""
    found = [_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            found.append(int(match[1]) * _SIZES.get(match[2], 1))
    return max(found)


def _seconds(once: Callable[[], None]) -> float:
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


def _medians(step: Callable[[], Iterator[float]], seconds: float) -> list[float]:
    """Medians of what ``step`` yields, over as many as fit, three at least, after one to warm up."""
    list(step())
    taken: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < until:
        taken.append(list(step()))
    return [median(column) for column in zip(*taken, strict=True)]
