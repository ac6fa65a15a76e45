"""What a bench is: a folder with bench.yaml, items.jsonl and persona.yaml. Data, no code.

``load_bench`` reads and checks all three and raises once with every problem, before any request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

import ktbridge
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.eval.persona import Persona, parse_persona
from ktbridge.eval.scorers import SCORERS

FILES = ("bench.yaml", "items.jsonl", "persona.yaml")
Axis = Literal["task", "persona"]

_BENCH_KEYS = {"name", "version", "language", "slices", "max_tokens", "sampling", "margin"}
_ITEM_KEYS = {"id", "slice", "sub", "lang", "messages", "checks", "origin", "license"}
_ITEM_OPTIONAL = {"cluster", "gold", "max_tokens"}
_OURS = {"model", "messages", "max_tokens", "stream", "n"}


@dataclass(frozen=True)
class Slice:
    """A group of items, and the axis that it is there for."""

    name: str
    primary: Axis
    meaning: str


@dataclass(frozen=True)
class Item:
    """One question. ``cluster`` ties items that are not independent (pairs, rewordings)."""

    id: str
    slice: str
    sub: str
    lang: str
    cluster: str
    messages: tuple[Mapping[str, str], ...]
    gold: Any
    checks: tuple[Mapping[str, Any], ...]
    max_tokens: int


@dataclass(frozen=True)
class Bench:
    """A checked bench. ``sha256`` covers the bytes of its three files."""

    name: str
    version: str
    language: str
    margin: float
    sampling: Mapping[str, Any]
    slices: tuple[Slice, ...]
    items: tuple[Item, ...]
    persona: Persona
    sha256: str
    files: Mapping[str, bytes]

    def select(self, slices: tuple[str, ...] = (), limit: int | None = None) -> tuple[Item, ...]:
        """The items of ``slices`` (all by default), at most ``limit``, spread evenly over them.

        Raises UsageError for a slice that the bench does not have.
        """
        known = [one.name for one in self.slices]
        unknown = [name for name in slices if name not in known]
        if unknown:
            raise UsageError(
                f"the bench {self.name!r} has no slice {', '.join(map(repr, unknown))}.",
                "choose from " + ", ".join(known),
            )
        chosen = [item for item in self.items if not slices or item.slice in slices]
        if limit is None:
            return tuple(chosen)
        turn: dict[str, int] = {}
        rank = {}
        for item in chosen:
            turn[item.slice] = turn.get(item.slice, 0) + 1
            rank[item.id] = (turn[item.slice], known.index(item.slice))
        kept = {item.id for item in sorted(chosen, key=lambda item: rank[item.id])[:limit]}
        return tuple(item for item in chosen if item.id in kept)


def benches_root() -> Path:
    """Where the benches that we ship are: inside the wheel, or ``eval/`` of a checkout."""
    package = Path(ktbridge.__file__).parent
    shipped = package / "benches"
    return shipped if shipped.is_dir() else package.parent / "eval"


def load_bench(name_or_path: str | Path) -> Bench:
    """Load a bench by name (ours) or by the path of a folder (yours).

    Raises UsageError when there is no such bench and ProblemsError with every problem in its files.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = benches_root() / str(name_or_path)
    if not folder.is_dir():
        root = benches_root()
        ours = sorted(p.parent.name for p in root.glob("*/bench.yaml")) if root.is_dir() else []
        raise UsageError(
            f"there is no bench {str(name_or_path)!r}.",
            f"name one of ours ({', '.join(ours) or 'none found'}) or a folder with bench.yaml",
        )
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"the bench folder {str(folder)!r} has no {' and no '.join(missing)}.",
            "a bench is a folder with " + ", ".join(FILES),
        )
    return parse_bench({name: (folder / name).read_bytes() for name in FILES})


def parse_bench(files: Mapping[str, bytes]) -> Bench:
    """Check the bytes of a bench's files and build it; ProblemsError lists all that is wrong."""
    problems: list[Problem] = []
    head = _yaml(files, "bench.yaml", problems)
    slices = _check_head(head, problems)
    persona = parse_persona(_yaml(files, "persona.yaml", problems), "persona.yaml", problems)
    items = _check_items(files["items.jsonl"], slices, head, problems)
    if problems or persona is None:
        raise ProblemsError(
            f"the bench has {len(problems)} problem(s); nothing was asked.",
            problems,
            "mend the bench's files and run again",
        )
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return Bench(
        str(head["name"]),
        str(head["version"]),
        str(head["language"]),
        float(head["margin"]),
        dict(head["sampling"]),
        tuple(slices.values()),
        tuple(items),
        persona,
        digest.hexdigest(),
        dict(files),
    )


