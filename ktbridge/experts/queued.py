"""Passes of the expert kernels in a CUDA stream's own time: Python queues what follows while they run.

A training step with attention on a GPU launches some ten thousand small operations, which takes Python about
as long as half of the experts' work. A pass that waits for its inputs makes the two take turns; one that
the stream itself starts, between the copies to the host and back, lets them overlap.

The price is that results on the CPU come later than the call that asks for them: LoRA gradients are
there when ``backward()`` returns, and a failure is raised there or by the stream's next pass. So whoever
switches it on promises to change the LoRA only after a backward pass.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ktbridge import _kernels
from ktbridge.experts import compat


class Stream(Protocol):
    """What is needed of a torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...
    def synchronize(self) -> None: ...


@dataclass(eq=False)
class _Queued:
    alive: object
    """What must live until the job has run: the kernels know it by address."""
    job: _kernels.Job | None = None
    ended: bool = False

    @property
    def over(self) -> bool:
        return self.ended or (self.job is not None and bool(self.job.done))


_queued: defaultdict[Stream, deque[_Queued]] = defaultdict(deque)
"""What each stream was given and hasn't been looked at since; a stream runs its jobs in order."""
_lock = threading.Lock()  # autograd has a thread for each GPU
_seconds = 0.0


@functools.cache
def launcher() -> int:
    """The address of the driver's cuLaunchHostFunc. Raises OSError where there is no driver."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


def queue(
    stream: Stream, start: Callable[..., _kernels.Job], arguments: tuple[Any, ...], alive: object
) -> _kernels.Job:
    """The job of ``start(cuLaunchHostFunc, stream, *arguments)``; ``alive`` is kept until it has run.

    Raises what ``start`` raises, and what an earlier job of the stream raised and nobody has seen yet.
    """
    _settle(stream)  # first, for what is queued must not be forgotten because of another's failure
    # Kept before the start: an interrupt right after it must not free what the job works on.
    entry = _Queued(alive)
    with _lock:
        _queued[stream].append(entry)
    try:
        entry.job = start(launcher(), stream.cuda_stream, *arguments)
    except Exception:
        with _lock:
            _queued[stream].remove(entry)
        raise
    return entry.job


def finish(stream: Stream) -> None:
    """Wait for the jobs of ``stream``. Raises what the first of them that failed raised."""
    with _lock:
        asked = tuple(_queued[stream])
    stream.synchronize()
    for entry in asked:
        entry.ended = True
    _settle(stream)


def finish_after_backward(stream: Stream) -> None:
    """``finish``, once, before the backward pass that is running returns to its caller."""
    compat.after_backward(stream, lambda: finish(stream))


def seconds() -> float:
    """Seconds that queued jobs have taken, of those that are known to be done."""
    return _seconds


def _settle(stream: Stream) -> None:
    """Let go of the jobs of ``stream`` that are over. Raises what the first that failed raised."""
    global _seconds
    over = []
    with _lock:
        entries = _queued[stream]
        while entries and entries[0].over:
            over.append(entries.popleft())
        jobs = [entry.job for entry in over if entry.job is not None]
        _seconds += sum(job.seconds for job in jobs)
    for job in jobs:
        job.check()


@atexit.register
def _let_jobs_end() -> None:
    """Before the interpreter frees what they work on."""
    with _lock:
        waiting = [stream for stream, entries in _queued.items() if entries]
    for stream in waiting:
        with suppress(RuntimeError):  # a GPU that has failed runs no more of them
            stream.synchronize()
