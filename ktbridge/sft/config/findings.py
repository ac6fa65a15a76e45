"""Findings while a configuration is read: errors, all reported at once, and notes that don't stop a run."""

from __future__ import annotations

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, Severity

UNKNOWN, WRONG, MISSING, MEANINGLESS, CONTRADICTION, NOT_THERE = (
    "KTC001", "KTC002", "KTC003", "KTC004", "KTC005", "KTC006"
)  # fmt: skip


class Findings:
    """Errors and notes about the keys of one configuration, which ``where`` names."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.errors: list[Problem] = []
        self.notes: list[Problem] = []

    def error(
        self, key: str, found: str, expected: str = "", next_step: str = "", code: str = WRONG
    ) -> None:
        """An error: the run isn't started."""
        self.errors.append(self._problem("error", key, found, expected, next_step, code))

    def note(
        self, key: str, found: str, expected: str = "", next_step: str = "", code: str = MEANINGLESS
    ) -> None:
        """A warning: the run continues."""
        self.notes.append(self._problem("warning", key, found, expected, next_step, code))

    def raise_errors(self) -> None:
        """``ProblemsError`` with all errors, if there are any."""
        if self.errors:
            count = f"{len(self.errors)} problem{'s' if len(self.errors) > 1 else ''}"
            raise ProblemsError(f"the configuration has {count}; nothing was started.", self.errors)

    def _problem(self, severity: Severity, key: str, *rest: str) -> Problem:
        found, expected, next_step, code = rest
        return problem(code, f"{self.where}: {key}", found, expected, next_step, severity)
