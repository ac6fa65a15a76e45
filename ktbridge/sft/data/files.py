"""Rows of JSON and JSONL files; a broken line is a row that can't be used, not the end of the file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.errors import KtbridgeError

NOT_JSON = {
    b"\x1f\x8b": ("gzip-compressed", "Unpack it first, as with `gunzip -k`."),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "Unpack it first, as with `unzstd`."),
    b"PK\x03\x04": ("a zip archive", "Unpack it first."),
    b"PAR1": ("Parquet", "Convert it to JSONL, as with datasets' Dataset.to_json."),
    b"ARROW1": ("Arrow", "Convert it to JSONL, as with datasets' Dataset.to_json."),
    codecs.BOM_UTF16_LE: ("UTF-16 text", "Save it as UTF-8."),
    codecs.BOM_UTF16_BE: ("UTF-16 text", "Save it as UTF-8."),
}


@dataclass(frozen=True)
class Line:
    """One raw row of a file: its location, and its value or why there is none."""

    where: str
    row: Any
    broken: str = ""


def read_lines(path: Path) -> Iterator[Line]:
    """The rows of a file, in order.

    A file is a JSON list of rows, one JSON object, or one JSON value per line (empty lines are skipped), as
    detected from its text, not its name. UTF-8, with or without a byte order mark. Raises KtbridgeError
    for a file that can't be read, has another form, or is in a compressed or binary format.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise KtbridgeError(f"{path} can't be read: {error.strerror}.") from error
    for magic, (kind, step) in NOT_JSON.items():
        if head.startswith(magic):
            raise KtbridgeError(f"{path} is {kind}, not JSON or JSONL.", step)
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()
    whole = None
    if first[:1] == b"[":
        whole = _whole(path)
    elif first[:1] == b"{" and not _is_json_lines(path):
        with suppress(KtbridgeError):  # no object over several lines, so its first line is broken
            whole = _whole(path)
    if whole is None:
        return _json_lines(path)
    return (Line(f"{path}: row {number}", row) for number, row in enumerate(whole, 1))


def _is_json_lines(path: Path) -> bool:
    """Whether the first line that has something in it is a JSON value of its own."""
    with path.open("rb") as file:
        line = next(text for text in file if text.removeprefix(codecs.BOM_UTF8).strip())
    return not _line("", line).broken


def _whole(path: Path) -> list[Any] | None:
    """The rows of a file that is one JSON value; None when it is several, one per line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise KtbridgeError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise KtbridgeError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            "Mend it there, or write one row a line (JSONL): then broken rows are listed, not fatal.",
        ) from error
    except (ValueError, RecursionError) as error:  # integer too long, or nesting too deep
        raise KtbridgeError(f"{path} is not JSON that can be read: {error}.") from error
    return value if isinstance(value, list) else [value]


def _json_lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            if text.strip():
                yield _line(f"{path}: line {number}", text)


def _line(where: str, text: bytes) -> Line:
    try:
        return Line(where, json.loads(text.decode("utf-8")))
    except UnicodeDecodeError as error:
        broken = f"not UTF-8 text: byte {error.start}"
    except json.JSONDecodeError as error:
        broken = f"not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        broken = f"not JSON that can be read: {error}"
    return Line(where, text.decode("utf-8", "backslashreplace").rstrip("\r\n"), broken)
