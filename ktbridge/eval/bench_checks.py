"""Validate bench.yaml and items.jsonl; every fault is found before the first request.

Defaults are filled in here; only the name, the slices and each item's messages and gold are
required.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.persona import Persona
from ktbridge.eval.scorers import SCORERS, check_faults
from ktbridge.eval.text import language_of

Axis = Literal["task", "persona"]
AXES = get_args(Axis)

_BENCH_KEYS = ("name", "slices")
BENCH_DEFAULTS: Mapping[str, Any] = {
    "version": "1",
    "language": "any",
    "max_tokens": 512,
    "sampling": {"temperature": 0},
    "margin": 0.1,
}
_BENCH_OPTIONAL = ("about", "source", "notes", "checklists", "partner", "private")
# Additional keys of a run's snapshot: the items' provenance, settings of the command line.
_SNAPSHOT_KEYS = ("data", "override")
_ITEM_KEYS = (
    *("id", "slice", "sub", "lang", "cluster", "messages", "gold", "checks", "judge"),
    *("max_tokens", "origin", "license"),
)
OURS = ("model", "messages", "max_tokens", "stream", "n")
_MANY = 8  # at most this many lines are listed for one problem


@dataclass(frozen=True)
class Slice:
    """A group of items, and its primary axis. ``label`` is its name in words, for the sentence of a
    verdict ("knowledge"); '' to use the name."""

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

    @property
    def references(self) -> list[str]:
        """The texts that an answer is compared with by the scorer "references"; else []."""
        compared = any(check["scorer"] == "references" for check in self.checks)
        return list(self.gold) if compared and isinstance(self.gold, list) else []


@dataclass(frozen=True)
class Partner:
    """A model that plays the user in the named slices: the arm gives ``turns`` answers, the first to
    the item's messages, each later one to the reply of the partner, which is given ``system``."""

    system: str
    turns: int
    slices: tuple[str, ...]


def check_head(head: Any, problems: list[Problem]) -> dict[str, Slice]:
    """Check bench.yaml's content; faults are appended to ``problems``. Returns the valid slices."""

    def complain(key: str, found: str, expected: str) -> None:
        problems.append(problem("KTB811", f"bench.yaml: {key}", found, expected))

    if not isinstance(head, Mapping):
        complain("(file)", type(head).__name__, "a mapping")
        return {}
    for key in _BENCH_KEYS:
        if key not in head:
            complain(key, "missing", "a value")
    known = (*_BENCH_KEYS, *BENCH_DEFAULTS, *_BENCH_OPTIONAL)
    for key in sorted(set(head) - {*known, *_SNAPSHOT_KEYS}, key=str):
        complain(str(key), "unknown key", "one of " + ", ".join(known))
    if "name" in head and not (isinstance(head["name"], (str, int)) and str(head["name"]).strip()):
        complain("name", repr(head["name"])[:60], "a name")
    if "max_tokens" in head and not _positive(head["max_tokens"]):
        complain("max_tokens", repr(head["max_tokens"]), "a whole number above 0")
    margin = head.get("margin", 0.1)
    if not isinstance(margin, (int, float)) or not 0 < margin < 1:
        complain("margin", repr(margin), "a number between 0 and 1")
    sampling = head.get("sampling", {})
    if not isinstance(sampling, Mapping):
        complain("sampling", repr(sampling), "a mapping of request fields")
    elif set(OURS) & set(sampling):
        found = ", ".join(sorted(set(OURS) & set(sampling)))
        complain("sampling", found, "fields that ktbridge does not set itself")
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
    override = head.get("override", {})
    if not isinstance(override, Mapping) or not set(override) <= {"max_tokens"}:
        complain("override", repr(override)[:60], "{max_tokens: n}")
    elif not all(map(_positive, override.values())):
        complain("override.max_tokens", repr(override["max_tokens"]), "a whole number above 0")
    slices = {}
    table = slice_table(head)
    if not table:
        if "slices" in head:
            complain(
                "slices", repr(head["slices"])[:60], "[NAME, ...] or {NAME: what it asks, ...}"
            )
        return {}
    for name, row in table.items():
        primary, label = row.get("primary", "task"), row.get("label", "")
        if primary not in AXES or not isinstance(row.get("meaning", ""), str):
            complain(f"slices.{name}", repr(row)[:80], "{primary: task|persona, meaning: text}")
        elif not isinstance(label, str):
            complain(f"slices.{name}.label", repr(label)[:60], "a word or two")
        else:
            slices[name] = Slice(name, cast(Axis, primary), row.get("meaning", ""), label)
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


