"""The files that people write for a bench, as models: bench.yaml, items.jsonl, anchors.

A field's description is what a problem says was expected. Defaults are filled in here; only the name,
the slices and each item's messages and gold are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationInfo,
)

from ktbridge.eval.results.types import Json, Message
from ktbridge.eval.text import is_json
from ktbridge.schemas import Refusal

Axis = Literal["task", "persona"]
OURS = ("model", "messages", "max_tokens", "stream", "n")
Text = Annotated[str, Field(min_length=1)]
_STRICT = ConfigDict(extra="forbid", strict=True)


def _check_name(value: object) -> object:
    if not str(value).strip():
        raise ValueError("it is blank")
    return value


def _check_sampling(value: dict[object, object]) -> dict[object, object]:
    if not is_json(value):
        raise ValueError("it isn't JSON")
    if ours := sorted(key for key in OURS if key in value):
        raise Refusal(", ".join(ours), "fields that ktbridge does not set itself")
    return value


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


def _check_some(value: str) -> str:
    if not value.strip():
        raise ValueError("it is blank")
    return value


Questions = Annotated[
    list[Annotated[Text, AfterValidator(_check_question)]],
    BeforeValidator(lambda value: [f"@{value}"] if isinstance(value, str) else value),
    Field(min_length=1, description="a checklist's name or a list of questions"),
]
_Some = Annotated[str, AfterValidator(_check_some), Field(description="some text")]


class SliceRow(BaseModel):
    """A slice in bench.yaml; it may have anchors too, which only a judge reads."""

    model_config = ConfigDict(extra="ignore", strict=True)

    primary: Axis = "task"
    meaning: str = ""
    label: str = Field("", description="a word or two")


class PartnerRow(BaseModel):
    model_config = _STRICT

    system: str
    turns: PositiveInt
    slices: list[object]


class BenchFile(BaseModel):
    """bench.yaml. ``data`` and ``override`` are in a run's snapshot only: the items' provenance, settings
    of the command line."""

    model_config = _STRICT

    name: Annotated[str | int | bool, AfterValidator(_check_name), Field(description="a name")]
    slices: object
    version: object = "1"
    language: object = "any"
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
    partner: PartnerRow | None = Field(
        None, description="{system: text, turns: n, slices: [NAME, ...]}"
    )
    private: bool = Field(False, description="true or false")
    data: object = Field(None, exclude=True)
    override: dict[Literal["max_tokens"], PositiveInt] = Field(
        {}, description="{max_tokens: a whole number above 0}", exclude=True
    )


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
    """An anchor of a slice in bench.yaml; see ``judging.anchors``."""

    model_config = _STRICT

    user: _Some = ""
    good: _Some = ""
    bad: _Some = ""
    fails: object = None
    judge: Questions = []
    system: _Some = ""
    gold: object = None


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


def list_questions(judge: list[str], lists: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Return the questions of ``judge``, with those of a checklist where it is named."""
    return tuple(
        question
        for one in judge
        for question in (lists.get(one[1:], []) if one[0] == "@" else [one])
    )
