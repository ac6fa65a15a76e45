"""The task axis: functions from an answer, an item's gold and a check to a mark in 0..1 and a reason, all of
them on the answer that a user would see, without thinking; and the persona axis (``rules.Persona``).

``SCORERS`` lists every scorer with its parameters, so that a faulty bench is refused before the first
request.
"""

from ktbridge.eval.scorers.registry import SCORERS, ScorerError, check_faults, score_task, scorer
from ktbridge.eval.scorers.rules import Persona
from ktbridge.eval.scorers.text_metrics import FAMILIES, measure_texts

__all__ = [
    "FAMILIES", "SCORERS", "Persona", "ScorerError", "check_faults", "measure_texts", "score_task", "scorer",
]  # fmt: skip
