"""What may be wrong with bench.yaml and items.jsonl: all of it is found before the first request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ktbridge.errors import Problem
from ktbridge.eval.persona import Persona
from ktbridge.eval.scorers import SCORERS, check_faults

Axis = Literal["task", "persona"]
AXES = get_args(Axis)

_BENCH_KEYS = {"name", "version", "language", "slices", "max_tokens", "sampling", "margin"}
_BENCH_OPTIONAL = {"about", "source", "data", "notes", "checklists", "partner", "private"}
_ITEM_KEYS = {"id", "slice", "sub", "lang", "messages", "checks", "origin", "license"}
_ITEM_OPTIONAL = {"cluster", "gold", "judge", "max_tokens"}
_OURS = {"model", "messages", "max_tokens", "stream", "n"}


@dataclass(frozen=True)
class Slice:
    """A group of items, and the axis that it is there for. ``label`` is its name in words, for the
    sentence of a verdict ("knowledge"); '' where the name will do."""

    name: str
    primary: Axis
    meaning: str
    label: str = ""


@dataclass(frozen=True)
class Item:
    """One question. ``cluster`` ties items that are not independent (pairs, rewordings).

    ``judge`` holds the yes/no questions for a judge, "yes" being the good answer to each.
    """

    id: str
    slice: str
    sub: str
    lang: str
    cluster: str
    messages: tuple[Mapping[str, str], ...]
    gold: Any
    checks: tuple[Mapping[str, Any], ...]
    max_tokens: int
    judge: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partner:
    """A model that plays the user in the slices named: ``turns`` answers are asked of the arm, the
    first to the item's messages, each later one to what the partner, given ``system``, said."""

    system: str
    turns: int
    slices: tuple[str, ...]


def check_head(head: Any, problems: list[Problem]) -> dict[str, Slice]:
    """Check bench.yaml's content; what is wrong goes to ``problems``. Returns the sound slices."""

    def complain(key: str, found: str, expected: str) -> None:
        problems.append(
            Problem("KTB811", "error", f"bench.yaml: {key}", found, expected, "edit bench.yaml")
        )

    if not isinstance(head, Mapping):
        complain("(file)", type(head).__name__, "a mapping")
        return {}
    for key in sorted(_BENCH_KEYS - set(head)):
        complain(key, "missing", "a value")
    for key in sorted(set(head) - _BENCH_KEYS - _BENCH_OPTIONAL, key=str):
        complain(str(key), "unknown key", "one of " + ", ".join(sorted(_BENCH_KEYS)))
    if "max_tokens" in head and not _positive(head["max_tokens"]):
        complain("max_tokens", repr(head["max_tokens"]), "a whole number above 0")
    margin = head.get("margin", 0.1)
    if not isinstance(margin, (int, float)) or not 0 < margin < 1:
        complain("margin", repr(margin), "a number between 0 and 1")
    sampling = head.get("sampling", {})
    if not isinstance(sampling, Mapping):
        complain("sampling", repr(sampling), "a mapping of request fields")
    elif _OURS & set(sampling):
        complain("sampling", ", ".join(sorted(_OURS & set(sampling))), "fields that we don't set")
    elif not is_json(sampling):
        complain("sampling", repr(sampling)[:80], "values that JSON can hold")
    notes = head.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(one, str) and one for one in notes):
        complain("notes", repr(notes)[:60], "a list of sentences")
    if not isinstance(head.get("private", False), bool):
        complain("private", repr(head["private"]), "true or false")
    lists = head.get("checklists", {})
    if not isinstance(lists, Mapping) or not all(_questions(one) for one in lists.values()):
        complain("checklists", repr(lists)[:60], "{NAME: [yes/no question, ...]}")
    slices = {}
    table = head.get("slices", {})
    if not isinstance(table, Mapping) or not table:
        complain("slices", repr(table)[:60], "{NAME: {primary, meaning}}")
        return {}
    for name, row in table.items():
        primary = row.get("primary") if isinstance(row, Mapping) else None
        if not isinstance(row, Mapping) or primary not in AXES or not row.get("meaning"):
            complain(f"slices.{name}", repr(row)[:80], "{primary: task|persona, meaning: text}")
            continue
        label = row.get("label", "")
        if not isinstance(label, str):
            complain(f"slices.{name}.label", repr(label)[:60], "a word or two")
            continue
        slices[str(name)] = Slice(str(name), cast(Axis, primary), str(row["meaning"]), label)
    partner = head.get("partner")
    if partner is not None and not (
        isinstance(partner, Mapping)
        and set(partner) == {"system", "turns", "slices"}
        and isinstance(partner["system"], str)
        and _positive(partner["turns"])
        and isinstance(partner["slices"], list)
        and all(name in table for name in partner["slices"])
    ):
        complain("partner", repr(partner)[:80], "{system: text, turns: n, slices: [NAME, ...]}")
    return slices


