"""Weights as checkpoints store them: what is stored means, and the same storage with other values.

===========  ===================================  ==================================================
storage      codes                                scale
===========  ===================================  ==================================================
plain        BF16, F16 or F32, of any shape       none
block FP8    ``.weight`` F8_E4M3 [..., out, in]   ``.weight_scale_inv``, one a block (128 x 128, or
                                                  config.json's ``weight_block_size``)
INT8         ``.weight`` I8 [out, in]             ``.weight_scale`` [out], [out, 1] or [out, in/group]
INT8, INT4   ``.weight_packed`` I32 [out, words]  the same, beside ``.weight_shape`` I64 [2]
MXFP4        ``_blocks`` U8 [..., out, in/32, 16] ``_scales`` U8 [..., out, in/32], 2 ** (it - 127)
===========  ===================================  ==================================================

value = (code - zero) · scale in float32. INT8 and INT4 are compressed-tensors' "int-quantized" and
"pack-quantized": a word has eight values of four bits, or four of eight, from its lowest bits up, each plus
half of their range. ``.weight_zero_point`` is there where they are asymmetric: I8 like the scale, or packed
along the rows. https://github.com/neuralmagic/compressed-tensors. MXFP4 is gpt-oss's: two codes a byte, the
lower half first (OCP Microscaling Formats 1.0).

A further storage is one class and one branch of ``find_storage``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.blocks import BITS
from ktbridge.adapter.floats import (
    E2M1,
    E2M1_STEPS,
    E4M3,
    E4M3_STEPS,
    LARGEST_E4M3,
    MXFP4_GROUP,
    Floats,
    to_bf16,
    to_e4m3,
    widened,
)
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry
from ktbridge.model.tensor import as_float32

KNOWN = "block FP8, and INT8 and INT4 as compressed-tensors stores them"
NUMPY_TYPES: Mapping[str, type[np.generic]] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F8_E4M3": np.uint8, "I8": np.int8,
    "I32": np.int32, "I64": np.int64, "U8": np.uint8,
}  # fmt: skip
"""Types by which numpy holds values or codes; those that it doesn't have as bits."""
_TINY = np.finfo(np.float32).tiny  # no scale is denormal
_EXPONENT = np.uint32(0x7F800000)
# 2 ** -bits of mantissa, and the least distance between two values.
_PRECISION = {"BF16": (2.0**-7, 2.0**-133), "F16": (2.0**-10, 2.0**-24), "F32": (2.0**-23, 2.0**-149)}


class Rows(NamedTuple):
    """Rows of a stored weight: ``codes`` [n, ...], ``scales`` [m, groups], ``zeros`` [n, groups].

    ``at``: the row of ``scales`` for each row; None if they correspond.
    """

    codes: NDArray[Any]
    scales: Floats
    zeros: Floats | None = None
    at: NDArray[np.intp] | None = None

    def by_row(self, of_blocks: NDArray[Any]) -> NDArray[Any]:
        """[m, groups] over the rows that they stand for, [n, groups]."""
        return of_blocks if self.at is None else of_blocks[self.at]


