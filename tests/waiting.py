"""Waiting for what another process does, and whether it lives."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    """Return once ``condition`` is true; an AssertionError after so many seconds."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def is_alive(pid: int) -> bool:
    """Return whether the process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
