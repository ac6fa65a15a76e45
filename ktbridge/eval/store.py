"""The answers of a run, in a file that survives anything.

``answers.jsonl`` is append-only JSON, one record a line, keyed by arm fingerprint and canonical
request. A kill leaves at most one torn last line, which the next writer cuts off and a reader
skips. Errors are recorded, so that a report can name them, but are never served as answers: the
next run asks again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import sha256
from ktbridge.eval.client import OUTCOMES

ANSWERS = "answers.jsonl"
FAILED = "http-error"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def request_key(fingerprint: str, request: Mapping[str, Any], repeat: int = 0) -> str:
    """The key of an answer: whose it is, to exactly what, and which repeat of it (from 0)."""
    key = {"arm": fingerprint, "request": dict(request)}
    return sha256({**key, "repeat": repeat} if repeat else key)


def read_answers(directory: Path) -> dict[str, dict[str, Any]]:
    """Every key's record: the first real answer, else the last error. {} where there is no file.

    Raises KtbridgeError for a damaged line that is not the torn last one.
    """
    path = directory / ANSWERS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            key, outcome = record["key"], record["outcome"]
            texts = [record[name] for name in ("key", "text", "thinking", "detail")]
            if outcome not in OUTCOMES or not all(isinstance(one, str) for one in texts):
                raise TypeError
            turns = record.get("turns", [])
            texts += [turn[name] for turn in turns for name in ("role", "content")]
            "".join(texts).encode()  # half a character could not be reported
        except (ValueError, KeyError, TypeError, RecursionError):
            raise KtbridgeError(
                f"{str(path)!r} is damaged at line {number}.",
                "delete that line (its question is asked again) or use another --out",
            ) from None
        if key not in records or (records[key]["outcome"] == FAILED and outcome):
            records[key] = record
    return records


class Store:
    """The one writer of a run's directory: a context manager that raises where another writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: dict[str, dict[str, Any]] = {}
        self._answers = -1
        self._lock = -1

    def __enter__(self) -> Store:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise KtbridgeError(
                f"another `ktbridge eval` is writing to {str(self.directory)!r}.",
                "wait for it, or use another --out",
            ) from None
        try:
            self._answers = os.open(
                self.directory / ANSWERS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            data = (self.directory / ANSWERS).read_bytes()
            os.ftruncate(self._answers, data.rfind(b"\n") + 1)
            self.records = read_answers(self.directory)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        os.fsync(self._answers)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._answers, self._lock):
            if descriptor >= 0:
                os.close(descriptor)

    def answered(self, key: str) -> bool:
        """Whether a real answer (of whatever outcome but an error) is stored under ``key``."""
        return key in self.records and self.records[key]["outcome"] != FAILED

    def add(self, record: dict[str, Any]) -> None:
        """Append one record in one write; it is safe from a kill when this returns."""
        line = _encode(record).encode() + b"\n"
        written = os.write(self._answers, line)
        if written != len(line):
            raise KtbridgeError(
                f"only a part of an answer could be written to {str(self.directory)!r}.",
                "free some disk space and run the same command again",
            )
        self.records[record["key"]] = record