def slice_table(head: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """bench.yaml's slices as {NAME: {primary, meaning, ...}}; the file may give a list of names, or
    names with meanings. {} for anything else; an invalid row becomes {"primary": None}."""
    table = head.get("slices")
    if isinstance(table, list) and all(isinstance(name, str) and name for name in table):
        table = dict.fromkeys(table)
    if not isinstance(table, Mapping):
        return {}
    rows: dict[str, Mapping[str, Any]] = {}
    for name, row in table.items():
        row = {} if row is None else {"meaning": row} if isinstance(row, str) else row
        rows[str(name)] = row if isinstance(row, Mapping) else {"primary": None, "meaning": row}
    return rows


def grouped(problems: list[Problem]) -> list[Problem]:
    """``problems`` with identical ones from several places merged into one."""
    groups: dict[tuple[str, ...], list[Problem]] = {}
    for one in problems:
        file = one.where.partition(":")[0]
        key = (one.code, one.severity, file, one.found, one.expected, one.next_step)
        groups.setdefault(key, []).append(one)
    return [_merged(file, same) for (_, _, file, *_), same in groups.items()]


def _merged(file: str, same: list[Problem]) -> Problem:
    if len(same) == 1:
        return same[0]
    # "items.jsonl:3 (id)" and "bench.yaml: key" without the file and the id
    places = [one.where.partition(":")[2].strip().partition(" (")[0] for one in same]
    rest = f" and {len(places) - _MANY} more" if len(places) > _MANY else ""
    head = f"{file}: " + ("lines " if all(map(str.isdigit, places)) else "")
    return replace(same[0], where=head + ", ".join(places[:_MANY]) + rest)


def check_items(
    data: bytes,
    slices: Mapping[str, Slice],
    head: Any,
    persona: Persona | None,
    problems: list[Problem],
) -> list[Item]:
    """Check items.jsonl line by line; faults are appended to ``problems``. Returns the valid items."""
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
                problem(
                    "KTB812", where, f"not JSON: {error}", "one JSON object a line", next_step=""
                )
            )
            continue
        if not is_json(row):
            fault = "NaN, an infinity or half a character"
            problems.append(
                problem("KTB813", where, fault, "finite numbers and whole characters", next_step="")
            )
            continue
        name = row.get("id") if isinstance(row, dict) else None
        row = with_item_defaults(row, slices, number)
        found = list(_item_faults(row, slices, lists))
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            if row["id"] in first_line:
                found.append((f"the id {row['id']!r} of line {first_line[row['id']]}", "a new id"))
            first_line.setdefault(row["id"], number)
        problems.extend(
            problem("KTB813", f"{where} ({name})" if name else where, fault, expected, next_step="")
            for fault, expected in found
        )
        if not found:
            items.append(_item(row, head, lists, persona))
    if not first_line:
        problems.append(
            problem("KTB812", "items.jsonl", "no items", "one item a line", next_step="")
        )
    return items


def with_item_defaults(row: Any, slices: Mapping[str, Slice], number: int) -> Any:
    """An item with defaults filled in: an id from its line number, the only slice, the language of its
    question, and the check that fits its gold."""
    if not isinstance(row, dict):
        return row
    filled = {"id": f"line-{number}", "sub": "", "origin": "unknown", "license": "unknown", **row}
    if len(slices) == 1:
        filled.setdefault("slice", next(iter(slices)))
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    text = last.get("content") if isinstance(last, dict) else None
    filled.setdefault("lang", language_of(text if isinstance(text, str) else ""))
    if "checks" not in row and "gold" in row:
        gold = row["gold"]
        filled["gold"] = [gold] if isinstance(gold, str) else gold
        number_like = isinstance(gold, (int, float)) and not isinstance(gold, bool)
        filled["checks"] = [{"scorer": "numeric" if number_like else "aliases"}]
    return filled


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
        _max_tokens(row, head),
        tuple(questions),
    )


def _max_tokens(row: Mapping[str, Any], head: Mapping[str, Any]) -> int:
    own = row.get("max_tokens", head.get("max_tokens", BENCH_DEFAULTS["max_tokens"]))
    override = head.get("override")
    return cast(int, override.get("max_tokens", own) if isinstance(override, Mapping) else own)


def _item_faults(
    row: Any, slices: Mapping[str, Slice], lists: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The faults of one item, as (found, expected) pairs."""
    if not isinstance(row, dict):
        return [(type(row).__name__, "a JSON object")]
    faults = []
    if "messages" not in row:
        faults.append(("no 'messages'", "[{role, content}, ...] that ends with the user's turn"))
    if "slice" not in row:
        faults.append(("no 'slice'", "one of " + ", ".join(slices)))
    if "checks" not in row:
        faults.append(
            ("neither 'gold' nor 'checks'", "what a right answer holds, or how to check it")
        )
    faults += [
        (f"the unknown field {key!r}", "one of " + ", ".join(_ITEM_KEYS))
        for key in sorted(set(row) - set(_ITEM_KEYS))
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
    """Faults of ``judge``: a checklist's name, or a list of questions and ``@NAME`` of checklists."""
    named = [f"@{judge}"] if isinstance(judge, str) else judge
    if not _questions(named):
        return [(f"judge = {judge!r}"[:80], "a checklist's name or a list of questions")]
    return [
        (f"the checklist {one[1:]!r}", "one of " + (", ".join(map(str, lists)) or "none"))
        for one in named
        if one[0] == "@" and one[1:] not in lists
    ]


def _questions(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(q, str) and q for q in value)


def is_json(value: object) -> bool:
    """Whether ``value`` can be sent and stored: no NaN, no infinity, no lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _positive(value: object) -> bool:
    return type(value) is int and value > 0
