"""The values of merged weights: a checkpoint's shards with deltas added, as steps of the writer.

A changed matrix is processed in blocks of rows that fit a core's cache: widened to float32, the delta
added, rounded once to nearest even. Workers share nothing but the files, so memory is bounded by
``workers * (block of BLOCK values * 16 bytes + the two factors of one pair in float32)``, whatever the
size of a shard. Everything else keeps the base's bytes, the header included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import Slice
from ktbridge.adapter.blocks import Span, as_float32
from ktbridge.adapter.merge_plan import Delta, Deltas, Matrix, Pair
from ktbridge.adapter.writer import Buffer, Copy, Target, Task
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry, TensorFile

if TYPE_CHECKING:
    from ktbridge.adapter.merge_quantised import Change

BLOCK = 1 << 16  # values of one block: 256 KB in float32; all of a worker's buffers fit its L2
# OpenBLAS computes a product of up to 2**18 multiplications in the calling thread; its own threads
# would compete with ours, and busy-wait on a loaded machine.
_PRODUCT = 1 << 18
_STORED: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Merger:
    """Makes the steps that write merged shards; counts what they compute."""

    def __init__(self, checkpoint: Checkpoint, deltas: Deltas) -> None:
        self._checkpoint, self._deltas = checkpoint, deltas
        self._counts: list[tuple[int, int]] = []
        self._local = threading.local()
        self.changes: list[tuple[Delta, Change]] = []
        """What became of each matrix of a quantised weight."""
        self._elsewhere: dict[str, list[Delta]] = {}
        for shard, members in deltas.by_shard.items():
            for delta in members:
                if delta.stored and (other := checkpoint.shard(delta.stored.scale.name)) != shard:
                    self._elsewhere.setdefault(other, []).append(delta)

    @property
    def values(self) -> int:
        """Values of the adapted weights so far."""
        quantised = sum(change.values for _, change in self.changes)
        return quantised + sum(values for values, _ in self._counts)

    @property
    def changed(self) -> int:
        """Those of them that are no longer the base's."""
        quantised = sum(change.moved for _, change in self.changes)
        return quantised + sum(changed for _, changed in self._counts)

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
            entry, stored, count = delta.entry, delta.stored, len(delta.matrices)
            size = entry.nbytes // count
            if stored is None:
                yield (
                    entry,
                    [Task(0, size, partial(self._merge, file, delta, m)) for m in delta.matrices],
                )
                continue
            together = self._checkpoint.shard(stored.scale.name) == shard
            size += together * stored.scale.nbytes // count
            parts = ("codes", "scales") if together else ("codes",)
            yield (
                entry,
                [Task(0, size, partial(self._requantise, delta, n, parts)) for n in range(count)],
            )
            if together:
                yield stored.scale, []
        for delta in self._elsewhere.get(shard, []):
            assert delta.stored is not None
            entry, count = delta.stored.scale, len(delta.matrices)
            make = [partial(self._requantise, delta, n, ("scales",)) for n in range(count)]
            yield entry, [Task(0, entry.nbytes // count, one) for one in make]

    def _requantise(
        self, delta: Delta, number: int, parts: tuple[str, ...]
    ) -> Iterator[tuple[int, Buffer]]:
        """One matrix of a quantised weight with its delta: its codes, its scales, or both."""
        from ktbridge.adapter.merge_quantised import Change, requantised

        change = Change()
        for band in requantised(self._checkpoint, delta, number):
            yield from (getattr(band, part) for part in parts)
            change = change.plus(band.change)
        if "codes" in parts:
            self.changes.append((delta, change))

    def _merge(
        self, file: TensorFile, delta: Delta, matrix: Matrix
    ) -> Iterator[tuple[int, Buffer]]:
        """One matrix with its delta, block by block."""
        factors = [factors_of(pair, delta) for pair in matrix.pairs]
        stored = np.dtype(_STORED[delta.entry.dtype])
        step = max(1, min(delta.rows, BLOCK // max(1, delta.columns)))
        buffers = self._buffers(step * delta.columns, stored)
        shaped = [buffer.reshape(step, delta.columns) for buffer in buffers]
        changed = 0
        with file.opened() as descriptor:
            for first in range(0, delta.rows, step):
                rows = min(step, delta.rows - first)
                old, wide, spare, new, flags = (one[:rows] for one in shaped)
                place = matrix.start + first * delta.columns * stored.itemsize
                file.read_into(place, old.data.cast("B"), descriptor)
                _widen(old, wide)
                add_pairs(wide, spare, matrix.pairs, factors, first, delta.transposed)
                if not np.isfinite(wide, out=flags).all():
                    raise not_finite(delta)
                _narrow(wide, spare, new)
                if delta.entry.dtype == "F16" and not np.isfinite(new).all():
                    raise not_finite(delta)
                changed += int(np.count_nonzero(np.not_equal(new, old, out=flags)))
                yield place, new.data.cast("B")
        self._counts.append((delta.rows * delta.columns, changed))

    def _buffers(self, count: int, stored: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
        """This worker's buffers for a block: input, two in float32, output, and flags.

        Reused across blocks: fresh memory of this size costs a page fault every 4 KB.
        """
        held = getattr(self._local, "buffers", None)
        if held is None or held[1].size < count or held[0].dtype != stored:
            kinds = (stored, np.float32, np.float32, stored, np.bool_)
            held = tuple(np.empty(count, kind) for kind in kinds)
            self._local.buffers = held
        return tuple(buffer[:count] for buffer in held)


def _unchanged(file: TensorFile, start: int, end: int) -> Iterator[Copy]:
    if start < end:
        yield Copy(Span(file, start, end, "U8"), "U8", (Target(0, start),))


def factors_of(pair: Pair, delta: Delta) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A [r, in] and scale * B [out, r] in float32; transposed to [in, r], [r, out] if W is."""
    a, b = _matrix(pair.a), _matrix(pair.b) * np.float32(pair.scale)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise KtbridgeError(
            f"{pair.a.file.path} has NaN or infinite values for {delta.label} of layer {delta.layer}",
            "run ktbridge validate on the adapter",
        )
    if delta.transposed:
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    return a, b


def _matrix(part: Slice) -> NDArray[np.float32]:
    return as_float32(part.file.read(part.start, part.end), part.dtype).reshape(part.shape)


def _widen(old: NDArray[Any], wide: NDArray[np.float32]) -> None:
    if old.dtype == np.uint16:  # bfloat16: the upper half of a float32
        bits = wide.view(np.uint32)
        np.copyto(bits, old)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(wide, old)


def _narrow(wide: NDArray[np.float32], spare: NDArray[np.float32], new: NDArray[Any]) -> None:
    """Round to the dtype of ``new``, to nearest even; the other buffers are overwritten.

    bfloat16: adding 0x7fff, and one more if the bit that will be the last is odd, carries into the
    upper half exactly when the number must go up.
    """
    if new.dtype == np.uint16:
        bits, odd = wide.view(np.uint32), spare.view(np.uint32)
        np.right_shift(bits, 16, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(odd, 0x7FFF, out=odd)
        np.add(bits, odd, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(new, bits, casting="unsafe")
        return
    with np.errstate(over="ignore"):  # the caller checks the result
        np.copyto(new, wide, casting="same_kind")


def add_pairs(
    wide: NDArray[np.float32],
    spare: NDArray[np.float32],
    pairs: Sequence[Pair],
    factors: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
    first: int,
    transposed: bool,
) -> None:
    """Add deltas to a block of stored rows that starts at ``first``; ``spare`` is overwritten."""
    for pair, (a, b) in zip(pairs, factors, strict=True):
        _add(wide, spare, pair, a, b, first, transposed)


def _add(
    wide: NDArray[np.float32],
    spare: NDArray[np.float32],
    pair: Pair,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    first: int,
    transposed: bool,
) -> None:
    """Add a pair's delta to a block of stored rows that starts at ``first``."""
    if transposed:
        chosen = wide[:, pair.first :: pair.step][:, : b.shape[1]]
        left, right = a[first : first + len(wide)], b
    else:
        skipped = max(0, pair.first - first)
        chosen = wide[skipped:]
        start = first + skipped - pair.first
        left, right = b[start : start + len(chosen)], a
        chosen = chosen[: len(left)]
    rows = max(1, _PRODUCT // max(1, right.size))
    for start in range(0, len(left), rows):
        part = left[start : start + rows]
        target = spare.reshape(-1)[: len(part) * right.shape[1]].reshape(len(part), -1)
        np.matmul(part, right, out=target)
        chosen[start : start + rows] += target


def not_finite(delta: Delta) -> KtbridgeError:
    return KtbridgeError(
        f"{delta.entry.name} with its delta has values that {delta.entry.dtype} can't hold",
        "check the base model and the adapter's alpha",
    )
