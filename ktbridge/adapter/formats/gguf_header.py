"""The header of a GGUF file, walked before gguf's own reader sees it.

That reader makes several arrays of numpy for every number in the header and follows arrays in arrays without
end: a header of some megabytes would take gigabytes, or end in RecursionError.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path

MAX_BYTES = 1 << 24  # of a header
MAX_TENSORS = 20_000  # five times what the adapter of all modules of a hundred layers has
MAX_FIELDS = 1_000
MAX_ITEMS = 10_000  # of all arrays together
MAX_NAME = 1_000  # bytes
MAX_DIMENSIONS = 4  # ggml's own
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type
_STRING, _ARRAY = 8, 9


def check_header(file: Path) -> None:
    """Raises ValueError for a header that isn't whole, or is more than an adapter's; OSError of the file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        _Header(stream.read(MAX_BYTES), size).check()


class _Header:
    """``data``: the file's beginning; ``size``: all of its bytes."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = data, size
        self._at = 0
        self._order = "<"
        self._items = 0

    def check(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it doesn't begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:  # the other byte order
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for count, most, what in (
            (tensors, MAX_TENSORS, "tensors"),
            (fields, MAX_FIELDS, "fields"),
        ):
            if count > most:
                raise ValueError(f"it has {count:,} {what}; an adapter has at most {most:,}")
        for _ in range(fields):
            self._text(MAX_NAME)
            self._value(self._number("I"))
        for _ in range(tensors):
            self._tensor()

    def _value(self, kind: int) -> None:
        if kind in _SCALARS:
            self._take(_SCALARS[kind])
        elif kind == _STRING:
            self._text(MAX_BYTES)
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._items += count
            if self._items > MAX_ITEMS:
                raise ValueError(f"it has an array of {count:,} items, which no adapter has")
            if kind == _ARRAY:
                raise ValueError("it has an array of arrays, which no adapter has")
            for _ in range(count):
                self._value(kind)
        else:
            raise ValueError(f"it has a field of the unknown type {kind}")

    def _tensor(self) -> None:
        name = self._text(MAX_NAME)
        count = self._number("I")
        if count > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {count:,} dimensions; {MAX_DIMENSIONS} are the most")
        elements = 1
        for _ in range(count):
            elements *= self._number("Q")
        self._take(4)
        offset = self._number("Q")
        # No type takes less than a bit per element.
        if offset > self._size or not 0 < elements <= 8 * self._size:
            raise ValueError(
                f"{name} has {elements:,} elements at byte {offset:,}, not in the file"
            )

    def _text(self, most: int) -> str:
        size = self._number("Q")
        if size > most:
            raise ValueError(f"it has a text of {size:,} bytes; {most:,} are the most")
        return self._take(size).decode()

    def _number(self, kind: str) -> int:
        number: int = struct.unpack(self._order + kind, self._take(struct.calcsize(kind)))[0]
        return number

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            if end <= self._size:
                raise ValueError(f"its header is longer than {MAX_BYTES:,} bytes")
            raise ValueError(f"it ends inside what begins at byte {self._at}")
        taken, self._at = self._data[self._at : end], end
        return taken
