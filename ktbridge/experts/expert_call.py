"""One call of the expert kernels: what forward and backward share, bound to autograd."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.experts import checkpointing, compat, crossing, queued
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights

LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")


@dataclass
class ExpertCall:
    """What one forward and its backward share besides tensors.

    The kernels hold addresses only, so the weights go along, to outlive the module in autograd.
    """

    layer: _kernels.Layer
    weights: tuple[ExpertWeights, ...]
    names: tuple[str, ...]
    rank: int
    scale: float
    keep: _kernels.Keep
    accumulate: bool
    ahead: bool = False
    """Whether passes with inputs on a GPU are queued in its stream instead of waited for."""
    replayed: torch.Tensor | None = None
    """The output [T, H] of this call, on the host, where a checkpointed layer runs a second time."""
    saved: _kernels.Saved | _kernels.Job | None = None
    host: tuple[torch.Tensor, ...] = ()
    """Host copies of hidden [T, H] and topk_weights [T, K] that came from a GPU."""

    def addresses(self, tensors: Iterable[torch.Tensor | None]) -> list[int]:
        """As ``addresses`` of this call's parameters."""
        return addresses(self.names, tensors)


class ExpertFunction(torch.autograd.Function):
    """Binds the kernels' forward and backward to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: ExpertCall,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        ctx.parameters = lora
        lora = tuple(parameter.contiguous() for parameter in lora)
        ctx.device = hidden.device
        crosses = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if crosses else call.replayed.clone()
        else:
            ahead = call.ahead and crosses and call.keep != _kernels.Keep.nothing
            hosts = crossing.to_host(hidden, topk_ids, topk_weights, wait=not ahead)
            out = crossing.host_empty(hidden, crosses)
            arguments: tuple[Any, ...] = (
                call.addresses(lora),
                call.rank,
                call.scale,
                hidden.shape[0],
                topk_ids.shape[1],
                *(tensor.data_ptr() for tensor in (*hosts, out)),
                call.keep,
            )
            if ahead:
                stream = torch.cuda.current_stream(hidden.device)
                alive = call, hosts, out, lora
                call.saved = queued.queue(stream, call.layer.queue_forward, arguments, alive)
            else:
                with counted():
                    call.saved = call.layer.forward(*arguments)
            # What stays on the CPU is the caller's, who may change it in place.
            checkpointing.record(out if crosses else out.clone())
            if call.saved is not None and crosses:
                call.host = (hosts[0], hosts[2])
        if call.keep != _kernels.Keep.nothing:
            ctx.call = call
            # A second forward saves what the first one did: checkpointing pairs them.
            own = () if crosses else (hidden, topk_weights)
            ctx.save_for_backward(*own, *lora)
        return crossing.to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: ExpertCall = ctx.call
        kept: tuple[torch.Tensor, ...] = ctx.saved_tensors
        assert call.saved is not None  # autograd refuses a second backward above
        hidden, topk_weights, *lora = (*call.host, *kept)
        hidden, topk_weights = hidden.contiguous(), topk_weights.contiguous()
        (d_out,) = crossing.to_host(
            d_out.to(torch.bfloat16), wait=not isinstance(call.saved, _kernels.Job)
        )
        crosses = ctx.device.type != "cpu"
        d_hidden = crossing.host_empty(hidden, crosses)
        d_weights = crossing.host_empty(topk_weights, crosses)
        # Where each gradient is accumulated, and what is returned to autograd.
        targets: list[torch.Tensor | None] = []
        returned: list[torch.Tensor | None] = []
        for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[4:], strict=True):
            straight = call.accumulate and needed and accumulates(parameter)
            if straight and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            fresh = needed and not straight
            returned.append(float_zeros(parameter.shape) if fresh else None)
            targets.append(parameter.grad if straight else returned[-1])
        arguments: tuple[Any, ...] = (
            call.addresses(lora),
            call.rank,
            call.scale,
            *(tensor.data_ptr() for tensor in (hidden, d_out, d_hidden, d_weights)),
            call.addresses(targets),
        )
        last = not compat.graph_is_kept()
        if isinstance(call.saved, _kernels.Job):
            stream = torch.cuda.current_stream(ctx.device)
            alive = call, hidden, d_out, d_hidden, d_weights, lora, targets
            start = call.layer.queue_backward
            queued.queue(stream, start, (call.saved, last, *arguments), alive)
            if any(gradient is not None for gradient in returned):
                queued.finish(stream)  # autograd adds these up at once
            else:
                queued.finish_after_backward(stream)
        else:
            with counted():
                call.layer.backward(call.saved, *arguments)
        if last:
            # Like saved tensors: a loss that lives on doesn't hold the activations.
            call.saved, call.host = None, ()
        there = (crossing.to_device(d, ctx.device) for d in (d_hidden, d_weights))
        return None, next(there), None, next(there), *returned


def kernels_of(weights: Sequence[ExpertWeights], isa: str, threads: int | None) -> _kernels.Layer:
    """The kernels of gate, up and down; the caller keeps ``weights`` alive as long.

    Raises ``UsageError`` where they can't start.
    """
    gate, _, down = weights
    try:
        return _kernels.Layer(
            down.rows,
            gate.rows,
            gate.storage,
            [each.for_kernels() for each in weights],
            gate.scale_is_bf16,
            gate.row_group,
            gate.column_group,
            isa,
            threads or 0,
        )
    except ValueError as error:
        raise UsageError(f"the expert kernels can't start: {error}.") from error


def addresses(names: Sequence[str], tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Addresses of the tensors of ``names``, by ``LORA_NAMES``; 0 where there is no name or no tensor."""
    at = {
        name: tensor.data_ptr()
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None
    }
    return [at.get(name, 0) for name in LORA_NAMES]


_seconds = 0.0


def kernel_seconds() -> float:
    """Seconds that this process has spent in the expert kernels so far, forward and backward."""
    return _seconds + queued.seconds()


@contextmanager
def counted() -> Iterator[None]:
    global _seconds
    started = time.perf_counter()
    try:
        yield
    finally:
        _seconds += time.perf_counter() - started


def float_zeros(shape: Sequence[int]) -> torch.Tensor:
    """float32 on the CPU whatever torch's defaults are: the kernels only get its address."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def accumulates(parameter: torch.Tensor, reduced: bool = True) -> bool:
    """Whether backward may add to ``parameter.grad`` itself, without bypassing a hook or a reducer.

    ``reduced``: in a process group of several, a reducer may be waiting for it, which is a hook unseen.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    hooks = compat.has_gradient_hooks(parameter)
    if hooks or not parameter.is_leaf or not parameter.is_contiguous():
        return False
    if reduced and distributed and torch.distributed.get_world_size() > 1:
        return False
    grad = parameter.grad
    return grad is None or (
        grad.dtype == torch.float32
        and grad.device == parameter.device
        and grad.layout == torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
    )
