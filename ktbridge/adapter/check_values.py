"""Scan every value of a file once at memory bandwidth: NaN, zero and rounding per matrix.

Floats are checked by bit pattern. Without the sign bit, the bit patterns of one format sort like the
numbers, infinities and NaNs last; so one maximum per matrix shows both whether it is all zero and
whether it is finite. Bytes go through one buffer small enough to stay in the
processor's cache, and ``reduceat`` computes the maxima of all its matrices in one call; memory use
doesn't depend on the file's size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.errors import KtbridgeError
from ktbridge.model import TensorFile

_BUFFER = 1 << 19
_REPORT_BYTES = 1 << 25


class _Format(NamedTuple):
    integer: Any
    magnitude: int  # every bit but the sign
    infinity: int  # bit pattern of +inf: anything not below is infinite or NaN
    rounded: int  # fraction bits that bfloat16, with 7 of them, drops


FORMATS = {
    "BF16": _Format(np.uint16, 0x7FFF, 0x7F80, 0),
    "F16": _Format(np.uint16, 0x7FFF, 0x7C00, 0x7),
    "F32": _Format(np.uint32, 0x7FFFFFFF, 0x7F800000, 0xFFFF),
}


class Run(NamedTuple):
    """Contiguous matrices of one float format: ``bounds`` are their n + 1 byte offsets."""

    dtype: str
    bounds: NDArray[np.int64]


class Flags(NamedTuple):
    """Per matrix: is it all zero, has it NaN or Inf, would bfloat16 round any value."""

    zero: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    rounds: NDArray[np.bool_]


def scan_run(
    file: TensorFile, run: Run, on_bytes: Callable[[int], None] = lambda count: None
) -> Flags:
    """Read the run's bytes once. ``on_bytes(n)`` reports n further bytes.

    Raises KtbridgeError when the file can't be read or was truncated.
    """
    layout = FORMATS[run.dtype]
    count = len(run.bounds) - 1
    top, low = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    # reduceat treats a segment of length 0 as length 1, so empty matrices are left out.
    filled = np.flatnonzero(np.diff(run.bounds))
    bounds = np.append(run.bounds[filled], run.bounds[-1])
    width = np.dtype(layout.integer).itemsize
    masked = np.empty(_BUFFER // width, layout.integer)
    for start, words in _words(file, int(bounds[0]), int(bounds[-1]), layout.integer, on_bytes):
        end = start + words.nbytes
        first = int(np.searchsorted(bounds, start, "right")) - 1
        last = int(np.searchsorted(bounds, end, "left"))
        offsets = (np.maximum(bounds[first:last], start) - start) // width
        part = filled[first:last]
        magnitudes = np.bitwise_and(words, layout.magnitude, out=masked[: len(words)])
        top[part] = np.maximum(top[part], np.maximum.reduceat(magnitudes, offsets))
        if layout.rounded:
            low[part] |= np.bitwise_or.reduceat(words, offsets)
    return Flags(top == 0, top >= layout.infinity, (low & layout.rounded) != 0)


def _words(
    file: TensorFile, start: int, end: int, integer: Any, on_bytes: Callable[[int], None]
) -> Iterator[tuple[int, NDArray[Any]]]:
    """The bytes ``start:end`` as integers, buffer by buffer, each with its start."""
    buffer = memoryview(bytearray(min(_BUFFER, max(end - start, 1))))
    unreported = 0
    try:
        with open(file.path, "rb", buffering=0) as source:
            source.seek(start)
            while start < end:
                view = buffer[: min(len(buffer), end - start)]
                filled = 0
                while filled < len(view):
                    got = source.readinto(view[filled:])
                    if not got:
                        raise KtbridgeError(
                            f"{file.path} became shorter while it was being read",
                            "wait until nothing writes to it, then run again",
                        )
                    filled += got
                yield start, np.frombuffer(view, integer)
                start += len(view)
                unreported += len(view)
                if unreported >= _REPORT_BYTES or start == end:
                    on_bytes(unreported)
                    unreported = 0
    except OSError as error:
        raise KtbridgeError(
            f"{file.path} can't be read: {os.strerror(error.errno or 0)}"
        ) from error