def _yaml(files: Mapping[str, bytes], name: str, problems: list[Problem]) -> Any:
    try:
        value = yaml.safe_load(files[name].decode("utf-8"))
        # Half a character ("\ud83d") can be written in YAML, but neither sent nor stored.
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
        return value
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())
        problems.append(Problem("KTB810", "error", name, found, "YAML in UTF-8", f"edit {name}"))
        return {}


def _check_head(head: Any, problems: list[Problem]) -> dict[str, Slice]:
    def complain(key: str, found: str, expected: str) -> None:
        problems.append(
            Problem("KTB811", "error", f"bench.yaml: {key}", found, expected, "edit bench.yaml")
        )

    if not isinstance(head, Mapping):
        complain("(file)", type(head).__name__, "a mapping")
        return {}
    for key in sorted(_BENCH_KEYS - set(head)):
        complain(key, "missing", "a value")
    for key in sorted(set(head) - _BENCH_KEYS - {"about"}, key=str):
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
    elif not _is_json(sampling):
        complain("sampling", repr(sampling)[:80], "values that JSON can hold")
    slices = {}
    table = head.get("slices", {})
    if not isinstance(table, Mapping) or not table:
        complain("slices", repr(table)[:60], "{NAME: {primary, meaning}}")
        return {}
    for name, row in table.items():
        primary = row.get("primary") if isinstance(row, Mapping) else None
        if primary not in ("task", "persona") or not row.get("meaning"):
            complain(f"slices.{name}", repr(row)[:80], "{primary: task|persona, meaning: text}")
            continue
        slices[str(name)] = Slice(str(name), primary, str(row["meaning"]))
    return slices


def _check_items(
    data: bytes, slices: Mapping[str, Slice], head: Any, problems: list[Problem]
) -> list[Item]:
    default = head.get("max_tokens") if isinstance(head, Mapping) else None
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
        if not _is_json(row):
            fault = "NaN, an infinity or half a character"
            problems.append(
                Problem("KTB813", "error", where, fault, "finite numbers and whole characters")
            )
            continue
        found = list(_item_faults(row, slices))
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
            items.append(
                Item(
                    row["id"],
                    row["slice"],
                    row["sub"],
                    row["lang"],
                    row.get("cluster", row["id"]),
                    tuple(row["messages"]),
                    row.get("gold"),
                    tuple(row["checks"]),
                    row.get("max_tokens", default),
                )
            )
    if not first_line:
        problems.append(Problem("KTB812", "error", "items.jsonl", "no items", "one item a line"))
    return items


def _item_faults(row: Any, slices: Mapping[str, Slice]) -> list[tuple[str, str]]:
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
        faults += _check_faults(check, row.get("gold"))
    return faults


def _check_faults(check: Any, gold: Any) -> list[tuple[str, str]]:
    name = check.get("scorer") if isinstance(check, dict) else None
    scorer = SCORERS.get(name) if isinstance(name, str) else None
    if scorer is None:
        return [(f"the scorer {name!r}", "one of " + ", ".join(SCORERS))]
    given = {key: value for key, value in check.items() if key != "scorer"}
    faults = [
        (f"{name} without {key!r}", "its parameters")
        for key in sorted(scorer.required - set(given))
    ]
    if name == "contains" and not given:
        faults.append(("contains without words", "any, all or none"))
    for key, value in given.items():
        if key not in scorer.parameters:
            faults.append((f"{name} with {key!r}", "one of " + ", ".join(scorer.parameters)))
        elif not scorer.parameters[key](value):
            faults.append((f"{name}: {key} = {value!r}", "a value that the scorer takes"))
    if scorer.gold is not None and not scorer.gold(gold):
        faults.append((f"gold = {gold!r}", f"a gold that {name} takes"))
    return faults


def _is_json(value: Any) -> bool:
    """Whether ``value`` can be sent and stored: no NaN, no infinity, no lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def read_snapshot(folder: Path) -> Bench:
    """The bench as a run stored it, so that a report needs nothing but the run's directory."""
    try:
        return parse_bench({name: (folder / name).read_bytes() for name in FILES})
    except FileNotFoundError as error:
        raise KtbridgeError(
            f"the run has no {Path(error.filename).name!r} in {str(folder)!r}.",
            "run `ktbridge eval` with --out on this directory",
        ) from None
