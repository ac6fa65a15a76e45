"""Registry of all problem codes: default severity, meaning, and next step.

One file per area: ``adapters``, ``hub``, ``serving``, ``training``, ``evaluation``, ``recipes``. A code never
changes its meaning; a new one goes at the end of its subject, and ``python scripts/make_rules.py`` writes
docs/rules.md anew. Checks create their findings with ``problem``.
"""

from __future__ import annotations

from ktbridge.codes import adapters, evaluation, hub, recipes, serving, training
from ktbridge.codes.table import Code, Subject
from ktbridge.errors import Problem, Severity

SUBJECTS: tuple[Subject, ...] = (
    *adapters.SUBJECTS,
    *hub.SUBJECTS,
    *serving.SUBJECTS,
    *training.SUBJECTS,
    *evaluation.SUBJECTS,
    *recipes.SUBJECTS,
)
CODES: dict[str, Code] = {row.code: row for subject in SUBJECTS for row in subject.codes}

__all__ = ["CODES", "SUBJECTS", "Code", "Subject", "problem"]


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
