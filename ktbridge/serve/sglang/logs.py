"""The engine's log: written to a file with the API key redacted; its tail in readable form."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

_KEPT = 4000  # lines: a traceback of eight ranks, and what led to it
_LONGEST = 1 << 16  # bytes of one line that are kept; progress bars end in no newline
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s*")
# Noise: traceback frames, the code they quote, progress bars.
_NOISE = re.compile(r"^\s*(File \"|\^+|~+|Traceback \(|During handling|The above exception)|\d+%\|")


class Pump:
    """A thread that moves a pipe's lines into a log file, and shows each to ``on_line`` first.

    ``secret`` is redacted (asterisks) in what is written and kept. Ends with the pipe.
    """

    def __init__(
        self, pipe: BinaryIO, path: Path, on_line: Callable[[bytes], None], secret: str | None
    ) -> None:
        self._pipe, self._on_line = pipe, on_line
        self._secrets = _redacted_forms(secret)
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by the thread)
        self._thread = threading.Thread(target=self._run, name="engine log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._pipe, self._file:
            while line := self._pipe.readline(_LONGEST):
                self._on_line(line)
                for secret in self._secrets:
                    line = line.replace(secret, b"***")
                self._file.write(line)
                with self._lock:
                    self._lines.append(line.decode("utf-8", "replace"))

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        with self._lock:
            return list(self._lines)

    def join(self, seconds: float) -> None:
        """Wait until the pipe is closed, so that the last lines are there."""
        self._thread.join(seconds)


def _redacted_forms(secret: str | None) -> list[bytes]:
    """The forms of a secret to redact: as it is and as Python's repr writes it."""
    if not secret:
        return []
    forms = {secret, repr(secret)[1:-1]}
    return sorted((form.encode() for form in forms), key=len, reverse=True)


def clean(line: str) -> str:
    """A line without ANSI colours, timestamp, and text that a progress bar has overwritten."""
    text = _ANSI.sub("", line.rstrip("\r\n").rpartition("\r")[2])
    return _STAMP.sub("", text).rstrip()


def readable(lines: Sequence[str], count: int) -> list[str]:
    """The last ``count`` lines worth reading: no frames, no bars, no line twice in a row."""
    kept: list[str] = []
    quoted = False
    for line in lines:
        text = clean(line)
        frame = text.lstrip().startswith('File "')
        if text and not quoted and not _NOISE.search(text) and text not in kept[-1:]:
            kept.append(text if len(text) <= 300 else text[:297] + "...")
        quoted = frame  # the line after a frame is its code
    return kept[-count:]
