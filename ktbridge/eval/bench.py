"""A bench: a folder with bench.yaml, items.jsonl and persona.yaml. Data, no code.

``load_bench`` reads and checks all of it and raises once with every problem, before any request. A
bench whose bench.yaml names a ``source`` has, instead of items.jsonl, a data file in the layout of
a public dataset: a small one of ours in the folder, or the user's copy, given with ``items``.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import json
import re
import urllib.parse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, UsageError, did_you_mean, did_you_mean_path, list_names
from ktbridge.eval.results.types import Json
from ktbridge.eval.schema import OURS, BenchFile, Item, check_keys, check_row, list_questions, list_slices
from ktbridge.eval.scorers import SCORERS, Persona, check_faults
from ktbridge.eval.scorers.text_metrics import language_of
from ktbridge.eval.sources import benches_root, last_text, read_source
from ktbridge.files import digests
from ktbridge.files.records import parse_json_lines
from ktbridge.files.yamlfile import load_yaml
from ktbridge.schemas import is_json
from ktbridge.server_api.hosts import is_loopback_url
from ktbridge.server_api.replies import OTHER_LIMIT

_MANY = 8  # at most this many lines are listed for one problem
FILES = ("bench.yaml", "items.jsonl", "persona.yaml")
# For a bench that has no persona.yaml: a report then has no persona axis.
_NO_PERSONA = b"""name: none
address: {}
tics: {}
breaks: {}
target_rate: 1
max_tics_per_sentence: 1
weights: {address: 0.5, tic: 0.5}
"""


class Bench(BenchFile):
    """A checked bench. ``sha256`` covers the bytes of its three files.

    ``max_tokens`` is the command line's limit for every item, None if the bench's own limits apply;
    ``data`` is the provenance of third-party items (file name, SHA-256, loader, rows, what was
    skipped and why); ``notes`` must be shown beside the numbers in a report; ``private`` data may
    only be sent to a judge on this machine.
    """

    items: tuple[Item, ...]
    persona: Persona
    sha256: str
    files: Mapping[str, bytes]

    @property
    def max_tokens(self) -> int | None:
        """The limit of the command line for every item."""
        return self.override.get("max_tokens")

    @property
    def has_persona(self) -> bool:
        """Return whether there is a persona, and so a persona axis."""
        return self.persona.name != "none"

    @property
    def is_compat(self) -> bool:
        """Return whether a judge gives digits, instead of answering a checklist."""
        return self.name == "nekobench-compat"

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
        groups = [[item for item in items if item.slice == one.name] for one in self.slices]
        return [item for turn in itertools.zip_longest(*groups) for item in turn if item]

    def refuse_remote(self, url: str, role: str, step: str) -> None:
        """Raise UsageError if private data would be sent to a ``role`` that is not on this machine.

        Only literal loopback addresses count as this machine ("localhost", 127.0.0.0/8, ::1); no name is
        resolved.
        """
        if self.private and not is_loopback_url(url):
            host = urllib.parse.urlsplit(url).hostname or ""
            raise UsageError(
                f"the data of {self.name!r} is private and the {role} {host!r} is another machine.", step
            )


# --- reading


def load_bench(name_or_path: str | Path, items: Path | None = None) -> Bench:
    """Load a bench by name (bundled) or by folder path (yours).

    ``items`` is the user's copy of the data that a bench with a ``source`` reads. Raises UsageError
    if there is no such bench or file, and ProblemsError with every problem in them.
    """
    folder = _find_folder(name_or_path)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    head = _read_yaml(files, "bench.yaml", []) if "bench.yaml" in files else {}
    source = head.get("source") if isinstance(head, Mapping) else None
    if source is None and items is not None:
        raise UsageError(
            f"the bench {str(name_or_path)!r} has items of its own and reads no --items file.",
            "leave --items out, or use --bench generic for a file of yours",
        )
    needed = FILES[:1] if source is not None else FILES[:2]
    if missing := [name for name in needed if name not in files]:
        raise UsageError(
            f"the bench folder {str(folder)!r} has no {' and no '.join(missing)}.",
            "a bench is a folder with bench.yaml, items.jsonl and, for a persona, persona.yaml",
        )
    if source is not None and isinstance(head, Mapping):
        rows, data = read_source(source, folder, items)
        lists = head.get("checklists") or {}
        # A folder without a checklist of that name is used without a judge.
        rows = [{k: v for k, v in row.items() if k != "judge" or v in lists} for row in rows]
        files |= make_files({**head, "data": data}, rows)
    try:
        return parse_bench(files)
    except ProblemsError as error:
        if source is None:
            raise
        # items.jsonl was made of the data file, which has other lines.
        name = f"{data['file']}: item "
        pattern = re.compile(r"^items\.jsonl:(?: lines )?")
        places = [pattern.sub(lambda _: name, one.where) for one in error.problems]
        problems = map(lambda one, where: replace(one, where=where), error.problems, places)
        raise ProblemsError(error.sentence, problems) from None


def _find_folder(name_or_path: str | Path) -> Path:
    root = benches_root()
    for folder in (Path(name_or_path), root / str(name_or_path)):
        if folder.is_dir():
            return folder
    ours = sorted(path.parent.name for path in root.glob("*/bench.yaml"))
    near = did_you_mean(str(name_or_path), ours) or did_you_mean_path(name_or_path)
    raise UsageError(
        f"there is no bench {str(name_or_path)!r}.",
        f"{near} Name one of ours ({', '.join(ours) or 'none found'}) or a folder with bench.yaml".lstrip(),
    )


def make_files(head: Json, rows: Sequence[Json]) -> dict[str, bytes]:
    """bench.yaml and items.jsonl of a bench whose items come from elsewhere."""
    lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
    return {
        "bench.yaml": yaml.safe_dump(dict(head), allow_unicode=True, sort_keys=False).encode(),
        "items.jsonl": "".join(f"{line}\n" for line in lines).encode(),
    }


def parse_bench(given: Mapping[str, bytes]) -> Bench:
    """Check the bytes of a bench's files and build it. Raises ProblemsError with every fault."""
    problems: list[Problem] = []
    files = {"persona.yaml": _NO_PERSONA, **given}
    keys = _read_yaml(files, "bench.yaml", problems)
    head = check_keys(BenchFile, keys, "bench.yaml: ", "KTB811", problems)
    rules = _read_yaml(files, "persona.yaml", problems)
    persona = check_keys(Persona, rules, "persona.yaml: ", "KTB814", problems)
    known = keys if isinstance(keys, Mapping) else {}
    slices = [str(one.get("name", "")) for one in list_slices(known.get("slices"))]
    lists = named if isinstance(named := known.get("checklists"), Mapping) else {}
    rows = _check_items(files["items.jsonl"], slices, lists, problems)
    if problems or persona is None or head is None:
        problems = _merge_alike(problems)
        raise ProblemsError(
            f"the bench has {len(problems)} problem(s); nothing was asked.",
            problems,
            "correct the bench's files and run again; eval/README.md has an example",
        )
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    clusters: dict[str, str] = {}  # one question that stands there twice is no second sample
    for row in rows:
        clusters.setdefault(json.dumps(row.messages), row.cluster or row.id)
    return Bench.model_construct(
        **dict(head),
        items=tuple(_finish_item(row, head, persona, clusters[json.dumps(row.messages)]) for row in rows),
        persona=persona,
        sha256=digest.hexdigest(),
        files=files,
    )


