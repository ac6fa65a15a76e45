"""Validate bench.yaml and items.jsonl; every fault is found before the first request.

Defaults are filled in here; only the name, the slices and each item's messages and gold are
required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.persona import Persona
from ktbridge.eval.results.cards import Json, Message
from ktbridge.eval.scorers import SCORERS, check_faults
from ktbridge.eval.text import is_json, language_of

Axis = Literal["task", "persona"]
AXES: tuple[Axis, ...] = ("task", "persona")

_MAX_TOKENS = 512
BENCH_DEFAULTS: Json = {
    "version": "1",
    "language": "any",
    "max_tokens": _MAX_TOKENS,
    "sampling": {"temperature": 0},
    "margin": 0.1,
}
_BENCH_KEYS = ("name", "slices")
_BENCH_OPTIONAL = ("about", "source", "notes", "checklists", "partner", "private")
# Additional keys of a run's snapshot: the items' provenance, settings of the command line.
_SNAPSHOT_KEYS = ("data", "override")
_ITEM_KEYS = (
    *("id", "slice", "sub", "lang", "cluster", "messages", "gold", "checks", "judge"),
    *("max_tokens", "origin", "license"),
)
OURS = ("model", "messages", "max_tokens", "stream", "n")
_MESSAGES = "[{role, content}, ...] that ends with the user's turn"
Fault = tuple[str, str]  # (found, expected)


class PartnerHead(TypedDict):
    system: str
    turns: int
    slices: list[str]


class Head(TypedDict, total=False):
    """bench.yaml, once it has passed ``check_head``."""

    name: str
    version: str
    language: str
    max_tokens: int
    sampling: Json
    margin: float
    notes: list[str]
    checklists: dict[str, list[str]]
    partner: PartnerHead
    private: bool
    data: Json
    override: dict[str, int]


class ItemRow(TypedDict, total=False):
    """A line of items.jsonl with defaults filled in, once it has passed ``_item_faults``."""

    id: str
    slice: str
    sub: str
    lang: str
    cluster: str
    messages: list[Message]
    gold: object
    checks: list[Json]
    judge: str | list[str]
    max_tokens: int


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
    messages: tuple[Message, ...]
    gold: object
    checks: tuple[Json, ...]
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


def check_head(head: object, problems: list[Problem]) -> dict[str, Slice]:
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
    for key, (is_right, expected) in _HEAD_RULES.items():
        if key in head and not is_right(head[key]):
            complain(key, repr(head[key])[:80], expected)
    sampling = head.get("sampling")
    if isinstance(sampling, Mapping) and set(OURS) & set(sampling):
        found = ", ".join(sorted(set(OURS) & set(sampling)))
        complain("sampling", found, "fields that ktbridge does not set itself")
    table = slice_table(head)
    if not table and "slices" in head:
        complain("slices", repr(head["slices"])[:60], "[NAME, ...] or {NAME: what it asks, ...}")
    partner = head.get("partner")
    if partner is not None and not _is_partner(partner, table):
        complain("partner", repr(partner)[:80], "{system: text, turns: n, slices: [NAME, ...]}")
    slices = {}
    for name, row in table.items():
        primary, meaning, label = (
            row.get("primary", "task"),
            row.get("meaning", ""),
            row.get("label", ""),
        )
        if primary not in AXES or not isinstance(meaning, str):
            complain(f"slices.{name}", repr(row)[:80], "{primary: task|persona, meaning: text}")
        elif not isinstance(label, str):
            complain(f"slices.{name}.label", repr(label)[:60], "a word or two")
        else:
            axis: Axis = "persona" if primary == "persona" else "task"
            slices[name] = Slice(name, axis, meaning, label)
    return slices


def _is_override(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) <= {"max_tokens"}
        and all(map(_positive, value.values()))
    )


def _is_partner(value: object, slices: Json) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"system", "turns", "slices"}
        and isinstance(value["system"], str)
        and _positive(value["turns"])
        and isinstance(value["slices"], list)
        and all(name in slices for name in value["slices"])
    )


def _is_checklists(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_questions, value.values()))


def _is_questions(value: object) -> bool:
    return _is_texts(value) and value != []


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _positive(value: object) -> bool:
    return type(value) is int and value > 0


# Key of bench.yaml -> the rule for its value, and what is expected.
_HEAD_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (lambda value: isinstance(value, (str, int)) and str(value).strip() != "", "a name"),
    "max_tokens": (_positive, "a whole number above 0"),
    "margin": (
        lambda value: isinstance(value, (int, float)) and 0 < value < 1,
        "a number between 0 and 1",
    ),
    "sampling": (
        lambda value: isinstance(value, Mapping) and is_json(value),
        "a mapping of request fields that JSON can hold",
    ),
    "notes": (_is_texts, "a list of sentences"),
    "private": (lambda value: isinstance(value, bool), "true or false"),
    "checklists": (_is_checklists, "{NAME: [yes/no question, ...]}"),
    "override": (_is_override, "{max_tokens: a whole number above 0}"),
}


def slice_table(head: Json) -> dict[str, Json]:
    """bench.yaml's slices as {NAME: {primary, meaning, ...}}; the file may give a list of names, or
    names with meanings. {} for anything else; an invalid row becomes {"primary": None}."""
    table = head.get("slices")
    if isinstance(table, list) and all(isinstance(name, str) and name for name in table):
        table = dict.fromkeys(table)
    if not isinstance(table, Mapping):
        return {}
    rows: dict[str, Json] = {}
    for name, row in table.items():
        row = {} if row is None else {"meaning": row} if isinstance(row, str) else row
        rows[str(name)] = row if isinstance(row, Mapping) else {"primary": None, "meaning": row}
    return rows


def check_items(
    data: bytes,
    slices: Mapping[str, Slice],
    head: object,
    persona: Persona | None,
    problems: list[Problem],
) -> list[Item]:
    """Check items.jsonl line by line; faults are appended to ``problems``. Returns the valid items."""
    sound = _sound(head)
    named = head.get("checklists") if isinstance(head, Mapping) else None
    lists: Json = named if isinstance(named, Mapping) else {}
    items: list[Item] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"items.jsonl:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = f"not JSON: {error}"
            problems.append(problem("KTB812", where, fault, "one JSON object a line", next_step=""))
            continue
        if not is_json(row):
            fault = "NaN, an infinity or half a character"
            expected = "finite numbers and whole characters"
            problems.append(problem("KTB813", where, fault, expected, next_step=""))
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
            items.append(_item(row, sound, persona))
    if not first_line:
        problems.append(
            problem("KTB812", "items.jsonl", "no items", "one item a line", next_step="")
        )
    return items


def with_item_defaults(row: object, slices: Mapping[str, Slice], number: int) -> object:
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


def _sound(head: object) -> Head:
    """Return what of bench.yaml keeps to its rules; the rest has been complained of."""
    given = head if isinstance(head, dict) else {}
    wrong = [key for key, (is_right, _) in _HEAD_RULES.items() if not is_right(given.get(key))]
    return {key: value for key, value in given.items() if key not in wrong}  # type: ignore[return-value]


def _item(row: ItemRow, head: Head, persona: Persona | None) -> Item:
    checks = tuple(
        {**check, "persona": persona} if SCORERS[str(check["scorer"])].needs_persona else check
        for check in row["checks"]
    )
    judge, lists = row.get("judge", []), head.get("checklists", {})
    questions = [
        question
        for one in ([f"@{judge}"] if isinstance(judge, str) else judge)
        for question in (lists.get(one[1:], []) if one[0] == "@" else [one])
    ]
    limit = row.get("max_tokens", head.get("max_tokens", _MAX_TOKENS))
    return Item(
        row["id"],
        row["slice"],
        row["sub"],
        row["lang"],
        row.get("cluster", row["id"]),
        tuple(row["messages"]),
        row.get("gold"),
        checks,
        head.get("override", {}).get("max_tokens", limit),
        tuple(questions),
    )


def _item_faults(row: object, slices: Mapping[str, Slice], lists: Json) -> Iterator[Fault]:
    """The faults of one item."""
    if not isinstance(row, dict):
        yield type(row).__name__, "a JSON object"
        return
    if "messages" not in row:
        yield "no 'messages'", _MESSAGES
    if "slice" not in row:
        yield "no 'slice'", "one of " + ", ".join(slices)
    if "checks" not in row:
        yield "neither 'gold' nor 'checks'", "what a right answer holds, or how to check it"
    for key in sorted(set(row) - set(_ITEM_KEYS)):
        yield f"the unknown field {key!r}", "one of " + ", ".join(_ITEM_KEYS)
    for key in ("id", "slice", "sub", "lang", "cluster", "origin", "license"):
        if key in row and not (isinstance(row[key], str) and (row[key] or key == "sub")):
            yield f"{key} = {row[key]!r}", "a string"
    if slices and isinstance(row.get("slice"), str) and row["slice"] not in slices:
        yield f"the slice {row['slice']!r}", "one of " + ", ".join(slices)
    if "max_tokens" in row and not _positive(row["max_tokens"]):
        yield f"max_tokens = {row['max_tokens']!r}", "a whole number above 0"
    if "judge" in row:
        yield from _judge_faults(row["judge"], lists)
    if "messages" in row and not _is_messages(row["messages"]):
        yield "messages", _MESSAGES
    checks = row.get("checks", [])
    if "checks" in row and not (isinstance(checks, list) and checks):
        yield f"checks = {checks!r}", "at least one check"
        return
    for check in checks:
        yield from check_faults(check, row.get("gold"))


def _is_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict)
            and set(one) == {"role", "content"}
            and one["role"] in ("system", "user", "assistant")
            and isinstance(one["content"], str)
            for one in value
        )
        and value[-1]["role"] == "user"
    )


def _judge_faults(judge: object, lists: Json) -> list[Fault]:
    """Faults of ``judge``: a checklist's name, or a list of questions and ``@NAME`` of checklists."""
    named = [f"@{judge}"] if isinstance(judge, str) else judge
    if not isinstance(named, list) or not _is_questions(named):
        return [(f"judge = {judge!r}"[:80], "a checklist's name or a list of questions")]
    return [
        (f"the checklist {one[1:]!r}", "one of " + (", ".join(map(str, lists)) or "none"))
        for one in named
        if one[0] == "@" and one[1:] not in lists
    ]
