"""Metadata of a run's directory: run.json, the bench's snapshot, benches.json."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

import ktbridge
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.arms import arm_rank
from ktbridge.eval.bench import FILES, Bench
from ktbridge.eval.results.types import AnyOutcome, ArmCard, Positive
from ktbridge.eval.store import make_directory, read_document, write_json, write_text
from ktbridge.schemas import fits

RUN = "run.json"
BENCH = "bench"
BENCHES = "benches.json"
_SCHEMA = "ktbridge.benches/1"
NOT_RUN: AnyOutcome = "not-run"


class PlannedSlice(TypedDict):
    """How many items of a slice are to be asked, from its first on, and how often each."""

    items: Positive
    repeat: Positive


Plan = dict[str, dict[str, PlannedSlice]]  # arm -> slice -> what is to be asked
Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


class _StoredRun(TypedDict):
    arms: dict[str, ArmCard]
    probes: dict[str, dict[str, str]]
    repeat: NotRequired[Positive]
    plan: NotRequired[Plan | None]
    date: NotRequired[Date | None]


class RunFile(TypedDict):
    """run.json: the arms' cards by name, and the hashes of probe answers by fingerprint. ``plan`` and
    ``date`` are None if it was written before 0.6."""

    arms: dict[str, ArmCard]
    probes: dict[str, dict[str, str]]
    repeat: int
    plan: Plan | None
    date: str | None


def read_run(directory: Path) -> RunFile:
    """The content of run.json; no arms without the file. Raises KtbridgeError for a damaged one."""
    path = directory / RUN
    try:
        run = read_document(path)
    except FileNotFoundError:
        return {"arms": {}, "probes": {}, "repeat": 1, "plan": None, "date": None}
    if not isinstance(run, dict) or not {"arms", "probes"} <= set(run):
        raise KtbridgeError(
            f"{str(path)!r} is not a run's description.", "use another --output directory"
        )
    if not fits(run, _StoredRun) or any(name != run["arms"][name]["name"] for name in run["arms"]):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.",
            "delete it and run the same `ktbridge eval` command again; the answers are kept",
        )
    return {
        "arms": run["arms"],
        "probes": run["probes"],
        "repeat": run.get("repeat", 1),
        "plan": run.get("plan"),
        "date": run.get("date"),
    }


def write_run(directory: Path, run: RunFile, bench: Bench) -> None:
    """Record arms, plan and bench, so that a report needs this directory and nothing else. The date
    is today's where ``run`` has none."""
    folder = directory / BENCH
    make_directory(folder)
    for name in FILES:
        if not (folder / name).is_file() or (folder / name).read_bytes() != bench.files[name]:
            write_text(folder / name, bench.files[name].decode("utf-8"))
    plan = run["plan"] or {}
    document = {
        "schema": "ktbridge.run/1",
        "ktbridge": ktbridge.__version__,
        "date": run["date"] or _today(),
        "repeat": run["repeat"],
        **({"max_tokens": bench.max_tokens} if bench.max_tokens else {}),
        "plan": {name: plan[name] for name in sorted(plan, key=arm_rank)},
        "arms": {name: run["arms"][name] for name in sorted(run["arms"], key=arm_rank)},
        "probes": run["probes"],
    }
    write_json(directory / RUN, document)


def _today() -> str:
    """Today's date in UTC; SOURCE_DATE_EPOCH (reproducible-builds.org) overrides the clock."""
    return time.strftime(
        "%Y-%m-%d", time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    )


def read_benches(directory: Path) -> tuple[Path, ...]:
    """The run directories in ``directory``: one per bench in the order given, or itself.

    Raises KtbridgeError for a damaged list.
    """
    path = directory / BENCHES
    try:
        document = read_document(path)
    except FileNotFoundError:
        return (directory,)
    names = document.get("benches") if isinstance(document, dict) else None
    if (
        not isinstance(document, dict)
        or document.get("schema") != _SCHEMA
        or not isinstance(names, list)
        or not all(map(_is_name, names))
    ):
        raise KtbridgeError(
            f"{str(path)!r} is not a list of benches.", "use another --output directory"
        )
    return tuple(directory / name for name in names)


def run_directories(directory: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The run directories for benches of these names: ``directory`` itself for one, a folder each for
    several. An existing layout is kept: a list of benches is extended.

    Raises UsageError for a duplicate name or one that can't be a folder's, and if ``directory``
    itself holds a run.
    """
    if len(names) == 1 and not (directory / BENCHES).is_file():
        return (directory,)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two benches are named {twice[0]!r}.", "give each its own --output")
    odd = [name for name in names if not _is_name(name)]
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
        document = {"schema": _SCHEMA, "benches": names}
        write_json(directory / BENCHES, document)


def _is_name(name: object) -> bool:
    """Return whether this names a direct subfolder that is not one of a run's own."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name == name.strip()
        and name not in ("", BENCH)
        and not name.startswith(".")
        and "/" not in name
    )
