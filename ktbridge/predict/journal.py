"""Answers as they come, so that a killed run loses none: one file beside the output directory.

Its first line has what the answers belong to; each further one is an answer, and durable before the next.
They come in any order; the output's own files are written in the dataset's when all are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ktbridge.codes import problem
from ktbridge.errors import ProblemsError
from ktbridge.files.ledger import LedgerFile
from ktbridge.files.publish import fsync_directory

Identity = Mapping[str, object]
"""What decides the answers, as JSON: models, rows, how answers are sampled."""


class Answered(NamedTuple):
    """One answer; ``cut``: it was ended by the limit of tokens."""

    text: str
    cut: bool


def journal_of(output_dir: Path) -> Path:
    """Return where the answers of an unfinished run are."""
    return output_dir.with_name(output_dir.name + ".predictions.jsonl")


class Journal:
    """The file at ``path``, open for appending; ``answers`` by row, ``seconds`` that they took so far.

    Raises ``ProblemsError`` naming each difference where the file belongs to another ``identity``. A last
    line that a kill has torn is removed.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.answers: dict[int, Answered] = {}
        self.seconds = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LedgerFile(path, durable=True)
        try:
            whole = self._read(identity)
            self._file.keep(whole)
            if not whole:
                self._file.add({"identity": identity})
                fsync_directory(path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: int, answer: Answered, seconds: float) -> None:
        """Write the answer to a row; ``seconds`` that all answers have taken by now."""
        self.answers[row], self.seconds = answer, seconds
        self._file.add({"row": row, "predict": answer.text, "cut": answer.cut, "seconds": seconds})

    def remove(self) -> None:
        """The answers are in their place."""
        self.path.unlink(missing_ok=True)

    def _read(self, identity: Identity) -> list[bytes]:
        """Take in what is there; the lines to keep, none where no line is an answer."""
        theirs: Identity = {}
        lines = self._file.lines()
        for number, text in enumerate(lines):
            try:
                line = json.loads(text)
                if number == 0:
                    theirs = dict(line["identity"])
                else:
                    answer = Answered(str(line["predict"]), bool(line["cut"]))
                    self.answers[int(line["row"])] = answer
                    self.seconds = float(line["seconds"])
            except (ValueError, TypeError, LookupError):
                lines = lines[:number]
                break
        if not self.answers:
            return []
        self._check(theirs, identity)
        return lines

    def _check(self, theirs: Identity, own: Identity) -> None:
        different = [key for key in sorted({*own, *theirs}) if own.get(key) != theirs.get(key)]
        if different:
            problems = [
                problem(
                    "KTP002",
                    f"{self.path}: {key}",
                    f"{_shown(theirs.get(key))} in the unfinished run",
                    f"{_shown(own.get(key))}, as now",
                    next_step="",
                )
                for key in different
            ]
            raise ProblemsError(
                "the output directory has unfinished predictions of another run; nothing was started.",
                problems,
                f"Restore these settings to go on, or delete {self.path} to start anew.",
            )


def _shown(value: object) -> str:
    """A setting; of a hash its beginning."""
    text = json.dumps(value)
    return text if len(text) < 40 else f"{text[:13]}…"
