"""What a run stores: answers.jsonl, by arm and request, and judgements.jsonl, by judge and request.

Both are append-only files of JSON records, one per line, that survive a crash. The judge's replies
are stored verbatim, so that parsing them again costs nothing.

A kill leaves at most one torn last line, which the next writer truncates and a reader skips; a full
disk leaves none. Failures are recorded, so that a report can list them, but are never reused: the next
run asks again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import sha256
from ktbridge.eval.client import OUTCOMES
from ktbridge.eval.disk import make_directory, writing

Record = dict[str, Any]
_Self = TypeVar("_Self", bound="Ledger")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Kind:
    """The record type of a file. Records have ``key`` and ``outcome``; ``failed`` is the outcome that is
    asked again. ``texts`` returns all that a report may show of a record, or raises KeyError, TypeError
    or ValueError for an invalid one. ``lock`` is the file that its writer locks; ``work`` ("writing
    to") and ``asked`` ("its question is asked again") are parts of messages."""

    name: str
    lock: str
    failed: str
    texts: Callable[[Record], list[str]]
    work: str
    asked: str


def read_records(directory: Path, kind: Kind) -> dict[str, Record]:
    """Every key's record: the first that is not a failure, else the last failure. {} without a file.

    Raises KtbridgeError for a damaged line other than a torn last one.
    """
    path = directory / kind.name
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    records: dict[str, Record] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            key = record["key"]
            # A lone surrogate could not be printed.
            "".join([key, *kind.texts(record)]).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            raise KtbridgeError(
                f"{str(path)!r} is damaged at line {number}.",
                f"delete that line ({kind.asked}) or use another --output",
            ) from None
        if key not in records or records[key]["outcome"] == kind.failed:
            records[key] = record
    return records


class Ledger:
    """The only writer of such a file: a context manager that raises if there is another."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        self.directory = directory
        self.records: dict[str, Record] = {}
        self._kind = kind
        self._file = self._lock = -1

    def __enter__(self: _Self) -> _Self:
        make_directory(self.directory)
        try:
            self._lock = self._open(self._kind.lock, os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = self._open(self._kind.name, os.O_RDWR | os.O_APPEND)
            data = (self.directory / self._kind.name).read_bytes()
            os.ftruncate(self._file, data.rfind(b"\n") + 1)
            self.records = read_records(self.directory, self._kind)
        except BlockingIOError:
            self._close()
            raise KtbridgeError(
                f"another `ktbridge eval` is {self._kind.work} {str(self.directory)!r}.",
                "wait for it, or use another --output",
            ) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with writing(self._path):
                os.fsync(self._file)
        finally:
            self._close()

    @property
    def _path(self) -> Path:
        return self.directory / self._kind.name

    def _open(self, name: str, flags: int) -> int:
        with writing(self.directory / name):
            return os.open(self.directory / name, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)

    def has(self, key: str) -> bool:
        """Whether a record other than a failure is stored under ``key``."""
        return key in self.records and self.records[key]["outcome"] != self._kind.failed

    def add(self, record: Record) -> None:
        """Append one record; it survives a kill once this returns. Raises KtbridgeError if the disk is
        full, with nothing of the record left in the file."""
        rest = _encode(record).encode() + b"\n"
        end = os.fstat(self._file).st_size
        with writing(self._path):
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, end)
                raise
        self.records[record["key"]] = record


FAILED = "http-error"


def request_key(fingerprint: str, request: Mapping[str, Any], repeat: int = 0) -> str:
    """The key of an answer: arm fingerprint, exact request, and repeat (from 0)."""
    key = {"arm": fingerprint, "request": dict(request)}
    return sha256({**key, "repeat": repeat} if repeat else key)


def _answer_texts(record: Record) -> list[str]:
    if record["outcome"] not in OUTCOMES:
        raise ValueError
    turns = record.get("turns", [])
    texts = [record[name] for name in ("text", "thinking", "detail")]
    return texts + [turn[name] for turn in turns for name in ("role", "content")]


# The lock covers the whole directory: run.json and the bench's snapshot have the same writer.
_ANSWERS = Kind(
    name="answers.jsonl",
    lock=".lock",
    failed=FAILED,
    texts=_answer_texts,
    work="writing to",
    asked="its question is asked again",
)


def read_answers(directory: Path) -> dict[str, Record]:
    """Every key's record: the first real answer, else the last error; see ``read_records``."""
    return read_records(directory, _ANSWERS)


class Store(Ledger):
    """The only writer of a run's directory; raises KtbridgeError if there is another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _ANSWERS)


JudgeOutcome = Literal["ok", "parse-fail", "judge-error"]
JUDGE_FAILED: JudgeOutcome = "judge-error"
_OUTCOMES = ("ok", "parse-fail", JUDGE_FAILED)


def _judgement_texts(record: Record) -> list[str]:
    counts = [record[name] for name in ("attempts", "prompt_tokens", "completion_tokens")]
    if record["outcome"] not in _OUTCOMES or any(type(one) is not int for one in counts):
        raise ValueError
    return [record["reply"], record["detail"]]


_JUDGEMENTS = Kind(
    name="judgements.jsonl",
    lock="judgements.jsonl",
    failed=JUDGE_FAILED,
    texts=_judgement_texts,
    work="judging",
    asked="its judgement is asked for again",
)


def read_journal(directory: Path) -> dict[str, Record]:
    """Every key's record: the first real judgement, else the last error; see ``read_records``."""
    return read_records(directory, _JUDGEMENTS)


class Journal(Ledger):
    """The only writer of a run's judgements; raises KtbridgeError if there is another."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _JUDGEMENTS)
