"""The task axis: small functions from (answer, check, gold) to a mark in 0..1 and a reason.

``SCORERS`` lists every scorer with its parameters, so that a faulty bench is refused before the first
request, never in the middle of a run. All of them score the answer that a user would see, without
thinking. Persona is a separate axis (``ktbridge.eval.persona``).
"""

from __future__ import annotations

from ktbridge.eval.scoring import form, gold, manner, reference  # noqa: F401  (import registers them)
from ktbridge.eval.scoring.families import FAMILIES, TextMetrics, measure_texts
from ktbridge.eval.scoring.form import UNITS
from ktbridge.eval.scoring.registry import (
    SCORERS,
    Mark,
    ParseRate,
    Scorer,
    ScorerError,
    check_faults,
    parse_rate,
    score_task,
    scorer,
)

__all__ = [
    "FAMILIES",
    "SCORERS",
    "UNITS",
    "Mark",
    "ParseRate",
    "Scorer",
    "ScorerError",
    "TextMetrics",
    "check_faults",
    "measure_texts",
    "parse_rate",
    "score_task",
    "scorer",
]
