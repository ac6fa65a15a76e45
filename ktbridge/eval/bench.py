"""A bench: a folder with bench.yaml, items.jsonl and persona.yaml. Data, no code.

``load_bench`` reads and checks all of it and raises once with every problem, before any request. A
bench whose bench.yaml names a ``source`` has, instead of items.jsonl, a data file in the layout of
a public dataset: a small one of ours in the folder, or the user's copy, given with ``items``.
"""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

import ktbridge
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.eval.persona import NO_PERSONA, Persona, parse_persona
from ktbridge.eval.results.cards import Json, Message
from ktbridge.eval.schema import (
    OURS,
    Axis,
    BenchFile,
    ItemLine,
    SliceRow,
    list_questions,
    slice_table,
)
from ktbridge.eval.scorers import SCORERS, check_faults
from ktbridge.eval.sources import read_source
from ktbridge.eval.store import read_stored
from ktbridge.eval.text import is_json, language_of
from ktbridge.files.yamlfile import load_yaml
from ktbridge.schemas import check_fields
from ktbridge.server_api.hosts import is_loopback_url
from ktbridge.server_api.replies import OTHER_LIMIT

__all__ = ["FILES", "Axis", "Bench", "Item", "Partner", "Slice", "load_bench", "parse_bench"]

_MANY = 8  # at most this many lines are listed for one problem
FILES = ("bench.yaml", "items.jsonl", "persona.yaml")


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


@dataclass(frozen=True)
class Bench:
    """A checked bench. ``sha256`` covers the bytes of its three files.

    ``max_tokens`` is the command line's limit for every item, None if the bench's own limits apply;
    ``data`` is the provenance of third-party items (file name, SHA-256, loader, rows, what was
    skipped and why); ``notes`` must be shown beside the numbers in a report; ``private`` data may
    only be sent to a judge on this machine.
    """

    name: str
    version: str
    language: str
    margin: float
    sampling: Json
    slices: tuple[Slice, ...]
    items: tuple[Item, ...]
    persona: Persona
    sha256: str
    files: Mapping[str, bytes]
    data: Json | None = None
    notes: tuple[str, ...] = ()
    partner: Partner | None = None
    private: bool = False
    max_tokens: int | None = None

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
        kept = {item.id for item in self.in_turn(chosen)[:limit]}
        return tuple(item for item in chosen if item.id in kept)

    def in_turn(self, items: Sequence[Item]) -> list[Item]:
        """``items`` round-robin over the slices: the first of each, the second of each, and so on. In
        this order, an interrupted run has as much of every slice as one with a ``limit``."""
        order = {one.name: i for i, one in enumerate(self.slices)}
        turn = Counter[str]()
        ranked: list[tuple[int, int, int, Item]] = []
        for item in items:
            turn[item.slice] += 1
            ranked.append((turn[item.slice], order[item.slice], len(ranked), item))
        return [item for *_, item in sorted(ranked, key=lambda one: one[:3])]

    def refuse_remote_judge(self, url: str, *, allowed: bool = False) -> None:
        """Raise UsageError if private data would be sent to a judge that is not on this machine.

        ``allowed``: the user permits it. Only literal loopback addresses count as this machine
        ("localhost", 127.0.0.0/8, ::1); no name is resolved.
        """
        if self.private and not is_loopback_url(url) and not allowed:
            host = urllib.parse.urlsplit(url).hostname or ""
            raise UsageError(
                f"the data of {self.name!r} is private and the judge {host!r} is another machine.",
                "use a judge on loopback, or --judge-may-be-remote if your agreement allows it",
            )


def benches_root() -> Path:
    """The directory of the bundled benches: inside the wheel, or ``eval/`` of a checkout."""
    package = Path(ktbridge.__file__).parent
    shipped = package / "shipped" / "eval"
    return shipped if shipped.is_dir() else package.parent / "eval"


