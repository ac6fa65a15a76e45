"""Rows of Parquet and CSV files: each cell of CSV is text."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.install import install_hint

CSV_SUFFIXES = (".csv", ".tsv")
_DELIMITERS = ",;\t"
_LONGEST_CELL = 1 << 30
_AT_ONCE = 64  # rows, whose images are in memory together


@dataclass(frozen=True)
class Line:
    """One raw row of a file: its location, and its value or why there is none."""

    where: str
    row: object
    broken: str = ""


def read_csv(path: Path, shown: str) -> Iterator[Line]:
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
                        yield Line(where, dict(zip(names, row, strict=True)))
                    else:
                        yield Line(
                            where, row, f"with {len(row)} cells under {len(names)} column names"
                        )
            except csv.Error as error:
                raise KtbridgeError(
                    f"{shown} is not CSV that can be read: {error} at line {reader.line_num}.",
                    "Close the quotes there, and write a quote within a cell twice.",
                ) from error
    except UnicodeDecodeError as error:
        raise KtbridgeError(f"{shown} is not UTF-8 text.", "Save it as CSV in UTF-8.") from error
    except OSError as error:
        raise KtbridgeError(f"{shown} can't be read: {error.strerror}.") from error


def read_parquet(path: Path, shown: str) -> Iterator[Line]:
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
                    yield Line(f"{shown}: row {number}", row)
    except (ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise KtbridgeError(
            f"{shown} is not Parquet that can be read: {reason}.", "Write or download it again."
        ) from error
