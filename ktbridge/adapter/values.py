"""Tensor bytes without a deep-learning framework: rounding to bfloat16, exact scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model.tensor import bf16_as_float32

if TYPE_CHECKING:  # numpy is imported where values are read: most conversions read none
    import numpy as np
    from numpy.typing import NDArray


def as_float32(data: memoryview | bytes | bytearray, dtype: str) -> NDArray[np.float32]:
    """The values of a BF16, F16 or F32 buffer as a flat float32 array (exact)."""
    import numpy as np

    if dtype == "BF16":
        return bf16_as_float32(data)
    return np.frombuffer(data, np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def to_bf16(data: memoryview, dtype: str) -> bytes | None:
    """F32 or F16 values rounded to the nearest bfloat16, ties to even (IEEE 754).

    None if a finite value would become infinite. NaN stays NaN.
    """
    import numpy as np

    values = as_float32(data, dtype)
    bits = values.view(np.uint32)
    # Half of the last kept bit's unit, minus one if that bit is even.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    rounded[nan] = (bits[nan] >> 16) | 0x40
    if np.any(np.isfinite(values) & ((rounded & 0x7FFF) == 0x7F80)):
        return None
    return bytes(rounded.tobytes())


def rounding_findings(where: str, counts: Mapping[str, int]) -> Iterator[Problem]:
    """Report how many tensors of each dtype a conversion to bfloat16 rounds."""
    for dtype, count in sorted(counts.items()):
        if dtype != "BF16":
            found = f"has {count} tensors in {dtype}, which are rounded to bfloat16 as asked for"
            yield problem("KTB304", where, found, next_step="nothing")


def scaled_exactly(data: memoryview, dtype: str, factor: float) -> bytes | None:
    """``data * factor`` in the same dtype, or None if any value would round, overflow or underflow.

    Meant for powers of two, which only change the exponent.
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
