"""The files that people write for a bench, as models: bench.yaml, items.jsonl, persona.yaml, anchors.

A field's description is what a problem says was expected. Defaults are filled in here; only the name,
the slices and each item's messages and gold are required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)

from ktbridge.eval.results.types import Json, Message, PersonaParts
from ktbridge.eval.text import is_json, sentences
from ktbridge.schemas import Refusal

Axis = Literal["task", "persona"]
OURS = ("model", "messages", "max_tokens", "stream", "n")
Text = Annotated[str, Field(min_length=1)]
_Texts = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
_STRICT = ConfigDict(extra="forbid", strict=True)


def _check_not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("it is blank")
    return value


_Some = Annotated[str, AfterValidator(_check_not_blank), Field(description="some text")]
_Word = Annotated[str, BeforeValidator(str)]  # a version may look like a number in YAML


# --- bench.yaml


class Slice(BaseModel):
    """A group of items, and its primary axis. ``label`` is its name in words, for the sentence of a
    verdict ("knowledge"); '' to use the name. bench.yaml may give anchors too, which only a judge reads."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    primary: Axis = "task"
    meaning: str = ""
    label: str = Field("", description="a word or two")


class Partner(BaseModel):
    """A model that plays the user in the named slices: the arm gives ``turns`` answers, the first to
    the item's messages, each later one to the reply of the partner, which is given ``system``."""

    model_config = _STRICT

    system: str
    turns: PositiveInt
    slices: list[_Word]


def _check_sampling(value: dict[object, object]) -> dict[object, object]:
    if not is_json(value):
        raise ValueError("it isn't JSON")
    if ours := sorted(key for key in OURS if key in value):
        raise Refusal(", ".join(ours), "fields that ktbridge does not set itself")
    return value


class BenchFile(BaseModel):
    """bench.yaml. ``data`` and ``override`` are in a run's snapshot only: the items' provenance, settings
    of the command line."""

    model_config = _STRICT

    name: Annotated[
        _Some,
        BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
        Field(description="a name"),
    ]
    slices: object
    version: _Word = "1"
    language: _Word = "any"
    max_tokens: PositiveInt = Field(512, description="a whole number above 0")
    sampling: Annotated[
        dict[object, object],
        AfterValidator(_check_sampling),
        Field(description="a mapping of request fields that JSON can hold"),
    ] = {"temperature": 0}
    margin: float = Field(0.1, gt=0, lt=1, description="a number between 0 and 1")
    about: object = None
    source: object = None
    notes: list[Text] = Field([], description="a list of sentences")
    checklists: dict[object, Annotated[list[Text], Field(min_length=1)]] = Field(
        {}, description="{NAME: [yes/no question, ...]}"
    )
    partner: Partner | None = Field(
        None, description="{system: text, turns: n, slices: [NAME, ...]}"
    )
    private: bool = Field(False, description="true or false")
    data: object = Field(None, exclude=True)
    override: dict[Literal["max_tokens"], PositiveInt] = Field(
        {}, description="{max_tokens: a whole number above 0}", exclude=True
    )


def slice_table(head: Json) -> dict[str, Json]:
    """Return bench.yaml's slices as {NAME: {primary, meaning, ...}}; the file may give a list of names,
    or names with meanings. {} for anything else; an invalid row becomes {"primary": None}."""
    table = head.get("slices")
    if isinstance(table, list) and all(isinstance(name, str) and name for name in table):
        table = dict.fromkeys(table)
    if not isinstance(table, Mapping):
        return {}
    rows: dict[str, Json] = {}
    for name, row in table.items():
        row = {} if row is None else {"meaning": row} if isinstance(row, str) else row
        rows[str(name)] = row if isinstance(row, Mapping) else {"primary": None, "meaning": row}
    return rows


# --- data files of others


class KnownAnswer(BaseModel):
    """Answers of a data file that are marked in a way of their own: ``gold`` (by default the answer as it is
    spelled in ``are``) by ``check``."""

    model_config = _STRICT

    are: list[Text]
    gold: str = ""
    check: dict[str, object]


class RowMap(BaseModel):
    """Rule by which a record of a data file becomes an item.

    A template holds fields in braces; ``{a|b}`` is the first of them that has text. ``when`` are fields
    with the values that they must have, ``has`` is one that must be there. ``context`` stands above the
    question. ``history`` names a field with [user, assistant] pairs, ``messages`` one with all messages,
    ``references`` one with a list of answers, ``options`` one with {name: option}. ``gather``: the answers
    to one question become one item's. ``copied`` fields go into the item as they are.
    """

    model_config = _STRICT

    when: dict[str, _Texts] = {}
    has: str = ""
    slice: Text
    sub: str = ""
    cluster: _Texts = []
    system: str = ""
    history: str = ""
    messages: str = ""
    context: str = ""
    question: Text
    options: str = ""
    references: str = ""
    answer: str = ""
    known: list[KnownAnswer] = []
    checks: list[dict[str, object]] = []
    judge: str = ""
    gather: bool = False
    copied: list[str] = []


class SourceFile(BaseModel):
    """``source`` in bench.yaml: a data file, and how its records become items. ``loader`` is one of our
    benches, whose ``rows`` are used where there are none; ``others`` says why a record that fits no row is
    skipped. ``strict``: a record that can't be used is a problem."""

    model_config = ConfigDict(extra="ignore", strict=True)

    loader: str = Field("", description="the name of one of our benches that reads a data file")
    file: str = Field("", description="a file's name")
    origin: str | None = Field(None, description="some text")
    license: str | None = Field(None, description="some text")
    metric: str = Field("rouge-l", description="the name of a metric")
    split: str = Field("", description="the name of a split")
    columns: list[list[str]] = Field([], description="[[FIELD, ...], ...]")
    rows: list[RowMap] = Field(
        [], description="[{slice, question, answer, ...}, ...], see eval/README.md"
    )
    others: str = Field("of another kind", description="some text")
    strict: bool = Field(False, description="true or false")


