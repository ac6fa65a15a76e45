"""Write merged shards: the kernel copies unchanged bytes, changed matrices are computed.

A changed matrix is processed in blocks of rows that fit a core's cache: widened to float32, the delta
added, rounded once to nearest even, written to its place. Workers share nothing but the files, so
memory is bounded by ``workers * (block of BLOCK values * 16 bytes + the two factors of one pair in
float32)``, whatever the size of a shard.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import Slice
from ktbridge.adapter.merge_plan import Delta, Matrix, Pair
from ktbridge.adapter.values import as_float32
from ktbridge.errors import KtbridgeError
from ktbridge.model import TensorFile

BLOCK = 1 << 17  # values of one block: 512 KB in float32
_COPY_BYTES = 1 << 25  # bytes per call; also the interval of progress reports
# OpenBLAS computes a product of up to 2**18 multiplications in the calling thread; its own threads
# would compete with ours, and busy-wait on a loaded machine.
_PRODUCT = 1 << 18
# Across file systems, or without support: then copy through memory.
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_STORED: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class Writer:
    """Writes shards into a directory; ``changed`` counts values that are no longer the base's."""

    def __init__(self, folder: Path, workers: int, on_bytes: Callable[[int], None]) -> None:
        self.changed = 0
        self.values = 0
        self._folder = folder
        self._on_bytes = on_bytes
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers)
        self._local = threading.local()
        self._sources: dict[Path, int] = {}
        self._jobs: deque[tuple[int, Future[tuple[int, int]]]] = deque()
        self._outputs: list[int] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for descriptor in (*self._sources.values(), *self._outputs):
            os.close(descriptor)

    def write(self, file: TensorFile, deltas: list[Delta]) -> None:
        """Write one shard under its own name: the base's bytes except where ``deltas`` change them."""
        source = self._source(file)
        output = os.open(
            self._folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        self._outputs.append(output)
        position = 0
        for delta in deltas:
            self._copy(file, source, output, position, delta.entry.start)
            for matrix in delta.matrices:
                self._submit(delta, matrix, file, source, output)
            position = delta.entry.end
        self._copy(file, source, output, position, file.size)

    def copy(self, path: Path) -> None:
        """Copy a file that is not a shard."""
        data = path.read_bytes()
        with open(self._folder / path.name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._on_bytes(len(data))

    def finish(self) -> None:
        """Wait for all submitted work, and fsync it."""
        while self._jobs:
            self._collect()
        flushed = [self._pool.submit(os.fsync, output) for output in self._outputs]
        for job in flushed:
            job.result()

    def _source(self, file: TensorFile) -> int:
        if file.path not in self._sources:
            descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            self._sources[file.path] = descriptor
            if os.fstat(descriptor).st_size != file.size:
                raise _changed(file)
        return self._sources[file.path]

    def _copy(self, file: TensorFile, source: int, output: int, start: int, end: int) -> None:
        while start < end:
            count = _copy_range(source, output, start, min(end - start, _COPY_BYTES))
            if count == 0:
                raise _changed(file)
            start += count
            self._on_bytes(count)

    def _submit(
        self, delta: Delta, matrix: Matrix, file: TensorFile, source: int, output: int
    ) -> None:
        while len(self._jobs) >= 4 * self._workers:
            self._collect()
        # Opened here, so that workers only read the dict.
        for pair in matrix.pairs:
            self._source(pair.a.file)
            self._source(pair.b.file)
        job = self._pool.submit(self._merge, delta, matrix, file, source, output)
        self._jobs.append((delta.entry.nbytes // len(delta.matrices), job))

    def _collect(self) -> None:
        size, job = self._jobs.popleft()
        values, changed = job.result()
        self.values += values
        self.changed += changed
        self._on_bytes(size)

    def _merge(
        self, delta: Delta, matrix: Matrix, file: TensorFile, source: int, output: int
    ) -> tuple[int, int]:
        """Merge one matrix; return how many values it has and how many changed."""
        factors = [self._factors(pair, delta) for pair in matrix.pairs]
        stored = np.dtype(_STORED[delta.entry.dtype])
        step = max(1, min(delta.rows, BLOCK // max(1, delta.columns)))
        changed = 0
        for first in range(0, delta.rows, step):
            rows = min(step, delta.rows - first)
            buffers = self._buffers(rows * delta.columns, stored)
            old, wide, spare, new = (buffer.reshape(rows, delta.columns) for buffer in buffers)
            place = matrix.start + first * delta.columns * stored.itemsize
            if os.preadv(source, [old.data.cast("B")], place) != old.nbytes:
                raise _changed(file)
            _widen(old, wide)
            for pair, (a, b) in zip(matrix.pairs, factors, strict=True):
                _add(wide, spare, pair, a, b, first, delta.transposed)
            # A sum is infinite or NaN if any value is (or nearly so), and costs less than checking each.
            if not np.isfinite(wide.sum(dtype=np.float32)) and not np.isfinite(wide).all():
                raise _not_finite(delta)
            _narrow(wide, spare, new)
            if delta.entry.dtype == "F16" and not np.isfinite(new).all():
                raise _not_finite(delta)
            changed += int(np.count_nonzero(new != old))
            _write_all(output, new.data.cast("B"), place)
        return delta.rows * delta.columns, changed

    def _factors(self, pair: Pair, delta: Delta) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [r, in] and scale * B [out, r] in float32; transposed to [in, r], [r, out] if W is."""
        a, b = self._matrix(pair.a), self._matrix(pair.b) * np.float32(pair.scale)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise KtbridgeError(
                f"{pair.a.file.path} has NaN or infinite values for {delta.label} "
                f"of layer {delta.layer}",
                "run ktbridge validate on the adapter",
            )
        if delta.transposed:
            return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        return a, b

    def _matrix(self, part: Slice) -> NDArray[np.float32]:
        data = os.pread(self._sources[part.file.path], part.end - part.start, part.start)
        if len(data) != part.end - part.start:
            raise _changed(part.file)
        return as_float32(data, part.dtype).reshape(part.shape)

    def _buffers(self, count: int, stored: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
        """This worker's buffers for a block: input, two in float32, and output.

        Reused across blocks: fresh memory of this size costs a page fault every 4 KB.
        """
        held = getattr(self._local, "buffers", None)
        if held is None or held[1].size < count or held[0].dtype != stored:
            kinds = (stored, np.float32, np.float32, stored)
            held = tuple(np.empty(count, kind) for kind in kinds)
            self._local.buffers = held
        return tuple(buffer[:count] for buffer in held)


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


def _copy_range(source: int, output: int, start: int, count: int) -> int:
    """Copy bytes to the same offset of another file, as a reflink where the file system can."""
    try:
        return os.copy_file_range(source, output, count, start, start)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    data = os.pread(source, min(count, 1 << 20), start)
    _write_all(output, memoryview(data), start)
    return len(data)


def _write_all(output: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(output, data, place)
        data, place = data[count:], place + count


def _changed(file: TensorFile) -> KtbridgeError:
    return KtbridgeError(
        f"{file.path} changed while it was being read",
        "wait until nothing writes to it, then run again",
    )


def _not_finite(delta: Delta) -> KtbridgeError:
    return KtbridgeError(
        f"{delta.entry.name} with its delta has values that {delta.entry.dtype} can't hold",
        "check the base model and the adapter's alpha",
    )
