"""Rows of the files that other tools write: LLaMA-Factory's generated_predictions.jsonl, and
lm-evaluation-harness's samples_TASK_DATE.jsonl (``--log_samples``)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.arms import sha256
from ktbridge.eval.results.cards import Json

Format = Literal["lf", "lm-eval"]
# Metrics of which lower is better, or that are not in 0..1: not usable as marks.
_NOT_MARKS = frozenset(
    "ter wer cer mae mse brier_score bypass perplexity word_perplexity byte_perplexity bits_per_byte "
    "likelihood_diff".split()
)
_FIELDS = frozenset(
    "doc_id doc target arguments resps filtered_resps filter metrics doc_hash prompt_hash "
    "target_hash".split()
)
_PROMPTS = ("question", "query", "prompt", "input", "text", "sentence", "problem")


class _Shown(TypedDict, total=False):
    shown: str


class KeptAnswer(_Shown):
    """An answer's text (None where a choice was weighed; then ``shown`` describes it), and the marks
    that the tool stored with it, None if it stored none."""

    text: str | None
    marks: dict[str, float] | None


class KeptItem(TypedDict):
    """A question with the arms' answers; ``identity`` must be the same in every arm."""

    id: str
    slice: str
    cluster: str
    prompt: str
    reference: str | None
    identity: object
    answers: dict[str, KeptAnswer]


@dataclass(frozen=True)
class Row:
    """A line of a file: where it stands, its question without answers, and the answer."""

    where: str
    item: KeptItem
    answer: KeptAnswer


Line = tuple[str, dict[str, object]]  # where it stands, and its JSON object


def _read_lf(rows: Sequence[Line], name: str, problems: list[Problem]) -> list[Row]:
    """{"prompt", "predict", "label"}: paired by prompt and label, duplicates in order."""
    found = []
    turn: Counter[str] = Counter()
    for where, row in rows:
        prompt, predict, label = row.get("prompt"), row.get("predict"), row.get("label")
        if not (isinstance(prompt, str) and isinstance(predict, str) and isinstance(label, str)):
            keys = ("prompt", "predict", "label")
            missing = [key for key in keys if not isinstance(row.get(key), str)]
            fault = f"no text under {', '.join(missing)}"
            problems.append(problem("KTB841", where, fault, ", ".join(keys), next_step=""))
            continue
        pair = sha256([prompt, label])[:16]
        turn[pair] += 1
        item: KeptItem = {
            "id": f"{pair}-{turn[pair]}",
            "slice": "predictions",
            "cluster": sha256(prompt)[:16],
            "prompt": prompt,
            "reference": label or None,
            "identity": pair,
            "answers": {},
        }
        found.append(Row(where, item, {"text": predict, "marks": None}))
    return found


# --- rows of lm-evaluation-harness's samples_TASK_DATE.jsonl (--log_samples)


def _read_lm_eval(rows: Sequence[Line], name: str, problems: list[Problem]) -> list[Row]:
    """Paired by task (from the file name), filter and doc_id; marked by the stored metrics."""
    task = re.sub(r"^samples_|(_\d{4}-\d\d-\d\dT[\d\-.:]+)?\.jsonl$", "", name) or name
    found = []
    for where, row in rows:
        marks = _marks(row)
        fault = None
        if type(row.get("doc_id")) not in (int, str):
            fault = ("no doc_id", "a row of `lm_eval --log_samples`")
        elif not isinstance(row.get("resps"), list):
            fault = ("no resps", "a row of `lm_eval --log_samples`")
        elif not marks:
            fault = ("no metric of it is a number from 0 to 1", "acc, exact_match, f1, …")
        if fault:
            problems.append(problem("KTB841", where, *fault, next_step=""))
            continue
        kind = str(row.get("filter", "none"))
        slice_name = task if kind == "none" else f"{task} ({kind})"
        target = row.get("target")
        text, shown = _response(row.get("filtered_resps") or row["resps"])
        item: KeptItem = {
            "id": f"{slice_name}/{row['doc_id']}",
            "slice": slice_name,
            "cluster": f"{task}/{row['doc_id']}",
            "prompt": _prompt(row),
            "reference": target if isinstance(target, str) and text is not None else None,
            "identity": row.get("doc_hash") or sha256([row.get("doc"), target]),
            "answers": {},
        }
        found.append(Row(where, item, {"text": text, "shown": shown, "marks": marks}))
    return found


def _marks(row: Json) -> dict[str, float]:
    """The metrics of a row that are marks in 0..1, in the row's order."""
    names = row.get("metrics")
    if not isinstance(names, list):
        names = [key for key in row if key not in _FIELDS]
    marks = {}
    for name in names:
        value = row.get(name) if isinstance(name, str) else None
        if name in _NOT_MARKS or not isinstance(value, (bool, int, float)):
            continue
        if math.isfinite(value) and 0 <= value <= 1:
            marks[name] = float(value)
    return marks


def _response(replies: object) -> tuple[str | None, str]:
    """(the generated text or None, text describing the log-likelihoods of choices instead)."""
    every = replies if isinstance(replies, list) else []
    first = every[0] if every else ""
    while isinstance(first, list) and len(first) == 1:
        first = first[0]
    if isinstance(first, str):
        return first, ""
    weights = [_weight(one) for one in every]
    known = [(weight, -i) for i, weight in enumerate(weights) if weight is not None]
    if not known:
        return None, json.dumps(replies, ensure_ascii=False)
    shown = ", ".join("–" if weight is None else f"{weight:.2f}" for weight in weights)
    return None, f"choice {1 - max(known)[1]} of {len(weights)} (log-likelihoods {shown})"


def _weight(reply: object) -> float | None:
    while isinstance(reply, list) and reply:
        reply = reply[0]
    try:
        return float(str(reply)) if isinstance(reply, (int, float, str)) else None
    except ValueError:
        return None


def _prompt(row: Json) -> str:
    """The prompt, as far as the row contains it: arguments, else the document's question."""
    arguments = row.get("arguments")
    if isinstance(arguments, dict) and arguments:
        first = next(iter(arguments.values()))
        arguments = [list(first.values())] if isinstance(first, dict) else [first]
    if isinstance(arguments, list) and arguments:
        first = arguments[0]
        text = first[0] if isinstance(first, list) and first else first
        if isinstance(text, str):
            return text
    doc = row.get("doc")
    for key in _PROMPTS:
        if isinstance(doc, Mapping) and isinstance(doc.get(key), str):
            return str(doc[key])
    return json.dumps(doc, ensure_ascii=False, sort_keys=True)


Reader = Callable[[Sequence[Line], str, list[Problem]], list[Row]]
READERS: dict[Format, Reader] = {"lf": _read_lf, "lm-eval": _read_lm_eval}
