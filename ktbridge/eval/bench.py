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
from ktbridge.eval.bench_checks import (
    BENCH_DEFAULTS,
    OURS,
    Axis,
    Head,
    Item,
    Partner,
    Slice,
    check_head,
    check_items,
)
from ktbridge.eval.persona import NO_PERSONA, Persona, parse_persona
from ktbridge.eval.results.cards import Json
from ktbridge.eval.sources import read_source
from ktbridge.eval.store import read_stored
from ktbridge.eval.text import is_json
from ktbridge.files.yamlfile import load_yaml
from ktbridge.hosts import is_loopback_url
from ktbridge.openai_client import OTHER_LIMIT

__all__ = ["FILES", "Axis", "Bench", "Item", "Partner", "Slice", "load_bench", "parse_bench"]

_MANY = 8  # at most this many lines are listed for one problem
FILES = ("bench.yaml", "items.jsonl", "persona.yaml")


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
    head = _yaml(files, "bench.yaml", problems)
    slices = check_head(head, problems)
    persona = parse_persona(_yaml(files, "persona.yaml", problems), "persona.yaml", problems)
    items = check_items(files["items.jsonl"], slices, head, persona, problems)
    if problems or persona is None:
        problems = _grouped(problems)
        raise ProblemsError(
            f"the bench has {len(problems)} problem(s); nothing was asked.",
            problems,
            "correct the bench's files and run again; eval/README.md has an example",
        )
    checked: Head = {**BENCH_DEFAULTS, **head}  # type: ignore[dict-item, misc, typeddict-item]
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    partner = checked.get("partner")
    return Bench(
        name=str(checked["name"]),
        version=str(checked["version"]),
        language=str(checked["language"]),
        margin=float(checked["margin"]),
        sampling=dict(checked["sampling"]),
        slices=tuple(slices.values()),
        items=tuple(items),
        persona=persona,
        sha256=digest.hexdigest(),
        files=dict(files),
        data=checked.get("data"),
        notes=tuple(checked.get("notes", ())),
        partner=Partner(partner["system"], partner["turns"], tuple(partner["slices"]))
        if partner
        else None,
        private=checked.get("private", False),
        max_tokens=checked.get("override", {}).get("max_tokens"),
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
