"""Parsers of values, one per kind.

A parser takes what YAML gave and returns the value, or raises ValueError with a phrase for what was
expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields
from typing import Any

from ktbridge.errors import UsageError
from ktbridge.files.sizes import parse_size

UNKNOWN, WRONG, NOT_GIVEN, MEANINGLESS, CONTRADICTION, NOT_THERE = (
    "KTC001", "KTC002", "KTC003", "KTC004", "KTC005", "KTC006"
)  # fmt: skip

Parser = Callable[[object], Any]
Values = dict[str, Any]
"""Parsed values by key, from which a TrainConfig or a KtConfig is made."""
_MOST = 2**31 - 1
_QUOTED_FLAGS = ("", "true", "false", "yes", "no", "on", "off", "null", "none", "~")


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value


def texts(value: object) -> tuple[str, ...]:
    """A list, or LLaMA-Factory's comma-separated text."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError("a text or a list of texts")
    if any(not isinstance(part, str) or not part.strip() for part in parts):
        raise ValueError("one or more texts with commas between, none of them empty")
    return tuple(part.strip() for part in parts)


def shares(value: object) -> tuple[float, ...]:
    """LLaMA-Factory's "0.7,0.3", or a list of numbers."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        return tuple(fraction(part) for part in parts)
    except ValueError:
        raise ValueError('shares above 0 with commas between, as "0.7,0.3"') from None


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def number(value: object) -> float:
    # YAML 1.1 reads 1e-4 (no dot) as text; LLaMA-Factory's own examples write it so.
    found = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError("a number, 0 or more")
    return found


def positive(value: object) -> float:
    if not (found := number(value)):
        raise ValueError("a number above 0")
    return found


def size(value: object) -> int:
    """Bytes of "24GB" or "24GiB"."""
    try:
        return parse_size(str(value))
    except UsageError as error:
        raise ValueError("a size with its unit, as 24GB") from error


def gpu_experts(value: object) -> int | None:
    """KTransformers' "auto", or a number of experts."""
    return None if value == "auto" else int(whole(0, 4096)(value))


def share(most: float = 1.0) -> Parser:
    def parse(value: object) -> float:
        if not (found := number(value)) < most:
            raise ValueError(f"a number from 0 to below {most:g}")
        return found

    return parse


def share_or_whole(value: object) -> float:
    """A share below 1, or a whole number."""
    try:
        found = number(value)
    except ValueError:
        found = math.nan
    if not (found < 1 or found.is_integer()):
        raise ValueError("a share below 1, or a whole number")
    return found if found < 1 else int(found)


def strategy(value: object) -> str:
    """transformers' intervals; YAML reads ``no`` as false."""
    return str(one_of("steps", "epoch", "no")("no" if value is False else value))


def fraction(value: object) -> float:
    if not (found := number(value)) or found > 1:
        raise ValueError("a number above 0, at most 1")
    return found


def schedule_values(value: object) -> dict[str, float | str]:
    """A block of numbers and names, or its JSON, as transformers takes it on a command line."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError("a block of keys, as {min_lr: 1e-6}")
    found: dict[str, float | str] = {}
    for key, one in value.items():
        try:
            parsed = number(one)
        except ValueError:
            if not isinstance(one, str):
                raise ValueError("a block of keys, each with a number") from None
            found[str(key)] = one
        else:
            found[str(key)] = int(parsed) if parsed.is_integer() else parsed
    return found


def flag_or_path(value: object) -> bool | str:
    """``null`` is what LLaMA-Factory's examples write for false; a flag in quotes is no path."""
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() in _QUOTED_FLAGS:
        raise ValueError("true, false or a path")
    return text(value)


def whole(least: int, most: int = _MOST) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(
                f"a whole number, {least} or more"
                if most == _MOST
                else f"a whole number from {least} to {most}"
            )
        return value

    return parse


def flag_or_auto(value: object) -> bool | str:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise ValueError("true, false or auto")
    return value


def whole_or_auto(value: object) -> int | str:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    try:
        return int(whole(1)(value))
    except ValueError as error:
        raise ValueError(f"auto, or {error}") from None


def steps(value: object) -> int:
    if value != -1:
        return int(whole(1)(value))
    return -1


def one_of(*choices: str) -> Parser:
    """One of ``choices``, whatever its case; the spelling of ``choices`` is returned."""
    known = {choice.lower(): choice for choice in choices}

    def parse(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError(" or ".join(choices))
        return known[value.lower()]

    return parse


def reporters(*choices: str) -> Parser:
    """One of ``choices``, or several as a list or comma-separated; "none" stands alone."""

    def parse(value: object) -> str | tuple[str, ...]:
        try:
            found = tuple(dict.fromkeys(one_of(*choices)(part) for part in texts(value)))
        except ValueError:
            found = ()
        if not found or ("none" in found and len(found) > 1):
            raise ValueError(f"{' or '.join(choices)}, or a list of them")
        return found[0] if len(found) == 1 else found

    return parse


def option(parse: Parser, default: Any = MISSING, hint: str = "") -> Any:
    """A key of the configuration; ``hint`` is the next step after a value it doesn't take."""
    return field(default=default, metadata={"parse": parse, "hint": hint})  # type: ignore[call-overload]


def options(cls: type) -> dict[str, Field]:
    """The keys of a configuration class that a file may set, in order."""
    return {item.name: item for item in fields(cls) if "parse" in item.metadata}
