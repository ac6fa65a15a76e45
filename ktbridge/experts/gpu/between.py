"""How long the device works on other things between the executor's calls, by CUDA events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch


class Between:
    """Nothing is timed until ``watch``."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Any, Any]] | None = None

    def watch(self) -> None:
        """Begin to time."""
        self._calls = []

    @contextmanager
    def call(self, name: str, stream: Any) -> Iterator[None]:
        """Around a call ``name`` that works in the CUDA ``stream``."""
        calls = self._calls
        if calls is None:
            yield
            return
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        yield
        ended.record(stream)
        calls.append((name, began, ended))

    def seconds(self, name: str) -> float:
        """Between one call ``name`` and the next call, where that is another of them; 0 where unknown."""
        calls = [each for each in self._calls or () if each[0] in ("forward", "backward")]
        if calls:
            calls[-1][2].synchronize()
        found = [
            ended.elapsed_time(began) / 1000
            for (one, _, ended), (other, began, _) in pairwise(calls)
            if one == other == name
        ]
        return median(found) if found else 0.0

    def end(self) -> None:
        """Forget what was timed, and time nothing more."""
        self._calls = None
