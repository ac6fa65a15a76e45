"""Import answers of other tools: LLaMA-Factory's predictions, lm-evaluation-harness samples.

Each named file becomes an arm (or a part of one); answers are paired by prompt or by document. The
data is kept in ``imported.json``, so that a report needs nothing but the run's directory.
Answers are marked by overlap with their label (ROUGE-L over ideographs and words, the scorer
``references``) or, for lm-evaluation-harness, by the metric that it stored for each sample.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.eval.arms import sha256
from ktbridge.eval.client import BadReplyError, read_completion
from ktbridge.eval.disk import make_directory, write_text
from ktbridge.eval.imports_lm_eval import read_lm_eval
from ktbridge.eval.results.build import assemble
from ktbridge.eval.results.rows import mark_task
from ktbridge.eval.results.types import ArmAnswer, ArmCard, BenchCard, CheckRow, ItemRow, Results

IMPORTED = "imported.json"
SCHEMA = "ktbridge.import/1"
MARGIN = 0.1
OVERLAP = {"scorer": "references", "metric": "rouge-l"}
FORMATS = {"lf": "LLaMA-Factory predictions", "lm-eval": "lm-evaluation-harness samples"}


@dataclass(frozen=True)
class Source:
    """A file to read as (a part of) an arm. ``format`` is "lf" or "lm-eval"."""

    arm: str
    format: str
    path: Path


def parse_source(format: str, text: str) -> Source:
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
    readers: dict[str, Callable[..., list[dict[str, Any]]]] = {
        "lf": _read_lf,
        "lm-eval": read_lm_eval,
    }
    items: dict[str, dict[str, Any]] = {}
    arms: dict[str, dict[str, Any]] = {}
    for source in sources:
        data = source.path.read_bytes()
        rows = _parse_lines(data, source.path, problems)
        found = readers[source.format](rows, source.path.name, problems)
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
    document = {"schema": SCHEMA, "arms": list(arms.values()), "items": list(items.values())}
    write_text(directory / IMPORTED, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _kinds(items: Iterable[Mapping[str, Any]], arm: str) -> str:
    return ", ".join(dict.fromkeys(one["slice"] for one in items if arm in one["answers"]))


def _join(
    items: dict[str, dict[str, Any]], source: Source, row: dict[str, Any], problems: list[Problem]
) -> None:
    """Add an arm's answer to its item; an id must mean the same question in every arm."""
    answer, where = row.pop("answer"), row.pop("where")
    identity = row.pop("identity")
    item = items.setdefault(row["id"], {**row, "identity": identity, "answers": {}})
    fault = None
    if item["identity"] != identity:
        fault = ("another question or target than in the other arm", "the same data for every arm")
    elif source.arm in item["answers"]:
        fault = (f"a second answer of {source.arm} to {row['id']}", "one answer an item and arm")
    if fault:
        problems.append(problem("KTB842", where, *fault, next_step=""))
    else:
        item["answers"][source.arm] = answer


def _parse_lines(
    data: bytes, path: Path, problems: list[Problem]
) -> list[tuple[str, dict[str, Any]]]:
    """(location, object) of each line; a line that is not a JSON object is a problem."""
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


def _read_lf(
    rows: Sequence[tuple[str, dict[str, Any]]], name: str, problems: list[Problem]
) -> list[dict[str, Any]]:
    """{"prompt", "predict", "label"}: paired by prompt and label, duplicates in order."""
    found = []
    turn: Counter[str] = Counter()
    for where, row in rows:
        keys = ("prompt", "predict", "label")
        missing = [key for key in keys if not isinstance(row.get(key), str)]
        if missing:
            fault = f"no text under {', '.join(missing)}"
            problems.append(problem("KTB841", where, fault, ", ".join(keys), next_step=""))
            continue
        pair = sha256([row["prompt"], row["label"]])[:16]
        turn[pair] += 1
        found.append(
            {
                "id": f"{pair}-{turn[pair]}",
                "slice": "predictions",
                "cluster": sha256(row["prompt"])[:16],
                "prompt": row["prompt"],
                "reference": row["label"] or None,
                "identity": pair,
                "answer": {"text": row["predict"], "marks": None},
                "where": where,
            }
        )
    return found


def score_imports(directory: Path) -> Results:
    """The results (schema ``ktbridge.eval/1``) of answers that ``import_answers`` stored."""
    path = directory / IMPORTED
    try:
        kept = json.loads(path.read_text("utf-8"))
        arms = {arm["name"]: arm for arm in kept["arms"]}
        rows = [_row(item, list(arms)) for item in kept["items"]]
        cards = {name: _arm_card(arm) for name, arm in arms.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise KtbridgeError(
            f"{str(path)!r} is damaged.", "import the files again, into a new directory"
        ) from None
    references = {
        item["id"]: [item["reference"]]
        for item in kept["items"]
        if item["reference"] and all(one["text"] is not None for one in item["answers"].values())
    }
    return assemble(_card(kept, rows), cards, rows, references=references)


def _first_checks(rows: Sequence[ItemRow], name: str) -> Iterator[str]:
    """The check that marks each answer of a slice."""
    for row in rows:
        for answer in row["answers"].values():
            if row["slice"] == name and "checks" in answer:
                yield answer["checks"][0]["scorer"]


def _check_name(scorer: str) -> str:
    return f"{scorer} ({OVERLAP['metric']})" if scorer == OVERLAP["scorer"] else scorer


def _row(item: Mapping[str, Any], arms: Sequence[str]) -> ItemRow:
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


def _answer(item: Mapping[str, Any], kept: Mapping[str, Any] | None) -> ArmAnswer:
    if kept is None:
        return {"outcome": "not-run"}
    if kept["marks"] is not None:
        names = list(kept["marks"])
        checks: list[CheckRow] = [
            {"scorer": name, "mark": kept["marks"][name], "reason": ""} for name in names
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


def _arm_card(arm: Mapping[str, Any]) -> ArmCard:
    files = arm["files"]
    formats = sorted({FORMATS[one["format"]] for one in files})
    return {
        "name": arm["name"],
        "model": ", ".join(formats),
        "url": ", ".join(one["name"] for one in files),
        "server": {"files": [dict(one) for one in files]},
        "sampling": {},
        "fingerprint": sha256([one["sha256"] for one in files]),
    }


def _card(kept: Mapping[str, Any], rows: Sequence[ItemRow]) -> BenchCard:
    formats = {one["format"] for arm in kept["arms"] for one in arm["files"]}
    notes = ["Answers collected by another tool; nothing is known here of models and sampling."]
    if "lf" in formats:
        notes.append("LLaMA-Factory rows are marked by ROUGE-L with their label.")
    if "lm-eval" in formats:
        notes.append("lm-evaluation-harness rows are marked by the first metric stored with them.")
    names = list(dict.fromkeys(row["slice"] for row in rows))
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
                "checks": list(dict.fromkeys(map(_check_name, _first_checks(rows, name)))),
            }
            for name in names
        ],
    }
