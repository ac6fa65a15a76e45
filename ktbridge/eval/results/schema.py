"""JSON schemas of the types in ``types``: the published one, and the check of files that are read."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import (
    Annotated,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from ktbridge.eval.results.cards import Only

_T = TypeVar("_T")
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
Schema = dict[str, object]


def fits(value: object, kind: type[_T]) -> TypeGuard[_T]:
    """Whether a value read from JSON has the shape of ``kind`` (a TypedDict); further keys may be there,
    as of a later version."""
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(schema_of(kind, open_types=None)).is_valid(value))


def schema_of(kind: object, *, open_types: Collection[str] | None = ()) -> Schema:
    """The JSON schema (2020-12) of a type, with every TypedDict in it under ``$defs``.

    A text in ``Annotated`` becomes the description, ``Only`` narrows it.
    ``open_types`` names the TypedDicts that may have further keys; None: all of them.
    """
    defs: dict[str, Schema] = {}
    schema = _schema(kind, defs, open_types)
    return {**schema, "$defs": defs}


def _schema(kind: object, defs: dict[str, Schema], open_types: Collection[str] | None) -> Schema:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        name = getattr(kind, "__name__", "")
        if name not in defs:
            defs[name] = {}  # it may contain itself
            defs[name].update(_object(kind, defs, open_types))
        return {"$ref": f"#/$defs/{name}"}
    if origin is Annotated:
        schema = _schema(arguments[0], defs, open_types)
        for note in arguments[1:]:
            schema |= _note(note)
        return schema
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, defs, open_types) for one in arguments]}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], defs, open_types)}
    if origin in (dict, Mapping):
        key, value = arguments
        schema = {"type": "object", "additionalProperties": _schema(value, defs, open_types)}
        return schema if key is str else {**schema, "propertyNames": _schema(key, defs, open_types)}
    return {"type": _PLAIN[kind]} if isinstance(kind, type) and kind in _PLAIN else {}


def _note(note: object) -> Schema:
    if isinstance(note, Only):
        return {key: value for key, value in note._asdict().items() if value is not None}
    return {"description": note}


def _object(kind: object, defs: dict[str, Schema], open_types: Collection[str] | None) -> Schema:
    hints = get_type_hints(kind, include_extras=True)
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    schema: Schema = {
        "type": "object",
        "required": [name for name in hints if name in required],
        "properties": {name: _schema(one, defs, open_types) for name, one in hints.items()},
        "additionalProperties": open_types is None or getattr(kind, "__name__", "") in open_types,
    }
    text = " ".join((getattr(kind, "__doc__", None) or "").replace("``", "").split())
    return {"description": text, **schema} if text else schema
