"""Files of predictions: the journal of an unfinished run, then LLaMA-Factory's two files.

The journal is one file beside the output directory, so that a killed run loses no answer. Its first line is
the run's fingerprint; each further line is an answer, in any order, and durable before the next.

Keys, text forms and metrics of the files are those of LLaMA-Factory's ``predict_with_generate`` (the family
"lf" of ``ktbridge.eval.scorers``: BLEU-4 over characters with nltk's smoothing method 3, ROUGE's F1 over
jieba's words, each row x 100 rounded to 4 digits, then the mean). Added are ``predict_samples``,
``predict_accuracy`` if every label is a choice's letter, and ``predict_unanswered`` if rows have no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ktbridge.codes import Problems
from ktbridge.eval.scorers import measure_texts, score_task
from ktbridge.files.ledger import LedgerFile
from ktbridge.files.publish import fsync_directory, write_text
from ktbridge.sft.data import RefusedRow, format_refused

PREDICTIONS = "generated_predictions.jsonl"
RESULTS = "predict_results.json"
REFUSED = "predict_refused_rows.jsonl"
Fingerprint = Mapping[str, object]
"""JSON of all that decides the answers, by the name of its key: models, rows, sampling."""
Row = Mapping[str, str]
"""``prompt``, ``predict`` and ``label``."""
_LETTER = re.compile(r"[(（]?([A-J])[)）.。]?")


class Head(BaseModel):
    """The journal's first line."""

    identity: dict[str, object]


class Answered(BaseModel):
    """A line of the journal: the answer to a row. ``cut``: the limit of tokens ended it; ``seconds`` that all
    answers have taken by then."""

    row: int
    predict: str
    cut: bool
    seconds: float


class Journal(LedgerFile):
    """The journal of ``output_dir``, open for appending until ``close``; ``answers`` by row.

    Raises ``ProblemsError`` naming each difference if the file belongs to a run with another fingerprint. A
    last line that a kill has torn is removed.
    """

    def __init__(self, output_dir: Path, fingerprint: Fingerprint) -> None:
        self.path = journal_path(output_dir)
        self.answers: dict[int, Answered] = {}
        self.seconds = 0.0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(self.path, durable=True)
        try:
            self._read(fingerprint)
        except BaseException:
            self.close()
            raise

    def _read(self, fingerprint: Fingerprint) -> None:
        theirs: Fingerprint = {}
        lines = self.lines()
        for number, line in enumerate(lines):
            try:
                if number:
                    self._take(Answered.model_validate_json(line))
                else:
                    theirs = Head.model_validate_json(line).identity
            except ValidationError:
                lines = lines[:number]
                break
        if not self.answers:
            self.keep([])
            self.add({"identity": fingerprint})
            fsync_directory(self.path.parent)
            return
        problems = Problems(str(self.path), "KTP002")
        for key in sorted({*fingerprint, *theirs}):
            was, now = theirs.get(key), fingerprint.get(key)
            if was != now:
                found = f"{_shorten(was)} in the unfinished run"
                problems.error(key, found, f"{_shorten(now)}, as now")
        problems.raise_if_any(
            "the output directory has unfinished predictions of another run; nothing was started.",
            f"Restore these settings to go on, or delete {self.path} to start anew.",
        )
        self.keep(lines)

    def _take(self, answer: Answered) -> None:
        self.answers[answer.row], self.seconds = answer, answer.seconds

    def store(self, answer: Answered) -> None:
        """Append the answer to a row."""
        self._take(answer)
        self.add(answer.model_dump())


def journal_path(output_dir: Path) -> Path:
    """Return the place of an unfinished run's answers."""
    return output_dir.with_name(output_dir.name + ".predictions.jsonl")


def _shorten(setting: object) -> str:
    """Return a setting as JSON; of a hash its beginning."""
    text = json.dumps(setting)
    return text if len(text) < 40 else f"{text[:13]}…"


def measure_answers(rows: Sequence[Row], unanswered: int, seconds: float) -> dict[str, float]:
    """Return the metrics of ``rows``, answered in ``seconds``; in per cent but for counts and times."""
    found: dict[str, float] = {}
    if rows:
        answers = [row["predict"] for row in rows]
        cell = measure_texts("lf", answers, [[row["label"]] for row in rows])
        found |= {f"predict_{name}": value for name, value in cell["scores"].items()}
        if (accuracy := _measure_choices(rows)) is not None:
            found["predict_accuracy"] = accuracy
    found["predict_runtime"] = round(seconds, 4)
    found["predict_samples"] = len(rows)
    found["predict_samples_per_second"] = round(len(rows) / seconds, 3) if seconds else 0.0
    if unanswered:
        found["predict_unanswered"] = unanswered
    return found


def _measure_choices(rows: Sequence[Row]) -> float | None:
    """Return the per cent of answers with the label's choice; None unless every label is a letter, A to J."""
    labels = [_LETTER.fullmatch(row["label"].strip()) for row in rows]
    letters = [match[1] for match in labels if match]
    if len(letters) < len(rows):
        return None
    options = "ABCDEFGHIJ"[: max(4, *(ord(letter) - ord("A") + 1 for letter in letters))]
    check = {"scorer": "choice", "options": options}
    marks = [
        score_task(row["predict"], [check], letter)[0] for row, letter in zip(rows, letters, strict=True)
    ]
    return round(100 * sum(marks) / len(marks), 4)


def write_predictions(
    output_dir: Path, rows: Sequence[Row], metrics: Mapping[str, float], refused: Sequence[RefusedRow]
) -> list[str]:
    """Write the files into ``output_dir``, each whole, the results last; return their names."""
    output_dir.mkdir(parents=True, exist_ok=True)
    texts = {PREDICTIONS: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)}
    if refused:
        texts[REFUSED] = format_refused(refused).decode()
    else:
        (output_dir / REFUSED).unlink(missing_ok=True)
    texts[RESULTS] = json.dumps(metrics, indent=4, sort_keys=True) + "\n"
    for name, text in texts.items():
        write_text(output_dir / name, text)
    return [*texts]
