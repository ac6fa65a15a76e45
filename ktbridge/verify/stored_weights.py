"""Weights of a checkpoint as blocks of float32 rows, wherever and however they are stored; numpy alone.

A *view* is one matrix [out, in] of a model: of a module, or of one projection of one routed expert. It may be
a tensor of its own or a part of a fused one, transposed, interleaved, in another precision or quantised, so
that the same view of two checkpoints is compared block by block.

==================  =============================================  ============================
stored              a view's row j is                              read
==================  =============================================  ============================
[out, in]           line first + j                                 rows as they are asked for
fused [E, 2I, H]    line first + j of matrix e                     the same
interleaved         line 2j (gate) or 2j + 1 (up)                  the whole matrix, once
transposed [in, o]  column first + j, or 2j, 2j + 1                the whole matrix, once
==================  =============================================  ============================

Files are read through buffers, never mapped: memory is a block, or one expert where it lies transposed.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.blocks import BITS, as_float32
from ktbridge.adapter.storages import KNOWN, Floats, Stored, decode_mxfp4, find_stored
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry, ModelConfig
from ktbridge.model.locate import ExpertHome, module_weights, stored_as

_HELD = 2  # whole matrices a thread keeps: the base's and the merged one's
# 2 ** -bits of mantissa, and the least distance between two values.
_PRECISION = {
    "BF16": (2.0**-7, 2.0**-133),
    "F16": (2.0**-10, 2.0**-24),
    "F32": (2.0**-23, 2.0**-149),
}
_EXPONENT = np.uint32(0x7F800000)
SIDE = ("_scale_inv", "_scale", "_shape", "_zero_point", "_scales", "_g_idx")
"""Ends of the names of tensors that belong to a quantised weight."""


class WeightLines(NamedTuple):
    """Float32 values [n, in], and the distance from each to the next value that could be stored.

    ``steps`` are [n, in], or [n, 1] where a row has one.
    """

    values: Floats
    steps: Floats


@dataclass(frozen=True)
class CheckpointMatrix:
    """One matrix of a tensor, as it lies: number ``index`` of ``count``, [rows, columns].

    ``storage``: "BF16", "F16", "F32", "FP8", "INT8", "INT4", "MXFP4". ``entry``: values or codes.
    ``scale``: of MXFP4. ``stored``: of what ``ktbridge.adapter.storages`` reads.
    """

    checkpoint: Checkpoint
    entry: Entry
    storage: str
    index: int
    count: int
    rows: int
    columns: int
    stored: Stored | None = None
    scale: Entry | None = None

    @property
    def is_plain(self) -> bool:
        return self.entry.dtype in BITS

    def raw(self, first: int, last: int) -> memoryview:
        """The bytes of some lines: of values, or of codes."""
        return self._bytes(self.entry, self.rows, first, last)

    def lines(self, first: int, last: int) -> WeightLines:
        """WeightLines ``first`` to ``last``, dequantised."""
        if self.is_plain:
            values = as_float32(self.raw(first, last), self.entry.dtype).reshape(-1, self.columns)
            return WeightLines(values, steps_of(values, self.entry.dtype))
        if self.scale is not None:
            blocks = np.frombuffer(self.raw(first, last), np.uint8).reshape(last - first, -1)
            exponents = np.frombuffer(self._bytes(self.scale, self.rows, first, last), np.uint8)
            return WeightLines(*decode_mxfp4(blocks, exponents.reshape(last - first, -1)))
        stored = self.stored
        assert stored is not None
        codes = stored.array(stored.codes, self.raw(first, last))
        high = stored.group[0]
        above, below = first // high, -(-last // high)
        scales = stored.array(
            stored.scale, self._bytes(stored.scale, stored.scale_rows, above, below)
        )
        begin = first - above * high
        by = stored.by_row(scales, (below - above) * high)[begin : begin + last - first]
        zeros = None
        if stored.zero is not None:
            zeros = stored.zeros(stored.array(stored.zero, self._whole(stored.zero)))[first:last]
        return WeightLines(stored.decode(codes, by, zeros), stored.steps(codes, by))

    def _whole(self, entry: Entry) -> memoryview:
        file = self.checkpoint.file(self.checkpoint.shard(entry.name))
        return file.read(entry.start, entry.end)

    def _bytes(self, entry: Entry, rows: int, first: int, last: int) -> memoryview:
        """Rows of the matrix's part of a tensor that has ``rows`` of a matrix."""
        width = entry.nbytes // (self.count * rows)
        start = entry.start + (self.index * rows + first) * width
        file = self.checkpoint.file(self.checkpoint.shard(entry.name))
        return file.read(start, start + (last - first) * width)


