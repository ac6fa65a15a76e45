"""Quantized weights as checkpoints store them: what they mean, and the same storage with other values.

===========  ===================================  ==================================================
storage      codes                                scale
===========  ===================================  ==================================================
block FP8    ``.weight`` F8_E4M3 [..., out, in]   ``.weight_scale_inv``, one a block (128 x 128, or
                                                  config.json's ``weight_block_size``)
INT8         ``.weight`` I8 [out, in]             ``.weight_scale`` [out], [out, 1] or [out, in/group]
INT8, INT4   ``.weight_packed`` I32 [out, words]  the same, beside ``.weight_shape`` I64 [2]
===========  ===================================  ==================================================

value = (code - zero) · scale in float32. INT8 and INT4 are compressed-tensors' "int-quantized" and
"pack-quantized": a word has eight values of four bits, or four of eight, from its lowest bits up, each plus
half of their range. ``.weight_zero_point`` is there where they are asymmetric: I8 like the scale, or packed
along the rows. https://github.com/neuralmagic/compressed-tensors
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.blocks import as_float32
from ktbridge.adapter.requantize import to_bf16, widened
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry

Floats = NDArray[np.float32]
SCALES = ("BF16", "F16", "F32")
KNOWN = "block FP8, and INT8 and INT4 as compressed-tensors stores them"
_NUMPY = {"F8_E4M3": np.uint8, "I8": np.int8, "I32": np.int32, "BF16": np.uint16, "F16": np.float16}
_TINY = np.finfo(np.float32).tiny  # no scale is denormal
_LARGEST = 448.0  # of float8 e4m3fn


@dataclass(frozen=True)
class Stored:
    """One quantized weight. ``shape`` is the weight's, ``group`` the rows and columns that share a scale.

    ``bits`` of an integer code; ``packed`` into 32-bit words. ``powers``: scales are powers of two.
    """

    storage: str
    codes: Entry
    scale: Entry
    shape: tuple[int, ...]
    group: tuple[int, int]
    bits: int = 8
    packed: bool = False
    powers: bool = False
    zero: Entry | None = None
    other: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it consists of."""
        zero = (self.zero.name,) if self.zero is not None else ()
        return (self.codes.name, self.scale.name, *zero, *self.other)

    @property
    def matrices(self) -> int:
        """Return how many matrices [out, in] it has."""
        return math.prod(self.shape[:-2])

    @property
    def scale_rows(self) -> int:
        """Rows of scales that a matrix has."""
        return -(-self.shape[-2] // self.group[0])

    @property
    def name(self) -> str:
        """The weight's name, as it would be unquantized."""
        return self.codes.name.removesuffix("_packed")

    def array(self, entry: Entry, data: memoryview | bytes) -> NDArray[Any]:
        """Rows of codes, of scales (as float32) or of zero points (packed as they are), from their bytes."""
        if entry is self.scale:
            return as_float32(data, entry.dtype).reshape(-1, self._groups)
        return np.frombuffer(data, _NUMPY[entry.dtype]).reshape(-1, entry.shape[-1])

    def zeros(self, stored: NDArray[Any]) -> Floats:
        """All zero points [out, groups] from what ``array`` made of them."""
        if stored.dtype == np.int32:
            stored = self._unpacked(np.ascontiguousarray(stored.T), self.shape[0]).T
        return stored.astype(np.float32)

    def scale_bytes(self, scales: Floats) -> memoryview:
        """Scales that ``array`` or ``requantize`` gave, as stored."""
        return np.ascontiguousarray(_as_stored(scales, self.scale.dtype)).data.cast("B")

    def decode(self, codes: NDArray[Any], scales: Floats, zeros: Floats | None = None) -> Floats:
        """Rows of codes [n, ...] as float32 [n, in]; ``scales`` and ``zeros`` [n, groups] are each row's."""
        middle = None if zeros is None else self._spread(zeros)
        return self._numbers(self._unpack(codes), middle) * self._spread(scales)

    def steps(self, codes: NDArray[np.generic], scales: Floats) -> Floats:
        """Distances to the next value that has a code, of what ``decode`` takes: [n, in] or [n, 1]."""
        wide = np.abs(self._spread(scales))
        return E4M3_STEPS[codes] * wide if self.storage == "fp8" else wide

    def requantize(
        self, values: Floats, codes: NDArray[Any], scales: Floats, zeros: Floats | None
    ) -> tuple[NDArray[Any], Floats, Floats]:
        """``values`` [n, in] as codes, with the scales [m, groups] of their groups, and what both mean.

        ``codes`` [n, ...], ``scales`` [m, groups] and ``zeros`` [n, groups] (which stay) are what is
        stored now. Of each group's scale now, and the smallest with which nothing is clipped, that is
        taken with which the squared error is smaller, the present one if they are equal: a group that did
        not change keeps its bits.
        """
        rows = len(values)
        fitting = self._fitting(values, zeros, scales)
        middle = None if zeros is None else self._spread(zeros)
        tried = []
        for by in (scales, fitting):
            wide = self._spread(self.by_row(by, rows))
            made = self._encode(values, wide, middle)
            meant = self._numbers(made, middle) * wide
            error = self._grouped(np.square(meant - values)).sum((1, 3))
            tried.append((made, meant, error))
        (kept, meant, error), (anew, meant_anew, error_anew) = tried
        if self.storage == "fp8":  # it has two zeros: a code that means the same stays
            kept = np.where(E4M3[kept] == E4M3[codes], codes, kept)
        better = error_anew < error
        mask = self._spread(self.by_row(better, rows))
        made = np.where(mask, anew, kept)
        chosen = np.where(better, fitting, scales)
        return self._pack(made, codes), chosen, np.where(mask, meant_anew, meant)

    def _fitting(self, values: Floats, zeros: Floats | None, scales: Floats) -> Floats:
        """The smallest scale of each group that clips nothing, of the present one's sign and dtype."""
        grouped = self._grouped(values)
        top, bottom = np.maximum(grouped.max((1, 3)), 0), np.maximum(-grouped.min((1, 3)), 0)
        top, bottom = np.where(scales < 0, (bottom, top), (top, bottom))
        if self.storage == "fp8":
            scale = np.maximum(top, bottom) / np.float32(_LARGEST)
        else:
            half = np.float32(1 << (self.bits - 1))
            middle = np.float32(0) if zeros is None else zeros  # a row's: it has groups of its own
            over, under = half - 1 - middle, half + middle
            with np.errstate(divide="ignore", invalid="ignore"):
                scale = np.maximum(
                    np.where(top > 0, top / over, 0), np.where(bottom > 0, bottom / under, 0)
                )
        if self.powers:
            with np.errstate(divide="ignore"):
                scale = np.exp2(np.ceil(np.log2(scale)))
        made = widened(_as_stored(scale, self.scale.dtype))
        made *= np.where(scales < 0, np.float32(-1), np.float32(1))
        return np.where(np.isfinite(made) & (np.abs(made) >= _TINY), made, scales)

    def _encode(self, values: Floats, wide: Floats, zeros: Floats | None) -> NDArray[Any]:
        """``values`` as codes; scales and zero points are each column's, or each row's."""
        by: Floats = np.where(wide == 0, np.float32(1), wide)
        if self.storage == "fp8":
            return to_e4m3(values / by)
        half = 1 << (self.bits - 1)
        numbers = np.rint(values / by)
        if zeros is not None:
            numbers += zeros
        return np.clip(numbers, -half, half - 1, out=numbers).astype(np.int8)

    def _numbers(self, codes: NDArray[Any], zeros: Floats | None) -> Floats:
        if self.storage == "fp8":
            found: Floats = E4M3[codes]
            return found
        numbers = codes.astype(np.float32)
        return numbers if zeros is None else numbers - zeros

    @property
    def _groups(self) -> int:
        return -(-self.shape[-1] // self.group[1])

    def _unpack(self, codes: NDArray[Any]) -> NDArray[Any]:
        return self._unpacked(codes, self.shape[-1]) if self.packed else codes

    def _unpacked(self, words: NDArray[Any], width: int) -> NDArray[np.int8]:
        found = np.ascontiguousarray(words).view(np.uint8)
        if self.bits == 4:
            found = np.stack((found & 15, found >> 4), -1).reshape(len(words), -1)
        return (found[:, :width].astype(np.int16) - (1 << (self.bits - 1))).astype(np.int8)

    def _pack(self, codes: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """As stored; bits behind the last column stay as they were ``before``."""
        if not self.packed:
            return codes
        width, filled = codes.shape[1], 32 // self.bits * before.shape[1]
        whole = np.empty((len(codes), filled), np.uint8)
        whole[:, :width] = codes.astype(np.int16) + (1 << (self.bits - 1))
        if filled > width:
            whole[:, width:] = self._unpacked(before, filled)[:, width:].astype(np.int16) + (
                1 << (self.bits - 1)
            )
        if self.bits == 4:
            whole = whole[:, 0::2] | whole[:, 1::2] << 4
        return np.ascontiguousarray(whole).view(np.int32)

    def by_row(self, of_groups: NDArray[Any], rows: int) -> NDArray[Any]:
        """[m, groups] over the ``rows`` that they stand for."""
        high = self.group[0]
        return of_groups if high == 1 else np.repeat(of_groups, high, 0)[:rows]

    def _spread(self, of_groups: NDArray[Any]) -> NDArray[Any]:
        """[n, groups] over the columns, [n, in] (or [n, 1], where a row has one group)."""
        if of_groups.shape[1] == 1:
            return of_groups
        return np.repeat(of_groups, self.group[1], 1)[:, : self.shape[-1]]

    def _grouped(self, values: Floats) -> Floats:
        """[n, in] as [rows of groups, rows of one, groups, columns of one]; zeros fill the last."""
        high, wide = self.group
        rows, groups = -(-len(values) // high), self._groups
        missing = (rows * high - len(values), groups * wide - values.shape[1])
        if any(missing):
            values = np.pad(values, ((0, missing[0]), (0, missing[1])))
        return values.reshape(rows, high, groups, wide)


def find_stored(checkpoint: Checkpoint, name: str, settings: Mapping[str, Any]) -> Stored | None:
    """The quantized weight whose codes are the tensor ``name``; None if they are none that is read here.

    ``settings`` is config.json's quantization_config. Raises KtbridgeError where codes and scale don't fit
    each other.
    """
    entry, stem = checkpoint.entry(name), name.removesuffix(".weight_packed")
    if stem != name and entry.dtype == "I32" and f"{stem}.weight_scale" in checkpoint:
        return _integers(checkpoint, entry, f"{stem}.weight", packed=True)
    if entry.dtype == "F8_E4M3" and f"{name}_scale_inv" in checkpoint:
        block = _block(settings)
        scale = _scale(checkpoint, entry, f"{name}_scale_inv")
        *stack, out, width = entry.shape if len(entry.shape) > 1 else (0, 0)
        if scale.shape != (*stack, -(-out // block[0]), -(-width // block[1])) or not width:
            raise _unfit(checkpoint, entry, scale, f"in FP8 with blocks of {block[0]} x {block[1]}")
        powers = settings.get("scale_fmt") == "ue8m0"
        return Stored("fp8", entry, scale, entry.shape, block, powers=powers)
    if entry.dtype == "I8" and f"{name}_scale" in checkpoint:
        return _integers(checkpoint, entry, name, packed=False)
    return None


def _integers(checkpoint: Checkpoint, codes: Entry, name: str, packed: bool) -> Stored:
    scale = _scale(checkpoint, codes, f"{name}_scale")
    shape, bits, other = codes.shape, 8, tuple[str, ...]()
    if f"{name}_g_idx" in checkpoint:
        raise KtbridgeError(
            f"{checkpoint.path} has {name}_g_idx: the columns that share a scale are reordered",
            f"read are {KNOWN}",
        )
    if packed:
        entry = checkpoint.entry(f"{name}_shape")
        data = checkpoint.file(checkpoint.shard(entry.name)).read(entry.start, entry.end)
        found = np.frombuffer(data, np.int64) if entry.dtype == "I64" else np.zeros(0, np.int64)
        shape = tuple(map(int, found)) if found.size == 2 else (0, 0)
        other = (entry.name,)
        bits = 4 if codes.shape[1:] == (-(-shape[1] // 8),) else 8
    group = _group(shape[1], scale.shape[-1] if len(scale.shape) == 2 else 1) if shape[1:] else 0
    words = (shape[0], -(-shape[-1] * bits // 32)) if packed else shape
    if len(shape) != 2 or not group or codes.shape != words or scale.shape[0] != shape[0]:
        raise _unfit(checkpoint, codes, scale, f"of a weight {list(shape)} in INT{bits}")
    zero = f"{name}_zero_point"
    point = checkpoint.entry(zero) if zero in checkpoint else None
    if point is not None:
        groups = -(-shape[1] // group)
        wanted = ("I32", (-(-shape[0] * bits // 32), groups)) if packed else ("I8", scale.shape)
        if (point.dtype, point.shape) != wanted:
            raise _unfit(checkpoint, codes, point, f"of a weight {list(shape)} in INT{bits}")
    return Stored(
        f"int{bits}", codes, scale, shape, (1, group), bits, packed, zero=point, other=other
    )


def _group(width: int, count: int) -> int:
    """Values that share a scale, where ``count`` scales cover a row of ``width``; 0 if none does.

    The whole row; else a power of two, as quantizers choose it; else one that divides the row.
    """
    if count == 1:
        return width
    for group in (1 << bit for bit in range(3, 31)):
        if -(-width // group) == count:
            return group
    return width // count if count and width % count == 0 else 0


def _block(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block: what config.json says, else DeepSeek-V3's."""
    said = settings.get("weight_block_size") or [128, 128]
    if (
        type(said) is not list
        or len(said) != 2
        or not all(type(size) is int and size > 0 for size in said)
    ):
        raise KtbridgeError(f"config.json: weight_block_size is {said!r:.80}", "repair config.json")
    return said[0], said[1]


def _scale(checkpoint: Checkpoint, weight: Entry, name: str) -> Entry:
    entry = checkpoint.entry(name)
    if entry.dtype not in SCALES or not entry.shape:
        raise _unfit(checkpoint, weight, entry, f"(read are scales in {', '.join(SCALES)})")
    return entry


def _unfit(checkpoint: Checkpoint, weight: Entry, scale: Entry, storage: str) -> KtbridgeError:
    return KtbridgeError(
        f"{weight.name} {list(weight.shape)} of {checkpoint.path} and its scale {scale.name} "
        f"{scale.dtype} {list(scale.shape)} don't fit each other {storage}",
        f"read are {KNOWN}",
    )


def _as_stored(scale: Floats, dtype: str) -> NDArray[Any]:
    """Scales rounded to nearest even as BF16 (its bits), F16 or F32."""
    if dtype == "BF16":
        return to_bf16(scale.astype(np.float32))
    with np.errstate(over="ignore"):  # looked at by the caller
        return scale.astype(np.float16 if dtype == "F16" else np.float32)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """Finite float32 rounded to nearest even as float8 e4m3fn; beyond ±448 it is that."""
    bits = np.minimum(np.abs(values), np.float32(_LARGEST)).view(np.uint32)
    # Three bits of mantissa are kept, and the exponent's bias goes from 127 to 7.
    normal = ((bits + (0x7FFFF + (bits >> 20 & 1))) >> 20).astype(np.int32) - (120 << 3)
    small = np.rint(bits.view(np.float32) * np.float32(512)).astype(np.int32)  # in units of 2**-9
    code = np.where(bits < 0x3C800000, small, normal)  # 2**-6, the smallest normal number
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _e4m3() -> Floats:
    """The 256 values of OCP's float8 e4m3fn (bias 7, no infinity; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent.astype(float) - 10)
    )
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
_E2M1_STEPS = np.array([0.5, 0.5, 0.5, 0.5, 1, 1, 2, 2] * 2, np.float32)
MXFP4_GROUP = 32


def decode_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> tuple[Floats, Floats]:
    """Return values and the distances between codes, [n, in], of MXFP4 as gpt-oss stores it.

    ``blocks`` [n, in / 2]: two codes a byte, the lower first; ``scales`` [n, in / 32]: exponents, biased by
    127. OCP Microscaling Formats (MX) Specification 1.0.
    """
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(len(blocks), -1)
    powers = np.exp2(scales.astype(np.float32) - 127)
    wide = np.repeat(powers, MXFP4_GROUP, 1)[:, : codes.shape[1]]
    return E2M1[codes] * wide, _E2M1_STEPS[codes] * wide
