"""Rows of lm-evaluation-harness's ``samples_TASK_DATE.jsonl`` (``--log_samples``)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.arms import sha256

# Lower is better, or not in 0..1: not usable as marks.
_NOT_MARKS = {"ter", "wer", "cer", "mae", "mse", "brier_score", "bypass", "perplexity"}
_NOT_MARKS |= {"word_perplexity", "byte_perplexity", "bits_per_byte", "likelihood_diff"}
_FIELDS = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
_FIELDS |= {"doc_hash", "prompt_hash", "target_hash"}
_PROMPTS = ("question", "query", "prompt", "input", "text", "sentence", "problem")


def read_lm_eval(
    rows: Sequence[tuple[str, dict[str, Any]]], name: str, problems: list[Problem]
) -> list[dict[str, Any]]:
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
        text, shown = _response(row)
        found.append(
            {
                "id": f"{slice_name}/{row['doc_id']}",
                "slice": slice_name,
                "cluster": f"{task}/{row['doc_id']}",
                "prompt": _prompt(row),
                "reference": target if isinstance(target, str) and text is not None else None,
                "identity": row.get("doc_hash") or sha256([row.get("doc"), target]),
                "answer": {"text": text, "shown": shown, "marks": marks},
                "where": where,
            }
        )
    return found


def _marks(row: Mapping[str, Any]) -> dict[str, float]:
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


def _response(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """(the generated text or None, text describing the log-likelihoods of choices instead)."""
    replies = row.get("filtered_resps") or row["resps"]
    first = replies[0] if isinstance(replies, list) and replies else ""
    while isinstance(first, list) and len(first) == 1:
        first = first[0]
    if isinstance(first, str):
        return first, ""
    weights = [_weight(one) for one in replies]
    known = [(weight, -i) for i, weight in enumerate(weights) if weight is not None]
    if not known:
        return None, json.dumps(replies, ensure_ascii=False)
    shown = ", ".join("–" if weight is None else f"{weight:.2f}" for weight in weights)
    return None, f"choice {1 - max(known)[1]} of {len(weights)} (log-likelihoods {shown})"


def _weight(reply: Any) -> float | None:
    while isinstance(reply, list) and reply:
        reply = reply[0]
    try:
        return float(reply)
    except (TypeError, ValueError):
        return None


def _prompt(row: Mapping[str, Any]) -> str:
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
