"""A key of the configuration: its kind of value, its default, and its marks.

A kind is a type with a ``FieldKind``: pydantic holds a file's value against both, and takes spellings that
LLaMA-Factory's files have. A dataclass of such fields is made without pydantic: it takes values as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from ktbridge.errors import UsageError
from ktbridge.experts import MAX_EXPERT_RANK
from ktbridge.files.sizes import parse_size

Values = dict[str, Any]
"""Parsed values by key, from which a TrainConfig or a KtConfig is made."""
Resume = Literal["free", "noted", "weights", "adapter"]
"""What a resumed run may have otherwise. free: this key; noted: this key, if resume_from_checkpoint is given;
weights: not this key, but a new run may begin with the checkpoint's weights; adapter: not even that."""
_MOST = 2**31 - 1
_QUOTED_FLAGS = ("", "true", "false", "yes", "no", "on", "off", "null", "none", "~")


@dataclass(frozen=True)
class FieldMark:
    """A key that a file may set. Where nothing is said of it, it counts for everything."""

    default: object
    resume: Resume = "weights"
    rows: bool = True
    """Rows as tokens may depend on it."""
    each_host: bool = False
    """Hosts of one run may differ in it: places of files, and what a process does for itself."""
    since: str = ""
    """The first version that knew it, if 0.5.0 didn't."""
    hint: str = ""
    """The next step after a value that it doesn't take."""


def option(
    default: object = MISSING,
    resume: Resume = "weights",
    *,
    rows: bool = True,
    each_host: bool = False,
    since: str = "",
    hint: str = "",
) -> Any:
    """Return a dataclass field for a key, with its ``FieldMark``."""
    mark = FieldMark(default, resume, rows, each_host, since, hint)
    return field(default=default, metadata={"option": mark})  # type: ignore[call-overload]


def options(cls: type) -> dict[str, FieldMark]:
    """Return the keys of a configuration class that a file may set, in order."""
    return {item.name: item.metadata["option"] for item in fields(cls) if item.metadata}


@cache
def file_model(cls: type) -> type[BaseModel]:
    """Return pydantic's model of what a file may say for a configuration class: none, some or all keys."""
    hints = get_type_hints(cls, include_extras=True)
    known: dict[str, Any] = {key: (hints[key], None) for key in options(cls)}
    return create_model(
        cls.__name__, __config__=ConfigDict(strict=True, extra="forbid", protected_namespaces=()), **known
    )


class FieldKind:
    """Values that a key takes beyond its type: ``bounds`` of its schema in pydantic, and other spellings.

    ``before`` makes the type's value of a spelling; ``parse`` reads a value instead of the type. Both raise
    ValueError. Whatever is wrong with a value, the problem says ``expected``.
    """

    def __init__(
        self,
        expected: str,
        *,
        before: Callable[[object], object] | None = None,
        parse: Callable[[object], object] | None = None,
        **bounds: float,
    ) -> None:
        self.expected, self._before, self._parse, self._bounds = expected, before, parse, bounds

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self._parse:
            schema: CoreSchema = core_schema.no_info_plain_validator_function(self._parse)
        else:
            schema = cast("CoreSchema", {**handler(source), **self._bounds})
        if self._before:
            schema = core_schema.no_info_before_validator_function(self._before, schema)
        return core_schema.custom_error_schema(
            schema, custom_error_type="expected", custom_error_message=self.expected
        )


def one_of(*choices: str) -> FieldKind:
    """Return the kind of a choice, whatever its case; its value is spelled as in ``choices``."""
    known = {choice.lower(): choice for choice in choices}

    def parse(value: object) -> str:
        word = "no" if value is False else value  # as YAML reads no
        if not isinstance(word, str) or word.lower() not in known:
            raise ValueError("it is no choice")
        return known[word.lower()]

    return FieldKind(" or ".join(choices), parse=parse)


def some_of(*choices: str) -> FieldKind:
    """Return the kind of a choice, or of several as a list or comma-separated; "none" stands alone."""
    known = {choice.lower(): choice for choice in choices}

    def parse(value: object) -> str | tuple[str, ...]:
        parts = _split(value)
        found = tuple(dict.fromkeys(known.get(str(part).lower(), "") for part in parts))
        if not all(found) or not found or ("none" in found and len(found) > 1):
            raise ValueError("it is no list of choices")
        return found[0] if len(found) == 1 else found

    return FieldKind(f"{' or '.join(choices)}, or a list of them", parse=parse)


