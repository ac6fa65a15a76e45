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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    model_validator,
)

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.results.types import PersonaParts
from ktbridge.eval.text import sentences
from ktbridge.schemas import Refusal, check_fields

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


def _check_patterns(groups: dict[object, list[str]]) -> dict[object, list[str]]:
    for one in _every(groups):
        try:
            re.compile(one)
        except re.error as error:
            raise Refusal(f"{one!r}: {error}", "a regular expression") from None
    return groups


class _Weights(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    address: NonNegativeFloat
    tic: NonNegativeFloat

    @model_validator(mode="after")
    def _check_sum(self) -> _Weights:
        if abs(self.address + self.tic - 1) >= 1e-9:
            raise ValueError("the weights aren't 1 together")
        return self


_Patterns = Annotated[
    dict[object, list[Annotated[str, Field(min_length=1)]]],
    AfterValidator(_check_patterns),
    Field(description="{language: [regular expression, ...]}"),
]


class _PersonaFile(BaseModel):
    """persona.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True)

    address: _Patterns
    breaks: _Patterns
    max_tics_per_sentence: int = Field(ge=1, description="a whole number of at least 1")
    name: object
    target_rate: float = Field(gt=0, le=1, description="a share above 0 and at most 1")
    tics: _Patterns
    weights: _Weights = Field(description="{address: a, tic: t} with a + t = 1")


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

    def complain(key: str, found: str, expected: str) -> None:
        problems.append(problem("KTB814", f"{where}: {key}", found, expected, f"edit {where}"))

    if not isinstance(data, Mapping):
        complain("(file)", f"{type(data).__name__}", "a mapping of rules")
        return None
    rules, faults = check_fields(_PersonaFile, data)
    for key, kind, found, expected in faults:
        if kind == "wrong":
            complain(key, found or repr(data[key])[:80], expected)
        elif kind == "missing":
            complain(key, "missing", "a value")
        else:
            complain(key, "unknown key", expected)
    if rules is None:
        return None
    return Persona(
        str(rules.name),
        _join(rules.address),
        _join(rules.tics),
        _join(rules.breaks),
        rules.target_rate,
        rules.max_tics_per_sentence,
        rules.weights.address,
        rules.weights.tic,
    )


def _every(groups: Mapping[object, list[str]]) -> list[str]:
    return [one for group in groups.values() for one in group]


def _join(groups: Mapping[object, list[str]]) -> re.Pattern[str]:
    """Return one alternation of the regular expressions of all languages."""
    return re.compile("|".join(f"(?:{one})" for one in _every(groups)) or r"(?!)")
