"""One call of the expert kernels: what forward and backward share, bound to autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge import _kernels
from ktbridge.sft.weights import PROJECTIONS, ExpertWeights

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
    saved: _kernels.Saved | None = None

    def addresses(self, tensors: Iterable[torch.Tensor | None]) -> list[int]:
        """Addresses by ``LORA_NAMES``; 0 where there is no parameter or no tensor."""
        at = {
            name: tensor.data_ptr()
            for name, tensor in zip(self.names, tensors, strict=True)
            if tensor is not None
        }
        return [at.get(name, 0) for name in LORA_NAMES]


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
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        topk_weights = topk_weights.contiguous()
        ctx.parameters = lora
        lora = tuple(parameter.contiguous() for parameter in lora)
        out = torch.empty_like(hidden)
        call.saved = call.layer.forward(
            call.addresses(lora),
            call.rank,
            call.scale,
            hidden.shape[0],
            topk_ids.shape[1],
            hidden.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
            call.keep,
        )
        if call.saved is not None:
            ctx.call = call
            ctx.save_for_backward(hidden, topk_weights, *lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, topk_weights, *lora = ctx.saved_tensors
        call: ExpertCall = ctx.call
        assert call.saved is not None  # autograd refuses a second backward above
        d_out = d_out.to(torch.bfloat16).contiguous()
        d_hidden = torch.empty_like(hidden)
        d_weights = torch.empty_like(topk_weights)
        # Where each gradient is added up, and what autograd is told of it.
        targets: list[torch.Tensor | None] = []
        told: list[torch.Tensor | None] = []
        for parameter, needed in zip(ctx.parameters, ctx.needs_input_grad[4:], strict=True):
            straight = call.accumulate and needed and _accumulates(parameter)
            if straight and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            fresh = needed and not straight
            told.append(float_zeros(parameter.shape) if fresh else None)
            targets.append(parameter.grad if straight else told[-1])
        call.layer.backward(
            call.saved,
            call.addresses(lora),
            call.rank,
            call.scale,
            hidden.data_ptr(),
            d_out.data_ptr(),
            d_hidden.data_ptr(),
            d_weights.data_ptr(),
            call.addresses(targets),
        )
        if not _graph_is_kept():
            # Like saved tensors: a loss that lives on doesn't hold the activations.
            call.saved = None
        return None, d_hidden, None, d_weights, *told


def float_zeros(shape: Sequence[int]) -> torch.Tensor:
    """float32 on the CPU whatever torch's defaults are: the kernels only get its address."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether backward may add to ``parameter.grad`` itself, with nobody left out who'd be told."""
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if hooks or not parameter.is_leaf or not parameter.is_contiguous():
        return False
    if distributed and torch.distributed.get_world_size() > 1:
        return False
    grad = parameter.grad
    return grad is None or (
        grad.dtype == torch.float32
        and grad.device.type == "cpu"
        and grad.layout == torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
    )


def _graph_is_kept() -> bool:
    """Whether the backward that is running was asked to retain_graph; if torch can't say, yes."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())
