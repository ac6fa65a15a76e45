"""One call of a layer whose experts a ``GpuExperts`` computes, bound to autograd; where its gradients go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge.experts import checkpointing, compat
from ktbridge.experts.expert_call import Lora, LoraUse, accumulates
from ktbridge.experts.gpu.executor import GpuExperts, Inputs
from ktbridge.experts.gpu.routing import Routing
from ktbridge.experts.gpu.streams import Kept


@dataclass(frozen=True)
class OnGpu:
    """Where a layer is computed: by ``experts``, under its number."""

    experts: GpuExperts
    index: int


@dataclass
class GpuCall:
    """What a forward and its backward share besides tensors."""

    experts: GpuExperts
    index: int
    used: LoraUse
    needed: bool
    """Whether a backward will follow."""
    accumulate: bool
    """Whether gradients are added to the parameters' own, see ``MoELoRAExperts.accumulate_grad``.

    In a process group, too: its reducers leave experts on the GPU alone (``ktbridge.sft.distributed``).
    """
    replayed: tuple[Kept, Routing] | None
    """Output and routing of this call, where a checkpointed layer runs a second time."""


class GpuFunction(torch.autograd.Function):
    """Binds ``GpuExperts`` to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: GpuCall,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        hidden = hidden.contiguous()
        if call.replayed is not None:
            kept, routing = call.replayed
            out = kept.get()
        else:
            routing = call.experts.route(call.index, ids)
            out = call.experts.forward(
                call.index, Inputs(hidden, weights, routing), _on_device(call, lora), call.needed
            )
            if checkpointing.recording():
                checkpointing.record((call.experts.outputs.keep(call.index, out), routing))
        if call.needed:
            ctx.call, ctx.routing, ctx.parameters = call, routing, lora
            ctx.save_for_backward(hidden, weights, *lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: GpuCall = ctx.call
        # The LoRA is saved so that autograd refuses one that was changed since.
        hidden, weights, *lora = ctx.saved_tensors
        routing = ctx.routing
        call.experts.outputs.fetch_before(call.index)
        if not compat.graph_is_kept():
            ctx.routing = None  # a loss that lives on doesn't hold them
        needed = ctx.needs_input_grad[4:]
        d_hidden, d_weights, gradients = call.experts.backward(
            call.index,
            Inputs(hidden, weights, routing),
            d_out.to(torch.bfloat16).contiguous(),
            _on_device(call, lora),
            any(needed),
        )
        returned: list[torch.Tensor | None] = []
        later = []
        for name, parameter, wanted in zip(call.used.names, ctx.parameters, needed, strict=True):
            if not wanted:
                returned.append(None)
            elif not (call.accumulate and accumulates(parameter, reduced=False)):
                returned.append(gradients[name].to(parameter.device))
            else:
                returned.append(None)
                later.append((parameter, gradients[name]))
        _add_gradients(later)
        return None, d_hidden, None, d_weights, *returned


def _on_device(call: GpuCall, parameters: Sequence[torch.Tensor]) -> Lora:
    device = call.experts.device
    return call.used.of(each.detach().to(device, non_blocking=True) for each in parameters)


_coming: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
"""Masters on the host, their gradients of the running backward pass, the event of arrival."""


def _add_gradients(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add float32 gradients to the ``.grad`` of their parameters, called within a backward pass.

    The first takes the place of a gradient that isn't there yet. Where a parameter is on the host and its
    gradient is not, it crosses through pinned memory and is added before that backward pass returns.
    """
    for parameter, gradient in found:
        if parameter.device == gradient.device:
            _add(parameter, gradient)
            continue
        pinned = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu", pin_memory=True)
        pinned.copy_(gradient, non_blocking=True)
        arrived = torch.cuda.current_stream(gradient.device).record_event()
        if compat.after_backward("LoRA gradients", _add_coming):
            _coming.clear()  # of a pass that raised half-way
        _coming.append((parameter, pinned, arrived))


def _add_coming() -> None:
    for parameter, gradient, arrived in _coming:
        arrived.synchronize()
        _add(parameter, gradient)
    _coming.clear()


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
