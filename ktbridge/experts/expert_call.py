"""One call of the expert kernels: what forward and backward share, bound to autograd."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge import _kernels
from ktbridge.errors import UsageError
from ktbridge.experts import compat, crossing, queued, recompute
from ktbridge.experts.dropout import Dropout
from ktbridge.experts.weights import PROJECTIONS, SILU, ExpertWeights
from ktbridge.kernel_choice import choose_isa, choose_threads, places

LORA_NAMES = tuple(f"{name}_lora_{side}" for name in PROJECTIONS for side in "ab")
AT_ONCE = (0, 0)
"""In the place of a launcher and its stream."""
Saved = _kernels.Job | None
"""What a forward left for its backward, once a stream has come to it where it was queued."""


@dataclass(frozen=True)
class Lora:
    """A layer's LoRA as one call uses it: tensors [E, ...] by name, α / r, and what is dropped of its inputs.

    What is kept is not scaled: with dropout ``scale`` is α / r / (1 - p).
    """

    tensors: dict[str, torch.Tensor]
    scale: float
    dropout: Dropout | None = None

    def arguments(self) -> tuple[list[int], int, float]:
        """Addresses, rank and scale as the kernels take them."""
        rank = next((t.shape[1] for name, t in self.tensors.items() if name.endswith("_a")), 0)
        return _addresses(self.tensors), rank, self.scale if self.tensors else 0.0


@dataclass(frozen=True)
class LoraUse:
    """How one call uses a layer's LoRA: all of ``Lora`` but its tensors."""

    names: tuple[str, ...]
    scale: float
    dropout: Dropout | None

    def of(self, tensors: Iterable[torch.Tensor]) -> Lora:
        """With ``tensors``, which are in the order of ``names``."""
        return Lora(dict(zip(self.names, tensors, strict=True)), self.scale, self.dropout)


def run_forward(
    kernels: _kernels.Layer,
    stream: torch.cuda.Stream | None,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lora: Lora,
    keep: _kernels.Keep,
    owner: object,
) -> Saved:
    """Fill ``out`` [T, H] from hidden [T, H], ids [T, K] and weights [T, K]; all are on the host.

    At once, or when ``stream`` comes to it: until then ``owner``, who has the experts' weights, is kept.
    """
    arguments = (
        *lora.arguments(),
        *inputs[1].shape,
        *(tensor.data_ptr() for tensor in (*inputs, out)),
        keep,
        lora.dropout.arguments() if lora.dropout else (0, 0, 0),
    )
    if stream is not None:
        return queued.queue(stream, kernels.forward, arguments, (owner, inputs, out, lora))
    with counted():
        return kernels.forward(*AT_ONCE, *arguments)


def run_backward(
    kernels: _kernels.Layer,
    stream: torch.cuda.Stream | None,
    saved: _kernels.Job,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    lora: Lora,
    targets: Mapping[str, torch.Tensor | None],
    last: bool,
    owner: object,
) -> None:
    """The backward of ``run_forward``, in the same stream; ``last``: no other follows.

    ``tensors`` are hidden and d_out, and what is filled, d_hidden [T, H] and d_weights [T, K]. The LoRA's
    gradients are added to ``targets``, float32 by name.
    """
    addresses = (tensor.data_ptr() for tensor in tensors)
    arguments: tuple[Any, ...] = (saved, last, *lora.arguments(), *addresses, _addresses(targets))
    if stream is not None:
        queued.queue(stream, kernels.backward, arguments, (owner, tensors, lora, targets))
        return
    with counted():
        kernels.backward(*AT_ONCE, *arguments)


def _addresses(tensors: Mapping[str, torch.Tensor | None]) -> list[int]:
    """By ``LORA_NAMES``; 0 where there is no tensor."""
    found = (tensors.get(name) for name in LORA_NAMES)
    return [0 if tensor is None else tensor.data_ptr() for tensor in found]


@dataclass
class ExpertCall:
    """What one forward and its backward share besides tensors.

    The kernels hold addresses only, so the weights go along, to outlive the module in autograd.
    """

    layer: _kernels.Layer
    weights: tuple[ExpertWeights, ...]
    used: LoraUse
    keep: _kernels.Keep
    accumulate: bool
    ahead: bool = False
    """Whether passes with inputs on a GPU are queued in its stream instead of waited for."""
    replayed: torch.Tensor | None = None
    """The output [T, H] of this call, on the host, where a checkpointed layer runs a second time."""
    saved: Saved = None
    queued: bool = False
    """Whether the forward was queued in a GPU's stream, as its backward is then."""
    host: tuple[torch.Tensor, ...] = ()
    """Host copies of hidden [T, H] and topk_weights [T, K] that came from a GPU."""


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
        ctx.parameters, ctx.device = lora, hidden.device
        used = call.used.of(parameter.contiguous() for parameter in lora)
        crosses = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if crosses else call.replayed.clone()
        else:
            ahead = call.ahead and crosses and call.keep != _kernels.Keep.nothing
            host, ids, weights = crossing.to_host(hidden, topk_ids, topk_weights, wait=not ahead)
            out = crossing.host_empty(hidden, crosses)
            call.queued = ahead
            stream = torch.cuda.current_stream(hidden.device) if ahead else None
            call.saved = run_forward(
                call.layer, stream, (host, ids, weights), out, used, call.keep, call
            )
            # What stays on the CPU is the caller's, who may change it in place.
            recompute.record(out if crosses else out.clone())
            if call.saved is not None and crosses:
                call.host = host, weights
        if call.keep != _kernels.Keep.nothing:
            ctx.call = call
            # A second forward saves what the first one did: checkpointing pairs them.
            own = () if crosses else (hidden, topk_weights)
            ctx.save_for_backward(*own, *used.tensors.values())
        return crossing.to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: ExpertCall = ctx.call
        kept: tuple[torch.Tensor, ...] = ctx.saved_tensors
        assert call.saved is not None  # autograd refuses a second backward above
        hidden, topk_weights, *lora = (*call.host, *kept)
        hidden, topk_weights = hidden.contiguous(), topk_weights.contiguous()
        (d_out,) = crossing.to_host(d_out.to(torch.bfloat16), wait=not call.queued)
        crosses = ctx.device.type != "cpu"
        d_hidden = crossing.host_empty(hidden, crosses)
        d_weights = crossing.host_empty(topk_weights, crosses)
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
        run_backward(call.layer, stream, call.saved, tensors, used, targets, last, call)
        if stream is not None:
            if any(gradient is not None for gradient in returned):
                queued.finish(stream)  # autograd adds these up at once
            else:
                queued.finish_after_backward(stream)
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
    """Return whether backward may add to ``parameter.grad`` itself, without bypassing a hook or a reducer.

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
