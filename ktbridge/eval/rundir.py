"""Metadata of a run's directory: run.json, the bench's snapshot, benches.json."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import ktbridge
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.arms import arm_rank
from ktbridge.eval.bench import FILES, Bench, Item
from ktbridge.eval.disk import make_directory, write_text
from ktbridge.eval.results.types import ArmAnswer, ArmCard, ArmPlan, ItemRow, PlanCounts, SlicePlan

RUN = "run.json"
BENCH = "bench"
BENCHES = "benches.json"
_SCHEMA = "ktbridge.benches/1"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_CARD = {"name": str, "model": str, "url": str, "server": dict, "sampling": dict}
_CARD["fingerprint"] = str


# Arm -> slice -> {"items": how many of the slice, from its first on; "repeat": how often each}
Plan = dict[str, dict[str, dict[str, int]]]
NOT_RUN = "not-run"


class RunFile(TypedDict):
    """run.json; ``plan`` and ``date`` are None if it was written before 0.6."""

    arms: dict[str, ArmCard]
    probes: dict[str, dict[str, str]]
    repeat: int
    plan: Plan | None
    date: str | None


def read_run(directory: Path) -> RunFile:
    """The content of run.json: ``arms`` (name -> card), ``probes`` (fingerprint -> hashes), ``repeat``,
    ``plan`` and ``date``; the last two None if written before 0.6.

    A card has ``partner`` {"model", "url"} if the arm's dialogues were held with one, and
    ``refused`` if preflight found that the arm can't be asked. Raises KtbridgeError for a damaged
    file.
    """
    path = directory / RUN
    try:
        run = json.loads(path.read_text("utf-8"))
        arms, probes = dict(run["arms"]), dict(run["probes"])
        repeat, plan, date = run.get("repeat", 1), run.get("plan"), run.get("date")
        json.dumps(run, ensure_ascii=False, allow_nan=False).encode()
    except FileNotFoundError:
        return {"arms": {}, "probes": {}, "repeat": 1, "plan": None, "date": None}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KtbridgeError(
            f"{str(path)!r} is not a run's description.", "use another --output directory"
        ) from None
    sound = all(
        isinstance(card, dict)
        and all(isinstance(card.get(key), kind) for key, kind in _CARD.items())
        and card["name"] == name
        and _is_partner(card.get("partner"))
        and isinstance(card.get("refused", ""), str)
        for name, card in arms.items()
    ) and all(
        isinstance(hashes, dict) and all(isinstance(one, str) for one in hashes.values())
        for hashes in probes.values()
    )
    sound = sound and (plan is None or is_plan(plan))
    sound = sound and (
        date is None or (isinstance(date, str) and _DATE.fullmatch(date) is not None)
    )
    if not sound or type(repeat) is not int or repeat < 1:
        raise KtbridgeError(
            f"{str(path)!r} is damaged.",
            "delete it and run the same `ktbridge eval` command again; the answers are kept",
        )
    return {"arms": arms, "probes": probes, "repeat": repeat, "plan": plan, "date": date}


def _is_partner(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"model", "url"}
        and all(isinstance(one, str) for one in value.values())
    )


def write_run(
    directory: Path,
    run: RunFile,
    bench: Bench,
    cards: Mapping[str, ArmCard],
    probes: Mapping[str, Mapping[str, str]],
    repeat: int,
    plan: Plan,
) -> None:
    """Record arms, plan and bench, so that a report needs this directory and nothing else.

    ``run`` is the previous content. Probe hashes stay those of an arm's first run, the baseline for
    drift. The date is that of the directory's first run.
    """
    folder = directory / BENCH
    make_directory(folder)
    for name in FILES:
        if not (folder / name).is_file() or (folder / name).read_bytes() != bench.files[name]:
            write_text(folder / name, bench.files[name].decode("utf-8"))
    arms = {**run["arms"], **cards}
    every = dict(run["probes"])
    for fingerprint, hashes in probes.items():
        every[fingerprint] = {**hashes, **every.get(fingerprint, {})}
    document = {
        "schema": "ktbridge.run/1",
        "ktbridge": ktbridge.__version__,
        "date": run["date"] or _today(),
        "repeat": max(repeat, run["repeat"]),
        **({"max_tokens": bench.max_tokens} if bench.max_tokens else {}),
        "plan": {name: plan[name] for name in sorted(plan, key=arm_rank)},
        "arms": {name: arms[name] for name in sorted(arms, key=arm_rank)},
        "probes": every,
    }
    write_text(directory / RUN, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


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
        document = json.loads(path.read_text("utf-8"))
        names = document["benches"]
        if document["schema"] != _SCHEMA or not all(map(_is_name, names)):
            raise TypeError
    except FileNotFoundError:
        return (directory,)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KtbridgeError(
            f"{str(path)!r} is not a list of benches.", "use another --output directory"
        ) from None
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
        write_text(directory / BENCHES, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _is_name(name: object) -> bool:
    """Whether this names a direct subfolder that is not one of a run's own."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name == name.strip()
        and name not in ("", BENCH)
        and not name.startswith(".")
        and "/" not in name
    )


