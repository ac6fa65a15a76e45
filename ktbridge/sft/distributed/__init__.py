"""Multi-process training of one model: each process runs attention and other non-experts on its own rows.

PEFT's LoRA is averaged over the ranks by DDP or FSDP2 as in any other model. The routed experts are computed
in one of two ways (``assign_experts``):

* On the CPU they and their LoRA are rank 0's. At each experts module the ranks send their tokens to rank 0,
  whose kernels run once on all of them, and get their outputs back. The expert LoRA has one owner and one
  gradient, scaled as the others.
* On the GPU each rank computes its own rows, from the weights that all of them map. The expert LoRA is the
  same on all ranks, and its gradients are averaged once a step.

This module joins the processes: a gloo group for tensors on the CPU, beside torch's default group. Every wait
ends: with its result, when another process has ended, or after the timeout. ``dispatch`` shares out the
experts, ``same_run`` compares the processes' runs; the optimizer's part is in ``ktbridge.sft.optimizer``.
"""

from __future__ import annotations

import atexit
import ipaddress
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch import distributed

from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.machine import read_machine
from ktbridge.sft.launch import World, launch_problems, several_hosts, unjoined_problems, world

_Made = TypeVar("_Made")
TIMEOUT = 1800
"""Default seconds to wait for another process (``ddp_timeout``)."""
ANSWER_SECONDS = 60
"""For what needs no work: a process that has joined and gives no answer in this time hangs."""
_CTAS = 8  # of a GPU's 100 and more multiprocessors, for weights from others: some 150 GB/s on NVLink
_INTERFACE = "GLOO_SOCKET_IFNAME"


class _State:
    group: distributed.ProcessGroup | None = None
    weights: distributed.ProcessGroup | None = None
    quick: distributed.ProcessGroup | None = None
    """The same processes, which wait for each other ``ANSWER_SECONDS`` at most."""
    timeout: float = TIMEOUT


def start(timeout: float = TIMEOUT, use_cpu: bool = False) -> World:
    """Join the other processes, each with the GPU of its local rank unless ``use_cpu`` or there is none.

    Does nothing for a process that is alone. ``timeout``, in seconds, is how long any wait for another
    process may take. Raises ``KtbridgeError`` where the others don't come, or there are more than GPUs,
    and ``ProblemsError`` naming unsupported settings of accelerate's configuration.
    """
    if problems := launch_problems():
        raise ProblemsError("this run can't be started as accelerate's configuration asks.", problems)
    if problems := unjoined_problems():
        raise ProblemsError("this process isn't joined to the others of its launch.", problems)
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
    if several_hosts():
        choose_interface()
    with explain_lost_rank():
        if not distributed.is_initialized():
            # The CPU backend of the default group is for what FSDP2 offloads.
            backend = "cuda:nccl,cpu:gloo" if gpus else "gloo"
            distributed.init_process_group(backend, timeout=limit)
        quick = timedelta(seconds=min(timeout, ANSWER_SECONDS))
        _State.quick = distributed.new_group(backend="gloo", timeout=quick)
        _State.group = distributed.new_group(backend="gloo", timeout=limit)
    atexit.register(_leave)
    if threads := shared_threads(os.environ, read_machine().usable_cores):
        torch.set_num_threads(threads)
    return here


def shared_threads(environment: Mapping[str, str], cores: int) -> int:
    """Return a process's part of its host's ``cores``, for torch; 0 where the user has given it threads.

    A launcher that wasn't told any sets OMP_NUM_THREADS to 1, and Adam of masters on the host would take
    several times as long as the step around it.
    """
    processes = environment.get("LOCAL_WORLD_SIZE", "")
    if environment.get("OMP_NUM_THREADS") != "1" or not processes.isdigit():
        return 0
    return max(1, cores // max(1, int(processes)))


def joined() -> bool:
    """Return whether this process has joined others."""
    return _State.group is not None


def choose_interface() -> None:
    """Have gloo listen where other hosts reach this one.

    gloo listens at the address of the host's name. Debian's installer makes that 127.0.1.1, and in containers
    it may be none: then it is the interface of the route to ``MASTER_ADDR``. Raises ``KtbridgeError`` with
    the variable to set where that doesn't lead out of this host.
    """
    if os.environ.get(_INTERFACE) or _reachable(socket.gethostname()):
        return
    main, found = os.environ.get("MASTER_ADDR", ""), ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((main, 9))  # of a datagram's socket: nothing is sent
            found = probe.getsockname()[0]
    except OSError:
        pass
    if found and not ipaddress.ip_address(found).is_loopback:
        import psutil

        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == found for each in addresses):
                os.environ[_INTERFACE] = name
                return
    raise KtbridgeError(
        f"other hosts can't reach this one by its name: {socket.gethostname()} leads to no address of a "
        f"network, and neither does MASTER_ADDR ({main or 'not set'}).",
        f"Set {_INTERFACE} to the network interface between the hosts (`ip -brief address` lists them).",
    )


def _reachable(name: str) -> bool:
    """Return whether the first address of ``name``, which is gloo's choice, is one of a network."""
    try:
        first = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False
    return not ipaddress.ip_address(str(first).partition("%")[0]).is_loopback


def finish() -> None:
    """Leave the group at the end of a successful run. Without ``start`` it does nothing."""
    if _State.group is not None:
        _State.group = _State.quick = _State.weights = None
        distributed.destroy_process_group()


def _leave() -> None:
    """End gloo's threads after a run that failed, while the interpreter is whole.

    One that lets go of the last tensor of a transfer needs the interpreter, and aborts the process (status
    -6 for the run's own) where that is being taken apart.
    """
    for each in (_State.group, _State.quick):
        if each is not None:
            distributed.destroy_process_group(each)
    _State.group = _State.quick = _State.weights = None