def check_items(
    data: bytes,
    slices: Mapping[str, Slice],
    head: Any,
    persona: Persona | None,
    problems: list[Problem],
) -> list[Item]:
    """Check items.jsonl line by line; what is wrong goes to ``problems``. Returns the sound items."""
    head = head if isinstance(head, Mapping) else {}
    lists = head.get("checklists", {})
    lists = lists if isinstance(lists, Mapping) else {}
    items: list[Item] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"items.jsonl:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(
                Problem("KTB812", "error", where, f"not JSON: {error}", "one JSON object a line")
            )
            continue
        if not is_json(row):
            fault = "NaN, an infinity or half a character"
            problems.append(
                Problem("KTB813", "error", where, fault, "finite numbers and whole characters")
            )
            continue
        found = list(_item_faults(row, slices, lists))
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            if row["id"] in first_line:
                found.append((f"the id {row['id']!r} of line {first_line[row['id']]}", "a new id"))
            first_line.setdefault(row["id"], number)
        name = row.get("id") if isinstance(row, dict) else None
        problems.extend(
            Problem("KTB813", "error", f"{where} ({name})" if name else where, fault, expected)
            for fault, expected in found
        )
        if not found:
            items.append(_item(row, head, lists, persona))
    if not first_line:
        problems.append(Problem("KTB812", "error", "items.jsonl", "no items", "one item a line"))
    return items


def _item(
    row: Mapping[str, Any],
    head: Mapping[str, Any],
    lists: Mapping[str, list[str]],
    persona: Persona | None,
) -> Item:
    checks = tuple(
        {**check, "persona": persona} if SCORERS[check["scorer"]].needs_persona else check
        for check in row["checks"]
    )
    judge = row.get("judge", [])
    judge = [f"@{judge}"] if isinstance(judge, str) else judge
    questions = [
        question for one in judge for question in (lists[one[1:]] if one[0] == "@" else [one])
    ]
    return Item(
        row["id"],
        row["slice"],
        row["sub"],
        row["lang"],
        row.get("cluster", row["id"]),
        tuple(row["messages"]),
        row.get("gold"),
        checks,
        row.get("max_tokens", head.get("max_tokens")),
        tuple(questions),
    )


def _item_faults(
    row: Any, slices: Mapping[str, Slice], lists: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What is wrong with one item, as (found, expected) pairs."""
    if not isinstance(row, dict):
        return [(type(row).__name__, "a JSON object")]
    faults = [(f"no {key!r}", "every field") for key in sorted(_ITEM_KEYS - set(row))]
    faults += [
        (f"the unknown field {key!r}", "one of " + ", ".join(sorted(_ITEM_KEYS | _ITEM_OPTIONAL)))
        for key in sorted(set(row) - _ITEM_KEYS - _ITEM_OPTIONAL)
    ]
    for key in ("id", "slice", "sub", "lang", "cluster", "origin", "license"):
        if key in row and not (isinstance(row[key], str) and (row[key] or key == "sub")):
            faults.append((f"{key} = {row[key]!r}", "a string"))
    if slices and isinstance(row.get("slice"), str) and row["slice"] not in slices:
        faults.append((f"the slice {row['slice']!r}", "one of " + ", ".join(slices)))
    if "max_tokens" in row and not _positive(row["max_tokens"]):
        faults.append((f"max_tokens = {row['max_tokens']!r}", "a whole number above 0"))
    if "judge" in row:
        faults += _judge_faults(row["judge"], lists)
    messages = row.get("messages")
    if "messages" in row and not (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(one, dict)
            and set(one) == {"role", "content"}
            and one["role"] in ("system", "user", "assistant")
            and isinstance(one["content"], str)
            for one in messages
        )
        and messages[-1]["role"] == "user"
    ):
        faults.append(("messages", "[{role, content}, ...] that ends with the user's turn"))
    checks = row.get("checks")
    if "checks" in row and not (isinstance(checks, list) and checks):
        faults.append((f"checks = {checks!r}", "at least one check"))
        checks = []
    for check in checks or ():
        faults += check_faults(check, row.get("gold"))
    return faults


def _judge_faults(judge: Any, lists: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A checklist's name, or a list of questions and ``@NAME`` of checklists."""
    named = [f"@{judge}"] if isinstance(judge, str) else judge
    if not _questions(named):
        return [(f"judge = {judge!r}"[:80], "a checklist's name or a list of questions")]
    return [
        (f"the checklist {one[1:]!r}", "one of " + (", ".join(map(str, lists)) or "none"))
        for one in named
        if one[0] == "@" and one[1:] not in lists
    ]


def _questions(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(q, str) and q for q in value)


def is_json(value: Any) -> bool:
    """Whether ``value`` can be sent and stored: no NaN, no infinity, no lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0
