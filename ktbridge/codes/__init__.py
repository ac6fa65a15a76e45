"""Registry of all problem codes: default severity, meaning, and next step.

One file per area: ``adapters``, ``serving``, ``training``, ``evaluation``, ``recipes``. A code never
changes its meaning; a new one goes at the end of its subject, and ``python scripts/make_rules.py`` writes
docs/rules.md anew. Checks create their findings with ``problem``, or collect them in
``Problems``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ktbridge.codes import adapters, evaluation, recipes, serving, training
from ktbridge.codes.table import Code, Subject
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, Severity

Result = TypeVar("Result")

SUBJECTS: tuple[Subject, ...] = (
    *adapters.SUBJECTS,
    *serving.SUBJECTS,
    *training.SUBJECTS,
    *evaluation.SUBJECTS,
    *recipes.SUBJECTS,
)
CODES: dict[str, Code] = {row.code: row for subject in SUBJECTS for row in subject.codes}

__all__ = ["CODES", "SUBJECTS", "Code", "Problems", "Subject", "problem"]


def problem(
    code: str,
    where: str,
    found: str,
    expected: str = "",
    next_step: str | None = None,
    severity: Severity | None = None,
) -> Problem:
    """A finding; severity and next step default to the code's.

    ``next_step=""`` is for findings that share the next step of the error that collects them.
    """
    usual = CODES[code]
    return Problem(
        code=code,
        severity=severity or usual.severity,
        where=where,
        found=found,
        expected=expected,
        next_step=usual.next_step if next_step is None else next_step,
    )


class Problems(list[Problem]):
    """Problems that checks of one thing collect, to be raised together.

    ``where`` begins each location; ``code`` and ``warning_code`` are what most have.
    """

    def __init__(self, where: str = "", code: str = "", warning_code: str = "") -> None:
        super().__init__()
        self._where = f"{where}: " if where else ""
        self._code, self._warning_code = code, warning_code
        self._failed: list[KtbridgeError] = []

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self if problem.severity == "warning"]

    def error(
        self, key: str, found: str, expected: str = "", next_step: str | None = "", code: str = ""
    ) -> None:
        """Add an error: the work isn't started. ``next_step=None`` is the code's."""
        about = (self._where + key, found, expected, next_step)
        self.append(problem(code or self._code, *about, "error"))

    def warn(self, key: str, found: str, expected: str = "", next_step: str = "", code: str = "") -> None:
        """Add a warning: the work goes on."""
        about = (self._where + key, found, expected, next_step)
        self.append(problem(code or self._warning_code, *about, "warning"))

    def attempt(self, key: str, check: Callable[[], Result]) -> Result | None:
        """Return the result of a check of ``key``; None where it fails, with its problems added."""
        try:
            return check()
        except KtbridgeError as error:
            self._failed.append(error)
            if isinstance(error, ProblemsError) and error.problems:
                self += error.problems
            else:
                self.error(key, error.sentence.rstrip("."), next_step=error.next_step)
            return None

    def raise_if_any(self, sentence: str, next_step: str = "") -> None:
        """Raise the errors, if there are any; "{count}" in ``sentence`` becomes "2 problems".

        A single failed attempt's error with nothing beside it is raised as it is; else warnings come along.
        """
        match self._failed:
            case [error] if len(self) == len(getattr(error, "problems", ()) or [error]):
                raise error
        found = self if self._failed else self.errors
        if found:
            count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
            raise ProblemsError(sentence.replace("{count}", count), found, next_step)
