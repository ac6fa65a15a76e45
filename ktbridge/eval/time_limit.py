"""A limit of time for patterns that a bench brings, and that an answer may make exponential."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 2.0


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """TimeoutError once the block has taken so many seconds of the process's CPU time.

    It comes as a signal, which ``re`` looks for while it matches. Only the main thread gets signals: in
    another one nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
