"""The thin product that merging adds, in numpy: for installations without kernels, with the kernels' bits.

The kernels (``kernels/gemm/delta.h``) sum in float32, column of ``left`` by column, each step one fused
multiply-add: sum = round(a b + sum), rounded once. numpy has no such operation, but float64 holds the product
of two float32 exactly. So a b + sum is rounded to float64 and then to float32, and the few sums for which two
roundings aren't one are rounded to odd first (S. Boldo, G. Melquiond: Emulation of FMA and correctly rounded
sums: proved algorithms using rounding to odd, IEEE Transactions on Computers 57, 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.floats import to_bf16, widened

_LOST = (1 << 29) - 1  # the bits of a float64's mantissa that a normal float32 hasn't
_HALFWAY = 1 << 28  # between two float32
_LEAST = 2.0**-126  # normal float32
# Products of factors above it, and so sums, are multiples of 2^-149, as subnormal float32 are: exact.
_FINE = 2.0**-100
_BLOCK = 1 << 14  # values at once, whose sums fit a core's cache


def add_delta(values: NDArray[Any], left: NDArray[np.float32], right: NDArray[np.float32]) -> int | None:
    """Add ``left`` [rows, r] times ``right`` [r, columns] to ``values`` [rows, columns], in place.

    ``values`` are float32, or bfloat16's bits in uint16; a sum is rounded to nearest even. Returns how many
    values moved, or None if one isn't finite now. Memory: some 30 bytes a value.
    """
    halves = values.dtype == np.uint16
    old = widened(values) if halves else values
    with np.errstate(all="ignore"):  # what isn't finite is looked at here
        sums = _product(left, right)
        sums += old
        if not np.isfinite(sums).all():
            return None
        made = to_bf16(sums) if halves else sums
    seen = widened(made) if halves else made
    moved = int(np.count_nonzero(seen != old))
    values[:] = made
    return moved if np.isfinite(seen).all() else None


def _product(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    sums = np.zeros((len(left), right.shape[1]), np.float32)
    fine = _smallest(left) * _smallest(right) >= _FINE
    wide = right.astype(np.float64)
    step = max(1, _BLOCK // max(1, right.shape[1]))
    scratch = np.empty((step, right.shape[1]))
    exact = np.empty_like(scratch)
    for first in range(0, len(left), step):
        block = sums[first : first + step]
        columns = left[first : first + step].T.astype(np.float64)
        for column, row in zip(columns, wide, strict=True):
            _fused(column, row, block, scratch[: len(block)], exact[: len(block)], fine)
    return sums


def _fused(
    column: NDArray[np.float64],
    row: NDArray[np.float64],
    sums: NDArray[np.float32],
    scratch: NDArray[np.float64],
    exact: NDArray[np.float64],
    fine: bool,
) -> None:
    """Fused multiply-add of the outer product of ``column`` and ``row`` to ``sums``, in place."""
    np.multiply(column[:, None], row, out=scratch)
    np.add(scratch, sums, out=exact)
    bits = np.bitwise_and(exact.view(np.int64), _LOST, out=scratch.view(np.int64))
    doubtful = bits == _HALFWAY
    if not fine:
        doubtful |= np.abs(exact) < _LEAST
    if doubtful.any():
        rows, columns = np.nonzero(doubtful)
        exact[doubtful] = _to_odd(column[rows] * row[columns], sums[doubtful], exact[doubtful])
    np.copyto(sums, exact, casting="same_kind")


def _to_odd(
    product: NDArray[np.float64], addend: NDArray[np.float32], total: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``product`` plus ``addend``, whose nearest float64 is ``total``, rounded to odd instead.

    That is the neighbor with an odd mantissa where the sum isn't exact, which no tie between two float32 has.
    """
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact: Knuth's TwoSum
    bits = total.view(np.int64)
    wrong = (error != 0) & (bits & 1 == 0)
    return (bits + np.where(wrong, np.where((error > 0) == (total > 0), 1, -1), 0)).view(np.float64)


def _smallest(values: NDArray[np.float32]) -> float:
    """The smallest magnitude but zero; infinite where all are zero."""
    return float(np.min(np.abs(values), where=values != 0, initial=np.inf))
