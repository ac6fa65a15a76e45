"""How fast the link is, and the GPU and the CPU with one layer of a model's experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.gpu.share import LayerTimes
from ktbridge.experts.layer import MoELoRAExperts

_MOST = 8192  # tokens timed; more take in proportion
_MOST_ON_CPU = 1024
_REPEATS = 3


def time_layer(
    layer: MoELoRAExperts, experts: GpuExperts, top_k: int, tokens: int, on_cpu: bool = True
) -> LayerTimes:
    """Time ``layer``, which ``experts`` computes, there and on the CPU (0 without ``on_cpu``).

    Its LoRA gradients are dropped afterwards.
    """
    device, place, masters = experts.device, layer.gpu, layer.lora_device

    def run(count: int, where: torch.device) -> float:
        inputs = _inputs(layer, top_k, count, where)

        def once() -> None:
            out = layer(*inputs)
            out.backward(torch.ones_like(out))

        return median_seconds(once, where)

    cpu = 0.0
    try:
        few = min(tokens, _MOST)
        gpu = run(few, device) * tokens / few
        if on_cpu:
            layer.gpu = None
            layer.move_lora(torch.device("cpu"))
            few = min(tokens, _MOST_ON_CPU)
            cpu = run(few, torch.device("cpu")) * tokens / few
    finally:
        layer.move_lora(masters, pinned=masters.type == "cpu" and device.type == "cuda")
        layer.gpu = place
    return LayerTimes(gpu, cpu, _link(experts))


def _link(experts: GpuExperts) -> float:
    """Bytes a second of one group's crossing, the second time, when its pages are in memory."""
    ring = experts.ring
    if not ring.groups:
        return 0.0
    group = ring.groups[0]
    slot = torch.empty(ring.slot_bytes, dtype=torch.uint8, device=experts.device)

    def once() -> None:
        ready = ring.copier.start(group, slot, None)
        if ready is not None:
            ready.wait()

    return group.bytes / median_seconds(once, experts.device)


def _inputs(
    layer: MoELoRAExperts, top_k: int, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts drawn evenly, equal weights."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, layer.hidden_size, generator=draw).bfloat16().to(device)
    ids = torch.rand(tokens, layer.num_experts, generator=draw).topk(top_k).indices.to(device)
    weights = torch.full((tokens, top_k), 1 / top_k, device=device)
    return hidden.requires_grad_(), ids, weights


def median_seconds(once: Callable[[], object], device: torch.device) -> float:
    """The median of some runs after one to warm up."""
    taken = []
    for _ in range(_REPEATS + 1):
        _wait(device)
        began = time.perf_counter()
        once()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
