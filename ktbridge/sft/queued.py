"""Passes of the expert kernels in a CUDA stream's own time: Python queues what follows while they run.

A training step with attention on a GPU launches some ten thousand small operations, which takes Python about
as long as half of the experts' work. A pass that waits for its inputs makes the two take turns; one that
the stream itself starts, between the copies to the host and back, lets them overlap.

The price is that results on the CPU come later than the call that asks for them: LoRA gradients are
there when ``backward()`` returns, and a failure is raised there. So whoever switches it on promises to
change the LoRA only after a backward pass.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from typing import Any

import torch

_pending: deque[tuple[Any, Any]] = deque()
"""Jobs that were queued and not looked at since, with what must live until they have run."""
_seconds = 0.0
_awaited: set[torch.cuda.Stream] = set()


@functools.cache
def launcher() -> int:
    """The address of the driver's cuLaunchHostFunc. Raises OSError where there is no driver."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    return address


def remember(job: Any, alive: Any) -> Any:
    """Keep ``alive`` until ``job`` has run; the job."""
    while _pending and _pending[0][0].done:
        _settle()
    _pending.append((job, alive))
    return job


def finish(stream: torch.cuda.Stream) -> None:
    """Wait for the jobs of ``stream``. Raises what the first of them that failed raised."""
    stream.synchronize()
    while _pending and _pending[0][0].done:
        _settle()


def finish_after_backward(stream: torch.cuda.Stream) -> None:
    """``finish``, once, before the backward pass that is running returns to its caller."""
    if stream not in _awaited:
        _awaited.add(stream)

        def ended() -> None:
            _awaited.discard(stream)
            finish(stream)

        torch.autograd.Variable._execution_engine.queue_callback(ended)  # type: ignore[attr-defined]


def seconds() -> float:
    """Seconds that queued jobs have taken, of those that are known to be done."""
    return _seconds


def _settle() -> None:
    global _seconds
    job, _ = _pending.popleft()
    _seconds += job.seconds
    job.check()
