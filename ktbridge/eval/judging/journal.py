"""The judgements of a run, in a file that survives anything: ``judgements.jsonl``.

Append-only JSON, one judgement a line, one write each. A kill leaves at most one torn last line,
which the next writer cuts off and a reader skips. A failed request is recorded, so that a report can
name it, but is never served as a judgement: the next run asks again. What the judge said is stored as
it stands, so that reading it again costs nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Literal

from ktbridge.errors import KtbridgeError

JUDGEMENTS = "judgements.jsonl"
Outcome = Literal["ok", "parse-fail", "judge-error"]
FAILED: Outcome = "judge-error"
_OUTCOMES = ("ok", "parse-fail", FAILED)


def read_journal(directory: Path) -> dict[str, dict[str, Any]]:
    """Every key's record: the first real judgement, else the last error. {} where there is no file.

    Raises KtbridgeError for a damaged line that is not the torn last one.
    """
    path = directory / JUDGEMENTS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            texts = [record[name] for name in ("key", "outcome", "reply", "detail")]
            "".join(texts).encode()  # half a character could not be reported
            counts = [record[name] for name in ("attempts", "prompt_tokens", "completion_tokens")]
            if record["outcome"] not in _OUTCOMES or any(type(one) is not int for one in counts):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise KtbridgeError(
                f"{str(path)!r} is damaged at line {number}.",
                "delete that line (its judgement is asked for again)",
            ) from None
        known = records.get(record["key"])
        if known is None or known["outcome"] == FAILED:
            records[record["key"]] = record
    return records


class Journal:
    """The one writer of a run's judgements: a context manager that raises where another writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: dict[str, dict[str, Any]] = {}
        self._file = -1

    def __enter__(self) -> Journal:
        path = self.directory / JUDGEMENTS
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)
            self.records = read_journal(self.directory)
        except BlockingIOError:
            os.close(self._file)
            raise KtbridgeError(
                f"another `ktbridge eval` is judging {str(self.directory)!r}.", "wait for it"
            ) from None
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        os.fsync(self._file)
        os.close(self._file)

    def judged(self, key: str) -> bool:
        """Whether a judgement (a parse failure too, but no error) is stored under ``key``."""
        return key in self.records and self.records[key]["outcome"] != FAILED

    def add(self, record: dict[str, Any]) -> None:
        """Append one record in one write; it is safe from a kill when this returns."""
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise KtbridgeError(
                f"only a part of a judgement could be written to {str(self.directory)!r}.",
                "free some disk space and run the same command again",
            )
        self.records[record["key"]] = record
