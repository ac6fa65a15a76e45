"""A run's directory: run.json, the bench's snapshot, answers, judgements; and benches.json above several.

answers.jsonl (by arm and request) and judgements.jsonl (by judge and request) are ledgers as files/ledger.py
has them. The judge's replies are stored verbatim, so that parsing them again costs nothing. Failures are
recorded, so that a report can list them, but are never reused: the next run asks again.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

import ktbridge
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.arms import arm_rank
from ktbridge.eval.bench import FILES, Bench, parse_bench
from ktbridge.eval.results.types import AnyOutcome, ArmCard, Json, JudgeOutcome, Message, Positive
from ktbridge.files import digests, publish
from ktbridge.files.ledger import LedgerFile, whole_lines, writing
from ktbridge.schemas import fits, is_json
from ktbridge.server_api.replies import Outcome

RUN = "run.json"
BENCH = "bench"
BENCHES = "benches.json"
JUDGE = "judge.json"
FAILED: Outcome = "http-error"
JUDGE_FAILED: JudgeOutcome = "judge-error"
NOT_RUN: AnyOutcome = "not-run"


# --- files of a run


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
    except (ValueError, RecursionError):
        return None
    return value if is_json(value) else None


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


# --- run.json and the bench's snapshot


class PlannedSlice(TypedDict):
    """Number of items of a slice to ask, from its first on, and how often each."""

    items: Positive
    repeat: Positive


Plan = dict[str, dict[str, PlannedSlice]]  # arm -> slice -> what is to be asked


class RunFile(TypedDict):
    """run.json: the arms' cards by name, and the hashes of probe answers by fingerprint. ``plan`` and
    ``date`` are None if it was written before 0.6."""

    arms: dict[str, ArmCard]
    probes: dict[str, dict[str, str]]
    repeat: Positive
    plan: Plan | None
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None


def read_run(directory: Path) -> RunFile:
    """The content of run.json; no arms without the file. Raises KtbridgeError for a damaged one."""
    run: RunFile = {"arms": {}, "probes": {}, "repeat": 1, "plan": None, "date": None}
    path = directory / RUN
    try:
        stored = read_document(path)
    except FileNotFoundError:
        return run
    if not isinstance(stored, dict) or not {"arms", "probes"} <= set(stored):
        raise KtbridgeError(f"{str(path)!r} is not a run's description.", "use another --output directory")
    found = {name: stored.get(name, default) for name, default in run.items()}
    if fits(found, RunFile) and all(name == one["name"] for name, one in found["arms"].items()):
        return found
    raise KtbridgeError(
        f"{str(path)!r} is damaged.",
        "delete it and run the same `ktbridge eval` command again; the answers are kept",
    )


def write_run(directory: Path, run: RunFile, bench: Bench) -> None:
    """Record arms, plan and bench, so that a report needs this directory and nothing else. The date
    is today's where ``run`` has none: in UTC, or of SOURCE_DATE_EPOCH (reproducible-builds.org)."""
    folder = directory / BENCH
    make_directory(folder)
    for name in FILES:
        if not (folder / name).is_file() or (folder / name).read_bytes() != bench.files[name]:
            write_text(folder / name, bench.files[name].decode("utf-8"))
    plan = run["plan"] or {}
    now = time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    document = {
        "schema": "ktbridge.run/1",
        "ktbridge": ktbridge.__version__,
        "date": run["date"] or time.strftime("%Y-%m-%d", now),
        "repeat": run["repeat"],
        **({"max_tokens": bench.max_tokens} if bench.max_tokens else {}),
        "plan": {name: plan[name] for name in sorted(plan, key=arm_rank)},
        "arms": {name: run["arms"][name] for name in sorted(run["arms"], key=arm_rank)},
        "probes": run["probes"],
    }
    write_json(directory / RUN, document)


def read_snapshot(directory: Path) -> Bench:
    """The bench of a run, so that a report needs nothing but the run's directory."""
    folder = directory / BENCH
    try:
        return parse_bench({name: read_stored(folder / name) for name in FILES})
    except FileNotFoundError as error:
        raise KtbridgeError(
            f"the run has no {Path(error.filename).name!r} in {str(folder)!r}.",
            "run `ktbridge eval` with --output on this directory",
        ) from None


# --- benches.json: one directory for several benches


def _check_folder(name: str) -> str:
    """Refuse a name that isn't that of a direct subfolder, or that a run uses itself."""
    known = name in ("", BENCH) or name.startswith(".") or "/" in name
    if known or not name.isprintable() or name != name.strip():
        raise ValueError("no folder's name")
    return name


_Folder = Annotated[str, AfterValidator(_check_folder)]


class _Benches(TypedDict):
    schema: Literal["ktbridge.benches/1"]
    benches: list[_Folder]


