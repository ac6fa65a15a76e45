"""How fast the link is, and the GPU and the CPU with one layer of a model's experts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from ktbridge.experts.gpu.copying import copier_for
from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.gpu.gpu_call import OnGpu
from ktbridge.experts.gpu.layout import layer_groups
from ktbridge.experts.gpu.share import LayerTimes
from ktbridge.experts.layer import MoELoRAExperts

_MOST = 32768  # tokens timed; more take in proportion
_MOST_ON_CPU = 1024
_REPEATS = 3


def time_layer(
    layer: MoELoRAExperts,
    device: torch.device,
    slot_bytes: int,
    top_k: int,
    tokens: int,
    *,
    slots: int | None = None,
    cpu: bool = True,
) -> LayerTimes:
    """Time a layer's experts with ``tokens`` [T] of a pass on ``device``, and how fast they cross.

    What is timed are the experts of ``slots`` groups (None: all), with as many tokens for each as in the
    layer, so that GPU memory is bounded; times are in proportion. Nothing crosses while the GPU is timed.
    ``cpu``: time the CPU's kernels too. ``layer`` itself is not run.
    """
    groups = list(layer_groups(layer.weights, slot_bytes))[:slots]
    part = _part(layer, [expert for group in groups for expert in group.experts])
    share = part.num_experts / layer.num_experts
    top_k = min(top_k, part.num_experts)
    copier, _ = copier_for(groups, device)
    experts = GpuExperts(
        {0: part.weights},
        device,
        part.lora_rank,
        slot_bytes=slot_bytes,
        slots=len(groups),
        copier=copier,
    )

    def run(most: int, where: torch.device) -> list[float]:
        few = min(tokens, most)
        found = _run(part, top_k, max(1, round(few * share)), where)
        return [each * tokens / few / share for each in found]

    try:
        part.gpu = OnGpu(experts, 0)
        part.move_lora(device)
        forward, backward = run(_MOST, device)
        part.gpu = None
        part.move_lora(torch.device("cpu"))
        on_cpu = sum(run(_MOST_ON_CPU, torch.device("cpu"))) if cpu else 0.0
        link = _link(experts)
        return LayerTimes(forward, backward, on_cpu, link)
    finally:
        _wait(device)
        experts.drop()
        copier.close()


def _part(layer: MoELoRAExperts, experts: Sequence[int]) -> MoELoRAExperts:
    """A layer of some of the ``experts`` of ``layer``, with a LoRA of its own."""
    gate, up, down = (each.only(experts) for each in layer.weights)
    return MoELoRAExperts.from_tensors(
        gate,
        up,
        down,
        lora_rank=layer.lora_rank,
        lora_alpha=layer.lora_alpha,
        isa=layer.isa,
        threads=layer.threads,
        lora_targets=layer.lora_targets,
        activation=layer.activation,
        accumulate_grad=True,
        lora_dropout=layer.lora_dropout.p,
    )


def _run(
    layer: MoELoRAExperts, top_k: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    inputs = _inputs(layer, top_k, tokens, device)

    def forward() -> torch.Tensor:
        out: torch.Tensor = layer(*inputs)
        return out

    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    alone = median_seconds(forward, device)
    return alone, max(0.0, median_seconds(both, device) - alone)


def _link(experts: GpuExperts) -> float:
    """Bytes a second of one group's crossing, the second time, when its pages are in memory."""
    ring = experts.ring
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


def median_seconds(once: Callable[[], Any], device: torch.device) -> float:
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
