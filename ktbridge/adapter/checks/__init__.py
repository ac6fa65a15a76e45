"""Checks of one adapter directory or several, one file per subject; findings, never exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from ktbridge.adapter.adapter import Part
from ktbridge.codes import SUBJECTS, problem
from ktbridge.codes import Code as Rule
from ktbridge.errors import Problem, Severity

# What validate, convert, merge and push report: their section of the registry of problem codes.
RULES: tuple[Rule, ...] = tuple(
    rule for subject in SUBJECTS if subject.room == "adapter" for rule in subject.codes
)


class Use(Enum):
    """The use of a directory, which decides what is wrong with it."""

    INPUT = "converted or merged first, which resolves rsLoRA, a second alpha and the like"
    SERVED = "served as it is, by any engine"
    SERVED_BY_KT = "served as it is, by SGLang-KT"
    SERVED_BY_SGLANG = "served as it is, by upstream SGLang"
    SERVED_BY_VLLM = "served as it is, by vLLM"

    @property
    def served(self) -> bool:
        return self is not Use.INPUT


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
