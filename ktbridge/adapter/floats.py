"""Floats of 16 bits and less in numpy, which has neither bfloat16 nor float8 nor float4."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LARGEST_E4M3 = 448.0


def widened(values: NDArray[np.generic], out: Floats | None = None) -> Floats:
    """BF16 bits (uint16), F16 or F32 as float32, exactly: in ``out``, where it is given, but for F32."""
    if values.dtype == np.float32:
        return values.view(np.float32) if out is not None else values.astype(np.float32)
    found: Floats = np.empty(values.shape, np.float32) if out is None else out
    if values.dtype == np.float16:
        np.copyto(found, values)
        return found
    wide = found.view(np.uint32)
    np.copyto(wide, values)
    np.left_shift(wide, 16, out=wide)
    return found


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Finite float32 (which is spent) rounded to nearest even, as bfloat16's bits.

    Adding 0x7fff, and one more if the bit that will be the last is odd, carries into the upper half
    exactly when the number must go up.
    """
    bits = values.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    odd += 0x7FFF
    bits += odd
    bits >>= 16
    return bits.astype(np.uint16)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Finite float32 rounded to nearest even as float8 e4m3fn; beyond ±448 it is that."""
    bits = np.minimum(np.abs(values), np.float32(LARGEST_E4M3)).view(np.uint32)
    # Three bits of mantissa are kept, and the exponent's bias goes from 127 to 7.
    normal = ((bits + (0x7FFFF + (bits >> 20 & 1))) >> 20).astype(np.int32) - (120 << 3)
    small = np.rint(bits.view(np.float32) * np.float32(512)).astype(np.int32)  # in units of 2**-9
    code = np.where(bits < 0x3C800000, small, normal)  # 2**-6, the smallest normal number
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _e4m3() -> Floats:
    """The 256 values of OCP's float8 e4m3fn (bias 7, no infinity; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent.astype(float) - 10))
    value[code & 127 == 127] = np.nan
    return np.where(code > 127, -value, value).astype(np.float32)


E4M3 = _e4m3()


def _e4m3_steps() -> Floats:
    exponent = np.maximum(np.arange(256) >> 3 & 15, 1)
    return np.exp2(exponent.astype(np.float32) - 10)


E4M3_STEPS = _e4m3_steps()
"""What lies between each code's value and the next one's."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each code of MXFP4."""
E2M1_STEPS = np.array([0.5, 0.5, 0.5, 0.5, 1, 1, 2, 2] * 2, np.float32)
MXFP4_GROUP = 32
