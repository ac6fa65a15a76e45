"""Weights of a checkpoint as blocks of float32 rows, wherever and however they are stored; numpy alone.

A *view* is one matrix [out, in] of a model: of a module, or of one projection of one routed expert. It may be
a tensor of its own or a part of a fused one, transposed, interleaved, in another precision or quantized, so
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
Fresh memory costs a page fault every 4 KB, which takes longer than the sums over it, so a thread uses its own
again: what is read is valid until it reads the next rows.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ktbridge.adapter.floats import Floats
from ktbridge.adapter.storage import KNOWN, Mxfp4Storage, PlainStorage, Storage, find_storage
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry, ModelConfig, TensorFile
from ktbridge.model.locate import ExpertHome, module_weights, stored_as
from ktbridge.verify.merge_sums import ALLOWED, ALLOWED_PLAIN, RowBlock

BLOCK = 1 << 17
"""Values at a time, in some six arrays that fit a core's cache."""
_HELD = 2  # whole matrices a thread keeps: the base's and the merged one's
SIDE = ("_scale_inv", "_scale", "_shape", "_zero_point", "_scales", "_g_idx")
"""Ends of the names of tensors that belong to a quantized weight."""


class WeightLines(NamedTuple):
    """Float32 values [n, in], and the distance from each to the next value that could be stored.

    ``steps`` are [n, in], or [n, 1] where a row has one.
    """

    values: Floats
    steps: Floats


@dataclass(frozen=True)
class CheckpointMatrix:
    """One matrix of a tensor, as it lies: number ``index`` of ``count``, [rows, columns]."""

    checkpoint: Checkpoint
    storage: Storage
    index: int
    count: int
    rows: int
    columns: int

    @property
    def entry(self) -> Entry:
        """The tensor of its values or codes."""
        return self.storage.codes

    @property
    def plain(self) -> PlainStorage | None:
        """Its storage, if it isn't quantized."""
        return self.storage if isinstance(self.storage, PlainStorage) else None

    def raw(self) -> NDArray[np.generic]:
        """All values of a plain matrix, as stored."""
        assert self.plain is not None
        width = self.entry.nbytes // self.count
        start = self.entry.start + self.index * width
        data = self.checkpoint.file(self.checkpoint.shard(self.entry.name)).read(start, start + width)
        return np.frombuffer(data, self.plain.bits).reshape(self.rows, self.columns)

    def lines(self, first: int, last: int) -> WeightLines:
        """Lines ``first`` to ``last`` of a quantized matrix."""
        begin = self.index * self.rows
        rows = self.storage.read(self.checkpoint, begin + first, begin + last)
        return WeightLines(self.storage.decode(rows), self.storage.steps(rows))


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

    @property
    def is_straight(self) -> bool:
        """Rows of plain values, one after the other."""
        return self.matrix.plain is not None and not self.turned and self.step == 1

    def bits(self, first: int, last: int, side: str, descriptor: int | None) -> NDArray[np.generic]:
        """Rows as they are stored, of a view that ``is_straight``; ``descriptor``: of its open file."""
        matrix, plain = self.matrix, self.matrix.plain
        assert plain is not None
        bits = scratch(f"{side} bits", (last - first, matrix.columns), plain.bits)
        row = matrix.index * matrix.rows + self.first + first
        start = plain.codes.start + row * matrix.columns * bits.itemsize
        self.file.read_into(start, bits.data.cast("B"), descriptor)
        return bits

    @property
    def file(self) -> TensorFile:
        checkpoint = self.matrix.checkpoint
        return checkpoint.file(checkpoint.shard(self.name))

    def widened(self, bits: NDArray[np.generic], side: str) -> Floats:
        """Return what ``bits`` gave as float32, in this thread's memory for ``side``."""
        plain = self.matrix.plain
        assert plain is not None
        return plain.widen(bits, scratch(f"{side} values", bits.shape).view(np.float32))

    def with_steps(self, values: Floats, side: str) -> WeightLines:
        """Return plain values with their steps, these in this thread's memory for ``side``."""
        plain = self.matrix.plain
        assert plain is not None
        steps = scratch(f"{side} steps", values.shape).view(np.float32)
        return WeightLines(values, plain.steps_of(values, steps))

    def read(self, first: int, last: int, side: str, descriptor: int | None = None) -> WeightLines:
        """Rows ``first`` to ``last`` as float32; some are in this thread's memory for ``side``."""
        matrix = self.matrix
        if self.is_straight:
            bits = self.bits(first, last, side, descriptor)
            return self.with_steps(self.widened(bits, side), side)
        if not self.turned and self.step == 1:
            return matrix.lines(self.first + first, self.first + last)
        picked = slice(self.first + first * self.step, self.first + (last - 1) * self.step + 1, self.step)
        if matrix.plain:  # narrow until it is picked
            (whole,) = _read_whole(matrix)
            part = whole[:, picked].T if self.turned else whole[picked]
            bits = scratch(f"{side} bits", part.shape, matrix.plain.bits)
            np.copyto(bits, part)
            return self.with_steps(self.widened(bits, side), side)
        values, steps = (each.astype(np.float32, copy=False) for each in _read_whole(matrix))
        if not self.turned:
            return WeightLines(values[picked], steps[picked])
        wide = np.broadcast_to(steps, values.shape)
        return WeightLines(*(np.ascontiguousarray(each[:, picked].T) for each in (values, wide)))


