"""Timing of what a placement is chosen by: ``Costs`` of a run's own layers, in some seconds on this machine.

Three things work beside each other, so they are timed apart: the link by copies of a group's own pages, the
GPU by the seconds that its kernels have in torch's profiler, and the host by small inputs, for which starting
the operations takes all of the time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import distributed, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ktbridge.experts.gpu.copying import make_copier
from ktbridge.experts.gpu.executor import GpuBinding, GpuExperts
from ktbridge.experts.gpu.layer_math import BorderedMatrices
from ktbridge.experts.gpu.layout import Group, group_experts, unpack_group
from ktbridge.experts.gpu.masters import clip_to_norm
from ktbridge.experts.gpu.placement import MICRO_BATCH_SECONDS, STEP_SECONDS, Costs, Line, Placement
from ktbridge.experts.gpu.ring import Copier
from ktbridge.experts.layer import MoELoRAExperts, expert_layers

MOST_TOKENS = 16384
"""Tokens timed; more take in proportion."""
_FEW = 64  # tokens whose products take less time than starting them
_CPU_TOKENS = 1024
_REPEATS = 3
_AGAIN = 0.35  # of a backward's seconds: two of its five products are gate's and up's second
_GROUP = 0.7
_UPDATED = (64, 1 << 18)
"""LoRA weights that the optimizer is timed with: with gradients and Adam's states more than a host caches."""
_TEARDOWN = "TEARDOWN_CUPTI"
_PART = 4 << 30  # bytes of bfloat16 matrices that are timed at most; of more, fewer experts are


Timing = Callable[[Callable[[], object], torch.device], float]


@dataclass(frozen=True)
class OutsideTimes:
    """All but the routed experts, of a whole model: GPU seconds by tokens, and the host's."""

    forward: Line
    backward: Line
    loss: Line
    launch: tuple[float, float]
    token_bytes: int | None
    """GPU memory that a token takes at the peak of forward and backward; None: not known."""


def combine_costs(
    experts: Costs,
    outside: OutsideTimes,
    update: tuple[tuple[float, float], tuple[float, float]],
    forwards: int = 1,
) -> Costs:
    """Return the costs of a step: those of its ``experts``, and of all else; ``forwards`` of a micro-batch.

    ``update``: what ``time_update`` returns for the GPU and for the host.
    """
    return replace(
        experts,
        outside=(outside.forward, outside.backward),
        launch_outside=outside.launch,
        loss=outside.loss.scaled((2 + forwards) / 3),
        update=(sum(update[0]), sum(update[1])),
        deferred=update[1][1],
        add=update[1][1],
        others=STEP_SECONDS,
        micro_batch=MICRO_BATCH_SECONDS,
        forwards=forwards,
    )


