"""A short measurement of this machine: the expert kernels at the layer's real shape, and a matrix product.

The only part of a plan that needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from ktbridge.sft.plan.kernels import Pass
from ktbridge.sft.plan.memory import Setting, expert_lora_elements, nonexpert_lora_elements
from ktbridge.sft.plan.parts import Pace

_SECONDS = 1.0
_ROOM = 1_500_000_000
# What attention, norms, LoRA in float32 and launches add to the plain products.
_OVERHEAD = 2.0
_DISK_RATE = 1e9
_OPTIMIZER_RATE = 4e9


def measure_pace(setting: Setting, room: int | None) -> Pace:
    """Time one layer's experts, forward and backward, and one product; scale both to the run.

    ``room`` are the bytes that may be taken; at most 1.5 GB are. If a layer needs more, fewer experts
    are measured, with as many tokens each.
    """
    tokens = round(setting.batch.rows * setting.lengths.mean)
    size, share = _fitting(setting.expert_pass(max(1, tokens)), min(_ROOM, (room or _ROOM) // 4))
    layer, storage = _expert_seconds(setting, size)
    experts = layer / share * setting.shape.sparse_layers
    rate, where = _product_rate(setting.cuda, setting.batch.width)
    work = _flops(setting, tokens)
    others = _OVERHEAD * work / rate
    accumulation = setting.config.gradient_accumulation_steps
    trained = expert_lora_elements(setting) + nonexpert_lora_elements(setting)
    step = accumulation * (experts + others) + 28 * trained / _OPTIMIZER_RATE
    saves = (setting.steps - 1) // setting.config.save_steps if setting.saves else 0
    rows = min(accumulation * setting.config.per_device_train_batch_size, setting.lengths.sequences)
    sides = 2 if setting.config.stage == "dpo" else 1
    seen = rows * sides * setting.lengths.mean
    measured = (
        "" if share == 1 else f", {size.experts} experts of a layer's {round(size.experts / share)}"
    )
    return Pace(
        tokens_per_second=seen / step,
        step_seconds=step,
        seconds=setting.steps * step + saves * 12 * trained / _DISK_RATE,
        expert_share=accumulation * experts / step,
        how=f"measured: {1000 * layer / share:.0f} ms a layer of experts ({storage}{measured}), "
        f"{rate / 1e9:,.0f} GFLOP/s in a product on the {where}; "
        f"assumed: everything but the experts takes {_OVERHEAD:g} times its products",
    )


def _fitting(size: Pass, room: int) -> tuple[Pass, float]:
    """As many experts as there is room for, and the share of a layer's work that they are."""
    one = 3 * size.hidden * size.inner * 2
    experts = max(min(size.experts, room // one), min(size.experts, size.top_k))
    if experts == size.experts:
        return size, 1.0
    tokens = max(1, size.tokens * experts // size.experts)
    return replace(size, experts=experts, tokens=tokens), tokens / size.tokens


def _expert_seconds(setting: Setting, size: Pass) -> tuple[float, str]:
    """Seconds of a forward and a backward on random weights, the median of a second's worth."""
    import torch

    from ktbridge.sft import MoELoRAExperts

    storage = setting.shape.expert_storage if setting.shape.mappable else "bf16"
    gate, up, down = (
        _random_weights(storage, size.experts, out, inputs)
        for out, inputs in ((size.inner, size.hidden),) * 2 + ((size.hidden, size.inner),)
    )
    layer = MoELoRAExperts.from_tensors(
        gate,
        up,
        down,
        lora_rank=size.rank,
        threads=setting.config.kt_config.kt_num_threads or None,
        activation=setting.config.activation,
        accumulate_grad=True,
    )
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=random).bfloat16().requires_grad_()
    scores = torch.rand(size.tokens, size.experts, generator=random)
    weights, ids = scores.topk(min(size.top_k, size.experts))

    def once() -> None:
        out = layer(hidden, ids, weights)
        out.backward(out.detach())

    return _timed(once), storage


def _random_weights(storage: str, experts: int, out: int, inputs: int) -> Any:
    """One projection of all experts: distinct memory, the same random values in each expert."""
    import torch

    from ktbridge.sft import ExpertWeights

    def stacked(one: Any) -> Any:
        return one.expand(experts, *one.shape).contiguous()

    if storage == "bf16":
        return ExpertWeights.bf16(stacked((torch.randn(out, inputs) / inputs**0.5).bfloat16()))
    if storage == "fp8":
        weight = stacked((torch.randn(out, inputs)).to(torch.float8_e4m3fn))
        return ExpertWeights.fp8(
            weight, torch.full((experts, -(-out // 128), -(-inputs // 128)), inputs**-0.5)
        )
    if storage == "int8":
        weight = stacked(torch.randint(-127, 128, (out, inputs), dtype=torch.int8))
        return ExpertWeights.int8(weight, torch.full((experts, out), 0.01 * inputs**-0.5))
    words = torch.randint(-(2**31), 2**31 - 1, (out, -(-inputs // 8))).to(torch.int32)
    scale = torch.full((experts, out, -(-inputs // 32)), 0.2 * inputs**-0.5, dtype=torch.bfloat16)
    return ExpertWeights.int4(stacked(words), scale, 32)


def _product_rate(cuda: bool, width: int) -> tuple[float, str]:
    """FLOP/s of a product on the device that attention runs on, in its dtype of ``width`` bytes."""
    import torch

    device = torch.device("cuda" if cuda and torch.cuda.is_available() else "cpu")
    side = 4096 if device.type == "cuda" else 256
    dtype = torch.bfloat16 if width == 2 else torch.float32
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)

    def once() -> None:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()

    where = "GPU" if device.type == "cuda" else "CPU"
    return 2 * side**3 / _timed(once, _SECONDS / 4), where


def _flops(setting: Setting, tokens: int) -> float:
    """Products outside the experts, forward and backward: 2 a weight each way, once more if checkpointed."""
    shape = setting.shape
    layers = sum(out * inputs for layer in shape.layers for out, inputs in layer.linears.values())
    lora = nonexpert_lora_elements(setting)
    passes = 2 if setting.config.disable_gradient_checkpointing else 3
    forward_only = 2 * layers * tokens if setting.config.stage == "dpo" else 0  # the reference
    head = shape.vocabulary * shape.config.hidden_size
    attention = 2 * setting.lengths.mean * shape.config.hidden_size * len(shape.layers)
    return forward_only + tokens * (
        passes * 2 * (layers + attention) + (passes + 1) * 2 * lora + 3 * 2 * head
    )


def _timed(once: Callable[[], None], seconds: float = _SECONDS) -> float:
    """The median of as many runs as fit, three at least, after one to warm up."""
    once()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        once()
        taken.append(time.perf_counter() - started)
    return median(taken)
