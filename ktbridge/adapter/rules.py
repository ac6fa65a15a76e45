"""The rules of ``validate``, ``convert`` and ``merge``: their section of the registry of problem codes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ktbridge.codes import SUBJECTS, problem
from ktbridge.codes import Code as Rule
from ktbridge.errors import Problem, Severity

if TYPE_CHECKING:
    from ktbridge.adapter.adapter import Part

RULES: tuple[Rule, ...] = tuple(
    rule for subject in SUBJECTS if subject.room == "adapter" for rule in subject.codes
)


def many(
    code: str,
    parts: list[Part],
    found: str,
    expected: str = "",
    severity: Severity | None = None,
    next_step: str | None = None,
) -> Iterator[Problem]:
    """One problem for all of ``parts``, located at the first; none if ``parts`` is empty."""
    if parts:
        if len(parts) > 1:
            found += f" ({len(parts)} tensors like it)"
        where = parts[0].where
        yield problem(code, where, found, expected, severity=severity, next_step=next_step)