@dataclass(frozen=True)
class Storage(ABC):
    """One weight [..., out, in] of a checkpoint; rows are counted over all of its matrices.

    ``codes``: the tensor of its values or codes. ``shape`` is the weight's, ``group`` the rows and columns
    that share a scale. ``others``: names of further tensors that belong to it.
    """

    codes: Entry
    shape: tuple[int, ...]
    scale: Entry | None = None
    group: tuple[int, int] = (1, 1)
    zero: Entry | None = None
    others: tuple[str, ...] = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """The storage's name: "BF16", "FP8", "INT4"."""

    @abstractmethod
    def decode(self, rows: Rows) -> Floats:
        """Return rows as float32 [n, in]."""

    @abstractmethod
    def steps(self, rows: Rows) -> Floats:
        """Return the distances to the next value that has a code: [n, in] or [n, 1]."""

    @property
    def name(self) -> str:
        """The weight's name, as it would be unquantized."""
        return self.codes.name.removesuffix("_packed").removesuffix("_blocks")

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it consists of."""
        own = (entry.name for entry in (self.codes, self.scale, self.zero) if entry is not None)
        return (*own, *self.others)

    @property
    def rows(self) -> int:
        """Rows of all matrices."""
        return math.prod(self.shape[:-1])

    def read(self, checkpoint: Checkpoint, first: int, last: int) -> Rows:
        """Read rows ``first`` to ``last``."""
        codes = self._array(checkpoint, self.codes, *self.place_of_codes(first, last))
        if self.scale is None:
            return Rows(codes, np.empty((0, 0), np.float32))
        data = _bytes(checkpoint, self.scale, *self.place_of_scales(first, last))
        scales, at = self._scales(data), None
        if self.group[0] > 1:
            at = np.array([self._scale_row(row) for row in range(first, last)])
            at -= at[0]
        return Rows(codes, scales, self._zeros(checkpoint, first, last), at)

    def values(self, checkpoint: Checkpoint, first: int, last: int) -> Floats:
        """Read rows ``first`` to ``last`` as float32 [n, in]."""
        return self.decode(self.read(checkpoint, first, last))

    def place_of_codes(self, first: int, last: int) -> tuple[int, int]:
        """The bytes of some rows' codes in their shard."""
        return _place(self.codes, self.rows, first, last)

    def place_of_scales(self, first: int, last: int) -> tuple[int, int]:
        """The bytes of some rows' scales in their shard."""
        assert self.scale is not None
        count = self._scale_row(self.rows - 1) + 1
        return _place(self.scale, count, self._scale_row(first), self._scale_row(last - 1) + 1)

    def _scale_row(self, row: int) -> int:
        out, high = self.shape[-2], self.group[0]
        return row // out * -(-out // high) + row % out // high

    def _scales(self, data: memoryview) -> Floats:
        assert self.scale is not None
        return as_float32(data, self.scale.dtype).reshape(-1, self._groups)

    def _zeros(self, checkpoint: Checkpoint, first: int, last: int) -> Floats | None:
        return None

    def _array(self, checkpoint: Checkpoint, entry: Entry, start: int, end: int) -> NDArray[Any]:
        data = _bytes(checkpoint, entry, start, end)
        return np.frombuffer(data, NUMPY_TYPES[entry.dtype]).reshape(-1, entry.shape[-1])

    @property
    def _groups(self) -> int:
        return -(-self.shape[-1] // self.group[1])

    def _spread(self, of_groups: NDArray[Any]) -> NDArray[Any]:
        """[n, groups] over the columns, [n, in] (or [n, 1], where a row has one group)."""
        if of_groups.shape[1] == 1:
            return of_groups
        return np.repeat(of_groups, self.group[1], 1)[:, : self.shape[-1]]


@dataclass(frozen=True)
class PlainStorage(Storage):
    """BF16, F16 or F32, of any shape: [first axis, all others]; what has no axis is one row."""

    @property
    def label(self) -> str:
        return self.codes.dtype

    @property
    def bits(self) -> np.dtype[Any]:
        """The type of the bit patterns."""
        return np.dtype(BITS[self.codes.dtype])

    def decode(self, rows: Rows) -> Floats:
        return self.widen(rows.codes, np.empty(rows.codes.shape, np.float32))

    def steps(self, rows: Rows) -> Floats:
        values = self.decode(rows)
        return self.steps_of(values, np.empty_like(values))

    def widen(self, bits: NDArray[Any], out: Floats) -> Floats:
        """Return what ``bits`` mean, in ``out`` where it isn't the same memory anyway."""
        return widened(bits.view(NUMPY_TYPES[self.codes.dtype]), out)

    def steps_of(self, values: Floats, out: Floats) -> Floats:
        """Return the distances from ``values`` to the next larger value, in ``out``."""
        relative, least = _PRECISION[self.codes.dtype]
        np.bitwise_and(values.view(np.uint32), _EXPONENT, out=out.view(np.uint32))
        out *= np.float32(relative)
        if self.codes.dtype == "F16":
            np.maximum(out, np.float32(least), out=out)
        return out

    def _array(self, checkpoint: Checkpoint, entry: Entry, start: int, end: int) -> NDArray[Any]:
        data = _bytes(checkpoint, entry, start, end)
        return np.frombuffer(data, self.bits).reshape(-1, self.shape[-1])


@dataclass(frozen=True)
class QuantizedStorage(Storage):
    """Codes and scales that merging can write: ``encode`` makes new ones of values."""

    def decode(self, rows: Rows) -> Floats:
        """Return rows as float32 [n, in]."""
        middle = None if rows.zeros is None else self._spread(rows.zeros)
        scales = self._spread(rows.by_row(rows.scales))
        return self._numbers(self._unpack(rows.codes), middle) * scales

    def encode(self, values: Floats, before: Rows) -> tuple[Rows, Floats]:
        """Return ``values`` [n, in] as codes and scales, and what these mean; ``before`` is stored now.

        Rows begin with a block, and zero points stay. Of each group's scale now, and the smallest with which
        nothing is clipped, that is taken with which the squared error is smaller, the present one if they
        are equal: a group that did not change keeps its bits.
        """
        codes, scales, zeros, _ = before
        fitting = self._fitting(values, zeros, scales)
        middle = None if zeros is None else self._spread(zeros)
        tried = []
        for by in (scales, fitting):
            wide = self._spread(before.by_row(by))
            made = self._encode(values, np.where(wide == 0, np.float32(1), wide), middle)
            meant = self._numbers(made, middle) * wide
            error = self._grouped(np.square(meant - values)).sum((1, 3))
            tried.append((made, meant, error))
        (kept, meant, error), (anew, meant_anew, error_anew) = tried
        better = error_anew < error
        mask = self._spread(before.by_row(better))
        made = np.where(mask, anew, self._unmoved(kept, codes))
        chosen = np.where(better, fitting, scales)
        new = before._replace(codes=self._pack(made, codes), scales=chosen)
        return new, np.where(mask, meant_anew, meant)

    def scale_bytes(self, scales: Floats) -> memoryview:
        """Return scales that ``read`` or ``encode`` gave, as stored."""
        return np.ascontiguousarray(self._stored_scales(scales)).data.cast("B")

    @abstractmethod
    def _numbers(self, codes: NDArray[Any], zeros: Floats | None) -> Floats:
        """Values of codes, one by one, in units of the scale."""

    @abstractmethod
    def _encode(self, values: Floats, scales: Floats, zeros: Floats | None) -> NDArray[Any]:
        """``values`` as codes; scales and zero points are each column's, or each row's."""

    @abstractmethod
    def _fit(self, top: Floats, bottom: Floats, zeros: Floats | None) -> Floats:
        """The smallest scales for values from -``bottom`` to ``top``."""

    def _unpack(self, codes: NDArray[Any]) -> NDArray[Any]:
        return codes

    def _pack(self, codes: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        return codes

    def _unmoved(self, made: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """Codes that mean the same as those ``before`` stay, where a value has several."""
        return made

    def _fitting(self, values: Floats, zeros: Floats | None, scales: Floats) -> Floats:
        """The smallest scale of each group that clips nothing, of the present one's sign and dtype."""
        grouped = self._grouped(values)
        top, bottom = np.maximum(grouped.max((1, 3)), 0), np.maximum(-grouped.min((1, 3)), 0)
        top, bottom = np.where(scales < 0, (bottom, top), (top, bottom))
        made = widened(self._stored_scales(self._fit(top, bottom, zeros)))
        made *= np.where(scales < 0, np.float32(-1), np.float32(1))
        return np.where(np.isfinite(made) & (np.abs(made) >= _TINY), made, scales)

    def _stored_scales(self, scales: Floats) -> NDArray[Any]:
        """Scales rounded to nearest even as BF16 (its bits), F16 or F32."""
        assert self.scale is not None
        if self.scale.dtype == "BF16":
            return to_bf16(scales.astype(np.float32))
        with np.errstate(over="ignore"):  # looked at by the caller
            return scales.astype(np.float16 if self.scale.dtype == "F16" else np.float32)

    def _grouped(self, values: Floats) -> Floats:
        """[n, in] as [rows of groups, rows of one, groups, columns of one]; zeros fill the last."""
        high, wide = self.group
        rows, groups = -(-len(values) // high), self._groups
        missing = (rows * high - len(values), groups * wide - values.shape[1])
        if any(missing):
            values = np.pad(values, ((0, missing[0]), (0, missing[1])))
        return values.reshape(rows, high, groups, wide)


@dataclass(frozen=True)
class Fp8Storage(QuantizedStorage):
    """Float8 e4m3fn in blocks; ``powers``: scales are powers of two."""

    label: ClassVar[str] = "FP8"
    powers: bool = False

    def steps(self, rows: Rows) -> Floats:
        return E4M3_STEPS[rows.codes] * np.abs(self._spread(rows.by_row(rows.scales)))

    def _numbers(self, codes: NDArray[Any], zeros: Floats | None) -> Floats:
        found: Floats = E4M3[codes]
        return found

    def _encode(self, values: Floats, scales: Floats, zeros: Floats | None) -> NDArray[Any]:
        return to_e4m3(values / scales)

    def _unmoved(self, made: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        return np.where(E4M3[made] == E4M3[before], before, made)  # it has two zeros

    def _fit(self, top: Floats, bottom: Floats, zeros: Floats | None) -> Floats:
        scale: Floats = np.maximum(top, bottom) / np.float32(LARGEST_E4M3)
        if self.powers:
            with np.errstate(divide="ignore"):
                scale = np.exp2(np.ceil(np.log2(scale)))
        return scale


@dataclass(frozen=True)
class IntegerStorage(QuantizedStorage):
    """Integers of ``bits``, from the zero point or from 0; ``packed`` into 32-bit words."""

    bits: int = 8
    packed: bool = False

    @property
    def label(self) -> str:
        return f"INT{self.bits}"

    def steps(self, rows: Rows) -> Floats:
        return np.abs(self._spread(rows.by_row(rows.scales)))

    @property
    def _half(self) -> int:
        return 1 << (self.bits - 1)

    def _zeros(self, checkpoint: Checkpoint, first: int, last: int) -> Floats | None:
        entry = self.zero
        if entry is None:
            return None
        each = 32 // self.bits if self.packed else 1  # rows of a row of words
        above, below = first // each, -(-last // each)
        place = _place(entry, -(-self.rows // each), above, below)
        stored = self._array(checkpoint, entry, *place)
        if self.packed:
            words = np.ascontiguousarray(stored.T)
            stored = self._unpacked(words, each * (below - above)).T
        return stored[first - above * each : last - above * each].astype(np.float32)

    def _numbers(self, codes: NDArray[Any], zeros: Floats | None) -> Floats:
        numbers = codes.astype(np.float32)
        return numbers if zeros is None else numbers - zeros

    def _encode(self, values: Floats, scales: Floats, zeros: Floats | None) -> NDArray[Any]:
        numbers = np.rint(values / scales)
        if zeros is not None:
            numbers += zeros
        return np.clip(numbers, -self._half, self._half - 1, out=numbers).astype(np.int8)

    def _fit(self, top: Floats, bottom: Floats, zeros: Floats | None) -> Floats:
        half = np.float32(self._half)
        middle = np.float32(0) if zeros is None else zeros  # a row's: it has groups of its own
        over, under = half - 1 - middle, half + middle
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.maximum(np.where(top > 0, top / over, 0), np.where(bottom > 0, bottom / under, 0))

    def _unpack(self, codes: NDArray[Any]) -> NDArray[Any]:
        return self._unpacked(codes, self.shape[-1]) if self.packed else codes

    def _unpacked(self, words: NDArray[Any], width: int) -> NDArray[np.int8]:
        found = np.ascontiguousarray(words).view(np.uint8)
        if self.bits == 4:
            found = np.stack((found & 15, found >> 4), -1).reshape(len(words), -1)
        return (found[:, :width].astype(np.int16) - self._half).astype(np.int8)

    def _pack(self, codes: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """As stored; bits behind the last column stay as they were ``before``."""
        if not self.packed:
            return codes
        width, filled = codes.shape[1], 32 // self.bits * before.shape[1]
        whole = np.empty((len(codes), filled), np.uint8)
        whole[:, :width] = codes.astype(np.int16) + self._half
        if filled > width:
            behind = self._unpacked(before, filled)[:, width:]
            whole[:, width:] = behind.astype(np.int16) + self._half
        if self.bits == 4:
            whole = whole[:, 0::2] | whole[:, 1::2] << 4
        return np.ascontiguousarray(whole).view(np.int32)


@dataclass(frozen=True)
class Mxfp4Storage(Storage):
    """Float4 e2m1 in groups of 32; it is read, not written."""

    label: ClassVar[str] = "MXFP4"

    def decode(self, rows: Rows) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):  # as the scales are
            found: Floats = E2M1[self._codes(rows)] * self._spread(rows.scales)
        return found

    def steps(self, rows: Rows) -> Floats:
        found: Floats = E2M1_STEPS[self._codes(rows)] * self._spread(rows.scales)
        return found

    def read_columns(self, checkpoint: Checkpoint, matrix: int, group: int) -> Rows:
        """Read the columns of one group, in all rows of a matrix; they are mapped."""
        assert self.scale is not None
        of_matrix = (-1, self.shape[-2], self._groups)
        codes, scales = (
            np.frombuffer(checkpoint.tensor(entry.name).data, np.uint8).reshape(*of_matrix, each)
            for entry, each in ((self.codes, MXFP4_GROUP // 2), (self.scale, 1))
        )
        return Rows(codes[matrix, :, group], _e8m0(scales[matrix, :, group]))

    def _codes(self, rows: Rows) -> NDArray[np.uint8]:
        packed = rows.codes
        return np.stack((packed & 15, packed >> 4), -1).reshape(len(packed), -1)

    def _scales(self, data: memoryview) -> Floats:
        return _e8m0(np.frombuffer(data, np.uint8).reshape(-1, self._groups))

    def _array(self, checkpoint: Checkpoint, entry: Entry, start: int, end: int) -> NDArray[Any]:
        data = _bytes(checkpoint, entry, start, end)
        return np.frombuffer(data, np.uint8).reshape(-1, self.shape[-1] // 2)


def _e8m0(powers: NDArray[np.uint8]) -> Floats:
    with np.errstate(over="ignore"):
        scales = np.exp2(powers.astype(np.float32) - 127)
    return np.where(powers == 255, np.float32(np.nan), scales)


def find_storage(checkpoint: Checkpoint, name: str, settings: Mapping[str, object]) -> Storage | None:
    """Return the weight whose values or codes are the tensor ``name``; None if it is none that is read.

    ``settings`` is config.json's quantization_config. Raises KtbridgeError where codes and scale don't fit
    each other.
    """
    entry, stem = checkpoint.entry(name), name.removesuffix(".weight_packed")
    if entry.dtype in BITS:
        return PlainStorage(entry, entry.shape)
    if entry.dtype == "U8" and name.endswith("_blocks"):
        scales = f"{name.removesuffix('_blocks')}_scales"
        return _mxfp4(checkpoint, entry, scales) if scales in checkpoint else None
    if entry.dtype == "I32" and stem != name and f"{stem}.weight_scale" in checkpoint:
        return _integers(checkpoint, entry, f"{stem}.weight", packed=True)
    if entry.dtype == "I8" and f"{name}_scale" in checkpoint:
        return _integers(checkpoint, entry, name, packed=False)
    if entry.dtype == "F8_E4M3" and f"{name}_scale_inv" in checkpoint:
        return _fp8(checkpoint, entry, f"{name}_scale_inv", settings)
    return None


def _mxfp4(checkpoint: Checkpoint, blocks: Entry, name: str) -> Storage:
    scale = checkpoint.entry(name)
    forms = ((*scale.shape, 16), (*scale.shape[:-1], 16 * scale.shape[-1])) if scale.shape else ()
    if scale.dtype != "U8" or len(scale.shape) < 2 or blocks.shape not in forms:
        raise _unfit(checkpoint, blocks, scale, "in MXFP4 with groups of 32")
    shape = (*scale.shape[:-1], MXFP4_GROUP * scale.shape[-1])
    return Mxfp4Storage(blocks, shape, scale, (1, MXFP4_GROUP))


def _fp8(checkpoint: Checkpoint, entry: Entry, name: str, settings: Mapping[str, object]) -> Storage:
    block = _block(settings)
    scale = _scale(checkpoint, entry, name)
    *stack, out, width = entry.shape if len(entry.shape) > 1 else (0, 0)
    if scale.shape != (*stack, -(-out // block[0]), -(-width // block[1])) or not width:
        raise _unfit(checkpoint, entry, scale, f"in FP8 with blocks of {block[0]} x {block[1]}")
    powers = settings.get("scale_fmt") == "ue8m0"
    return Fp8Storage(entry, entry.shape, scale, block, powers=powers)


def _integers(checkpoint: Checkpoint, codes: Entry, name: str, packed: bool) -> Storage:
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
    return IntegerStorage(codes, shape, scale, (1, group), point, other, bits, packed)


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


def _block(settings: Mapping[str, object]) -> tuple[int, int]:
    """Rows and columns of an FP8 block: what config.json says, else DeepSeek-V3's."""
    said = settings.get("weight_block_size") or [128, 128]
    if type(said) is not list or len(said) != 2 or not all(type(size) is int and size > 0 for size in said):
        raise KtbridgeError(f"config.json: weight_block_size is {said!r:.80}", "repair config.json")
    return said[0], said[1]


def _scale(checkpoint: Checkpoint, weight: Entry, name: str) -> Entry:
    entry = checkpoint.entry(name)
    if entry.dtype not in BITS or not entry.shape:
        raise _unfit(checkpoint, weight, entry, f"(read are scales in {', '.join(BITS)})")
    return entry


def _unfit(checkpoint: Checkpoint, weight: Entry, scale: Entry, storage: str) -> KtbridgeError:
    return KtbridgeError(
        f"{weight.name} {list(weight.shape)} of {checkpoint.path} and its scale {scale.name} "
        f"{scale.dtype} {list(scale.shape)} don't fit each other {storage}",
        f"read are {KNOWN}",
    )


def _place(entry: Entry, count: int, first: int, last: int) -> tuple[int, int]:
    """The bytes of some of ``count`` equal rows of a tensor."""
    width = entry.nbytes // count
    return entry.start + first * width, entry.start + last * width


def _bytes(checkpoint: Checkpoint, entry: Entry, start: int, end: int) -> memoryview:
    return checkpoint.file(checkpoint.shard(entry.name)).read(start, end)
