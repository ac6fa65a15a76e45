"""A gloo process group for tensors on the CPU, beside torch's default group.

Every wait ends: with its result, when another process has ended, or after the timeout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.launch import World, launch_problems, world

TIMEOUT = 1800
"""Default seconds to wait for another process (``ddp_timeout``)."""


class _State:
    group: distributed.ProcessGroup | None = None
    timeout: float = TIMEOUT


def start(timeout: float = TIMEOUT, use_cpu: bool = False) -> World:
    """Join the other processes, each with the GPU of its local rank unless ``use_cpu`` or there is none.

    Does nothing for a process that is alone. ``timeout``, in seconds, is how long any wait for another
    process may take. Raises ``KtbridgeError`` where the others don't come, or there are more than GPUs,
    and ``ProblemsError`` naming unsupported settings of accelerate's configuration.
    """
    if problems := launch_problems():
        raise ProblemsError(
            "this run can't be started as accelerate's configuration asks.", problems
        )
    here = world()
    if here.size == 1 or _State.group is not None:
        return here
    _State.timeout = timeout
    gpus = 0 if use_cpu else torch.cuda.device_count()
    if gpus:
        if here.local_rank >= gpus:
            raise KtbridgeError(
                f"process {here.local_rank} of this host has no GPU: there are {gpus}.",
                f"Start {gpus} processes here (num_processes), or set use_cpu: true.",
            )
        torch.cuda.set_device(here.local_rank)
    limit = timedelta(seconds=timeout)
    with explain_lost_rank():
        if not distributed.is_initialized():
            # The CPU backend of the default group is for what FSDP2 offloads.
            backend = "cuda:nccl,cpu:gloo" if gpus else "gloo"
            distributed.init_process_group(backend, timeout=limit)
        _State.group = distributed.new_group(backend="gloo", timeout=limit)
    return here


def finish() -> None:
    """Leave the group at the end of a successful run. Without ``start`` it does nothing."""
    if _State.group is not None:
        _State.group = None
        distributed.destroy_process_group()


def group() -> distributed.ProcessGroup:
    """The group for tensors on the CPU. Raises ``KtbridgeError`` before ``start``."""
    if _State.group is None:
        raise KtbridgeError(
            "several processes run this model, but they were not joined.",
            "Call ktbridge.sft.distributed.start() first.",
        )
    return _State.group


@contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Turn torch's error about a lost rank into a KtbridgeError."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KtbridgeError(
            f"rank {world().rank}: another process of this run has ended, or gave no answer within "
            f"{_State.timeout:g} s ({first[:200]}).",
            "Read its own message; ddp_timeout is how many seconds are waited for.",
        ) from error


def agree(value: int) -> int:
    """The largest ``value`` of all ranks, which all of them must ask for: "has one been interrupted?"."""
    if world().size == 1:
        return value
    mine = torch.tensor([value], dtype=torch.int64)
    with explain_lost_rank():
        distributed.all_reduce(mine, distributed.ReduceOp.MAX, group())
    return int(mine)


def from_main(value: float) -> float:
    """Broadcast rank 0's ``value``."""
    if world().size == 1:
        return value
    mine = torch.tensor([value], dtype=torch.float64)
    with explain_lost_rank():
        distributed.broadcast(mine, 0, group())
    return float(mine)


def barrier() -> None:
    """Barrier: wait for all ranks."""
    agree(0)


def exchange(row: Sequence[int]) -> list[list[int]]:
    """All-gather each rank's ``row`` of integers, in rank order; rows are equally long."""
    mine = torch.tensor(row, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(world().size)]
    with explain_lost_rank():
        distributed.all_gather(rows, mine, group())
    return [each.tolist() for each in rows]


def add(values: Sequence[float]) -> list[float]:
    """The sums of all ranks' ``values``, the same bits on every rank."""
    if world().size == 1:
        return [*values]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world().size)]
    with explain_lost_rank():
        distributed.all_gather(rows, mine, group())
    return [math.fsum(each) for each in zip(*(row.tolist() for row in rows), strict=True)]


def collect(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Gather the rows of all ranks, concatenated, on rank 0; the others get nothing.

    ``tensors`` are this rank's, contiguous on the CPU, each [counts[rank], …].
    """
    here = world()
    work: list[distributed.Work] = []
    with explain_lost_rank():
        if here.rank:
            for tag, tensor in enumerate(tensors):
                if tensor.numel():
                    work.append(_begun(distributed.isend(tensor, 0, group(), tag)))
            whole = []
        else:
            whole = [tensor.new_empty((sum(counts), *tensor.shape[1:])) for tensor in tensors]
            for tag, (all_rows, mine) in enumerate(zip(whole, tensors, strict=True)):
                own, *parts = all_rows.split(list(counts))
                for rank, part in enumerate(parts, 1):
                    if part.numel():
                        work.append(_begun(distributed.irecv(part, rank, group(), tag)))
                own.copy_(mine)
        for each in work:
            each.wait()
    return whole


def distribute(
    whole: Sequence[torch.Tensor], like: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Scatter: each rank's rows of rank 0's ``whole``, with shape and dtype of its ``like``.

    Rank 0's are views.
    """
    here = world()
    work: list[distributed.Work] = []
    with explain_lost_rank():
        if here.rank:
            own = [torch.empty_like(tensor) for tensor in like]
            for tag, part in enumerate(own):
                if part.numel():
                    work.append(_begun(distributed.irecv(part, 0, group(), tag)))
        else:
            own = []
            for tag, all_rows in enumerate(whole):
                mine, *parts = all_rows.split(list(counts))
                own.append(mine)
                for rank, part in enumerate(parts, 1):
                    if part.numel():
                        work.append(_begun(distributed.isend(part, rank, group(), tag)))
        for each in work:
            each.wait()
    return own


def _begun(work: distributed.Work | None) -> distributed.Work:
    assert work is not None  # None is for processes outside the group
    return work
