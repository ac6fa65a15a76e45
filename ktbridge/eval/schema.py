"""The files that people write for a bench, as models: bench.yaml, items.jsonl, anchors (persona.yaml is in
``scorers/rules.py``).

A field's description is what a problem says was expected. Only the name, the slices and each item's messages
and gold are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    SkipValidation,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic import ValidationInfo as Info

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.results.types import Json, Message, Text
from ktbridge.schemas import Refusal, check_fields, is_json

_Model = TypeVar("_Model", bound=BaseModel)

Axis = Literal["task", "persona"]
OURS = ("model", "messages", "max_tokens", "stream", "n")
_Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_Some = Annotated[str, Field(pattern=r"\S", description="some text")]
_Word = Annotated[str, BeforeValidator(str)]  # a version may look like a number in YAML


def check_keys(
    model: type[_Model], given: object, place: str, code: str, problems: list[Problem]
) -> _Model | None:
    """Return a mapping whose keys people write as ``model``, or None and add its faults to ``problems``.

    ``place`` stands before a key: "bench.yaml: "."""
    if not isinstance(given, Mapping):
        problems.append(problem(code, f"{place}(file)", type(given).__name__, "a mapping"))
        return None
    value, faults = check_fields(model, given)
    for key, kind, found, expected in faults:
        if kind == "wrong":
            found = found or repr(given[key])[:80]
        else:
            found = "missing" if kind == "missing" else "unknown key"
            expected = "a value" if kind == "missing" else expected
        problems.append(problem(code, place + key, found, expected))
    return value


def check_row(model: type[_Model], given: Json, context: Json) -> tuple[_Model | None, list[tuple[str, str]]]:
    """Return a row of a list as ``model``, or None and its faults as (found, expected)."""
    value, faults = check_fields(model, given, context)
    found = {
        "missing": lambda key, told: f"no {key!r}",
        "unknown": lambda key, told: f"the unknown field {key!r}",
        "wrong": lambda key, told: told or f"{key} = {given[key]!r}"[:80],
    }
    return value, [(found[one.kind](one.key, one.found), one.expected) for one in faults]


# --- bench.yaml


class Slice(BaseModel):
    """A group of items, and its primary axis. ``label`` is its name in words ("knowledge"); '' to use the
    name. ``anchors`` are checked once a judge is to read them."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    primary: Axis = "task"
    meaning: str = ""
    label: str = Field("", description="a word or two")
    anchors: Annotated[
        list[object], BeforeValidator(lambda value: value if isinstance(value, list) else [value])
    ] = []


def list_slices(value: object) -> tuple[Json, ...]:
    """Return a row {name, primary, meaning, ...} of each slice of bench.yaml, which has them as {NAME: row},
    as {NAME: meaning} or as names alone; () for anything else."""
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        value = dict.fromkeys(value)
    if not isinstance(value, Mapping):
        return ()
    rows: list[Json] = []
    for name, row in value.items():
        row = {} if row is None else {"meaning": row} if isinstance(row, str) else row
        rows.append({**(row if isinstance(row, Mapping) else {"primary": row}), "name": str(name)})
    return tuple(rows)


def _read_slice(value: object, read: ValidatorFunctionWrapHandler) -> Slice:
    try:
        return cast("Slice", read(value))
    except ValidationError:
        expected = "{primary: task|persona, meaning: text, label: a word or two}"
        raise Refusal(repr(value)[:80], expected) from None


class Partner(BaseModel):
    """A model that plays the user in the named slices: the arm gives ``turns`` answers, the first to
    the item's messages, each later one to the reply of the partner, which is given ``system``."""

    model_config = _STRICT

    system: str
    turns: PositiveInt
    slices: list[_Word]