# --- items.jsonl, and the anchors in bench.yaml


def _check_messages(value: list[Message]) -> list[Message]:
    roles = ("system", "user", "assistant")
    if any(len(one) < 2 or one["role"] not in roles for one in value):
        raise ValueError("a message without role or content")
    if not value or value[-1]["role"] != "user":
        raise ValueError("it doesn't end with the user's turn")
    return value


def _check_slice(value: str, info: ValidationInfo) -> str:
    known = info.context["slices"] if info.context else ()
    if known and value not in known:
        raise Refusal(f"the slice {value!r}", "one of " + ", ".join(known))
    return value


def _check_question(value: str, info: ValidationInfo) -> str:
    lists = info.context["lists"] if info.context else {}
    if value[0] == "@" and value[1:] not in lists:
        expected = "one of " + (", ".join(map(str, lists)) or "none")
        raise Refusal(f"the checklist {value[1:]!r}", expected)
    return value


Questions = Annotated[
    list[Annotated[Text, AfterValidator(_check_question)]],
    BeforeValidator(lambda value: [f"@{value}"] if isinstance(value, str) else value),
    Field(min_length=1, description="a checklist's name or a list of questions"),
]


class ItemLine(BaseModel):
    """A line of items.jsonl with defaults filled in. ``checks`` are the scorers' to validate."""

    model_config = _STRICT

    id: Text = Field("", description="a string")
    slice: Annotated[Text, AfterValidator(_check_slice), Field(description="a string")]
    sub: str = Field("", description="a string")
    lang: Text = Field("", description="a string")
    cluster: Text = Field("", description="a string")
    messages: Annotated[
        list[dict[Literal["role", "content"], str]],
        AfterValidator(_check_messages),
        Field(description="[{role, content}, ...] that ends with the user's turn"),
    ]
    gold: object = None
    checks: list[object] = Field(min_length=1, description="at least one check")
    judge: Questions = []
    max_tokens: PositiveInt = Field(0, description="a whole number above 0")
    origin: Text = Field("", description="a string")
    license: Text = Field("", description="a string")


class AnchorRow(BaseModel):
    """An anchor of a slice in bench.yaml; see ``judge.plan``."""

    model_config = _STRICT

    user: _Some = ""
    good: _Some = ""
    bad: _Some = ""
    fails: object = None
    judge: Questions = []
    system: _Some = ""
    gold: object = None


def list_questions(judge: list[str], lists: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the questions of ``judge``, with those of a checklist where it is named."""
    return tuple(
        question
        for one in judge
        for question in (lists.get(one[1:], []) if one[0] == "@" else [one])
    )


# --- persona.yaml

_GROUPS = TypeAdapter(dict[object, list[Text]])


def _compile(groups: object) -> re.Pattern[str]:
    """One alternation of {language: [regular expression, ...]}."""
    found = _GROUPS.validate_python(groups, strict=True).values()
    patterns = [pattern for group in found for pattern in group]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(f"{pattern!r}: {error}", "a regular expression") from None
    return re.compile("|".join(f"(?:{one})" for one in patterns) or r"(?!)")


_Patterns = Annotated[
    re.Pattern[str],
    BeforeValidator(_compile),
    Field(description="{language: [regular expression, ...]}"),
]


class _Weights(BaseModel):
    model_config = _STRICT

    address: NonNegativeFloat
    tic: NonNegativeFloat

    @model_validator(mode="after")
    def _check_sum(self) -> _Weights:
        if abs(self.address + self.tic - 1) >= 1e-9:
            raise ValueError("the weights aren't 1 together")
        return self


class Persona(BaseModel):
    """The persona axis: rules of persona.yaml, the same for every answer. Patterns of all languages apply.

    The score of an answer lies in 0..1::

        score = 0                                                   if a break pattern occurs
              = w_address * [an address term occurs]
                + w_tic * min(1, (sentences with a tic / sentences) / target_rate)     otherwise

    A sentence with more than ``max_tics_per_sentence`` tics does not count: spam is not a persona. Rate
    and spread are one number because sentences are counted, not tics.
    """

    model_config = _STRICT

    address: _Patterns
    breaks: _Patterns
    max_tics_per_sentence: int = Field(ge=1, description="a whole number of at least 1")
    name: _Word
    target_rate: float = Field(gt=0, le=1, description="a share above 0 and at most 1")
    tics: _Patterns
    weights: _Weights = Field(description="{address: a, tic: t} with a + t = 1")

    def score(self, text: str) -> PersonaParts:
        """Score one answer (the text the user would see, without thinking)."""
        parts = sentences(text)
        tics = [len(self.tics.findall(part)) for part in parts]
        marked = sum(1 <= count <= self.max_tics_per_sentence for count in tics)
        rate = marked / len(parts) if parts else 0.0
        address = self.address.search(text) is not None
        broke = self.breaks.search(text) is not None
        score = self.weights.address * address
        score += self.weights.tic * min(1.0, rate / self.target_rate)
        return {
            "score": 0.0 if broke else round(score, 6),
            "address": address,
            "tic_rate": round(rate, 6),
            "broke": broke,
        }
