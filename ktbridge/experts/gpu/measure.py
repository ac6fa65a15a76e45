"""How fast the link is, and the GPU and the CPU with one layer of a model's experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from ktbridge import _kernels
from ktbridge.experts.expert_call import kernel_seconds
from ktbridge.experts.gpu.cold import ColdExperts
from ktbridge.experts.gpu.copying import copier_for
from ktbridge.experts.gpu.cut import Phase
from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.gpu.gpu_call import OnGpu
from ktbridge.experts.gpu.layout import layer_groups
from ktbridge.experts.gpu.lora import Lora
from ktbridge.experts.gpu.share import LayerTimes
from ktbridge.experts.layer import MoELoRAExperts

_MOST = 8192  # tokens timed; more take in proportion
_MOST_ON_CPU = 1024
_COLD_ROWS = (4, 64)  # of each expert
_REPEATS = 3


def time_layer(
    layer: MoELoRAExperts,
    device: torch.device,
    slot_bytes: int,
    top_k: int,
    tokens: int,
    *,
    cpu: bool = True,
    cold_threads: int | None = None,
) -> LayerTimes:
    """Time one layer's experts with ``tokens`` [T] of a pass on ``device``, and how fast they cross.

    Nothing crosses while the GPU is timed. ``cpu``: time the CPU's kernels too; with ``cold_threads``, also
    so many threads of them (0: their default) while the link is busy, for a cut. The layer is left as it
    was, without gradients.
    """
    groups = list(layer_groups(layer.weights, slot_bytes))
    copier, _ = copier_for(groups, device)
    experts = GpuExperts(
        {0: layer.weights},
        device,
        layer.lora_rank,
        slot_bytes=slot_bytes,
        slots=len(groups),
        copier=copier,
    )
    place, masters = layer.gpu, layer.lora_device
    try:
        layer.gpu = OnGpu(experts, 0)
        layer.move_lora(device)
        few = min(tokens, _MOST)
        forward, backward = (tokens / few * each for each in _run(layer, top_k, few, device))
        layer.gpu = None
        layer.move_lora(torch.device("cpu"))
        on_cpu = 0.0
        if cpu:
            few = min(tokens, _MOST_ON_CPU)
            on_cpu = tokens / few * sum(_run(layer, top_k, few, torch.device("cpu")))
        link = _link(experts)
        phases: list[tuple[float, float]] = [(0.0, 0.0), (0.0, 0.0)]
        if cold_threads is not None:
            with _busy(experts):
                phases = _cold(layer, cold_threads)
        return LayerTimes(Phase(*phases[0], forward), Phase(*phases[1], backward), on_cpu, link)
    finally:
        _wait(device)
        layer.gpu = place
        layer.move_lora(masters)
        experts.drop()
        copier.close()


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


def _cold(layer: MoELoRAExperts, threads: int) -> list[tuple[float, float]]:
    """Of forward and of backward: the CPU's seconds for an expert that has rows, and for each row."""
    names = layer.lora_names
    tensors = (each.detach() for each in layer.lora_parameters())
    lora = Lora(dict(zip(names, tensors, strict=True)), 1.0)
    count, host = layer.num_experts, torch.device("cpu")
    cold = ColdExperts(layer.weights, range(count), threads, None, host)
    keep = getattr(_kernels.Keep, layer.activation)
    draw = torch.Generator().manual_seed(0)

    def timed(rows: int) -> tuple[float, float]:
        hidden = torch.randn(count * rows, layer.hidden_size, generator=draw).bfloat16()
        tokens = torch.arange(len(hidden))
        ids = torch.arange(count).repeat_interleave(rows)
        weights = torch.ones(len(hidden))

        forward, backward = [], []
        for _ in range(_REPEATS + 1):
            begun = kernel_seconds()  # gathering rows is the GPU's
            _, saved = cold.forward(hidden, tokens, ids, weights, lora, keep)
            between = kernel_seconds()
            cold.backward(saved, hidden, hidden, tokens, lora, True, True)
            forward.append(between - begun)
            backward.append(kernel_seconds() - between)
        return median(forward[1:]), median(backward[1:])

    few, many = _COLD_ROWS
    found = []
    for small, large in zip(timed(few), timed(many), strict=True):
        row = max(0.0, large - small) / (count * (many - few))
        found.append((max(0.0, small / count - few * row), row))
    return found


@contextmanager
def _busy(experts: GpuExperts) -> Iterator[None]:
    """The link busy with crossings meanwhile, as in training."""
    ring, ended = experts.ring, threading.Event()
    slot = torch.empty(ring.slot_bytes, dtype=torch.uint8, device=experts.device)

    def work() -> None:
        while not ended.is_set():
            ready = ring.copier.start(ring.groups[0], slot, None)
            if experts.device.type == "cuda":
                ready.wait()
                torch.cuda.synchronize(experts.device)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
