"""Import answers of other tools: LLaMA-Factory's predictions, lm-evaluation-harness samples.

Each named file becomes an arm (or a part of one); answers are paired by prompt or by document. The
data is kept in ``imported.json``, so that a report needs nothing but the run's directory.
Answers are marked by overlap with their label (ROUGE-L over ideographs and words, the scorer
``references``) or, for lm-evaluation-harness, by the metric that it stored for each sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.eval.arms import sha256
from ktbridge.eval.client import BadReplyError, read_completion
from ktbridge.eval.imported_rows import READERS, Format, KeptAnswer, KeptItem, Line, Row
from ktbridge.eval.results.build import Gathered, assemble
from ktbridge.eval.results.cards import ArmCard, BenchCard
from ktbridge.eval.results.rows import mark_task
from ktbridge.eval.results.schema import fits
from ktbridge.eval.results.types import ArmAnswer, CheckRow, ItemRow, Results
from ktbridge.eval.store import make_directory, read_document, write_json

IMPORTED = "imported.json"
MARGIN = 0.1
OVERLAP = {"scorer": "references", "metric": "rouge-l"}
FORMATS: dict[Format, str] = {
    "lf": "LLaMA-Factory predictions",
    "lm-eval": "lm-evaluation-harness samples",
}


class KeptFile(TypedDict):
    format: Format
    name: str
    sha256: str
    rows: int


class KeptArm(TypedDict):
    name: str
    files: list[KeptFile]


class Imported(TypedDict):
    """imported.json."""

    schema: Literal["ktbridge.import/1"]
    arms: list[KeptArm]
    items: list[KeptItem]


@dataclass(frozen=True)
class Source:
    """A file to read as (a part of) an arm."""

    arm: str
    format: Format
    path: Path


def parse_source(format: Format, text: str) -> Source:
    """Parse NAME=FILE. Raises UsageError if it is invalid."""
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path:
        raise UsageError(
            f"--{format} {text!r} is not of the form NAME=FILE.",
            f"write it as --{format} full=generated_predictions.jsonl",
        )
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path!r}.", f"give --{format} NAME=FILE a file")
    return Source(name.strip(), format, Path(path))


def import_answers(sources: Sequence[Source], directory: Path) -> None:
    """Read every file and write the answers to ``directory``/imported.json.

    Raises ProblemsError with every row that cannot be read, and UsageError if the directory
    already holds an evaluation; nothing is written then.
    """
    if (directory / "run.json").exists() or (directory / "benches.json").exists():
        raise UsageError(
            f"{str(directory)!r} holds an evaluation; imported answers need a directory of their own.",
            "name another directory",
        )
    problems: list[Problem] = []
    items: dict[str, KeptItem] = {}
    arms: dict[str, KeptArm] = {}
    for source in sources:
        data = source.path.read_bytes()
        lines = _parse_lines(data, source.path, problems)
        found = READERS[source.format](lines, source.path.name, problems)
        arm = arms.setdefault(source.arm, {"name": source.arm, "files": []})
        arm["files"].append(
            {
                "format": source.format,
                "name": source.path.name,
                "sha256": hashlib.sha256(data).hexdigest(),
                "rows": len(found),
            }
        )
        for row in found:
            _join(items, source, row, problems)
    if not problems and not items:
        problems.append(
            problem("KTB841", "the files", "no rows", "one answer a line", next_step="")
        )
    if not problems and not any(one["answers"].keys() == arms.keys() for one in items.values()):
        kinds = "; ".join(f"{name} answers {_kinds(items.values(), name)}" for name in arms)
        fault = f"no question is in the files of every arm: {kinds}"
        wanted, next_step = "the same data for every arm", "give each arm its answers to one task"
        problems.append(problem("KTB842", "the files", fault, wanted, next_step))
    if problems:
        raise ProblemsError(
            f"the import has {len(problems)} problem(s); nothing was written.",
            problems,
            "correct these rows, or leave them out of the files",
        )
    make_directory(directory)
    document: Imported = {
        "schema": "ktbridge.import/1",
        "arms": list(arms.values()),
        "items": list(items.values()),
    }
    write_json(directory / IMPORTED, document, indent=1)


def _kinds(items: Iterable[KeptItem], arm: str) -> str:
    return ", ".join(dict.fromkeys(one["slice"] for one in items if arm in one["answers"]))


def _join(items: dict[str, KeptItem], source: Source, row: Row, problems: list[Problem]) -> None:
    """Add an arm's answer to its item; an id must mean the same question in every arm."""
    item = items.setdefault(row.item["id"], row.item)
    fault = None
    if item["identity"] != row.item["identity"]:
        fault = ("another question or target than in the other arm", "the same data for every arm")
    elif source.arm in item["answers"]:
        fault = (f"a second answer of {source.arm} to {item['id']}", "one answer an item and arm")
    if fault:
        problems.append(problem("KTB842", row.where, *fault, next_step=""))
    else:
        item["answers"][source.arm] = row.answer


