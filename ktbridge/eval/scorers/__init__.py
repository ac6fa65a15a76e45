"""The task axis: small functions from an answer, an item's gold and a check to a mark in 0..1 and a reason.

``SCORERS`` lists every scorer with its parameters, so that a faulty bench is refused before the first
request, never in the middle of a run. All of them score the answer that a user would see, without
thinking. Persona is a separate axis (``schema.Persona``).
"""

from __future__ import annotations

from ktbridge.eval.scorers import rules as rules  # registers its scorers
from ktbridge.eval.scorers.registry import SCORERS, ScorerError, check_faults, score_task, scorer
from ktbridge.eval.scorers.text_metrics import FAMILIES, measure_texts

__all__ = [
    "FAMILIES",
    "SCORERS",
    "ScorerError",
    "check_faults",
    "measure_texts",
    "score_task",
    "scorer",
]
