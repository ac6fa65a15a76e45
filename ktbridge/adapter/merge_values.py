"""The values of merged weights: a checkpoint's shards with deltas added, as steps of the writer.

A changed matrix is processed in blocks of rows that fit a core's cache: read, the delta added in float32
and rounded once to nearest even (``kernels/gemm/delta.h``; ``thin_product`` where there are no kernels),
written. Workers share nothing but the files, so memory is bounded by
``workers * (a block of BLOCK values + a matrix's factors in float32)``, whatever the size of a shard.
Everything else keeps the base's bytes, the header included.

Quantized weights are dequantized, added to and requantized. The scheme stays: codes, groups, zero points
and the scales' dtype are the checkpoint's. A delta that is much smaller than the step between two codes is
rounded away, so what became of it is measured: over the exact sum S, what is stored of it Q, and the delta
D, the relative error is ‖Q - S‖ / ‖S‖, and the share of the delta that is kept 1 - ‖Q - S‖² / ‖D‖²: 1 if
all of it is there, 0 if the weights might as well not have been touched.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.checks.layers import numbers
from ktbridge.adapter.floats import Floats
from ktbridge.adapter.merge_plan import Delta, Deltas, Matrix, Pair
from ktbridge.adapter.storage import NUMPY_TYPES, QuantizedStorage
from ktbridge.adapter.writer import Buffer, Copy, Target, Task
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.kernel_choice import choose_isa, has_kernels
from ktbridge.model import Checkpoint, Entry, TensorFile, TensorRef
from ktbridge.model.tensor import as_float32

BLOCK = 1 << 17  # values of one block, which fits a core's L2
_BAND = 1 << 16  # values of a quantized weight, of some 60 bytes each
_TILE = 32  # columns of a right factor that the kernels read together: ``_kernels.DOUBLE``
KEPT = 0.5
"""Share of a delta's squared norm below which quantization lost more of it than it kept."""


class Change(NamedTuple):
    """Sums over values: squares of the exact sum, of its error, of the delta and of what was changed.

    ``product``: of the delta with what was changed; ``moved`` of ``values`` are no longer the base's.
    """

    values: int = 0
    moved: int = 0
    exact: float = 0.0
    error: float = 0.0
    delta: float = 0.0
    changed: float = 0.0
    product: float = 0.0

    def plus(self, other: Change) -> Change:
        return Change._make(a + b for a, b in zip(self, other, strict=True))


