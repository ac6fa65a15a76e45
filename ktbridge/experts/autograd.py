"""The expert kernels in autograd: one call, its tensors' way to the host and back, and a GPU stream's queue.

A training step with attention on a GPU launches some ten thousand small operations, which takes Python about
as long as half of the experts' work. A call that waits for its inputs makes the two take turns; one that
the stream itself starts (``queue``), between the copies to the host and back, lets them overlap.

The price is that results on the CPU come later than the call that asks for them: LoRA gradients are
there when ``backward()`` returns, and a failure is raised there or by the stream's next call. So whoever
switches it on promises to change the LoRA only after a backward pass.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.experts import compat, recompute
from ktbridge.experts.lora import LoraUse, accumulates, addresses_of, float_zeros
from ktbridge.experts.weights import SILU, ExpertWeights
from ktbridge.kernel_choice import choose_isa, choose_threads, places

Saved = _kernels.Job | None
"""State that a forward left for its backward, once a stream has come to it where it was queued."""


@dataclass
class KernelCall:
    """State that one forward and its backward share besides tensors.

    The kernels hold addresses only, so the weights go along, to outlive the module in autograd.
    """

    layer: _kernels.Layer
    weights: tuple[ExpertWeights, ...]
    used: LoraUse
    keep: _kernels.Keep
    accumulate: bool
    ahead: bool = False
    """True where passes with inputs on a GPU are queued in its stream instead of waited for."""
    replayed: torch.Tensor | None = None
    """The output [T, H] of this call, on the host, where a checkpointed layer runs a second time."""
    saved: Saved = None
    queued: bool = False
    """True once the forward was queued in a GPU's stream, as its backward is then."""
    host: tuple[torch.Tensor, ...] = ()
    """Host copies of hidden [T, H] and topk_weights [T, K] that came from a GPU."""


class ExpertFunction(torch.autograd.Function):
    """Binds the kernels' forward and backward to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: KernelCall,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        ctx.parameters, ctx.device = lora, hidden.device
        used = call.used.of(parameter.contiguous() for parameter in lora)
        on_gpu = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if on_gpu else call.replayed.clone()
        else:
            ahead = call.ahead and on_gpu and call.keep != _kernels.Keep.nothing
            host, ids, weights = to_host(hidden, topk_ids, topk_weights, wait=not ahead)
            out = host_empty(hidden, on_gpu)
            call.queued = ahead
            tensors = host, ids, weights, out
            arguments = (
                *used.arguments(),
                *ids.shape,
                *(tensor.data_ptr() for tensor in tensors),
                call.keep,
                used.dropout.arguments() if used.dropout else (0, 0, 0),
                0 if used.tokens is None else used.tokens.data_ptr(),
            )
            stream = torch.cuda.current_stream(hidden.device) if ahead else None
            call.saved = _run(call.layer.forward, stream, arguments, (call, tensors, used))
            # What stays on the CPU is the caller's, who may change it in place.
            recompute.record(out if on_gpu else out.clone())
            if call.saved is not None and on_gpu:
                call.host = host, weights
        if call.keep != _kernels.Keep.nothing:
            ctx.call = call
            # A second forward saves what the first one did: checkpointing pairs them.
            own = () if on_gpu else (hidden, topk_weights)
            ctx.save_for_backward(*own, *used.tensors.values())
        return to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: KernelCall = ctx.call
        kept: tuple[torch.Tensor, ...] = ctx.saved_tensors
        assert call.saved is not None  # autograd refuses a second backward above
        hidden, topk_weights, *lora = (*call.host, *kept)
        hidden, topk_weights = hidden.contiguous(), topk_weights.contiguous()
        (d_out,) = to_host(d_out.to(torch.bfloat16), wait=not call.queued)
        on_gpu = ctx.device.type != "cpu"
        d_hidden = host_empty(hidden, on_gpu)
        d_weights = host_empty(topk_weights, on_gpu)
        # Where each gradient is accumulated, and what is returned to autograd.
        targets: dict[str, torch.Tensor | None] = {}
        returned: list[torch.Tensor | None] = []
        needs = ctx.needs_input_grad[4:]
        for name, parameter, needed in zip(call.used.names, ctx.parameters, needs, strict=True):
            straight = call.accumulate and needed and accumulates(parameter)
            if straight and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            fresh = needed and not straight
            returned.append(float_zeros(parameter.shape) if fresh else None)
            targets[name] = parameter.grad if straight else returned[-1]
        last = not compat.graph_is_kept()
        stream = torch.cuda.current_stream(ctx.device) if call.queued else None
        tensors = hidden, d_out, d_hidden, d_weights
        used = call.used.of(lora)
        addresses = (tensor.data_ptr() for tensor in tensors)
        arguments = call.saved, last, *used.arguments(), *addresses, addresses_of(targets)
        _run(call.layer.backward, stream, arguments, (call, tensors, used, targets))
        if stream is not None:
            if any(gradient is not None for gradient in returned):
                finish_jobs(stream)  # autograd adds these up at once
            else:
                finish_after_backward(stream)
        if last:
            # Like saved tensors: a loss that lives on doesn't hold the activations.
            call.saved, call.host = None, ()
        there = (to_device(d, ctx.device) for d in (d_hidden, d_weights))
        return None, next(there), None, next(there), *returned


def _run(
    kernel: Callable[..., Any], stream: torch.cuda.Stream | None, arguments: tuple[Any, ...], alive: object
) -> Any:
    """Call a kernel at once, or have ``stream`` call it, which keeps ``alive`` until then."""
    global _seconds
    if stream is not None:
        return queue(stream, kernel, arguments, alive)
    started = time.perf_counter()
    try:
        return kernel(0, 0, *arguments)  # no launcher, no stream
    finally:
        _seconds += time.perf_counter() - started


def kernels_of(weights: Sequence[ExpertWeights], isa: str, threads: int | None) -> _kernels.Layer:
    """Make the kernels of gate, up and down; the caller keeps ``weights`` alive as long.

    Raises ``UsageError`` where they can't start.
    """
    gate, _, down = weights
    biases = [_padded(each.bias) for each in weights]
    own = gate.gating
    try:
        return _kernels.Layer(
            down.rows,
            gate.rows,
            getattr(_kernels.Storage, gate.storage),
            [each.for_kernels(bias) for each, bias in zip(weights, biases, strict=True)],
            gate.scale_is_bf16,
            gate.row_group.bit_length() - 1,
            gate.column_group.bit_length() - 1,
            None if own == SILU else (own.limit, own.alpha, own.offset),
            choose_isa(isa),
            places(choose_threads(threads or 0)),
        )
    except ValueError as error:
        raise UsageError(f"the expert kernels can't start: {error}.") from error


def _padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    """[E, rows] as float32, contiguous, with zeros behind the rows to a multiple of a tile's."""
    if bias is None:
        return None
    room = -bias.shape[1] % _kernels.DOUBLE
    return torch.nn.functional.pad(bias.float(), (0, room)).contiguous()


