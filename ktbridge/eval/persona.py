"""The persona axis: scored by the rules of an editable persona.yaml, the same for every answer.

The score of an answer lies in 0..1::

    score = 0                                                   if a break pattern occurs
          = w_address * [an address term occurs]
            + w_tic * min(1, (sentences with a tic / sentences) / target_rate)     otherwise

A sentence with more than ``max_tics_per_sentence`` tics does not count: spam is not a persona. Rate
and spread are one number because sentences are counted, not tics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.results.types import PersonaParts
from ktbridge.eval.text import sentences

_KEYS = {
    "name",
    "address",
    "tics",
    "breaks",
    "target_rate",
    "max_tics_per_sentence",
    "weights",
}

# For a bench that has no persona.yaml: a report then has no persona axis.
NO_PERSONA_NAME = "none"
NO_PERSONA = b"""name: none
address: {}
tics: {}
breaks: {}
target_rate: 1
max_tics_per_sentence: 1
weights: {address: 0.5, tic: 0.5}
"""


@dataclass(frozen=True)
class Persona:
    """Compiled rules. Patterns of all languages apply to every answer."""

    name: str
    address: re.Pattern[str]
    tics: re.Pattern[str]
    breaks: re.Pattern[str]
    target_rate: float
    max_tics_per_sentence: int
    address_weight: float
    tic_weight: float


def score_persona(text: str, persona: Persona) -> PersonaParts:
    """Score one answer (the text the user would see, without thinking)."""
    parts = sentences(text)
    marked = sum(
        1 for part in parts if 1 <= len(persona.tics.findall(part)) <= persona.max_tics_per_sentence
    )
    rate = marked / len(parts) if parts else 0.0
    address = persona.address.search(text) is not None
    broke = persona.breaks.search(text) is not None
    score = persona.address_weight * address + persona.tic_weight * min(
        1.0, rate / persona.target_rate
    )
    return {
        "score": 0.0 if broke else round(score, 6),
        "address": address,
        "tic_rate": round(rate, 6),
        "broke": broke,
    }


def parse_persona(data: object, where: str, problems: list[Problem]) -> Persona | None:
    """Compile persona.yaml's content; every fault is appended to ``problems``."""
    before = len(problems)

    def complain(key: str, found: str, expected: str) -> None:
        problems.append(problem("KTB814", f"{where}: {key}", found, expected, f"edit {where}"))

    if not isinstance(data, Mapping):
        complain("(file)", f"{type(data).__name__}", "a mapping of rules")
        return None
    for key in sorted(_KEYS - set(data)):
        complain(key, "missing", "a value")
    for key in sorted(set(data) - _KEYS, key=str):
        complain(str(key), "unknown key", "one of " + ", ".join(sorted(_KEYS)))

    patterns = {
        key: _patterns(data.get(key), key, complain)
        for key in ("address", "tics", "breaks")
        if key in data
    }
    rate = data.get("target_rate")
    if "target_rate" in data and not (isinstance(rate, (int, float)) and 0 < rate <= 1):
        complain("target_rate", repr(rate), "a share above 0 and at most 1")
    most = data.get("max_tics_per_sentence")
    if "max_tics_per_sentence" in data and not (isinstance(most, int) and most >= 1):
        complain("max_tics_per_sentence", repr(most), "a whole number of at least 1")
    weights = data.get("weights")
    if "weights" in data and not (
        isinstance(weights, Mapping)
        and set(weights) == {"address", "tic"}
        and all(_is_number(value) and value >= 0 for value in weights.values())
        and abs(sum(weights.values()) - 1) < 1e-9
    ):
        complain("weights", repr(weights), "{address: a, tic: t} with a + t = 1")
    if len(problems) > before:
        return None
    return Persona(
        str(data["name"]),
        patterns["address"],
        patterns["tics"],
        patterns["breaks"],
        float(data["target_rate"]),
        int(data["max_tics_per_sentence"]),
        float(data["weights"]["address"]),
        float(data["weights"]["tic"]),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _patterns(
    value: object, key: str, complain: Callable[[str, str, str], None]
) -> re.Pattern[str]:
    """One regex alternation from {language: [regular expression, ...]}."""
    never = re.compile(r"(?!)")
    if not isinstance(value, Mapping) or not all(
        isinstance(group, list) and all(isinstance(one, str) and one for one in group)
        for group in value.values()
    ):
        complain(key, repr(value)[:80], "{language: [regular expression, ...]}")
        return never
    every = [one for group in value.values() for one in group]
    for one in every:
        try:
            re.compile(one)
        except re.error as error:
            complain(key, f"{one!r}: {error}", "a regular expression")
            return never
    return re.compile("|".join(f"(?:{one})" for one in every)) if every else never