def _read_yaml(files: Mapping[str, bytes], name: str, problems: list[Problem]) -> object:
    try:
        return load_yaml(files[name].decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        found = " ".join(str(error).split())
        problems.append(problem("KTB810", name, found, "YAML in UTF-8", f"edit {name}"))
        return {}


def _check_items(data: bytes, slices: Sequence[str], lists: Json, problems: list[Problem]) -> list[Item]:
    rows: list[Item] = []
    first_line: dict[str, int] = {}
    for number, _, given, error in parse_json_lines(data.split(b"\n")):
        where, row = f"items.jsonl:{number}", None
        if error is not None:
            fault = f"not JSON: {error}"
            problems.append(problem("KTB812", where, fault, "one JSON object a line", next_step=""))
            continue
        if not is_json(given):
            found = [("NaN, an infinity or half a character", "finite numbers, whole characters")]
        elif not isinstance(given, dict):
            found = [(type(given).__name__, "a JSON object")]
        else:
            where += f" ({given['id']})" if given.get("id") else ""
            filled = _fill_defaults(given, slices, number)
            row, found = check_row(Item, filled, {"slices": slices, "lists": lists})
            checks = filled.get("checks")
            for check in checks if isinstance(checks, list) else []:
                found += check_faults(check, filled.get("gold"))
            name = filled["id"]
            if isinstance(name, str) and first_line.setdefault(name, number) != number:
                found.append((f"the id {name!r} of line {first_line[name]}", "a new id"))
        problems += [problem("KTB813", where, *fault, next_step="") for fault in found]
        if row and not found:
            rows.append(row)
    if not first_line:
        problems.append(problem("KTB812", "items.jsonl", "no items", "one item a line", next_step=""))
    return rows


def _fill_defaults(row: dict[str, object], slices: Sequence[str], number: int) -> dict[str, object]:
    """Return an item with an id from its line number, the only slice, the language of its question, and
    the check that fits its gold."""
    filled = {"id": f"line-{number}", "sub": "", "origin": "unknown", "license": "unknown", **row}
    if len(slices) == 1:
        filled.setdefault("slice", slices[0])
    filled.setdefault("lang", language_of(last_text(row.get("messages"))))
    if "checks" not in row and "gold" in row:
        gold = row["gold"]
        filled["gold"] = [gold] if isinstance(gold, str) else gold
        number_like = isinstance(gold, (int, float)) and not isinstance(gold, bool)
        filled["checks"] = [{"scorer": "numeric" if number_like else "aliases"}]
    return filled


def _finish_item(row: Item, head: BenchFile, persona: Persona, cluster: str) -> Item:
    """``row`` with the bench's persona, checklists, limit of tokens and ``cluster`` in their places."""
    checks = [
        {**check, "persona": persona} if SCORERS[str(check["scorer"])].needs_persona else check
        for check in row.checks
    ]
    values = {
        "cluster": row.cluster or cluster,
        "checks": checks,
        "judge": list_questions(row.judge, head.checklists),
        "max_tokens": head.override.get("max_tokens", row.max_tokens or head.item_tokens),
    }
    return row.model_copy(update=values)


def _merge_alike(problems: list[Problem]) -> list[Problem]:
    """``problems`` with identical ones from several places of a file merged into one."""
    groups: dict[Problem, list[str]] = {}
    for one in problems:
        file, _, place = one.where.partition(":")
        # "items.jsonl:3 (id)" and "bench.yaml: key" without the file and the id
        groups.setdefault(replace(one, where=file), []).append(place)
    merged = []
    for one, places in groups.items():
        where = f"{one.where}:{places[0]}" if places[0] else one.where
        if len(places) > 1:
            names = [place.strip().partition(" (")[0] for place in places]
            lines = "lines " if all(map(str.isdigit, names)) else ""
            where = f"{one.where}: {lines}{list_names(names, _MANY)}"
        merged.append(replace(one, where=where))
    return merged


# --- --compat nekobench: the public set as it is
#
# 600 questions in six modules and a script whose judge gives each answer one digit 0..5
# (github.com/mindsRiverPonder/LLM-practice, "NekoQA-10K for catgirl finetune"). Neither is part of this
# package: they are read from the user's copies, the script as text, never run. So the judge gets what the
# script sends, word for word, and its reply is read as the script does: the first digit in it.

HIGHEST = 5
REQUEST = {"max_tokens": 2048, "temperature": 0.5}
"""What the public script asks its judge with, beside the prompt (commit 7adf40a)."""
_LITERALS = ("PROMPT_LIST", "MODULE_TO_INDEX")
PLACE = re.compile(r"\{\{[^{}]+\}\}")  # where the script puts the question, and then the answer
_WHERE = (
    "give your copy of the script of mindsRiverPonder/LLM-practice ('NekoQA-10K for catgirl finetune/data')"
)


def load_compat(name: str, items: Path, script: Path | None = None) -> Bench:
    """The public questions in ``items`` as a bench; our persona.yaml measures the persona.

    ``script`` is the public one, whose prompts a judge gets; without it nothing is judged. Raises
    UsageError for another name, a missing file or another script, ProblemsError with every bad record.
    """
    if name != "nekobench":
        raise UsageError(f"there is no --compat {name!r}.", "choose nekobench")
    folder = benches_root() / name
    head = yaml.safe_load((folder / "compat.yaml").read_text("utf-8"))
    rows, head["data"] = read_source(head.pop("source"), folder, items)
    prompts, note = {}, "no judge's prompts were given: the script is missing"
    if script is not None:
        prompts = read_prompts(script, head["slices"])
        digest = digests.of_file(script)
        note = f"the judge's prompts are those of {script.name} (SHA-256 {digest})"
    turn = Counter[str]()
    for row in rows:
        module = str(row["slice"])
        turn[module] += 1
        row["id"] = f"{module.lower()}-{turn[module]:03d}"
        row |= {"judge": [prompts[module]]} if prompts else {}
    head["notes"].append(note)
    head["slices"] = {module: one for module, one in head["slices"].items() if turn[module]}
    persona = (folder / "persona.yaml").read_bytes()
    return parse_bench({**make_files(head, rows), "persona.yaml": persona})


def read_prompts(script: Path, modules: Collection[str]) -> dict[str, str]:
    """The judge's prompt of each module in a copy of the public script, a notebook or its text.

    Nothing is run: the literals PROMPT_LIST and MODULE_TO_INDEX are read, and what the request is made
    with. Raises UsageError if they are not there or not those that are reproduced here.
    """
    try:
        text = script.read_text("utf-8")
        if text.lstrip().startswith("{"):  # a notebook: its cells, one after the other
            cells = [one for one in json.loads(text)["cells"] if one["cell_type"] == "code"]
            text = "\n".join("".join(one["source"]) for one in cells)
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, LookupError, TypeError) as error:
        raise UsageError(f"{str(script)!r} can't be read: {error}.", _WHERE) from None
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {one.id for one in targets if isinstance(one, ast.Name)} & {*_LITERALS}
            with contextlib.suppress(ValueError):
                found |= {name: ast.literal_eval(node.value) for name in names}
        elif isinstance(node, ast.Call):
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            if REQUEST.keys() <= given.keys():
                found["request"] = {name: given[name] for name in REQUEST}
    try:
        texts, places = (found[name] for name in _LITERALS)
        prompts = {module: str(texts[places[module]]) for module in modules}
        fits = len(places) == len(prompts) and found["request"] == REQUEST
    except (LookupError, TypeError):
        prompts, fits = {}, False
    if not fits or any(len(set(PLACE.findall(one))) != 2 for one in prompts.values()):
        raise UsageError(
            f"{str(script)!r} is not the public script that is reproduced here: PROMPT_LIST with a place for "
            f"the question and one for the answer, MODULE_TO_INDEX for {', '.join(modules)}, and a "
            f"request with {REQUEST}.",
            _WHERE,
        )
    return prompts


# --- what the command line changes


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
        raise UsageError(f"--extra-body: {OTHER_LIMIT} is {limit!r}.", "give a whole number above 0")
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
    return parse_bench({**bench.files, "bench.yaml": make_files(head, ())["bench.yaml"]})