def time_experts(
    layer: MoELoRAExperts,
    device: torch.device,
    top_k: int,
    tokens: int,
    *,
    free: int = _PART,
    cpu: bool = False,
) -> Costs:
    """Time the experts of ``layer`` with up to ``tokens`` [T] on ``device``; ``cpu``: on the CPU, too.

    Where the layer's matrices are more than a third of ``free`` bytes, some experts are timed, with as many
    tokens for each as in the layer; times are in proportion. ``layer`` itself is not run.
    """
    matrix = 6 * layer.hidden_size * layer.intermediate_size
    count = max(min(layer.num_experts, top_k), min(layer.num_experts, min(_PART, free // 3) // matrix))
    part = _part(layer, range(count))
    share, top_k = count / layer.num_experts, min(top_k, count)
    (group,) = group_experts(part.weights, 1 << 40)
    copier, _ = make_copier([group], device)
    experts = GpuExperts(
        {0: part.weights},
        device,
        part.lora_rank,
        Placement(tokens, slot_bytes=group.bytes, slots=1, resident=(0,)),
        copier,
    )
    try:
        on_cpu = None
        if cpu:
            few = min(tokens, _CPU_TOKENS)
            size = max(1, round(few * share))
            forward, backward = _run(part, top_k, size, torch.device("cpu"), seconds_waited)
            on_cpu = Line(0.0, (forward + backward) / share / few)
        part.gpu = GpuBinding(experts, 0)
        part.move_lora(device)
        large = max(2 * _FEW, round(min(tokens, MOST_TOKENS) * share))
        sizes = large // 2, large
        less, more = (_run(part, top_k, size, device, seconds_busy) for size in sizes)
        detach_profiler(device)  # the host's seconds are those of the run, which goes on without it
        launch = _run(part, top_k, _FEW, device, seconds_waited)
        rows = [size * top_k for size in sizes]
        # Of as many rows an expert as in the layer; what doesn't grow with them is started once.
        ways = [_line(rows, (less[way], more[way])) for way in range(2)]
        part.gpu = None
        experts.drop()
        link, unpacking = _transfers(part, group, copier, device)
        return Costs(
            link,
            (ways[0], ways[1]),
            again=ways[1].scaled(_AGAIN),
            unpack=unpacking,
            launch=launch,
            # A further group starts what a layer in one group does, but for routing and summing up.
            launch_group=_GROUP * max(launch),
            cpu=on_cpu,
        )
    finally:
        part.gpu = None
        _wait(device)
        experts.drop()
        copier.close()


def time_outside(
    model: nn.Module,
    whole: Callable[[torch.Tensor], torch.Tensor],
    hidden: Callable[[torch.Tensor], torch.Tensor],
    sizes: Sequence[tuple[int, int]],
    device: torch.device,
) -> OutsideTimes:
    """Time a ``model`` on ``device`` whose routed experts hand their inputs on.

    ``hidden`` and ``whole`` make last hidden states, and a loss, of token ids [rows, length]; ``sizes`` are
    rows and length of micro-batches, the smallest for the host first, then a small and a large one. Random
    numbers, gradients and modes are as before. Raises ``torch.OutOfMemoryError``.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients, training = [p.grad for p in trained], model.training
    numbers = [device] if device.type == "cuda" else []
    found: list[tuple[float, float, float, int]] = []
    try:
        with torch.random.fork_rng(devices=numbers), _without_experts(model):
            model.train()
            for number, (rows, length) in enumerate(sizes):
                ids = torch.ones(rows, length, dtype=torch.int64, device=device)
                found.append(_outside(hidden, whole, ids, device, seconds_busy if number else seconds_waited))
    finally:
        detach_profiler(device)
        model.train(training)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
    few, small, large = found
    tokens = [rows * length for rows, length in sizes[1:]]
    lines = [_line(tokens, (a, b)) for a, b in zip(small[:3], large[:3], strict=True)]
    taken = None
    if large[3] > small[3]:
        taken = round((large[3] - small[3]) / (tokens[1] - tokens[0]))
    return OutsideTimes(lines[0], lines[1], lines[2], few[:2], taken)


def time_update(device: torch.device) -> tuple[float, float]:
    """Seconds for clipping and for AdamW of one LoRA weight on ``device``."""
    value = torch.nn.Parameter(torch.zeros(_UPDATED, device=device))
    value.grad = torch.ones_like(value)
    optimizer = torch.optim.AdamW([value], lr=1e-9, fused=True)
    clipping = median_seconds(lambda: clip_to_norm([value], 1.0), device)
    return clipping / value.numel(), median_seconds(optimizer.step, device) / value.numel()


def seconds_waited(once: Callable[[], object], device: torch.device) -> float:
    """Median seconds of three runs, the device waited for, after two.

    A second backward adds where the first wrote, by kernels that are compiled then.
    """
    return median(time_runs(once, device, 5)[2:])


def seconds_busy(once: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``device`` computes in a run, however long the host takes to start that.

    Of the second one: kernels of libraries are compiled, and tried against each other, at a shape's first.
    """
    if device.type == "cuda":
        once()
        _wait(device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            once()
            _wait(device)
        found = sum(
            each.self_device_time_total for each in seen.key_averages() if each.device_type != DeviceType.CPU
        )
        if found:  # else the driver lets nobody look
            return float(found) / 1e6
    return min(time_runs(once, device, 1))


def detach_profiler(device: torch.device) -> None:
    """End what torch's profiler leaves attached behind its last session: CUPTI, in all calls of CUDA.

    That is 8 us for each launch (docs/kernel-log.md, entry 72). A session that finds TEARDOWN_CUPTI detaches
    it at the next call; before CUDA 12.6 not reliably (kineto 1264), and not seen beside NCCL's threads.
    """
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
    if device.type != "cuda" or version < (12, 6) or _TEARDOWN in os.environ or distributed.is_initialized():
        return
    os.environ[_TEARDOWN] = "1"
    try:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            _wait(device)
    finally:
        del os.environ[_TEARDOWN]
    _wait(device)


def median_seconds(once: Callable[[], object], device: torch.device, seconds: float = 0.0) -> float:
    """Return the median of some runs on ``device``, as ``median_columns`` makes them."""
    return median_columns(lambda: time_runs(once, device, 1), seconds)[0]


def median_columns(step: Callable[[], Iterable[float]], seconds: float = 0.0) -> list[float]:
    """Return medians of what ``step`` yields: three runs or all in ``seconds``, after one to warm up."""
    list(step())
    taken: list[list[float]] = []
    until = time.perf_counter() + seconds
    while len(taken) < _REPEATS or time.perf_counter() < until:
        taken.append(list(step()))
    return [median(column) for column in zip(*taken, strict=True)]


def time_runs(once: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Seconds of each of some runs, the device waited for."""
    taken = []
    for _ in range(runs):
        _wait(device)
        began = time.perf_counter()
        once()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return taken


def _line(sizes: Sequence[int], seconds: tuple[float, float]) -> Line:
    """The line through two measurements."""
    (small, large), (less, more) = sizes, seconds
    # Of the large one a half at least is by size, whatever disturbed the measurements.
    each = max(0.0, (more - less) / max(1, large - small), 0.5 * more / large)
    return Line(max(0.0, more - each * large), each)


def _outside(
    hidden: Callable[[torch.Tensor], torch.Tensor],
    whole: Callable[[torch.Tensor], torch.Tensor],
    ids: torch.Tensor,
    device: torch.device,
    timing: Timing,
) -> tuple[float, float, float, int]:
    """Seconds of a forward, a backward, and of head and loss; peak bytes of the first two."""

    def both() -> None:
        out = hidden(ids)
        out.backward(torch.ones_like(out))

    alone = timing(lambda: hidden(ids), device)
    taken = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        taken = torch.cuda.memory_allocated(device)
    two = timing(both, device)
    if device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(device) - taken
    three = timing(lambda: whole(ids).backward(), device)
    return alone, max(0.0, two - alone), max(0.0, three - two), taken


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Have routed experts hand on their input."""
    layers = list(expert_layers(model).values())

    def hand_on(states: torch.Tensor, *_: object) -> torch.Tensor:
        return states.clone()

    for layer in layers:
        layer.forward = hand_on  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _part(layer: MoELoRAExperts, experts: Sequence[int]) -> MoELoRAExperts:
    """A layer of some of the ``experts`` of ``layer``, with a LoRA of its own."""
    gate, up, down = (each.only(experts) for each in layer.weights)
    return MoELoRAExperts(gate, up, down, replace(layer.options, accumulate_grad=True))


def _run(
    layer: MoELoRAExperts, top_k: int, tokens: int, device: torch.device, timing: Timing
) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, layer.hidden_size, generator=draw).bfloat16().to(device)
    ids = torch.rand(tokens, layer.num_experts, generator=draw).topk(top_k).indices.to(device)
    weights = torch.full((tokens, top_k), 1 / top_k, device=device)
    hidden.requires_grad_()

    def forward() -> torch.Tensor:
        out: torch.Tensor = layer(hidden, ids, weights)
        return out

    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    alone = timing(forward, device)
    return alone, max(0.0, timing(both, device) - alone)


def _transfers(
    layer: MoELoRAExperts, group: Group, copier: Copier, device: torch.device
) -> tuple[float, float]:
    """Bytes a second of a group's copy, and seconds for a byte of the matrices that it is unpacked into."""
    raw = torch.empty(group.bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        copier.start(group, raw, None).wait()

    link = group.bytes / median_seconds(copy, device)
    sizes = len(group.experts), layer.hidden_size, layer.intermediate_size
    into = BorderedMatrices.empty(*sizes, layer.lora_rank, device)
    seconds = median_seconds(lambda: unpack_group(group, raw, layer.weights, into), device)
    return link, seconds / (6 * math.prod(sizes))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