def load_bench(name_or_path: str | Path, items: Path | None = None) -> Bench:
    """Load a bench by name (bundled) or by folder path (yours).

    ``items`` is the user's copy of the data that a bench with a ``source`` reads. Raises UsageError
    if there is no such bench or file, and ProblemsError with every problem in them.
    """
    folder = _folder(name_or_path)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    files.setdefault("persona.yaml", NO_PERSONA)
    problems: list[Problem] = []
    head = _yaml(files, "bench.yaml", problems) if "bench.yaml" in files else {}
    source = head.get("source") if isinstance(head, Mapping) else None
    if source is None and items is not None:
        raise UsageError(
            f"the bench {str(name_or_path)!r} has items of its own and reads no --items file.",
            "leave --items out, or use --bench generic for a file of yours",
        )
    missing = [name for name in FILES if name not in files and (source is None or name != FILES[1])]
    if missing:
        raise UsageError(
            f"the bench folder {str(folder)!r} has no {' and no '.join(missing)}.",
            "a bench is a folder with bench.yaml, items.jsonl and, for a persona, persona.yaml",
        )
    if source is not None:
        rows, data = read_source(source, folder, items)
        lists = head.get("checklists") or {} if isinstance(head, Mapping) else {}
        # A folder without a checklist of that name is used without a judge.
        rows = [{k: v for k, v in row.items() if k != "judge" or v in lists} for row in rows]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        files["items.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
        head_lines = files["bench.yaml"].rstrip() + b"\n"
        files["bench.yaml"] = head_lines + f"data: {json.dumps(data)}\n".encode()
    return parse_bench(files)


def _folder(name_or_path: str | Path) -> Path:
    for folder in (Path(name_or_path), benches_root() / str(name_or_path)):
        if folder.is_dir():
            return folder
    root = benches_root()
    ours = sorted(p.parent.name for p in root.glob("*/bench.yaml")) if root.is_dir() else []
    raise UsageError(
        f"there is no bench {str(name_or_path)!r}.",
        f"name one of ours ({', '.join(ours) or 'none found'}) or a folder with bench.yaml",
    )


def parse_bench(files: Mapping[str, bytes]) -> Bench:
    """Check the bytes of a bench's three files and build it. Raises ProblemsError with every fault."""
    problems: list[Problem] = []
    given = _yaml(files, "bench.yaml", problems)
    head, slices = _check_head(given, problems)
    persona = parse_persona(_yaml(files, "persona.yaml", problems), "persona.yaml", problems)
    named = given.get("checklists") if isinstance(given, Mapping) else None
    lists = named if isinstance(named, Mapping) else {}
    rows = _check_items(files["items.jsonl"], slices, lists, problems)
    if problems or persona is None or head is None:
        problems = _grouped(problems)
        raise ProblemsError(
            f"the bench has {len(problems)} problem(s); nothing was asked.",
            problems,
            "correct the bench's files and run again; eval/README.md has an example",
        )
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    partner = head.partner
    return Bench(
        name=str(head.name),
        version=str(head.version),
        language=str(head.language),
        margin=head.margin,
        sampling={str(key): value for key, value in head.sampling.items()},
        slices=tuple(slices.values()),
        items=tuple(_item(row, head, persona) for row in rows),
        persona=persona,
        sha256=digest.hexdigest(),
        files=dict(files),
        data=head.data if isinstance(head.data, dict) else None,
        notes=tuple(head.notes),
        partner=Partner(partner.system, partner.turns, tuple(map(str, partner.slices)))
        if partner
        else None,
        private=head.private,
        max_tokens=head.override.get("max_tokens"),
    )


def _check_head(
    given: object, problems: list[Problem]
) -> tuple[BenchFile | None, dict[str, Slice]]:
    """Return bench.yaml, None if it has faults, and its valid slices."""

    def complain(key: str, found: str, expected: str) -> None:
        problems.append(problem("KTB811", f"bench.yaml: {key}", found, expected))

    if not isinstance(given, Mapping):
        complain("(file)", type(given).__name__, "a mapping")
        return None, {}
    head, faults = check_fields(BenchFile, given)
    for fault in faults:
        if fault.kind == "wrong":
            found = fault.found or repr(given[fault.key])[:80]
            complain(fault.key, found, fault.expected)
        elif fault.kind == "missing":
            complain(fault.key, "missing", "a value")
        else:
            complain(fault.key, "unknown key", fault.expected)
    table = slice_table(given)
    if not table and "slices" in given:
        complain("slices", repr(given["slices"])[:60], "[NAME, ...] or {NAME: what it asks, ...}")
    if head and head.partner and not all(name in table for name in head.partner.slices):
        expected = BenchFile.model_fields["partner"].description or ""
        complain("partner", repr(given["partner"])[:80], expected)
    slices = {}
    for name, values in table.items():
        row, faults = check_fields(SliceRow, values)
        if row:
            slices[name] = Slice(name, row.primary, row.meaning, row.label)
        elif all(fault.key == "label" for fault in faults):
            complain(f"slices.{name}.label", repr(values["label"])[:60], faults[0].expected)
        else:
            expected = "{primary: task|persona, meaning: text}"
            complain(f"slices.{name}", repr(values)[:80], expected)
    return head, slices


def _check_items(
    data: bytes, slices: Mapping[str, Slice], lists: Json, problems: list[Problem]
) -> list[ItemLine]:
    """Return the valid lines of items.jsonl."""
    rows: list[ItemLine] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"items.jsonl:{number}"
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            fault = f"not JSON: {error}"
            problems.append(problem("KTB812", where, fault, "one JSON object a line", next_step=""))
            continue
        if not is_json(given):
            fault = "NaN, an infinity or half a character"
            expected = "finite numbers and whole characters"
            problems.append(problem("KTB813", where, fault, expected, next_step=""))
            continue
        row, found = None, [(type(given).__name__, "a JSON object")]
        if isinstance(given, dict):
            where += f" ({given['id']})" if given.get("id") else ""
            given = _with_item_defaults(given, slices, number)
            row, found = _check_item(given, slices, lists)
            name = given["id"]
            if isinstance(name, str):
                if name in first_line:
                    found.append((f"the id {name!r} of line {first_line[name]}", "a new id"))
                first_line.setdefault(name, number)
        problems += [problem("KTB813", where, *fault, next_step="") for fault in found]
        if row:
            rows.append(row)
    if not first_line:
        problems.append(
            problem("KTB812", "items.jsonl", "no items", "one item a line", next_step="")
        )
    return rows


def _with_item_defaults(
    row: dict[str, object], slices: Mapping[str, Slice], number: int
) -> dict[str, object]:
    """Return an item with an id from its line number, the only slice, the language of its question, and
    the check that fits its gold."""
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


def _check_item(
    given: dict[str, object], slices: Mapping[str, Slice], lists: Json
) -> tuple[ItemLine | None, list[tuple[str, str]]]:
    """Return an item, or None and its faults as (found, expected)."""
    row, faults = check_fields(ItemLine, given, {"slices": slices, "lists": lists})
    missing = {
        "slice": ("no 'slice'", "one of " + ", ".join(slices)),
        "checks": ("neither 'gold' nor 'checks'", "what a right answer holds, or how to check it"),
    }
    found = []
    for key, kind, told, expected in faults:
        if kind == "missing":
            found.append(missing.get(key, (f"no {key!r}", expected)))
        elif kind == "unknown":
            found.append((f"the unknown field {key!r}", expected))
        elif key == "messages":
            found.append((key, expected))
        else:
            value = f"{key} = {given[key]!r}"
            found.append((told or (value[:80] if key == "judge" else value), expected))
    checks = given.get("checks")
    for check in checks if isinstance(checks, list) else []:
        found += check_faults(check, given.get("gold"))
    return (None if found else row), found


def _item(row: ItemLine, head: BenchFile, persona: Persona) -> Item:
    checks = tuple(
        {**check, "persona": persona} if SCORERS[str(check["scorer"])].needs_persona else check
        for check in row.checks
        if isinstance(check, dict)
    )
    return Item(
        row.id,
        row.slice,
        row.sub,
        row.lang,
        row.cluster or row.id,
        tuple(row.messages),  # type: ignore[arg-type]
        row.gold,
        checks,
        head.override.get("max_tokens", row.max_tokens or head.max_tokens),
        list_questions(row.judge, {str(key): one for key, one in head.checklists.items()}),
    )


def _grouped(problems: list[Problem]) -> list[Problem]:
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


def _yaml(files: Mapping[str, bytes], name: str, problems: list[Problem]) -> object:
    try:
        return load_yaml(files[name].decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())
        problems.append(problem("KTB810", name, found, "YAML in UTF-8", f"edit {name}"))
        return {}


def read_snapshot(folder: Path) -> Bench:
    """The bench's snapshot in a run, so that a report needs nothing but the run's directory."""
    try:
        return parse_bench({name: read_stored(folder / name) for name in FILES})
    except FileNotFoundError as error:
        raise KtbridgeError(
            f"the run has no {Path(error.filename).name!r} in {str(folder)!r}.",
            "run `ktbridge eval` with --output on this directory",
        ) from None


def parse_extra_body(text: str, option: str = "--extra-body") -> dict[str, object]:
    """Parse a JSON object of request fields. Raises UsageError if it is invalid."""
    example = """write it as '{"chat_template_kwargs": {"enable_thinking": false}}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}.", example) from None
    if not isinstance(value, dict):
        raise UsageError(f"{option} is not a JSON object.", example)
    if not is_json(value):
        raise UsageError(f"{option} holds NaN, an infinity or half a character.", example)
    return value


def with_sampling(bench: Bench, fields: Json) -> Bench:
    """``bench`` with its sampling overridden by ``fields``; None removes a field.

    The bench itself changes, so that the run's snapshot, every key and the report contain what was
    sent. Raises UsageError for fields that only ktbridge may set.
    """
    if not fields:
        return bench
    sampling = {**bench.sampling, **fields}
    kept = {key: value for key, value in sampling.items() if value is not None}
    # The limit may be given by its other name, and then by that alone.
    if OTHER_LIMIT in kept and fields.get("max_tokens", 0) is None:
        fields = {key: value for key, value in fields.items() if key != "max_tokens"}
    if ours := sorted(set(OURS) & set(fields)):
        own_option = "leave them out"
        if ours == ["max_tokens"]:
            own_option = f"give --max-tokens N instead, or {OTHER_LIMIT} beside a null"
        raise UsageError(f"--extra-body sets {', '.join(ours)}, which ktbridge sets.", own_option)
    limit = kept.get(OTHER_LIMIT, 1)
    if type(limit) is not int or limit < 1:
        raise UsageError(
            f"--extra-body: {OTHER_LIMIT} is {limit!r}.", "give a whole number above 0"
        )
    return _changed(bench, {"sampling": kept})


def with_max_tokens(bench: Bench, count: int | None) -> Bench:
    """``bench`` with ``count`` as the token limit of every answer; unchanged for None."""
    if count is None:
        return bench
    if OTHER_LIMIT in bench.sampling:
        raise UsageError(
            f"--max-tokens and {OTHER_LIMIT} both set the limit of an answer.", "give one of them"
        )
    return _changed(bench, {"override": {"max_tokens": count}})


def answer_limit(item: Item, bench: Bench) -> int:
    """The most tokens of an answer to ``item``."""
    other = bench.sampling.get(OTHER_LIMIT)
    return other if isinstance(other, int) else item.max_tokens


def _changed(bench: Bench, keys: Json) -> Bench:
    head = yaml.safe_load(bench.files["bench.yaml"]) | keys
    files = dict(bench.files)
    files["bench.yaml"] = yaml.safe_dump(head, allow_unicode=True, sort_keys=False).encode()
    return parse_bench(files)
