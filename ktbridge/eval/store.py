"""What a run stores: answers.jsonl, by arm and request, and judgements.jsonl, by judge and request.

Both are ledgers as files/ledger.py has them. The judge's replies are stored verbatim, so that parsing them
again costs nothing. Failures are recorded, so that a report can list them, but are never reused: the next
run asks again.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, TypedDict, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.cards import Json, JudgeOutcome, Message
from ktbridge.files import digests, publish
from ktbridge.files.ledger import LedgerFile, whole_lines, writing
from ktbridge.files.locks import lock_open
from ktbridge.server_api.replies import OUTCOMES, Outcome

FAILED = "http-error"
JUDGE_FAILED: JudgeOutcome = "judge-error"


class _OptionalAnswerRecord(TypedDict, total=False):
    repeat: int
    turns: list[Message]


class AnswerRecord(_OptionalAnswerRecord):
    """A line of answers.jsonl."""

    key: str
    arm: str
    item: str
    outcome: Outcome
    text: str
    thinking: str
    detail: str
    status: int
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float | None


class Compared(TypedDict, total=False):
    """Of a judgement of two answers."""

    minus: str
    swapped: bool


class JudgementRecord(Compared):
    """A line of judgements.jsonl."""

    key: str
    form: str
    item: str
    of: str
    outcome: JudgeOutcome
    reply: str
    detail: str
    attempts: int
    prompt_tokens: int
    completion_tokens: int


_Record = TypeVar("_Record", AnswerRecord, JudgementRecord)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Kind(Generic[_Record]):
    """The record type of a file. ``failed`` is the outcome that is asked again. ``texts`` returns all
    that a report may show of a record, or raises KeyError, TypeError or ValueError for an invalid one.
    ``lock`` is the file that its writer locks; ``work`` ("writing to") and ``asked`` ("its question is
    asked again") are parts of messages."""

    name: str
    lock: str
    failed: str
    texts: Callable[[_Record], list[str]]
    work: str
    asked: str


def request_key(fingerprint: str, request: Json, repeat: int = 0) -> str:
    """The key of an answer: arm fingerprint, exact request, and repeat (from 0)."""
    key = {"arm": fingerprint, "request": dict(request)}
    return digests.of_json({**key, "repeat": repeat} if repeat else key)


def _answer_texts(record: AnswerRecord) -> list[str]:
    if record["outcome"] not in OUTCOMES:
        raise ValueError
    turns = [turn[name] for turn in record.get("turns", []) for name in ("role", "content")]
    return [record["text"], record["thinking"], record["detail"], *turns]


def _judgement_texts(record: JudgementRecord) -> list[str]:
    counts = (record["attempts"], record["prompt_tokens"], record["completion_tokens"])
    known = record["outcome"] in ("ok", "parse-fail", JUDGE_FAILED)
    if not known or any(type(one) is not int for one in counts):
        raise ValueError
    return [record["reply"], record["detail"]]


# The lock covers the whole directory: run.json and the bench's snapshot have the same writer.
ANSWERS = Kind(
    name="answers.jsonl",
    lock=".lock",
    failed=FAILED,
    texts=_answer_texts,
    work="writing to",
    asked="its question is asked again",
)
JUDGEMENTS = Kind(
    name="judgements.jsonl",
    lock="judgements.jsonl",
    failed=JUDGE_FAILED,
    texts=_judgement_texts,
    work="judging",
    asked="its judgement is asked for again",
)


def read_stored(path: Path) -> bytes:
    """A file of a run's directory. Raises FileNotFoundError, and KtbridgeError for anything but a regular
    file that fits into memory: a pipe would be waited for, a device read, without an end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise KtbridgeError(f"{str(path)!r} is not a regular file.", "use another directory")
        return path.read_bytes()
    except MemoryError:
        size = path.stat().st_size
        raise KtbridgeError(
            f"{str(path)!r} has {size} bytes, more than there is memory.", "use another directory"
        ) from None


def read_document(path: Path) -> object:
    """The JSON value in a file of a run's directory; None if it isn't JSON that can be shown or stored.

    Raises FileNotFoundError, and KtbridgeError as ``read_stored`` does.
    """
    try:
        value: object = json.loads(read_stored(path))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def read_ledger(directory: Path, kind: Kind[_Record]) -> dict[str, _Record]:
    """Every key's record: the first that is not a failure, else the last failure. {} without a file.

    Raises KtbridgeError for a damaged line other than a torn last one.
    """
    path = directory / kind.name
    try:
        data = read_stored(path)
    except FileNotFoundError:
        return {}
    records: dict[str, _Record] = {}
    for number, line in enumerate(whole_lines(data), 1):
        try:
            record: _Record = json.loads(line)
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


class Ledger(Generic[_Record]):
    """The only writer of such a file: a context manager that raises if there is another."""

    def __init__(self, directory: Path, kind: Kind[_Record]) -> None:
        self.directory = directory
        self.records: dict[str, _Record] = {}
        self._kind: Kind[_Record] = kind
        self._closing = ExitStack()

    def __enter__(self) -> Ledger[_Record]:
        make_directory(self.directory)
        with ExitStack() as opened:
            self._lock(opened)
            self._file = LedgerFile(self.directory / self._kind.name, encode=_encode)
            opened.callback(self._file.close)
            self._file.keep(self._file.lines())
            self.records = read_ledger(self.directory, self._kind)
            self._closing = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def _lock(self, opened: ExitStack) -> None:
        path = self.directory / self._kind.lock
        with writing(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        opened.callback(os.close, lock)
        if not lock_open(lock):
            raise KtbridgeError(
                f"another `ktbridge eval` is {self._kind.work} {str(self.directory)!r}.",
                "wait for it, or use another --output",
            )

    def has(self, key: str) -> bool:
        """Return whether a record other than a failure is stored under ``key``."""
        return key in self.records and self.records[key]["outcome"] != self._kind.failed

    def add(self, record: _Record) -> None:
        """Append one record; it survives a kill once this returns. Raises KtbridgeError if the disk is
        full, with nothing of the record left in the file."""
        self._file.add(record)
        self.records[record["key"]] = record


def write_text(path: Path, text: str) -> None:
    """``publish.write_text`` that raises KtbridgeError if the file can't be written."""
    with writing(path):
        publish.write_text(path, text)


def write_json(path: Path, document: object, indent: int = 2) -> None:
    """``document`` as the whole file."""
    write_text(path, json.dumps(document, indent=indent, ensure_ascii=False) + "\n")


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents if they are missing; raises KtbridgeError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