_seconds = 0.0


def kernel_seconds() -> float:
    """Return the seconds that this process has spent in the expert kernels so far, forward and backward.

    Of queued jobs those count that are known to be done.
    """
    return _seconds


def to_host(*tensors: torch.Tensor, wait: bool = True) -> tuple[torch.Tensor, ...]:
    """Return contiguous tensors on the CPU; those that are there already are not copied.

    Copies go through pinned memory, which torch's own caching allocator hands out again and again, so a
    transfer costs what PCIe costs: 2 MiB each way for 512 tokens of 2,048 features.

    All are on one device. They are ready to be read, or with ``wait=False`` when the current stream has
    come so far.
    """
    if tensors[0].device.type == "cpu":
        return tuple(tensor.contiguous() for tensor in tensors)
    copies = tuple(
        host_empty(tensor, pinned=True).copy_(tensor.contiguous(), non_blocking=True) for tensor in tensors
    )
    if wait:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def host_empty(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    """Return uninitialized CPU memory in the shape and dtype of ``like``, pinned for transfers."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, in the order of the current stream: the host does not wait."""
    return tensor.to(device, non_blocking=True)


@dataclass(eq=False)
class _Queued:
    alive: object
    """Objects that must live until the job has run: the kernels know them by address."""
    job: _kernels.Job | None = None
    ended: bool = False

    @property
    def over(self) -> bool:
        return self.ended or (self.job is not None and bool(self.job.done))


_queued: defaultdict[torch.cuda.Stream, deque[_Queued]] = defaultdict(deque)
"""Jobs of each stream that haven't been looked at since they were given; a stream runs them in order."""
_lock = threading.Lock()  # autograd has a thread for each GPU


@functools.cache
def launcher() -> int:
    """The address of the driver's cuLaunchHostFunc. Raises OSError where there is no driver."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


def queue(
    stream: torch.cuda.Stream, start: Callable[..., _kernels.Job], arguments: tuple[Any, ...], alive: object
) -> _kernels.Job:
    """Return the job of ``start(cuLaunchHostFunc, stream, *arguments)``; ``alive`` is kept until it has run.

    Raises what ``start`` raises, and what an earlier job of the stream raised and nobody has seen yet.
    """
    _settle(stream)  # first, for what is queued must not be forgotten because of another's failure
    # Kept before the start: an interrupt right after it must not free what the job works on.
    entry = _Queued(alive)
    with _lock:
        _queued[stream].append(entry)
    try:
        entry.job = start(launcher(), stream.cuda_stream, *arguments)
    except Exception:
        with _lock:
            _queued[stream].remove(entry)
        raise
    return entry.job


def finish_jobs(stream: torch.cuda.Stream) -> None:
    """Wait for the jobs of ``stream``. Raises what the first of them that failed raised."""
    with _lock:
        asked = tuple(_queued[stream])
    stream.synchronize()
    for entry in asked:
        entry.ended = True
    _settle(stream)


def finish_after_backward(stream: torch.cuda.Stream) -> None:
    """Call ``finish_jobs`` once, before the backward pass that is running returns to its caller."""
    compat.after_backward(stream, lambda: finish_jobs(stream))


def _settle(stream: torch.cuda.Stream) -> None:
    """Let go of the jobs of ``stream`` that are over. Raises what the first that failed raised."""
    global _seconds
    over = []
    with _lock:
        entries = _queued[stream]
        while entries and entries[0].over:
            over.append(entries.popleft())
        jobs = [entry.job for entry in over if entry.job is not None]
        _seconds += sum(job.seconds for job in jobs)
    for job in jobs:
        job.check()


@atexit.register
def _let_jobs_end() -> None:
    """Wait for all jobs before the interpreter frees what they work on."""
    with _lock:
        waiting = [stream for stream, entries in _queued.items() if entries]
    for stream in waiting:
        with suppress(RuntimeError):  # a GPU that has failed runs no more of them
            stream.synchronize()
