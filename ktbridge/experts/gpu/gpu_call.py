"""One call of a layer whose experts a ``GpuExperts`` computes, bound to autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge.experts import checkpointing, compat
from ktbridge.experts.expert_call import LoraUse
from ktbridge.experts.gpu.executor import GpuExperts, Inputs, Left
from ktbridge.experts.gpu.masters import Gradients, Masters
from ktbridge.experts.gpu.streams import Kept


@dataclass(frozen=True)
class OnGpu:
    """Where a layer is computed: by ``experts``, under its number."""

    experts: GpuExperts
    index: int


@dataclass(slots=True)
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
    replayed: tuple[Kept, Left] | None
    """What the first forward recorded, where a checkpointed layer runs a second time."""


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
        hidden, masters = hidden.contiguous(), Masters(call.used, lora)
        if call.replayed is not None:
            kept, left = call.replayed
            out = kept.get()
        else:
            out, left = call.experts.forward(
                call.index, Inputs(hidden, weights), ids, masters, call.needed
            )
            if checkpointing.recording():
                checkpointing.record((call.experts.outputs.keep(call.index, out), left))
        if call.needed:
            ctx.call, ctx.left, ctx.masters = call, left, masters
            ctx.save_for_backward(hidden, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        call: GpuCall = ctx.call
        hidden, weights = ctx.saved_tensors
        left: Left = ctx.left
        before: Masters = ctx.masters
        masters = Masters(call.used, before.parameters)
        if masters.differ(before):  # as autograd refuses what it saves: that costs more
            raise RuntimeError(
                "the expert LoRA has been modified by an inplace operation since this forward."
            )
        call.experts.outputs.fetch_before(call.index)
        last = not compat.graph_is_kept()
        if last:
            ctx.left = None  # a loss that lives on doesn't hold it
        gradients = Gradients(
            call.used.names,
            masters.parameters,
            ctx.needs_input_grad[4:],
            call.accumulate,
            call.experts.device,
        )
        d_hidden, d_weights = call.experts.backward(
            call.index,
            Inputs(hidden, weights),
            left,
            d_out.to(torch.bfloat16).contiguous(),
            masters,
            gradients,
        )
        if last:
            left.kept = None  # what recorded it may live on
        return None, d_hidden, None, d_weights, *gradients.deliver()
