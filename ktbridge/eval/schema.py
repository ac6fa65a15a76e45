"""The files that people write for a bench, as models: bench.yaml, items.jsonl, anchors (persona.yaml is in
``scorers/rules.py``).

A field's description is what a problem says was expected. Only the name, the slices and each item's messages
and gold are required.
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
    SkipValidation,
)
from pydantic import ValidationInfo as Info

from ktbridge.eval.results.types import Json, Message, Text
from ktbridge.schemas import Refusal, is_json

Axis = Literal["task", "persona"]
OURS = ("model", "messages", "max_tokens", "stream", "n")
_Texts = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_Some = Annotated[str, Field(pattern=r"\S", description="some text")]
_Word = Annotated[str, BeforeValidator(str)]  # a version may look like a number in YAML


# --- bench.yaml


class Slice(BaseModel):
    """A group of items, and its primary axis. ``label`` is its name in words ("knowledge"); '' to use the
    name. bench.yaml may give anchors too, which only a judge reads."""

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


def _check_sampling(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if not is_json(value):
        raise ValueError("it isn't JSON")
    if ours := sorted(key for key in OURS if key in value):
        raise Refusal(", ".join(ours), "fields that ktbridge does not set itself")
    return {str(key): one for key, one in value.items()}


class BenchFile(BaseModel):
    """bench.yaml. ``item_tokens`` is the limit of items without their own. ``data`` (the items' provenance)
    and ``override`` (of the command line) are a run's only."""

    model_config = _STRICT

    name: Annotated[
        _Some,
        BeforeValidator(lambda value: str(value) if isinstance(value, int) else value),
        Field(description="a name"),
    ]
    slices: object
    version: _Word = "1"
    language: _Word = "any"
    item_tokens: PositiveInt = Field(512, alias="max_tokens", description="a whole number above 0")
    sampling: Annotated[
        dict[str, object],
        BeforeValidator(_check_sampling),
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
    data: dict[str, object] | None = Field(None, exclude=True)
    override: dict[Literal["max_tokens"], PositiveInt] = Field(
        {}, description="{max_tokens: a whole number above 0}", exclude=True
    )


def slice_table(head: Json) -> dict[str, Json]:
    """Return bench.yaml's slices as {NAME: {primary, meaning, ...}}, also of a list of names, or of names
    with meanings. {} for anything else; an invalid row becomes {"primary": None}."""
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
    """Answers that are marked by ``check`` against ``gold`` (default: the answer as it is spelled in
    ``are``)."""

    model_config = _STRICT

    are: list[Text]
    gold: str = ""
    check: dict[str, object]


class RowMap(BaseModel):
    """Rule by which a record of a data file becomes an item; eval/README.md explains each key.

    A template holds fields in braces; ``{a|b}`` is the first of them that has text. ``history`` names a field
    with [user, assistant] pairs, ``messages`` one with all messages, ``references`` one with a list of
    answers, ``options`` one with {name: option}."""

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
    benches, whose ``rows`` are the default; ``others`` says why a record that fits no row is skipped,
    which is a problem where ``strict``."""

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
    if any(one.keys() != {"role", "content"} or one["role"] not in roles for one in value):
        raise ValueError("a message without role or content")
    if not value or value[-1]["role"] != "user":
        raise ValueError("it doesn't end with the user's turn")
    return value


def _check_slice(value: str, info: Info) -> str:
    known = info.context["slices"] if info.context else ()
    if known and value not in known:
        raise Refusal(f"the slice {value!r}", "one of " + ", ".join(known))
    return value


def _check_question(value: str, info: Info) -> str:
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


class Item(BaseModel):
    """One question: a line of items.jsonl, with all defaults filled in.

    ``cluster`` ties items that are not independent (pairs, rewordings). ``checks`` are the scorers' to
    validate. ``judge`` holds the yes/no questions for a judge, "yes" being the good answer to each.
    """

    model_config = _STRICT

    id: Text = Field("", description="a string")
    slice: Annotated[Text, AfterValidator(_check_slice), Field(description="a string")]
    sub: str = Field("", description="a string")
    lang: Text = Field("", description="a string")
    cluster: Text = Field("", description="a string")
    messages: Annotated[
        list[Message],
        AfterValidator(_check_messages),
        Field(description="[{role, content}, ...] that ends with the user's turn"),
    ]
    gold: object = None
    checks: list[SkipValidation[Json]] = Field(min_length=1, description="at least one check")
    judge: Questions = []
    max_tokens: PositiveInt = Field(0, description="a whole number above 0")
    origin: Text = Field("", description="a string")
    license: Text = Field("", description="a string")

    @property
    def references(self) -> list[str]:
        """The texts that an answer is compared with by the scorer "references"; else []."""
        compared = any(check["scorer"] == "references" for check in self.checks)
        return list(self.gold) if compared and isinstance(self.gold, list) else []


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


def list_questions(judge: list[str], lists: Mapping[str, list[str]]) -> list[str]:
    """Return the questions of ``judge``, with those of a checklist where it is named."""
    groups = [lists.get(one[1:], []) if one[0] == "@" else [one] for one in judge]
    return [question for group in groups for question in group]
