"""Exceptions and findings shared by all packages.

Exception tree::

    KtbridgeError            the work failed; exit code 1
    ├── UsageError           the request itself is invalid; exit code 2
    └── ProblemsError        a check collected problems, then raised once; exit code 1

``sentence`` states the error and its location; ``next_step`` is the remedy.
Code outside ``ktbridge.cli`` never prints or exits: it raises one of these.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "info"]
NOTES_FILE = "KTBRIDGE_NOTES_FILE"
"""The environment variable of the file with digests of notes that commands of one `ktbridge run` printed."""


@dataclass(frozen=True)
class Problem:
    """One finding of a check.

    ``code`` is stable and a row of ``ktbridge.codes`` ("KTB101"), ``where`` is a file, key or line,
    ``found`` and ``expected`` are short phrases, ``next_step`` is an instruction or a command.
    """

    code: str
    severity: Severity
    where: str
    found: str
    expected: str = ""
    next_step: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.where}: {self.found}"
        if self.expected:
            text += f" (expected {self.expected})"
        return text


class KtbridgeError(Exception):
    """The work failed. ``sentence`` states the error and its location, ``next_step`` the remedy.

    ``str(error)``, and so a traceback, shows both. Build other messages from ``sentence``.
    """

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.sentence = message
        self.next_step = next_step

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.sentence
        if self.next_step:
            yield f"  next: {self.next_step}"


class UsageError(KtbridgeError):
    """The request is invalid (unknown key, impossible combination)."""

    exit_code = 2


class ProblemsError(KtbridgeError):
    """A check found problems, all of them in ``problems``, worst first; nothing was changed.

    ``str(error)`` shows the first ``SHOWN`` of them, each with its next step, and how many more there are.
    """

    SHOWN = 8

    def __init__(self, message: str, problems: Iterable[Problem], next_step: str = "") -> None:
        super().__init__(message, next_step)
        self.problems: tuple[Problem, ...] = tuple(worst_first(problems))

    def _lines(self) -> Iterator[str]:
        yield self.sentence
        step = ""
        for problem in self.problems[: self.SHOWN]:
            if step and problem.next_step != step:  # once for consecutive problems that share it
                yield f"    next: {step}"
            step = problem.next_step
            yield f"  {problem.severity} {problem.code}  {problem}"
        if step:
            yield f"    next: {step}"
        if len(self.problems) > self.SHOWN:
            yield f"  and {len(self.problems) - self.SHOWN:,} more in `error.problems`"
        if self.next_step:
            yield f"  next: {self.next_step}"


_ORDER = {"error": 0, "warning": 1, "info": 2}


def worst_first(problems: Iterable[Problem]) -> list[Problem]:
    """Errors, then warnings, then infos; within each as given."""
    return sorted(problems, key=lambda problem: _ORDER[problem.severity])


def has_errors(problems: Iterable[Problem]) -> bool:
    """Return whether any problem is an error (warnings and infos don't fail a command)."""
    return any(problem.severity == "error" for problem in problems)


def count_problems(problems: Iterable[Problem]) -> str:
    """Return how many there are of each severity: "2 errors, 1 warning, 3 info"; "" if there are none."""
    counts = Counter(problem.severity for problem in problems)
    plurals: dict[Severity, str] = {"error": "s", "warning": "s", "info": ""}
    return ", ".join(
        f"{counts[severity]} {severity}{plural if counts[severity] > 1 else ''}"
        for severity, plural in plurals.items()
        if counts[severity]
    )


def list_names(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """The next step after an unknown key that is close to a known one; "" where none is."""
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else ""


def did_you_mean_path(path: str | os.PathLike[str]) -> str:
    """The next step for a path that isn't there, but for a few letters of one part; "" where none is near."""
    try:
        place = Path(path).expanduser()
        gone = next((one for one in (*reversed(place.parents), place) if not one.exists()), None)
        if gone is None:
            return ""
        near = difflib.get_close_matches(gone.name, os.listdir(gone.parent), n=1, cutoff=0.75)
    except (OSError, RuntimeError, ValueError):  # no such user; a name with a NUL
        return ""
    found = [gone.with_name(name) / place.relative_to(gone) for name in near]
    return f"Did you mean {found[0]}?" if found and found[0].exists() else ""
