"""Several independent checks before a start, whose failures are reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError

Result = TypeVar("Result")


class Failures:
    """Failures of several independent checks, reported together."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence
        self._found: list[tuple[str, KtbridgeError]] = []

    def of(self, where: str, check: Callable[[], Result]) -> Result | None:
        """The check's result, or None where it fails; ``where`` is what it looks at."""
        try:
            return check()
        except KtbridgeError as error:
            self._found.append((where, error))
            return None

    def raise_collected(self) -> None:
        """Raise a single failure as it is, several as one ProblemsError."""
        if len(self._found) == 1:
            raise self._found[0][1]
        if self._found:
            problems = [problem for found in self._found for problem in _problems(*found)]
            raise ProblemsError(self._sentence, problems)


def _problems(where: str, error: KtbridgeError) -> tuple[Problem, ...]:
    if isinstance(error, ProblemsError) and error.problems:
        return error.problems
    return (problem("KTC014", where, error.sentence.rstrip("."), next_step=error.next_step),)