def _parse_lines(data: bytes, path: Path, problems: list[Problem]) -> list[Line]:
    """The lines; one that is not a JSON object is a problem."""
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate could not be shown
            if not isinstance(row, dict):
                raise ValueError(f"a JSON {type(row).__name__}")
        except (ValueError, RecursionError) as error:
            found = " ".join(f"no JSON object: {error}".split())[:120]
            problems.append(problem("KTB841", where, found, "one JSON object a line", next_step=""))
            continue
        rows.append((where, row))
    return rows


def score_imports(directory: Path) -> Results:
    """The results (schema ``ktbridge.eval/1``) of answers that ``import_answers`` stored."""
    path = directory / IMPORTED
    kept = read_document(path)
    if not fits(kept, Imported):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.", "import the files again, into a new directory"
        )
    arms = {arm["name"]: arm for arm in kept["arms"]}
    rows = [_row(item, list(arms)) for item in kept["items"]]
    references = {
        item["id"]: [item["reference"]]
        for item in kept["items"]
        if item["reference"] and all(one["text"] is not None for one in item["answers"].values())
    }
    cards = {name: _arm_card(arm) for name, arm in arms.items()}
    return assemble(Gathered(_card(kept, rows), cards, rows, references=references))


def _row(item: KeptItem, arms: Sequence[str]) -> ItemRow:
    return {
        "id": item["id"],
        "slice": item["slice"],
        "sub": "",
        "lang": "",
        "cluster": item["cluster"],
        "messages": [{"role": "user", "content": item["prompt"]}],
        "gold": item["reference"],
        "answers": {name: _answer(item, item["answers"].get(name)) for name in arms},
    }


def _answer(item: KeptItem, kept: KeptAnswer | None) -> ArmAnswer:
    if kept is None:
        return {"outcome": "not-run"}
    if kept["marks"] is not None:
        checks: list[CheckRow] = [
            {"scorer": name, "mark": mark, "reason": ""} for name, mark in kept["marks"].items()
        ]
        text = kept["text"] if kept["text"] is not None else kept.get("shown", "")
        return {"outcome": "ok", "text": text, "task": checks[0]["mark"], "checks": checks}
    try:
        # Same as for a server's answer: thinking is split off, and thinking alone is no answer.
        body = {"choices": [{"message": {"content": kept["text"]}, "finish_reason": "stop"}]}
        read = read_completion(body)
    except BadReplyError as error:
        return {"outcome": "http-error", "detail": str(error)}
    answer: ArmAnswer = {"outcome": read.outcome}
    if read.text:
        answer["text"] = read.text
    if read.thinking:
        answer["thinking"] = read.thinking
    if read.outcome == "ok":
        mark_task(answer, read.text, [OVERLAP], [item["reference"] or ""])
    return answer


def _arm_card(arm: KeptArm) -> ArmCard:
    files = arm["files"]
    return {
        "name": arm["name"],
        "model": ", ".join(sorted({FORMATS[one["format"]] for one in files})),
        "url": ", ".join(one["name"] for one in files),
        "server": {"files": [dict(one) for one in files]},
        "sampling": {},
        "fingerprint": sha256([one["sha256"] for one in files]),
    }


def _card(kept: Imported, rows: Sequence[ItemRow]) -> BenchCard:
    formats = {one["format"] for arm in kept["arms"] for one in arm["files"]}
    notes = ["Answers collected by another tool; nothing is known here of models and sampling."]
    if "lf" in formats:
        notes.append("LLaMA-Factory rows are marked by ROUGE-L with their label.")
    if "lm-eval" in formats:
        notes.append("lm-evaluation-harness rows are marked by the first metric stored with them.")
    return {
        "name": "imported answers",
        "version": "",
        "language": "",
        "sha256": sha256(kept["items"]),
        "data": None,
        "notes": notes,
        "persona": None,
        "items": len(rows),
        "margin": MARGIN,
        "sampling": {},
        "max_tokens": None,
        "slices": [
            {
                "name": name,
                "label": name,
                "primary": "task",
                "meaning": "imported",
                "checks": _checks(row for row in rows if row["slice"] == name),
            }
            for name in dict.fromkeys(row["slice"] for row in rows)
        ],
    }


def _checks(rows: Iterable[ItemRow]) -> list[str]:
    """The checks that mark these rows' answers: the first of each answer."""
    names = (
        answer["checks"][0]["scorer"]
        for row in rows
        for answer in row["answers"].values()
        if "checks" in answer
    )
    own = OVERLAP["scorer"]
    return list(
        dict.fromkeys(f"{own} ({OVERLAP['metric']})" if one == own else one for one in names)
    )