def read_benches(directory: Path) -> tuple[Path, ...]:
    """The run directories in ``directory``: one per bench in the order given, or itself.

    Raises KtbridgeError for a damaged list.
    """
    path = directory / BENCHES
    try:
        document = read_document(path)
    except FileNotFoundError:
        return (directory,)
    if not fits(document, _Benches):
        raise KtbridgeError(f"{str(path)!r} is not a list of benches.", "use another --output directory")
    return tuple(directory / name for name in document["benches"])


def run_directories(directory: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The run directories for benches of these names: ``directory`` itself for one, a folder each for
    several. An existing layout is kept: a list of benches is extended.

    Raises UsageError for a duplicate name or one that can't be a folder's, and if ``directory``
    itself holds a run.
    """
    if len(names) == 1 and not (directory / BENCHES).is_file():
        return (directory,)
    twice = sorted({name for name in names if names.count(name) > 1})
    odd = [name for name in names if not fits(name, _Folder)]
    if twice:
        raise UsageError(f"two benches are named {twice[0]!r}.", "give each its own --output")
    if odd:
        raise UsageError(f"{odd[0]!r} cannot name a folder.", "change `name` in its bench.yaml")
    if (directory / RUN).is_file():
        raise UsageError(
            f"{str(directory)!r} holds the run of one bench; several need a directory of their own.",
            "use another --output",
        )
    return tuple(directory / name for name in names)


def write_benches(directory: Path, folders: Sequence[Path]) -> None:
    """Append the benches run in ``directory`` to those listed already."""
    if tuple(folders) == (directory,):
        return
    make_directory(directory)
    listed = [folder.name for folder in read_benches(directory) if folder != directory]
    names = list(dict.fromkeys([*listed, *(folder.name for folder in folders)]))
    if names != listed:
        write_json(directory / BENCHES, {"schema": "ktbridge.benches/1", "benches": names})


# --- answers.jsonl and judgements.jsonl


def _check_turn(turn: Message) -> Message:
    if not {"role", "content"} <= turn.keys():
        raise ValueError("a turn without role or content")
    return turn


class AnswerRecord(TypedDict):
    """A line of answers.jsonl."""

    key: str
    arm: NotRequired[str]
    item: NotRequired[str]
    outcome: Outcome
    text: str
    thinking: str
    detail: str
    status: NotRequired[int]
    prompt_tokens: NotRequired[int | None]
    completion_tokens: NotRequired[int | None]
    seconds: NotRequired[float | None]
    repeat: NotRequired[int]
    turns: NotRequired[list[Annotated[Message, AfterValidator(_check_turn)]]]


class Compared(TypedDict, total=False):
    """Further fields of a judgement of two answers."""

    minus: str
    swapped: bool


class JudgementRecord(Compared):
    """A line of judgements.jsonl."""

    key: str
    form: NotRequired[str]
    item: NotRequired[str]
    of: NotRequired[str]
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
    """A ledger of a run; the outcome ``failed`` is asked again."""

    name: str
    record: TypeAdapter[_Record]
    failed: str


ANSWERS = Kind("answers.jsonl", TypeAdapter(AnswerRecord), FAILED)
JUDGEMENTS = Kind("judgements.jsonl", TypeAdapter(JudgementRecord), JUDGE_FAILED)


def request_key(fingerprint: str, request: Json, repeat: int = 0) -> str:
    """The key of an answer: arm fingerprint, exact request, and repeat (from 0)."""
    key = {"arm": fingerprint, "request": dict(request)}
    return digests.of_json({**key, "repeat": repeat} if repeat else key)


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
            record = kind.record.validate_json(line, strict=True)
        except ValueError:
            raise KtbridgeError(
                f"{str(path)!r} is damaged at line {number}.",
                "delete that line, whose answer is asked for again, or use another --output",
            ) from None
        key = record["key"]
        if key not in records or records[key]["outcome"] == kind.failed:
            records[key] = record
    return records


class Ledger(Generic[_Record]):
    """The only writer of such a file: a context manager that raises if there is another.

    Who writes answers also writes run.json and the bench's snapshot.
    """

    def __init__(self, directory: Path, kind: Kind[_Record]) -> None:
        self.directory = directory
        self.records: dict[str, _Record] = {}
        self._kind: Kind[_Record] = kind

    def __enter__(self) -> Ledger[_Record]:
        make_directory(self.directory)
        path = self.directory / self._kind.name
        self._file = LedgerFile(path, encode=_encode)
        try:
            if not self._file.lock():
                raise KtbridgeError(
                    f"another `ktbridge eval` is writing to {str(path)!r}.",
                    "wait for it, or use another --output",
                )
            self._file.keep(self._file.lines())
            self.records = read_ledger(self.directory, self._kind)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def has(self, key: str) -> bool:
        """Return whether a record other than a failure is stored under ``key``."""
        return key in self.records and self.records[key]["outcome"] != self._kind.failed

    def add(self, record: _Record) -> None:
        """Append one record; it survives a kill once this returns. Raises KtbridgeError if the disk is
        full, with nothing of the record left in the file."""
        self._file.add(record)
        self.records[record["key"]] = record
