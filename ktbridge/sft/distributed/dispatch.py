"""One call of an experts module by several processes: tokens to rank 0, outputs back, in backward alike.

All ranks make the same calls in the same order. Each call starts with a row of whole numbers from every
rank, so ranks out of step stop with an error before tokens of different layers are mixed. Gradient
checkpointing repeats nothing here: outputs are kept and handed out again (``experts.recompute``).

Scale: DDP and FSDP2 average gradients over W ranks, and the trainers scale losses for that. The expert
LoRA's gradient is a sum over all tokens, so rank 0 runs backward on d_out / W, and multiplies what goes
back to the ranks by W. Both are exact where W is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ktbridge.errors import KtbridgeError
from ktbridge.experts import autograd, recompute
from ktbridge.experts.compat import graph_is_kept
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.sft.distributed.group import collect, distribute, exchange
from ktbridge.sft.launch import is_main, world

_FORWARD, _BACKWARD = 0, 1


class _Calls:
    number = 0


@dataclass
class _Call:
    """What one call's forward and backward share."""

    layer: MoELoRAExperts
    ids: torch.Tensor
    replayed: torch.Tensor | None
    number: int = 0
    counts: Sequence[int] = ()
    training: bool = False
    inner: tuple[torch.Tensor, ...] = ()
    """Rank 0's hidden [ΣT, H], weights [ΣT, K] and output [ΣT, H], with their graph."""
    like: tuple[torch.Tensor, ...] = field(default=())
    """Tensors without memory in the shapes and dtypes of this rank's hidden and weights."""


def run_experts(
    layer: MoELoRAExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``layer(hidden, ids, weights)`` where its experts are rank 0's: the same shapes, dtypes and gradients.

    hidden [T, H] bfloat16, ids [T, K] int64, weights [T, K] float32 -> [T, H] bfloat16; T is each rank's
    own and may be 0. Raises ``KtbridgeError`` when the ranks are not at the same call, or one is lost.
    """
    call = _Call(layer, ids, recompute.replayed())
    if call.replayed is not None:
        call.training = True
        if is_main():
            layer.draw_lora_use()  # as the first time, for what comes after it
    else:
        _Calls.number += 1
        call.number = _Calls.number
        call.counts, call.training = _agreed(layer, hidden, ids, weights, call.number)
    # Something that requires a gradient on every rank, so that all of them come to backward.
    anchor = torch.zeros((), requires_grad=call.training)
    return _Dispatched.apply(call, anchor, hidden, weights)


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: _Call, anchor: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.device = call, hidden.device
        crosses = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if crosses else call.replayed.clone()
        else:
            out = _forward(call, *autograd.to_host(hidden, call.ids, weights))
            # What stays on the CPU is the caller's, who may change it in place.
            recompute.record(out if crosses else out.clone())
        return autograd.to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (d_out,) = autograd.to_host(d_out.to(torch.bfloat16))
        d_hidden, d_weights = (
            autograd.to_device(d, ctx.device) for d in _backward(ctx.call, d_out)
        )
        return None, None, d_hidden, d_weights


def _agreed(
    layer: MoELoRAExperts,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    number: int,
) -> tuple[list[int], bool]:
    """Return how many tokens each rank brings, and whether any of them wants gradients."""
    wants = torch.is_grad_enabled() and (
        hidden.requires_grad
        or weights.requires_grad
        or (layer.lora_enabled and layer.lora_rank > 0)
    )
    row = [_FORWARD, number, hidden.shape[1], ids.shape[1], int(torch.is_grad_enabled())]
    rows = _in_step([*row, len(hidden), int(wants)])
    return [each[-2] for each in rows], any(each[-1] for each in rows)


def _in_step(row: Sequence[int]) -> list[list[int]]:
    """Every rank's row, of which all but the last two numbers must be the same everywhere.

    Rows are equally long in forward and backward: gloo ends a process that is sent more than it expects.
    """
    rows = exchange(row)
    for rank, other in enumerate(rows):
        if other[:-2] != rows[0][:-2]:
            first, second = (
                f"{'backward' if each[0] else 'forward'} of call {each[1]}"
                for each in (rows[0], other)
            )
            raise KtbridgeError(
                f"the processes lost step: rank 0 is in the {first} of the experts, rank {rank} in the "
                f"{second} ({rows[0][2:-2]}, {other[2:-2]}).",
                "Give every process the same configuration and the same number of batches.",
            )
    return rows


def _forward(
    call: _Call, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """This rank's outputs [T, H] on the host."""
    call.like = (hidden.to("meta"), weights.to("meta"))
    whole = collect([hidden, ids, weights], call.counts)
    outputs = []
    if is_main():
        # A graph of its own: the one outside holds this rank's tokens only. What it saves must not be seen by
        # a checkpointed layer around it, which would count it and find nothing of it the second time.
        with (
            torch.set_grad_enabled(call.training),
            recompute.unrecorded(),
            saved_tensors_hooks(_as_it_is, _as_it_is),
        ):
            inputs = [whole[0].requires_grad_(call.training), whole[1]]
            inputs.append(whole[2].requires_grad_(call.training))
            out = type(call.layer).forward(call.layer, *inputs)  # layer() would dispatch again
        outputs.append(out.detach())
        if call.training:
            call.inner = (inputs[0], inputs[2], out)
    (own,) = distribute(outputs, [hidden], call.counts)
    return own


def _backward(call: _Call, d_out: torch.Tensor) -> list[torch.Tensor]:
    """This rank's d_hidden [T, H] and d_weights [T, K] on the host; the expert LoRA's goes to ``.grad``."""
    _in_step([_BACKWARD, call.number, 0, 0, 0, 0, 0])
    whole, gradients = collect([d_out], call.counts), []
    if is_main():
        hidden, weights, out = call.inner
        share = 1 / world().size
        torch.autograd.backward(out, whole[0].mul_(share), retain_graph=graph_is_kept())
        for tensor in (hidden, weights):
            assert tensor.grad is not None
            gradients.append(tensor.grad.mul_(world().size))
            tensor.grad = None
    like = [torch.empty_like(tensor, device="cpu") for tensor in call.like]
    own = distribute(gradients, like, call.counts)
    if not graph_is_kept():
        call.inner = ()
    return own


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