def make_plan(
    before: Plan,
    bench: Bench,
    arms: Sequence[str],
    chosen: Sequence[str],
    items: Sequence[Item],
    repeat: int,
) -> Plan:
    """The directory's plan updated with ``items`` for ``arms``, out of the slices ``chosen``.

    For each arm it replaces the plan of these slices; other slices and arms are kept, because they
    may be asked by separate commands.
    """
    counts = Counter(item.slice for item in items)
    plan: Plan = {name: dict(slices) for name, slices in before.items()}
    for arm in arms:
        kept = {name: one for name, one in plan.get(arm, {}).items() if name not in chosen}
        now = {name: {"items": n, "repeat": repeat} for name, n in counts.items()}
        order = [one.name for one in bench.slices]
        both = kept | now
        plan[arm] = {name: both[name] for name in sorted(both, key=_rank(order))}
    return plan


def _rank(order: Sequence[str]) -> Callable[[str], tuple[int, str]]:
    return lambda name: (order.index(name) if name in order else len(order), name)


def is_plan(value: object) -> bool:
    """Whether ``value`` is a valid result of ``make_plan``."""
    return isinstance(value, dict) and all(
        isinstance(slices, dict)
        and all(
            isinstance(one, dict)
            and one.keys() == {"items", "repeat"}
            and all(type(number) is int and number > 0 for number in one.values())
            for one in slices.values()
        )
        for slices in value.values()
    )


def planned_answers(plan: Plan, bench: Bench) -> dict[str, dict[str, int]]:
    """Arm -> item id -> how many answers are planned."""
    planned: dict[str, dict[str, int]] = {}
    for arm, slices in plan.items():
        planned[arm] = {}
        for name, one in slices.items():
            items = [item for item in bench.items if item.slice == name][: one["items"]]
            planned[arm] |= {item.id: one["repeat"] for item in items}
    return planned


def compare_plan(
    planned: Mapping[str, Mapping[str, int]],
    arms: Sequence[str],
    slice_of: Mapping[str, str],
    rows: Sequence[ItemRow],
) -> PlanCounts:
    """How much of the plan for ``arms`` was asked, regardless of the outcome.

    An item is missing if an arm that it was planned for has no first answer. ``slice_of``: the
    slice of each item by id.
    """
    answers = {row["id"]: row["answers"] for row in rows}
    slices: dict[str, SlicePlan] = {
        name: {"items": 0, "missing": 0} for name in dict.fromkeys(slice_of.values())
    }
    by_arm: dict[str, ArmPlan] = {
        arm: {"answers": 0, "missing": 0} for arm in arms if arm in planned
    }
    for item, name in slice_of.items():
        wanted = {arm: planned[arm][item] for arm in by_arm if item in planned[arm]}
        if not wanted:
            continue
        had = {arm: _had(answers.get(item, {}).get(arm)) for arm in wanted}
        slices[name]["items"] += 1
        slices[name]["missing"] += any(not count for count in had.values())
        for arm, count in wanted.items():
            by_arm[arm]["answers"] += count
            by_arm[arm]["missing"] += max(0, count - had[arm])
    slices = {name: one for name, one in slices.items() if one["items"]}
    return {
        "items": sum(one["items"] for one in slices.values()),
        "missing_items": sum(one["missing"] for one in slices.values()),
        "answers": sum(one["answers"] for one in by_arm.values()),
        "missing_answers": sum(one["missing"] for one in by_arm.values()),
        "slices": slices,
        "arms": by_arm,
    }


def _had(answer: ArmAnswer | None) -> int:
    """How many of an item's repeats were asked, including the first; else 0."""
    if answer is None or answer["outcome"] == NOT_RUN:
        return 0
    repeats = answer.get("repeats", [answer])
    if repeats[0]["outcome"] == NOT_RUN:
        return 0
    return sum(one["outcome"] != NOT_RUN for one in repeats)