class PairReader:
    """Reads a matrix of both checkpoints, as a context; ``allowed``: times N² that may be left of it."""

    def __init__(self, base: View, merged: View) -> None:
        self.base, self.merged = base, merged
        self.allowed = ALLOWED_PLAIN if merged.matrix.plain else ALLOWED
        self._alike = (
            base.is_straight and merged.is_straight and base.matrix.entry.dtype == merged.matrix.entry.dtype
        )
        self._files = ExitStack()

    def __enter__(self) -> PairReader:
        both = (self.base, self.merged)
        self._open = [self._files.enter_context(view.file.opened()) for view in both]
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def bands(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, from first to last."""
        rows, step = self.base.rows, max(1, BLOCK // max(1, self.base.columns))
        for view in (self.base, self.merged):
            step = max(step, view.matrix.storage.group[0])
        for first in range(0, rows, step):
            yield first, min(rows, first + step)

    def read(self, first: int, last: int) -> RowBlock:
        """Return rows ``first`` to ``last``."""
        block = self._read(first, last, equal_too=True)
        assert block is not None
        return block

    def read_changed(self, first: int, last: int) -> RowBlock | None:
        """Return the rows, or None if they have the same bits in both checkpoints."""
        return self._read(first, last, equal_too=False)

    def _read(self, first: int, last: int, *, equal_too: bool) -> RowBlock | None:
        base, merged = self.base, self.merged
        of_base, of_merged = self._open
        alike = base.matrix.storage.label == merged.matrix.storage.label
        anew = not (alike or base.matrix.plain)
        changed = -1
        if self._alike:
            one = base.bits(first, last, "base", of_base)
            two = merged.bits(first, last, "merged", of_merged)
            flags = scratch("flags", one.shape, np.bool_)
            changed = int(np.count_nonzero(np.not_equal(one, two, out=flags)))
            if not (changed or equal_too):
                return None
            old, own = base.widened(one, "base"), None
            new, steps = merged.with_steps(merged.widened(two, "merged"), "merged")
        else:
            old, own = base.read(first, last, "base", of_base)
            new, steps = merged.read(first, last, "merged", of_merged)
        change = np.subtract(new, old, out=scratch("change", new.shape))
        if changed < 0:
            changed = int(np.count_nonzero(change != 0))
        return RowBlock(old, new, change, changed, steps, own if anew else None)


def open_matrix(
    checkpoint: Checkpoint, name: str, settings: Mapping[str, object], index: int = 0
) -> CheckpointMatrix:
    """Return a matrix of the tensor ``name``; one that isn't 2-D or 3-D is [first axis, all others].

    ``settings``: config.json's quantization_config. Raises KtbridgeError for a storage that isn't read.
    """
    storage = find_storage(checkpoint, name, settings)
    if storage is None:
        raise KtbridgeError(
            f"{name} of {checkpoint.path} is {checkpoint.entry(name).dtype}, and read are BF16, F16, F32, "
            f"MXFP4, {KNOWN}",
            "write it in bfloat16 first, with scripts/dequantize_checkpoint.py or the tool that quantized it",
        )
    return CheckpointMatrix(checkpoint, storage, index, *_sizes(storage.shape))


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
            coded = isinstance(both.storage, Mxfp4Storage)
            if not (straight or turned):
                raise KtbridgeError(
                    f"{both.entry.name} {list(both.entry.shape)} and {down.entry.name} "
                    f"{list(down.entry.shape)} of {checkpoint.path} don't fit each other",
                    "check that the files belong together",
                )
            self.turned = turned and not (straight and coded)
            self._inner = down.rows if self.turned else down.columns

    def view(self, projection: str, expert: int) -> View:
        """Raises KtbridgeError where the checkpoint lacks it or stores it in a way that isn't read."""
        matrix = self._open(self._home.stem(projection, expert), 0 if self._home.names else expert)
        if self._home.names:
            return View(matrix, matrix.rows)
        if projection == "down":
            return View(matrix, matrix.columns if self.turned else matrix.rows, turned=self.turned)
        if expert >= matrix.count:
            raise KtbridgeError(f"{matrix.entry.name} of {self._checkpoint.path} has no expert {expert}")
        number = ("gate", "up").index(projection)
        if self._home.interleaved:  # gate and up alternate in what is stored
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
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return 1, shape[0], math.prod(shape[1:])


_local = threading.local()


def _read_whole(matrix: CheckpointMatrix) -> Sequence[NDArray[np.generic]]:
    """All of a matrix that a thread keeps: values of a plain one, as stored, else values and steps."""
    held: OrderedDict[object, Sequence[NDArray[np.generic]]]
    held = _local.__dict__.setdefault("held", OrderedDict())
    key = str(matrix.checkpoint.path), matrix.entry.name, matrix.index
    if key not in held:
        while len(held) >= _HELD:
            held.popitem(last=False)
        held[key] = (matrix.raw(),) if matrix.plain else matrix.lines(0, matrix.rows)
    held.move_to_end(key)
    return held[key]


def scratch(name: str, shape: tuple[int, ...], kind: DTypeLike = np.float32) -> NDArray[np.generic]:
    """Return this thread's memory of that name, of ``shape``; what was in it is overwritten."""
    if not hasattr(_local, "scratch"):
        _local.scratch = {}
    count, kind = math.prod(shape), np.dtype(kind)
    memory = _local.scratch.get((name, kind))
    if memory is None or memory.size < count:
        memory = _local.scratch[name, kind] = np.empty(count, kind)
    found: NDArray[np.generic] = memory[:count].reshape(shape)
    return found


def release_held() -> None:
    """Let go of the memory that this thread keeps."""
    _local.__dict__.clear()
