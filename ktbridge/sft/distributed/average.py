"""Gradients that no reducer averages: those of the expert LoRA where every rank computes its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import distributed, nn

from ktbridge.sft.distributed.group import explain_lost_rank
from ktbridge.sft.distributed.world import world

_BUCKET = 64 << 20  # bytes: a link reaches full bandwidth with fewer, and a GPU has room for this


def average_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Put the mean over all ranks in the place of each float32 ``.grad``, as DDP and FSDP2 do of theirs.

    All ranks give the same parameters in the same order; a missing gradient counts as 0. They meet on
    ``device``, wherever they are themselves: NCCL on a GPU, gloo on the CPU. Between a whole backward pass
    and clipping. Does nothing for a process that is alone. Raises ``KtbridgeError`` when a rank is lost.
    """
    if world().size == 1:
        return
    for bucket in _buckets(parameters):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [each.grad for each in bucket if each.grad is not None]
        flat = torch.empty(sum(map(torch.numel, gradients)), dtype=torch.float32, device=device)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.flatten(), non_blocking=True)
        with explain_lost_rank():
            distributed.all_reduce(flat)
        flat /= world().size
        for part, gradient in zip(parts, gradients, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """``parameters`` in their order, in runs of at most ``_BUCKET`` bytes of float32, or of one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + 4 * parameter.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += 4 * parameter.numel()
    if bucket:
        yield bucket
