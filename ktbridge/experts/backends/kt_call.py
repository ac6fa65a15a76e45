"""One layer of kt-kernel, driven as its sources and test runs require, bound to autograd.

What a ``KTMoEWrapper`` in "sft" mode wants of its caller, and what is done about it here:

* LoRA is bfloat16, and part of it is copied when ``update_lora_weights`` is called. So masters are rounded
  into buffers, and each change is announced to it.
* A backward overwrites six bfloat16 gradient buffers, and clears only the experts that it filled the time
  before. So the buffers live as long as the layer, nobody else writes them, and gradients leave as
  float32 copies, which autograd adds up.
* A forward that keeps activations must be followed by its own backward: a second one overruns a stack,
  which ends the process or gives the wrong gradients. So one call holds the layer's activations, and every
  other one runs its forward again, right before its backward.
* A buffer for inputs and outputs is shared by all layers, whatever their sizes. It is dropped where the
  sizes change.
* It skips ids that are no expert's. They are refused instead.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ktbridge.experts import checkpointing, compat, crossing
from ktbridge.experts.expert_call import LORA_NAMES, counted

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden [T, H] bfloat16, topk_ids [T, K] int64, topk_weights [T, K] float32, contiguous, on the CPU."""

_buffer_shape: tuple[int, int] | None = None


class KtLayer:
    """A loaded ``KTMoEWrapper`` with LoRA buffers of its own; any order of forwards and backwards is fine."""

    def __init__(self, wrapper: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        """``shapes`` are those of the LoRA's six tensors, by ``LORA_NAMES``."""
        self._wrapper = wrapper
        self._lora = {name: _zeros(shape) for name, shape in shapes.items()}
        self._gradients = {name: _zeros(shape) for name, shape in shapes.items()}
        wrapper.init_lora_weights(
            **self._lora, **{f"grad_{name}": tensor for name, tensor in self._gradients.items()}
        )
        self._holder: weakref.ref[object] | None = None
        self._held_tokens = 0

    def forward(self, inputs: Inputs, lora: Sequence[torch.Tensor], holder: object) -> torch.Tensor:
        """[T, H] bfloat16. ``lora`` is in the order of ``LORA_NAMES``, or empty for the base alone.

        ``holder`` comes back for a backward and would have the activations kept; None keeps nothing. They
        are not kept while another holder that is still alive waits for its own.
        """
        self._tell(lora)
        if holder is not None and self._holder is not None and self._holder() is None:
            self._let_go()  # a graph that was dropped without a backward
        keep = holder is not None and self._holder is None
        out = self._run(inputs, keep)
        if keep:
            self._holder, self._held_tokens = weakref.ref(holder), len(inputs[0])
        return out

    def backward(
        self, inputs: Inputs, lora: Sequence[torch.Tensor], holder: object, d_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """d_hidden [T, H] bfloat16, d_topk_weights [T, K] float32 and float32 LoRA gradients by name.

        ``inputs`` and ``lora`` are those of the forward; ``d_out`` is [T, H] bfloat16.
        """
        self._tell(lora)
        if self._holder is None or self._holder() is not holder:
            self._let_go()
            self._run(inputs, keep=True)
        d_hidden, d_weights = self._run_back(d_out)
        names = LORA_NAMES if lora else ()
        return d_hidden, d_weights, {name: self._gradients[name].float() for name in names}

    def holds(self, holder: object) -> bool:
        """Return whether the activations of ``holder`` are kept."""
        return self._holder is not None and self._holder() is holder

    def _run(self, inputs: Inputs, keep: bool) -> torch.Tensor:
        self._make_room()
        out: torch.Tensor = self._wrapper.forward(*inputs, save_for_backward=keep)
        return out

    def _run_back(self, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._make_room()
        self._holder = None
        d_hidden, d_weights = self._wrapper.backward(d_out)
        return d_hidden, d_weights

    def _let_go(self) -> None:
        """Free the activations that are kept: only a backward does, so one whose results nobody reads."""
        if self._holder is not None:
            self._run_back(_zeros((self._held_tokens, self._wrapper.hidden_size)))

    def _make_room(self) -> None:
        """Drop the buffer that all layers share where it has another width: it grows in tokens only."""
        global _buffer_shape
        shape = self._wrapper.hidden_size, self._wrapper.num_experts_per_tok
        if shape != _buffer_shape:
            importlib.import_module("kt_kernel").KTMoEWrapper.clear_sft_buffer_cache()
            _buffer_shape = shape

    def _tell(self, lora: Sequence[torch.Tensor]) -> None:
        """Round the masters into the buffers, and announce it if that changed anything; no LoRA is B = 0."""
        changed = False
        with torch.no_grad():
            for at, (name, buffer) in enumerate(self._lora.items()):
                if lora:
                    rounded = lora[at].to(torch.bfloat16)
                elif name.endswith("_b"):
                    rounded = torch.zeros_like(buffer)
                else:
                    continue
                if not torch.equal(buffer, rounded):
                    buffer.copy_(rounded)
                    changed = True
        if changed:
            self._wrapper.update_lora_weights()


@dataclass(eq=False)
class KtCall:
    """What one forward and its backward share besides tensors."""

    layer: KtLayer
    keep: bool
    """Whether the forward's activations are wanted for backward, rather than a forward once more."""
    needed: bool
    """Whether there will be a backward."""
    replayed: torch.Tensor | None = None
    """The output [T, H] of this call, on the host, where a checkpointed layer runs a second time."""
    host: tuple[torch.Tensor, ...] = ()
    """Host copies of inputs that came from a GPU."""


class KtFunction(torch.autograd.Function):
    """Binds a ``KtLayer`` to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: KtCall,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        crosses = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if crosses else call.replayed.clone()
        else:
            hidden_host, ids, weights = crossing.to_host(hidden, topk_ids, topk_weights)
            inputs = hidden_host, ids, weights
            if len(hidden):
                with counted():
                    out = call.layer.forward(inputs, lora, call if call.keep else None)
            else:
                out = torch.empty_like(inputs[0])
            # What stays on the CPU is the caller's, who may change it in place.
            checkpointing.record(out if crosses else out.clone())
            if call.needed and crosses:
                call.host = inputs
        if call.needed:
            ctx.call, ctx.device = call, hidden.device
            # A second forward saves what the first one did: checkpointing pairs them.
            own = () if crosses else (hidden, topk_ids, topk_weights)
            ctx.save_for_backward(*own, *lora)
        return crossing.to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: KtCall = ctx.call
        kept: tuple[torch.Tensor, ...] = ctx.saved_tensors
        hidden, ids, weights, *lora = (*call.host, *kept)
        inputs = hidden.contiguous(), ids.contiguous(), weights.contiguous()
        d_hidden, d_weights = torch.zeros_like(inputs[0]), torch.zeros_like(inputs[2])
        gradients: dict[str, torch.Tensor] = {}
        if len(hidden):
            (d_out,) = crossing.to_host(d_out.to(torch.bfloat16))
            with counted():
                d_hidden, d_weights, gradients = call.layer.backward(inputs, lora, call, d_out)
        if not compat.graph_is_kept():
            call.host = ()
        returned = [
            gradients.get(name, torch.zeros_like(parameter)) if needed else None
            for name, parameter, needed in zip(
                LORA_NAMES if lora else (), lora, ctx.needs_input_grad[4:], strict=True
            )
        ]
        there = (crossing.to_device(d, ctx.device) for d in (d_hidden, d_weights))
        return None, next(there), None, next(there), *returned


def _zeros(shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=torch.bfloat16, device="cpu")
