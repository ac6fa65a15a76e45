"""LLaMA-Factory's files of predictions: a line per row, and the means of BLEU-4 and ROUGE.

Keys, text forms and metrics are those of its ``predict_with_generate`` (the family "lf" of
``ktbridge.eval.scorers``: BLEU-4 over characters with nltk's smoothing method 3, ROUGE's F1 over jieba's
words, each row x 100 rounded to 4 digits, then the mean). Added are ``predict_samples``; ``predict_accuracy``
where every label is a letter of a choice; and ``predict_unanswered`` where rows have no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktbridge.eval.scorers import measure_texts, score_task
from ktbridge.files.publish import write_text
from ktbridge.sft.data import Refused, refused_file

PREDICTIONS = "generated_predictions.jsonl"
RESULTS = "predict_results.json"
REFUSED = "predict_refused_rows.jsonl"
Row = Mapping[str, str]
"""``prompt``, ``predict`` and ``label``."""
_LETTER = re.compile(r"[(（]?([A-J])[)）.。]?")


def measure(rows: Sequence[Row], unanswered: int, seconds: float) -> dict[str, float]:
    """The metrics of answered ``rows``, which took ``seconds``; in per cent but for the counts and times."""
    found: dict[str, float] = {}
    if rows:
        answers = [row["predict"] for row in rows]
        cell = measure_texts("lf", answers, [[row["label"]] for row in rows])
        found |= {f"predict_{name}": value for name, value in cell["scores"].items()}
        if (accuracy := _accuracy(rows)) is not None:
            found["predict_accuracy"] = accuracy
    found["predict_runtime"] = round(seconds, 4)
    found["predict_samples"] = len(rows)
    found["predict_samples_per_second"] = round(len(rows) / seconds, 3) if seconds else 0.0
    if unanswered:
        found["predict_unanswered"] = unanswered
    return found


def _accuracy(rows: Sequence[Row]) -> float | None:
    """Per cent of the answers whose choice is the label's; None unless every label is a letter, A to J."""
    labels = [_LETTER.fullmatch(row["label"].strip()) for row in rows]
    letters = [match[1] for match in labels if match]
    if len(letters) < len(rows):
        return None
    options = "ABCDEFGHIJ"[: max(4, *(ord(letter) - ord("A") + 1 for letter in letters))]
    check = {"scorer": "choice", "options": options}
    marks = [
        score_task(row["predict"], [check], letter)[0]
        for row, letter in zip(rows, letters, strict=True)
    ]
    return round(100 * sum(marks) / len(marks), 4)


def write(
    output_dir: Path,
    rows: Sequence[Row],
    metrics: Mapping[str, float],
    refused: Sequence[Refused],
) -> list[str]:
    """Write the files into ``output_dir``, each whole, the results last; their names."""
    output_dir.mkdir(parents=True, exist_ok=True)
    texts = {PREDICTIONS: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)}
    if refused:
        texts[REFUSED] = refused_file(refused).decode()
    else:
        (output_dir / REFUSED).unlink(missing_ok=True)
    texts[RESULTS] = json.dumps(metrics, indent=4, sort_keys=True) + "\n"
    for name, text in texts.items():
        write_text(output_dir / name, text)
    return list(texts)