def _split(value: object) -> tuple[object, ...]:
    """A list, or LLaMA-Factory's comma-separated text."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("it is no list")
    return tuple(part.strip() if isinstance(part, str) else part for part in parts)


def _to_text(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("it is blank")
    return value


def _to_number(value: object) -> object:
    """YAML 1.1 reads 1e-4 (no dot) as text; LLaMA-Factory's own examples write it so."""
    return float(value) if isinstance(value, str) else value


def _number(expected: str, **bounds: Any) -> FieldKind:
    """Return the kind of a finite number within ``bounds``."""
    return FieldKind(expected, before=_to_number, allow_inf_nan=False, **bounds)


def _to_auto(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _to_share_or_whole(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it is no number")
    found = float(value)
    if not 0 <= found < float("inf") or (found >= 1 and not found.is_integer()):
        raise ValueError("it is neither")
    return int(found) if found >= 1 else found


def _to_flag_or_path(value: object) -> object:
    if isinstance(value, str) and value.strip().lower() in _QUOTED_FLAGS:
        raise ValueError("a flag in quotes is no path")
    return value


def _to_bytes(value: object) -> int:
    try:
        return parse_size(str(value))
    except UsageError as error:
        raise ValueError("it is no size") from error


def _to_schedule_values(value: object) -> dict[str, float | str]:
    """A block of numbers and names, or its JSON, as transformers takes it on a command line."""
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError("it is no block")
    return {str(key): _number_or_name(one) for key, one in value.items()}


def _number_or_name(value: object) -> float | str:
    with suppress(ValueError, OverflowError):
        found = float(value) if isinstance(value, int | float | str) else -1.0
        if not isinstance(value, bool) and 0 <= found < float("inf"):
            return int(found) if found.is_integer() else found
    if not isinstance(value, str):
        raise ValueError("it is neither a number nor a name")
    return value


Text = Annotated[str, FieldKind("a text", before=_to_text)]
Texts = Annotated[
    tuple[Text, ...],
    FieldKind("one or more texts with commas between, or a list of them", before=_split, min_length=1),
]
Flag = Annotated[bool, FieldKind("true or false")]
FlagOrAuto = Annotated[bool | Literal["auto"], FieldKind("true, false or auto", before=_to_auto)]
FlagOrPath = Annotated[bool | Text, FieldKind("true, false or a path", before=_to_flag_or_path)]
Whole = Annotated[int, FieldKind("a whole number, 0 or more", ge=0, le=_MOST)]
Count = Annotated[int, FieldKind("a whole number, 1 or more", ge=1, le=_MOST)]
CountOrAuto = Annotated[
    Count | Literal["auto"], FieldKind("auto, or a whole number, 1 or more", before=_to_auto)
]
CountOrAll = Annotated[Count | Literal[-1], FieldKind("a whole number, 1 or more")]
ExpertRank = Annotated[
    int, FieldKind(f"a whole number from 1 to {MAX_EXPERT_RANK}", ge=1, le=MAX_EXPERT_RANK)
]
UpTo4096 = Annotated[int, FieldKind("a whole number from 0 to 4096", ge=0, le=4096)]
Number = Annotated[float, _number("a number, 0 or more", ge=0)]
Positive = Annotated[float, _number("a number above 0", gt=0)]
Fraction = Annotated[float, _number("a number above 0, at most 1", gt=0, le=1)]
Share = Annotated[float, _number("a number from 0 to below 1", ge=0, lt=1)]
BelowHalf = Annotated[float, _number("a number from 0 to below 0.5", ge=0, lt=0.5)]
Fractions = Annotated[
    tuple[Fraction, ...],
    FieldKind(
        'shares above 0 with commas between, as "0.7,0.3"',
        before=lambda value: _split(value if isinstance(value, list | tuple) else str(value)),
    ),
]
ShareOrWhole = Annotated[float, FieldKind("a share below 1, or a whole number", parse=_to_share_or_whole)]
Bytes = Annotated[int, FieldKind("a size with its unit, as 24GB", parse=_to_bytes)]
ScheduleValues = Annotated[
    Mapping[str, float | str],
    FieldKind("a block of keys, each with a number, as {min_lr: 1e-6}", parse=_to_schedule_values),
]
ExpertsOnGpu = Annotated[
    UpTo4096 | None,
    FieldKind(
        "a whole number from 0 to 4096",
        before=lambda value: None if value == "auto" else value,  # KTransformers' word
    ),
]
