"""Rows of JSON, JSONL, CSV and Parquet files, each with its place in the file.

A broken line of a JSONL file is a row that can't be used, not the end of the file. Each cell of CSV is text.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ktbridge.errors import KtbridgeError
from ktbridge.install import install_hint

CSV_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
_LONGEST_CELL = 1 << 30
_AT_ONCE = 64  # rows, whose images are in memory together


NOT_JSON = {
    b"\x1f\x8b": ("gzip-compressed", "Unpack it first, as with `gunzip -k`."),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "Unpack it first, as with `unzstd`."),
    b"PK\x03\x04": ("a zip archive", "Unpack it first."),
    b"ARROW1": ("Arrow", "Convert it to JSONL, as with datasets' Dataset.to_json."),
    codecs.BOM_UTF16_LE: ("UTF-16 text", "Save it as UTF-8."),
    codecs.BOM_UTF16_BE: ("UTF-16 text", "Save it as UTF-8."),
}


class JsonLine(NamedTuple):
    """A line of a JSONL file: its number from 1, its bytes, and its value or why there is none."""

    number: int
    text: bytes
    value: object
    error: Exception | None = None


@dataclass(frozen=True)
class FileRow:
    """One raw row of a file: its location, and its value or why there is none."""

    where: str
    row: object
    broken: str = ""


def parse_json_lines(lines: Iterable[bytes]) -> Iterator[JsonLine]:
    """Parse lines of JSON in UTF-8; empty ones and a byte order mark before the first are skipped."""
    for number, text in enumerate(lines, 1):
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        if not text.strip():
            continue
        try:
            yield JsonLine(number, text, json.loads(text.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            yield JsonLine(number, text, None, error)


def read_records(path: Path, shown: str = "") -> Iterator[FileRow]:
    """The rows of a file, in order; ``shown`` is its name in messages, by default its path.

    A file is Parquet, CSV (by its suffix), a JSON list of rows, one JSON object, or one JSON value per line
    (empty lines are skipped), as detected from its bytes. UTF-8, with or without a byte order mark. Raises
    KtbridgeError for a file that can't be read, has another form, or is in another binary format.
    """
    shown = shown or str(path)
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise KtbridgeError(f"{shown} can't be read: {error.strerror}.") from error
    if head.startswith(b"PAR1"):
        return _read_parquet(path, shown)
    for magic, (kind, step) in NOT_JSON.items():
        if head.startswith(magic):
            raise KtbridgeError(f"{shown} is {kind}, not JSON, Parquet or CSV.", step)
    if path.suffix.lower() in CSV_SUFFIXES:
        return _read_csv(path, shown)
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()
    whole = None
    if first[:1] == b"[":
        whole = _whole(path, shown)
    elif first[:1] == b"{" and not _is_json_lines(path):
        with suppress(KtbridgeError):  # no object over several lines, so its first line is broken
            whole = _whole(path, shown)
    if whole is None:
        return _json_lines(path, shown)
    return (FileRow(f"{shown}: row {number}", row) for number, row in enumerate(whole, 1))


def is_read_by_row(path: Path) -> bool:
    """Return whether ``read_records`` reads a file a row at a time."""
    with path.open("rb") as file:
        head = file.read(4096)
    first = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if head.startswith(b"PAR1") or path.suffix.lower() in CSV_SUFFIXES or first not in (b"[", b"{"):
        return True
    return first == b"{" and _is_json_lines(path)


def _read_csv(path: Path, shown: str) -> Iterator[FileRow]:
    """Rows under the names in the first line; commas, semicolons or tabs, whichever that has most of.

    UTF-8, with or without a byte order mark; quotes as RFC 4180 has them. Raises KtbridgeError for a file
    that isn't, from the place on where it stops to be.
    """
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = re.sub('"[^"]*"?', "", file.readline())  # what is quoted separates nothing
            file.seek(0)
            reader = csv.reader(file, delimiter=max(_DELIMITERS, key=head.count), strict=True)
            try:
                names = next(reader, [])
                if again := next((name for name in names if names.count(name) > 1), None):
                    raise KtbridgeError(
                        f"{shown} has two columns {again!r}.", "Rename one in its first line."
                    )
                cells = (row for row in reader if row)  # an empty line is no row
                for number, row in enumerate(cells, 1):
                    where = f"{shown}: row {number}"
                    if len(row) == len(names):
                        yield FileRow(where, dict(zip(names, row, strict=True)))
                    else:
                        yield FileRow(where, row, f"with {len(row)} cells under {len(names)} column names")
            except csv.Error as error:
                raise KtbridgeError(
                    f"{shown} is not CSV that can be read: {error} at line {reader.line_num}.",
                    "Close the quotes there, and write a quote within a cell twice.",
                ) from error
    except UnicodeDecodeError as error:
        raise KtbridgeError(f"{shown} is not UTF-8 text.", "Save it as CSV in UTF-8.") from error
    except OSError as error:
        raise KtbridgeError(f"{shown} can't be read: {error.strerror}.") from error


def _read_parquet(path: Path, shown: str) -> Iterator[FileRow]:
    """The rows of a Parquet file. Raises KtbridgeError for one that is damaged, or without pyarrow."""
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise KtbridgeError(
            f"{shown} is Parquet, which needs the package {error.name}.", install_hint("train")
        ) from error
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield FileRow(f"{shown}: row {number}", row)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise KtbridgeError(
            f"{shown} is not Parquet that can be read: {reason}.", "Write or download it again."
        ) from error


def _is_json_lines(path: Path) -> bool:
    """Return whether the first line that has something in it is a JSON value of its own."""
    with path.open("rb") as file:
        return next(parse_json_lines(file)).error is None


def _whole(path: Path, shown: str) -> list[object] | None:
    """The rows of a file that is one JSON value; None when it is several, one per line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise KtbridgeError(f"{shown} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise KtbridgeError(
            f"{shown} is not valid JSON: {_said(error)} at line {error.lineno}, column {error.colno}.",
            "Mend it there, or write one row a line (JSONL): then broken rows are listed, not fatal.",
        ) from error
    except (ValueError, RecursionError) as error:  # integer too long, or nesting too deep
        raise KtbridgeError(f"{shown} is not JSON that can be read: {error}.") from error
    return value if isinstance(value, list) else [value]


def _json_lines(path: Path, shown: str) -> Iterator[FileRow]:
    with path.open("rb") as file:
        for line in parse_json_lines(file):
            where = f"{shown}: line {line.number}"
            if line.error is None:
                yield FileRow(where, line.value)
            else:
                text = line.text.decode("utf-8", "backslashreplace").rstrip("\r\n")
                yield FileRow(where, text, _broken(line.error))


def _broken(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {_said(error)} at column {error.colno}"
    return f"not JSON that can be read: {error}"


def _said(error: json.JSONDecodeError) -> str:
    return error.msg.removesuffix(" at")  # as in "Invalid control character at"
