"""Looking at tensor bytes without a deep-learning framework: NaN, zero, rounding, scaling.

Floats are judged by their bit patterns. With the sign bit masked off, bit patterns of one format
order as the numbers do, infinities and NaNs last; so one maximum per tensor tells both whether it
is all zero and whether it is finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # numpy is imported where values are looked at: most conversions look at none
    import numpy as np
    from numpy.typing import NDArray

_CHUNK = 1 << 24


class _Format(NamedTuple):
    integer: str
    magnitude: int  # every bit but the sign
    infinity: int  # bit pattern of +inf: whatever is not below is infinite or NaN


_FORMATS = {
    "BF16": _Format("u2", 0x7FFF, 0x7F80),
    "F16": _Format("u2", 0x7FFF, 0x7C00),
    "F32": _Format("u4", 0x7FFFFFFF, 0x7F800000),
}


class Scan(NamedTuple):
    """Per tensor of a run of equals: is it all zero, has it NaN/Inf, would bfloat16 round it."""

    zero: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    rounds: NDArray[np.bool_]


def scan_values(data: memoryview, dtype: str, count: int) -> Scan:
    """Scan ``count`` equally long tensors of ``dtype`` (BF16, F16, F32) that lie end to end."""
    import numpy as np

    layout = _FORMATS[dtype]
    table = np.frombuffer(data, layout.integer).reshape(count, -1)
    zero, bad = np.ones(count, bool), np.zeros(count, bool)
    rounds = np.zeros(count, bool)
    if table.shape[1] == 0:
        return Scan(zero, bad, rounds)
    rows = max(1, _CHUNK // max(1, table.shape[1] * table.itemsize))
    for first in range(0, count, rows):
        part = table[first : first + rows]
        chosen = slice(first, first + len(part))
        top = (part & layout.magnitude).max(axis=1)
        zero[chosen] = top == 0
        bad[chosen] = top >= layout.infinity
        if dtype == "F32":
            rounds[chosen] = (part & 0xFFFF).any(axis=1)
        elif dtype == "F16":
            # bfloat16 has 7 fraction bits, half precision 10.
            rounds[chosen] = (part & 0x7).any(axis=1)
    return Scan(zero, bad, rounds)


def as_float32(data: memoryview | bytes | bytearray, dtype: str) -> NDArray[np.float32]:
    """The values of a BF16, F16 or F32 buffer as a flat float32 array (exact)."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def to_bf16(data: memoryview, dtype: str) -> bytes | None:
    """F32 or F16 values rounded to the nearest bfloat16, ties to even (IEEE 754).

    None if a finite value would become infinite. NaN stays NaN.
    """
    import numpy as np

    values = as_float32(data, dtype)
    bits = values.view(np.uint32)
    # Half of the last kept place, less one where that place is even already.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    rounded[nan] = (bits[nan] >> 16) | 0x40
    if np.any(np.isfinite(values) & ((rounded & 0x7FFF) == 0x7F80)):
        return None
    return bytes(rounded.tobytes())


def scaled_exactly(data: memoryview, dtype: str, factor: float) -> bytes | None:
    """``data * factor`` in the same dtype, or None if any value would round, overflow or vanish.

    Meant for powers of two, which only move the exponent.
    """
    import numpy as np

    values = as_float32(data, dtype)
    with np.errstate(all="ignore"):
        product = values * np.float32(factor)
        if dtype == "BF16":
            bits = product.view(np.uint32)
            result = (bits >> 16).astype(np.uint16)
            exact = not (bits & 0xFFFF).any()
        else:
            result = product.astype(np.float16 if dtype == "F16" else np.float32)
            exact = True
        back = as_float32(result.tobytes(), dtype) / np.float32(factor)
    if not exact or not np.array_equal(back, values):
        return None
    return bytes(result.tobytes())


def is_power_of_two(numerator: int, denominator: int) -> bool:
    """Whether a reduced positive fraction is 2**k for some integer k, negative included."""
    return numerator & (numerator - 1) == 0 and denominator & (denominator - 1) == 0