@dataclass(frozen=True)
class View:
    """A matrix [rows, columns] of a model: row j is line ``first + j * step`` of what is stored.

    ``turned``: stored [in, out], so that it is a column of that number.
    """

    matrix: CheckpointMatrix
    rows: int
    first: int = 0
    step: int = 1
    turned: bool = False

    @property
    def columns(self) -> int:
        return self.matrix.rows if self.turned else self.matrix.columns

    @property
    def name(self) -> str:
        return self.matrix.entry.name

    def read(self, first: int, last: int) -> WeightLines:
        """Rows ``first`` to ``last`` as float32."""
        matrix = self.matrix
        if not self.turned and self.step == 1:
            return matrix.lines(self.first + first, self.first + last)
        picked = slice(
            self.first + first * self.step, self.first + (last - 1) * self.step + 1, self.step
        )
        if matrix.is_plain:  # narrow until it is picked
            whole = _whole_raw(matrix)
            part = np.ascontiguousarray(whole[:, picked].T if self.turned else whole[picked])
            values = as_float32(part.data.cast("B"), matrix.entry.dtype).reshape(part.shape)
            return WeightLines(values, steps_of(values, matrix.entry.dtype))
        values, steps = _whole_lines(matrix)
        if not self.turned:
            return WeightLines(values[picked], steps[picked])
        wide = np.broadcast_to(steps, values.shape)
        return WeightLines(*(np.ascontiguousarray(each[:, picked].T) for each in (values, wide)))

    def same_bytes(self, other: View, first: int, last: int) -> bool | None:
        """Return whether the rows have the same bytes; None if they are stored in another way."""
        if self.turned or other.turned or self.step != 1 or other.step != 1:
            return None
        one, two = self.matrix, other.matrix
        if not one.is_plain or one.entry.dtype != two.entry.dtype or one.columns != two.columns:
            return None
        mine = one.raw(self.first + first, self.first + last)
        return mine == two.raw(other.first + first, other.first + last)


def steps_of(values: Floats, dtype: str) -> Floats:
    """Distances to the next larger value of BF16, F16 or F32, [n, in]."""
    relative, least = _PRECISION[dtype]
    powers = (values.view(np.uint32) & _EXPONENT).view(np.float32)
    powers *= np.float32(relative)
    if dtype == "F16":
        np.maximum(powers, np.float32(least), out=powers)
    return powers


def open_matrix(
    checkpoint: Checkpoint, name: str, settings: Mapping[str, object], index: int = 0
) -> CheckpointMatrix:
    """Return a matrix of the tensor ``name``; one that isn't 2-D or 3-D is [first axis, all others].

    ``settings``: config.json's quantization_config. Raises KtbridgeError for a storage that isn't read.
    """
    entry = checkpoint.entry(name)
    if entry.dtype in BITS:
        count, rows, columns = _sizes(entry.shape)
        return CheckpointMatrix(checkpoint, entry, entry.dtype, index, count, rows, columns)
    other = f"{name.removesuffix('_blocks')}_scales"
    if name.endswith("_blocks") and other in checkpoint and entry.dtype == "U8":
        scale = checkpoint.entry(other)
        count, rows = (
            (entry.shape[0], entry.shape[1]) if len(entry.shape) > 2 else (1, entry.shape[0])
        )
        columns = 2 * entry.nbytes // (count * rows)
        return CheckpointMatrix(
            checkpoint, entry, "MXFP4", index, count, rows, columns, scale=scale
        )
    stored = find_stored(checkpoint, name, settings)
    if stored is None:
        raise KtbridgeError(
            f"{name} of {checkpoint.path} is {entry.dtype}, and read are BF16, F16, F32, MXFP4, {KNOWN}",
            "write it in bfloat16 first, with scripts/dequantize_checkpoint.py or the tool that quantised it",
        )
    count, rows, columns = _sizes(stored.shape)
    return CheckpointMatrix(
        checkpoint, entry, stored.storage.upper(), index, count, rows, columns, stored
    )