def _check_partner(value: Partner | None, info: Info) -> Partner | None:
    known = [one.name for one in info.data.get("slices", ())]
    if value is not None and known and not {*value.slices} <= {*known}:
        raise ValueError("it names other slices")
    return value


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
    slices: Annotated[
        tuple[Annotated[Slice, WrapValidator(_read_slice)], ...],
        BeforeValidator(list_slices),
        Field(min_length=1, description="[NAME, ...] or {NAME: what it asks, ...}"),
    ]
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
    checklists: dict[_Word, Annotated[list[Text], Field(min_length=1)]] = Field(
        {}, description="{NAME: [yes/no question, ...]}"
    )
    partner: Annotated[Partner | None, AfterValidator(_check_partner)] = Field(
        None, description="{system: text, turns: n, slices: [NAME, ...]}"
    )
    private: bool = Field(False, description="true or false")
    data: dict[str, object] | None = Field(None, exclude=True)
    override: dict[Literal["max_tokens"], PositiveInt] = Field(
        {}, description="{max_tokens: a whole number above 0}", exclude=True
    )


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
    rows: list[RowMap] = Field([], description="[{slice, question, answer, ...}, ...], see eval/README.md")
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
        found = f"the slice {value!r}" if value else "no 'slice'"
        raise Refusal(found, "one of " + ", ".join(known))
    return value


def _check_checks(value: list[Json], info: Info) -> list[Json]:
    if not value and info.data.get("gold") is None:
        expected = "what a right answer holds, or how to check it"
        raise Refusal("neither 'gold' nor 'checks'", expected)
    if not value:
        raise Refusal("checks = []", "at least one check")
    return value


def _lists(info: Info) -> dict[str, list[str]]:
    return info.context["lists"] if info.context else {}


def _check_question(value: str, info: Info) -> str:
    lists = _lists(info)
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
    slice: Annotated[str, AfterValidator(_check_slice)] = Field(
        "", validate_default=True, description="a string"
    )
    sub: str = Field("", description="a string")
    lang: Text = Field("", description="a string")
    cluster: Text = Field("", description="a string")
    messages: Annotated[
        list[Message],
        AfterValidator(_check_messages),
        Field(description="[{role, content}, ...] that ends with the user's turn"),
    ]
    gold: object = None
    checks: Annotated[list[SkipValidation[Json]], AfterValidator(_check_checks)] = Field(
        [], validate_default=True, description="at least one check"
    )
    judge: Questions = []
    max_tokens: PositiveInt = Field(0, description="a whole number above 0")
    origin: Text = Field("", description="a string")
    license: Text = Field("", description="a string")

    @property
    def references(self) -> list[str]:
        """The texts that an answer is compared with by the scorer "references"; else []."""
        compared = any(check["scorer"] == "references" for check in self.checks)
        return list(self.gold) if compared and isinstance(self.gold, list) else []


def _check_answers(value: str | None, info: Info) -> str | None:
    if value is None and info.data.get("good", "") is None:
        raise Refusal("neither 'good' nor 'bad'", "an answer")
    return value


def _check_fails(value: list[int] | None, info: Info) -> list[int] | None:
    if "judge" not in info.data:
        return value  # its questions are at fault
    count = len(list_questions(info.data["judge"], _lists(info))) or 1
    every = list(range(1, count + 1))
    if value is not None and not (value and set(value) <= {*every}):
        raise Refusal(f"fails = {value!r}"[:60], f"question numbers, 1 to {count}")
    return every if value is None else value


_Answer = _Some | None


class Anchor(BaseModel):
    """An anchor of a slice: a question with a good answer, which earns yes to every question of ``judge``,
    and a bad one, which earns no to those whose numbers are in ``fails``, by default to all."""

    model_config = _STRICT

    user: _Some
    judge: Questions
    good: _Answer = None
    bad: Annotated[_Answer, AfterValidator(_check_answers)] = Field(
        None, validate_default=True, description="some text"
    )
    fails: Annotated[list[int] | None, AfterValidator(_check_fails)] = Field(
        None, validate_default=True, description="[question number, ...]"
    )
    system: _Some = ""
    gold: object = None


def list_questions(judge: list[str], lists: Mapping[str, list[str]]) -> list[str]:
    """Return the questions of ``judge``, with those of a checklist where it is named."""
    groups = [lists.get(one[1:], []) if one[0] == "@" else [one] for one in judge]
    return [question for group in groups for question in group]
