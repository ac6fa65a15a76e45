"""The values of merged weights: a checkpoint's shards with deltas added, as steps of the writer.

A changed matrix is processed in blocks of rows that fit a core's cache: read, the delta added in float32
and rounded once to nearest even (``kernels/gemm/delta.h``; ``thin_product`` where there are no kernels),
written. Workers share nothing but the files, so memory is bounded by
``workers * (a block of BLOCK values + a matrix's factors in float32)``, whatever the size of a shard.
Everything else keeps the base's bytes, the header included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.blocks import as_float32
from ktbridge.adapter.merge_plan import Delta, Deltas, Matrix, Pair
from ktbridge.adapter.writer import Buffer, Copy, Target, Task
from ktbridge.errors import KtbridgeError
from ktbridge.kernel_choice import choose_isa, has_kernels
from ktbridge.model import Checkpoint, Entry, TensorFile, TensorRef

if TYPE_CHECKING:
    from ktbridge.adapter.merge_quantized import Change

BLOCK = 1 << 17  # values of one block, which fits a core's L2
_TILE = 32  # columns of a right factor that the kernels read together: ``_kernels.DOUBLE``
_STORED: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Merger:
    """Makes the steps that write merged shards; counts what they compute.

    Raises UsageError where KTBRIDGE_ISA names kernels that this CPU can't run.
    """

    def __init__(self, checkpoint: Checkpoint, deltas: Deltas) -> None:
        if has_kernels():
            choose_isa()
        self._checkpoint, self._deltas = checkpoint, deltas
        self._counts: list[tuple[int, int]] = []
        self._local = threading.local()
        self.changes: list[tuple[Delta, Change]] = []
        """What became of each matrix of a quantized weight."""
        self._elsewhere: dict[str, list[Delta]] = {}
        for shard, members in deltas.by_shard.items():
            for delta in members:
                scale = delta.storage.scale
                if scale is not None and (other := checkpoint.shard(scale.name)) != shard:
                    self._elsewhere.setdefault(other, []).append(delta)

    @property
    def values(self) -> int:
        """Values of the adapted weights so far."""
        quantized = sum(change.values for _, change in self.changes)
        return quantized + sum(values for values, _ in self._counts)

    @property
    def changed(self) -> int:
        """Number of them that are no longer the base's."""
        quantized = sum(change.moved for _, change in self.changes)
        return quantized + sum(changed for _, changed in self._counts)

    def steps(self, shard: str) -> Iterator[Copy | Task]:
        """The steps for one shard: the base's bytes except where its deltas change them."""
        file = self._checkpoint.file(shard)
        position = 0
        for entry, tasks in sorted(self._changed(shard, file), key=lambda item: item[0].start):
            yield from _unchanged(file, position, entry.start)
            yield from tasks
            position = entry.end
        yield from _unchanged(file, position, file.size)

    def _changed(self, shard: str, file: TensorFile) -> Iterator[tuple[Entry, list[Task]]]:
        """The tensors of a shard that change, with the tasks that write them.

        Scales are written by the task of their codes, unless they are in another shard: then they are
        computed again.
        """
        for delta in self._deltas.by_shard.get(shard, []):
            entry, scale, count = delta.entry, delta.storage.scale, len(delta.matrices)
            size = entry.nbytes // count
            if scale is None:
                yield (
                    entry,
                    [Task(0, size, partial(self._merge, file, delta, m)) for m in delta.matrices],
                )
                continue
            together = self._checkpoint.shard(scale.name) == shard
            size += together * scale.nbytes // count
            parts = ("codes", "scales") if together else ("codes",)
            yield (
                entry,
                [Task(0, size, partial(self._requantize, delta, n, parts)) for n in range(count)],
            )
            if together:
                yield scale, []
        for delta in self._elsewhere.get(shard, []):
            scale, count = delta.storage.scale, len(delta.matrices)
            assert scale is not None
            make = [partial(self._requantize, delta, n, ("scales",)) for n in range(count)]
            yield scale, [Task(0, scale.nbytes // count, one) for one in make]

    def _requantize(
        self, delta: Delta, number: int, parts: tuple[str, ...]
    ) -> Iterator[tuple[int, Buffer]]:
        """One matrix of a quantized weight with its delta: its codes, its scales, or both."""
        from ktbridge.adapter.merge_quantized import Change, requantized

        change = Change()
        for band in requantized(self._checkpoint, delta, number):
            yield from (getattr(band, part) for part in parts)
            change = change.plus(band.change)
        if "codes" in parts:
            self.changes.append((delta, change))

    def _merge(
        self, file: TensorFile, delta: Delta, matrix: Matrix
    ) -> Iterator[tuple[int, Buffer]]:
        """One matrix with its delta, block by block."""
        products = products_of(matrix, delta)
        stored = np.dtype(_STORED[delta.entry.dtype])
        step = max(1, min(delta.rows, BLOCK // max(1, delta.columns)))
        block = self._buffer(step * delta.columns, stored).reshape(step, delta.columns)
        changed = 0
        with file.opened() as descriptor:
            for first in range(0, delta.rows, step):
                values = block[: min(step, delta.rows - first)]
                place = matrix.start + first * delta.columns * stored.itemsize
                file.read_into(place, values.data.cast("B"), descriptor)
                halves = delta.entry.dtype == "F16"
                moved = (_add_to_halves if halves else add_products)(values, products, first)
                if moved is None:
                    raise not_finite(delta)
                changed += moved
                yield place, values.data.cast("B")
        self._counts.append((delta.rows * delta.columns, changed))

    def _buffer(self, count: int, stored: np.dtype[Any]) -> NDArray[Any]:
        """This worker's memory for a block: fresh memory costs a page fault every 4 KB."""
        held: NDArray[Any] | None = getattr(self._local, "buffer", None)
        if held is None or held.size < count or held.dtype != stored:
            held = self._local.buffer = np.empty(count, stored)
        return held[:count]


def _unchanged(file: TensorFile, start: int, end: int) -> Iterator[Copy]:
    if start < end:
        yield Copy(TensorRef(file, start, end, "U8", (end - start,)), "U8", (Target(0, start),))


class Product(NamedTuple):
    """``left`` [n, r] times a right factor [r, ``columns``]: what is added to n rows from ``row`` on.

    Its first column is ``column``. ``right`` is that factor as the kernel reads it: [columns / 32, r, 32],
    zeros behind the last column. All float32.
    """

    left: NDArray[np.float32]
    right: NDArray[np.float32]
    row: int
    column: int
    columns: int


def read_factors(pair: Pair) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return A [r, in] of a pair, and B [out, r] with the scale in it."""
    a, b = (as_float32(part.read(), part.dtype).reshape(part.shape) for part in (pair.a, pair.b))
    return a, b * np.float32(pair.scale)


def products_of(matrix: Matrix, delta: Delta) -> list[Product]:
    """A matrix's delta, in which every value of it belongs to one product: scale * B A, or transposed.

    Raises KtbridgeError if a factor has NaN or infinite values.
    """
    products, turned = [], []
    for pair in matrix.pairs:
        a, b = read_factors(pair)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise KtbridgeError(
                f"{pair.a.file.path} has NaN or infinite values for {delta.label} of layer {delta.layer}",
                "run ktbridge validate on the adapter",
            )
        if not delta.transposed:
            products.append(Product(b, _tiles(a), pair.first, 0, a.shape[1]))
        elif pair.step == 1:
            products.append(_turned(a.T, b.T, pair.first))
        else:
            wide = np.zeros((len(a), delta.columns), np.float32)
            wide[:, pair.first :: pair.step] = b.T
            turned.append((a.T, wide))
    if turned:  # columns in turns: the other pairs' factors are zero in each
        left, right = zip(*turned, strict=True)
        products.append(_turned(np.concatenate(left, 1), np.concatenate(right), 0))
    return products


def _turned(left: NDArray[np.float32], right: NDArray[np.float32], column: int) -> Product:
    return Product(np.ascontiguousarray(left), _tiles(right), 0, column, right.shape[1])


def _tiles(right: NDArray[np.float32]) -> NDArray[np.float32]:
    rank, columns = right.shape
    tiles = -(-columns // _TILE)
    padded = np.zeros((rank, tiles * _TILE), np.float32)
    padded[:, :columns] = right
    return np.ascontiguousarray(padded.reshape(rank, tiles, -1).transpose(1, 0, 2))


def add_products(values: NDArray[Any], products: Sequence[Product], first: int) -> int | None:
    """Add to a block of a matrix's rows, of which it has those from ``first`` on.

    ``values`` [rows, columns] are float32, or bfloat16's bits in uint16. Sums are float32, rounded once.
    Returns how many values moved, or None if one isn't finite now.
    """
    moved = 0
    add = _add_by_kernel if has_kernels() else _add_by_numpy
    for left, right, row, column, width in products:
        start, end = max(first, row), min(first + len(values), row + len(left))
        if start >= end:
            continue
        block = values[start - first : end - first, column : column + width]
        counted = add(block, left[start - row : end - row], right)
        if counted is None:
            return None
        moved += counted
    return moved


def _add_by_kernel(
    block: NDArray[Any], left: NDArray[np.float32], right: NDArray[np.float32]
) -> int | None:
    """``left`` times ``right``, which is as ``Product`` has it, added to a block."""
    from ktbridge import _kernels

    rows, columns = block.shape
    moved = _kernels.add_delta(
        choose_isa(), block.ctypes.data, block.dtype == np.uint16, rows, columns,
        block.strides[0] // block.itemsize, left.ctypes.data, left.shape[1], right.ctypes.data,
    )  # fmt: skip
    return None if moved < 0 else moved


def _add_by_numpy(
    block: NDArray[Any], left: NDArray[np.float32], right: NDArray[np.float32]
) -> int | None:
    """``_add_by_kernel`` without kernels, and with the same bits."""
    from ktbridge.adapter.thin_product import add_delta

    flat = right.transpose(1, 0, 2).reshape(right.shape[1], -1)[:, : block.shape[1]]
    return add_delta(block, left, flat)


def _add_to_halves(values: NDArray[Any], products: Sequence[Product], first: int) -> int | None:
    """``add_products`` for float16."""
    wide = values.astype(np.float32)
    if add_products(wide, products, first) is None:
        return None
    with np.errstate(over="ignore"):  # looked at here
        made = wide.astype(np.float16)
    moved = int(np.count_nonzero(made != values))
    values[:] = made
    return moved if np.isfinite(made).all() else None


def not_finite(delta: Delta) -> KtbridgeError:
    return KtbridgeError(
        f"{delta.entry.name} with its delta has values that {delta.entry.dtype} can't hold",
        "check the base model and the adapter's alpha",
    )
