"""Problems of a launch, and which of them a user may allow.

``--allow CODE`` turns an error of ``ktbridge.codes.serving.LAUNCH`` into a warning, if the user knows
better than an estimate.
"""

from __future__ import annotations

from dataclasses import replace

from ktbridge.codes.serving import LAUNCH
from ktbridge.errors import Problem

CODES = frozenset(row.code for row in LAUNCH.codes)


def allow(problems: list[Problem], allowed: frozenset[str]) -> tuple[Problem, ...]:
    """The problems, worst first, with allowed errors as warnings. Other codes can't be allowed."""
    eased = [
        replace(p, severity="warning")
        if p.severity == "error" and p.code in allowed and p.code in CODES
        else p
        for p in problems
    ]
    return sort_problems(eased)


def sort_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """Each problem once, the worst first."""
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(dict.fromkeys(problems), key=lambda p: order[p.severity]))
