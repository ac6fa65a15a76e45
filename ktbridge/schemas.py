"""pydantic's findings and schema of a type: faults of what people write in our words, and its JSON schema.

A field's description says what is expected of it, or else its type's own message; a field with ``exclude``
isn't offered to the reader.
A validator that knows more raises ``Refusal``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

_Model = TypeVar("_Model", bound=BaseModel)
_T = TypeVar("_T")


class Fault(NamedTuple):
    """One fault of a key. ``found`` is '' where the value itself is what was found."""

    key: str
    kind: Literal["missing", "unknown", "wrong"]
    found: str
    expected: str


class Refusal(ValueError):
    """Error of a validator that knows better than the field's description what is wrong."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found, self.expected = found, expected


def check_fields(
    model: type[_Model],
    given: Mapping[str, object] | Mapping[object, object],
    context: Mapping[str, object] | None = None,
) -> tuple[_Model | None, list[Fault]]:
    """Return ``given`` as ``model``, or None and every fault: missing keys, unknown ones, wrong values.

    A value with several faults is one fault, unless a validator tells them apart.
    """
    try:
        named = {str(key): value for key, value in given.items()}
        return model.model_validate(named, context=dict(context or {})), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    own = [(str(one["loc"][0]), one["type"]) for one in details if len(one["loc"]) == 1]
    missing = sorted(key for key, kind in own if kind == "missing")
    unknown = sorted(key for key, kind in own if kind == "extra_forbidden")
    faults = [Fault(key, "missing", "", fields[key].description or "") for key in missing]
    shown = ", ".join(key for key, field in fields.items() if not field.exclude)
    faults += [Fault(key, "unknown", "", f"one of {shown}") for key in unknown]
    for key in [key for key in fields if key not in missing]:
        own_details = [one for one in details if one["loc"][:1] == (key,)]
        wrong = [one.get("ctx", {}).get("error") for one in own_details]
        told = [one for one in wrong if isinstance(one, Refusal)]
        if told and len(told) == len(wrong):
            faults += [Fault(key, "wrong", one.found, one.expected) for one in told]
        elif wrong:
            expected = fields[key].description or own_details[0]["msg"]
            faults.append(Fault(key, "wrong", "", expected))
    return None, faults


def fits(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Return whether a value read from JSON has the shape of ``kind`` (a TypedDict); further keys may be
    there, as of a later version."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def is_json(value: object) -> bool:
    """Return whether ``value`` can be sent and stored: no NaN, no infinity, no lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def schema_of(kind: type[object], open_types: Collection[str]) -> JsonSchemaValue:
    """Return the JSON schema (2020-12) of a type; ``open_types`` may have further keys.

    Docstrings describe types and, below them, fields.
    """
    config = ConfigDict(use_attribute_docstrings=True)
    schema = TypeAdapter(kind, config=config).json_schema(schema_generator=_Generator)
    for name, one in schema["$defs"].items():
        del one["title"]
        one["additionalProperties"] = name in open_types
        for described in (one, *one["properties"].values()):
            if text := described.get("description"):
                described["description"] = " ".join(text.replace("``", "").split())
    return schema