def find_tensor(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the tensor of another checkpoint that holds what ``name`` of a base does; None if none does."""
    if name in checkpoint:
        return name
    stem = name
    for suffix in (".weight_packed", "_packed", ".weight", "_blocks"):
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            break
    found = module_weights(checkpoint, stem)
    return found[0] if len(found) == 1 else None


class ExpertViews:
    """Views of the routed experts of one layer: by projection ("gate", "up", "down") and expert."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, home: ExpertHome) -> None:
        self._checkpoint, self._settings, self._home = checkpoint, config.quantization, home
        self.turned = False
        self._inner = config.intermediate_size
        if not home.names:
            both, down = (self._open(home.stem(name, 0), 0) for name in ("gate", "down"))
            # Both shapes together tell which way round they are, even where 2 I = H or I = H.
            straight = (both.rows, both.columns) == (2 * down.columns, down.rows)
            turned = (both.columns, both.rows) == (2 * down.rows, down.columns)
            coded = both.storage == "MXFP4"
            if not (straight or turned):
                raise KtbridgeError(
                    f"{both.entry.name} {list(both.entry.shape)} and {down.entry.name} "
                    f"{list(down.entry.shape)} of {checkpoint.path} don't fit each other",
                    "check that the files belong together",
                )
            self.turned = turned and not (straight and coded)
            self._inner = down.rows if self.turned else down.columns

    @property
    def names(self) -> tuple[str, ...]:
        """Return what the names of the experts' tensors begin with."""
        return self._home.prefixes

    @property
    def is_fused(self) -> bool:
        return not self._home.names

    @property
    def interleaved(self) -> bool:
        """Return whether gate and up alternate in what is stored."""
        return self._home.interleaved and self.is_fused

    def view(self, projection: str, expert: int) -> View:
        """Raises KtbridgeError where the checkpoint lacks it or stores it in a way that isn't read."""
        matrix = self._open(self._home.stem(projection, expert), expert if self.is_fused else 0)
        if self._home.names:
            return View(matrix, matrix.rows)
        if projection == "down":
            return View(matrix, matrix.columns if self.turned else matrix.rows, turned=self.turned)
        if expert >= matrix.count:
            raise KtbridgeError(
                f"{matrix.entry.name} of {self._checkpoint.path} has no expert {expert}"
            )
        number = ("gate", "up").index(projection)
        if self.interleaved:
            return View(matrix, self._inner, number, 2, self.turned)
        return View(matrix, self._inner, number * self._inner, 1, self.turned)

    def _open(self, stem: str, index: int) -> CheckpointMatrix:
        name = stored_as(self._checkpoint, stem)
        if name is None:
            raise KtbridgeError(f"{self._checkpoint.path} has no {stem}")
        return open_matrix(self._checkpoint, name, self._settings, index)


def whole_view(matrix: CheckpointMatrix) -> View:
    """Return all of a tensor as one matrix."""
    if matrix.count > 1:
        matrix = replace(matrix, count=1, rows=matrix.count * matrix.rows)
    return View(matrix, matrix.rows)


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The number of matrices, and rows and columns of each."""
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return 1, shape[0], math.prod(shape[1:])


_local = threading.local()


def _whole_raw(matrix: CheckpointMatrix) -> NDArray[np.generic]:
    """All values of a plain matrix, as stored (BF16 as uint16)."""
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[matrix.entry.dtype]
    held = _holder(matrix, "raw")
    if "raw" not in held:
        data = np.frombuffer(matrix.raw(0, matrix.rows), kind)
        held["raw"] = data.reshape(matrix.rows, matrix.columns)
    return held["raw"]


def _whole_lines(matrix: CheckpointMatrix) -> WeightLines:
    held = _holder(matrix, "lines")
    if "values" not in held:
        held["values"], held["steps"] = matrix.lines(0, matrix.rows)
    return WeightLines(
        held["values"].astype(np.float32, copy=False), held["steps"].astype(np.float32, copy=False)
    )


def _holder(matrix: CheckpointMatrix, kind: str) -> dict[str, NDArray[np.generic]]:
    """This thread's store for a whole matrix; the oldest goes when there are too many."""
    held: OrderedDict[tuple[str, str, int, str], dict[str, NDArray[np.generic]]]
    if not hasattr(_local, "held"):
        _local.held = OrderedDict()
    held = _local.held
    key = (str(matrix.checkpoint.path), matrix.entry.name, matrix.index, kind)
    if key not in held:
        held[key] = {}
        while len(held) > _HELD:
            held.popitem(last=False)
    held.move_to_end(key)
    return held[key]


def release_held() -> None:
    """Let go of the whole matrices that this thread keeps."""
    if hasattr(_local, "held"):
        _local.held.clear()