def group() -> distributed.ProcessGroup:
    """The group for tensors on the CPU. Raises ``KtbridgeError`` before ``start``."""
    if _State.group is None:
        raise KtbridgeError(
            "several processes run this model, but they were not joined.",
            "Call ktbridge.sft.distributed.start() first.",
        )
    return _State.group


def weights_group(device: torch.device) -> distributed.ProcessGroup:
    """The group of weights that ranks give each other on their ``device``; all of them call it.

    It is one of its own, because operations of a group wait for those before: gradients would for weights.
    """
    if _State.weights is None:
        limit, backend, options = timedelta(seconds=_State.timeout), "gloo", None
        if device.type == "cuda":
            backend, options = "nccl", distributed.ProcessGroupNCCL.Options()
            options.config.max_ctas = _CTAS
        with explain_lost_rank():
            _State.weights = distributed.new_group(timeout=limit, backend=backend, pg_options=options)
    return _State.weights


def wait_limit() -> float:
    """Return the seconds that a wait for another process may take (``ddp_timeout``)."""
    return _State.timeout


@contextmanager
def explain_lost_rank(seconds: float | None = None) -> Iterator[None]:
    """Turn torch's error about a lost rank, waited for ``seconds`` or the limit, into a KtbridgeError."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        limit = _State.timeout if seconds is None else seconds
        step = "; ddp_timeout is how many seconds are waited for" if seconds is None else ""
        raise KtbridgeError(
            f"rank {world().rank}: another process of this run has ended, or gave no answer within "
            f"{limit:g} s ({first[:200]}).",
            f"Read its own message{step}.",
        ) from error


def agree(value: int) -> int:
    """The largest ``value`` of all ranks, which all of them must ask for: "has one been interrupted?"."""
    if world().size == 1:
        return value
    mine = torch.tensor([value], dtype=torch.int64)
    with explain_lost_rank():
        distributed.all_reduce(mine, distributed.ReduceOp.MAX, group())
    return int(mine)


def from_main(value: _Made) -> _Made:
    """Broadcast rank 0's ``value``."""
    return made_by_main(lambda: value)


def made_by_main(make: Callable[[], _Made]) -> _Made:
    """Return what rank 0's ``make`` returns, on every rank; the others don't call theirs."""
    if world().size == 1:
        return make()
    found = [make() if world().rank == 0 else None]
    with explain_lost_rank():
        distributed.broadcast_object_list(found, 0, group())
    (made,) = found
    return cast(_Made, made)


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


def exchange_texts(mine: Mapping[str, str], seconds: float) -> list[dict[str, str]]:
    """Each rank's ``mine``, in rank order, on every rank: the others come within ``seconds``, or all end.

    Raises ``KtbridgeError`` for a rank that doesn't, or is lost.
    """
    found: list[dict[str, str]] = [{} for _ in range(world().size)]
    limit = timedelta(seconds=seconds)
    with explain_lost_rank(seconds):
        distributed.monitored_barrier(group(), timeout=limit, wait_all_ranks=True)
        distributed.all_gather_object(found, dict(mine), group=_State.quick)
        # Who ends now breaks a connection: not before all have what they were told.
        distributed.monitored_barrier(_State.quick, wait_all_ranks=True)
    return found


def add(values: Sequence[float]) -> list[float]:
    """The sums of all ranks' ``values``, the same bits on every rank."""
    if world().size == 1:
        return [*values]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(world().size)]
    with explain_lost_rank():
        distributed.all_gather(rows, mine, group())
    return [math.fsum(each) for each in zip(*(row.tolist() for row in rows), strict=True)]


def put_mean(tensor: torch.Tensor) -> None:
    """Put the mean over all ranks in the place of ``tensor``, which all of them must give alike.

    By torch's default group: NCCL for a tensor on a GPU.
    """
    with explain_lost_rank():
        distributed.all_reduce(tensor)
    tensor /= world().size


def gather_on_main(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Gather the rows of all ranks, concatenated, on rank 0; the others get nothing.

    ``tensors`` are this rank's, contiguous on the CPU, each [counts[rank], …].
    """
    here = world()
    work: list[distributed.Work | None] = []  # None is for processes outside the group
    with explain_lost_rank():
        if here.rank:
            for tag, tensor in enumerate(tensors):
                if tensor.numel():
                    work.append(distributed.isend(tensor, 0, group(), tag))
            whole = []
        else:
            whole = [tensor.new_empty((sum(counts), *tensor.shape[1:])) for tensor in tensors]
            for tag, (all_rows, mine) in enumerate(zip(whole, tensors, strict=True)):
                own, *parts = all_rows.split(list(counts))
                for rank, part in enumerate(parts, 1):
                    if part.numel():
                        work.append(distributed.irecv(part, rank, group(), tag))
                own.copy_(mine)
        for each in filter(None, work):
            each.wait()
    return whole


def distribute(
    whole: Sequence[torch.Tensor], like: Sequence[torch.Tensor], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Scatter: each rank's rows of rank 0's ``whole``, with shape and dtype of its ``like``.

    Rank 0's are views.
    """
    here = world()
    work: list[distributed.Work | None] = []  # None is for processes outside the group
    with explain_lost_rank():
        if here.rank:
            own = [torch.empty_like(tensor) for tensor in like]
            for tag, part in enumerate(own):
                if part.numel():
                    work.append(distributed.irecv(part, 0, group(), tag))
        else:
            own = []
            for tag, all_rows in enumerate(whole):
                mine, *parts = all_rows.split(list(counts))
                own.append(mine)
                for rank, part in enumerate(parts, 1):
                    if part.numel():
                        work.append(distributed.isend(part, rank, group(), tag))
        for each in filter(None, work):
            each.wait()
    return own