@dataclass(frozen=True)
class Loss:
    """Loss by requantizing the weights of one storage in one layer (-1: outside the layers).

    ``relative_error`` is of the weights, ``kept`` the share of the delta's squared norm that is left,
    ``cosine`` that between the delta and what was changed.
    """

    layer: int
    storage: str
    weights: int
    relative_error: float
    kept: float
    cosine: float

    def as_dict(self) -> dict[str, object]:
        return dict(vars(self))


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
                yield (entry, [Task(0, size, partial(self._merge, file, delta, m)) for m in delta.matrices])
                continue
            together = self._checkpoint.shard(scale.name) == shard
            size += together * scale.nbytes // count
            parts = ("codes", "scales") if together else ("codes",)
            yield (entry, [Task(0, size, partial(self._requantize, delta, n, parts)) for n in range(count)])
            if together:
                yield scale, []
        for delta in self._elsewhere.get(shard, []):
            scale, count = delta.storage.scale, len(delta.matrices)
            assert scale is not None
            make = [partial(self._requantize, delta, n, ("scales",)) for n in range(count)]
            yield scale, [Task(0, scale.nbytes // count, one) for one in make]

    def _requantize(self, delta: Delta, number: int, parts: tuple[str, ...]) -> Iterator[tuple[int, Buffer]]:
        """One matrix of a quantized weight with its delta: its codes, its scales, or both."""
        change = Change()
        for band in requantized(self._checkpoint, delta, number):
            yield from (getattr(band, part) for part in parts)
            change = change.plus(band.change)
        if "codes" in parts:
            self.changes.append((delta, change))

    def _merge(self, file: TensorFile, delta: Delta, matrix: Matrix) -> Iterator[tuple[int, Buffer]]:
        """One matrix with its delta, block by block."""
        products = products_of(matrix, delta)
        stored = np.dtype(NUMPY_TYPES[delta.entry.dtype])
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

    left: Floats
    right: Floats
    row: int
    column: int
    columns: int


def read_factors(pair: Pair) -> tuple[Floats, Floats]:
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


def _turned(left: Floats, right: Floats, column: int) -> Product:
    return Product(np.ascontiguousarray(left), _tiles(right), 0, column, right.shape[1])


def _tiles(right: Floats) -> Floats:
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


def _add_by_kernel(block: NDArray[Any], left: Floats, right: Floats) -> int | None:
    """``left`` times ``right``, which is as ``Product`` has it, added to a block."""
    from ktbridge import _kernels

    rows, columns = block.shape
    moved = _kernels.add_delta(
        choose_isa(), block.ctypes.data, block.dtype == np.uint16, rows, columns,
        block.strides[0] // block.itemsize, left.ctypes.data, left.shape[1], right.ctypes.data,
    )  # fmt: skip
    return None if moved < 0 else moved


def _add_by_numpy(block: NDArray[Any], left: Floats, right: Floats) -> int | None:
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


# --- quantized weights


class Band(NamedTuple):
    """Rows of a matrix: their codes and their scales, each with its place in its shard, and the change."""

    codes: tuple[int, Buffer]
    scales: tuple[int, Buffer]
    change: Change


def requantized(checkpoint: Checkpoint, delta: Delta, number: int) -> Iterator[Band]:
    """The ``number``-th matrix of a quantized weight with its delta, band by band of whole groups.

    Memory: a band of ``_BAND`` values (at least one row of groups), some 60 bytes each.
    """
    storage = delta.storage
    assert isinstance(storage, QuantizedStorage)
    products = products_of(delta.matrices[number], delta)
    high = storage.group[0]
    step = max(1, _BAND // max(1, delta.columns) // high) * high
    begin, end = number * delta.rows, (number + 1) * delta.rows
    for first in range(begin, end, step):
        last = min(end, first + step)
        before = storage.read(checkpoint, first, last)
        old = storage.decode(before)
        exact = old.copy()
        if add_products(exact, products, first - begin) is None:
            raise not_finite(delta)
        rows, new = storage.encode(exact, before)
        yield Band(
            (storage.place_of_codes(first, last)[0], np.ascontiguousarray(rows.codes).data.cast("B")),
            (storage.place_of_scales(first, last)[0], storage.scale_bytes(rows.scales)),
            _change(old, exact, new),
        )


def _change(old: Floats, exact: Floats, new: Floats) -> Change:
    delta, change, error = exact - old, new - old, new - exact
    pairs = ((exact, exact), (error, error), (delta, delta), (change, change), (delta, change))
    sums = [float(np.einsum("ij,ij->", a, b, dtype=np.float64)) for a, b in pairs]
    return Change(old.size, int(np.count_nonzero(change)), *sums)


def losses(changes: Iterable[tuple[Delta, Change]]) -> tuple[Loss, ...]:
    """Layer by layer, storage by storage, what is left of the deltas."""
    sums: dict[tuple[int, str], Change] = {}
    weights: dict[tuple[int, str], int] = {}
    # In an order of their own: workers finish in any, and sums of floats depend on it.
    for delta, change in sorted(changes, key=lambda one: (one[0].entry.name, one[1])):
        key = (delta.layer, delta.storage.label)
        sums[key] = sums.get(key, Change()).plus(change)
        weights[key] = weights.get(key, 0) + 1
    return tuple(
        Loss(
            *key,
            weights[key],
            math.sqrt(one.error / one.exact) if one.exact else 0.0,
            1 - one.error / one.delta if one.delta else 1.0,
            one.product / math.sqrt(one.delta * one.changed) if one.changed * one.delta else 0.0,
        )
        for key, one in sorted(sums.items())
    )


def swallowed(found: Iterable[Loss]) -> Iterator[Problem]:
    """A warning for each storage in which more of the delta was lost than kept."""
    by_storage: dict[str, list[Loss]] = {}
    for loss in found:
        if loss.kept < KEPT:
            by_storage.setdefault(loss.storage, []).append(loss)
    for storage, members in by_storage.items():
        ends = (f"{pick(loss.kept for loss in members):.0%}" for pick in (min, max))
        share = " to ".join(dict.fromkeys(ends))
        layers = numbers(loss.layer for loss in members)
        yield problem(
            "KTB910",
            f"{storage} weights of layers {layers}",
            f"{share} of the adapter's delta is left: the rest is smaller than the step between two codes",
            f"{KEPT:.0%} and more",
        )
