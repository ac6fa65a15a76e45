"""The one writer of tensors: conversions, merges and (de)quantized checkpoints all go through it.

What is to be written is a list of steps. A ``Copy`` is read or computed once, and goes to one place or
several: between unhashed files as they are the kernel copies, otherwise through a ring of blocks that
bounds memory, whatever the size of the input, and lets hashing run beside copying. A ``Task`` is computed
by a worker thread, block by block. Files of an adapter are hashed while they are written, shards of a
checkpoint aren't. Write-back to disk is started during writing.

Around it, ``guarded`` makes sure that nothing is published of an input that changed meanwhile, and
``explained`` says what is in place when writing fails or is interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ktbridge.adapter.blocks import Block, Buffer, bytes_of, converted
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.files.digests import Stamps, difference, stamp
from ktbridge.files.publish import ELSEWHERE, Staging, start_writeback
from ktbridge.files.sizes import size_text
from ktbridge.machine import own_cpus
from ktbridge.model import TensorRef

OnBytes = Callable[[int], None]
# Memory for blocks, in the order of their use, each with what still hashes it.
Ring = deque[tuple[memoryview, "list[Future[None]]"]]
_BLOCK = 1 << 19  # bytes: small enough to stay in the cache until written and hashed
_BLOCKS = 16  # how far copying may run ahead of hashing
_MOVE = 1 << 25  # bytes that the kernel copies per call; also between requests for write-back
_WORKERS = 8  # at most
# Across file systems, or without support: then copy through memory.
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


class Target(NamedTuple):
    """A place in an output: the file's number, and the offset after its header."""

    file: int
    offset: int
    factor: float = 1.0


class Copy(NamedTuple):
    """Bytes that are read or computed once, and written to all ``targets``.

    They become values of ``dtype``, times each target's factor, followed by ``padding`` zero bytes.
    """

    source: TensorRef | Block
    dtype: str
    targets: tuple[Target, ...]
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are read or computed."""
        return self.source.nbytes


class Task(NamedTuple):
    """Bytes that a worker computes: ``make`` yields them with their offset after the header.

    What was yielded is written before the next is asked for, so its memory may be used again.
    """

    file: int
    nbytes: int
    make: Callable[[], Iterator[tuple[int, Buffer]]]


class OutputFile:
    """One weight file. A hashed one is written from front to back, another in any order by any thread."""

    def __init__(self, path: Path, header: bytes = b"", *, hashed: bool = False) -> None:
        self.hashed = hashed
        self._hasher = ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._start = self._unflushed = 0
        self._last = self.write(0, header)
        self._start = len(header)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)

    def write(self, offset: int, data: Buffer) -> Future[None] | None:
        """Write at ``offset`` after the header; the future is done when the memory may be reused."""
        self._last = self._hasher.submit(self._digest.update, data) if self.hashed else None
        rest, place = memoryview(data), self._start + offset
        while rest:
            count = os.pwrite(self._file, rest, place)
            rest, place = rest[count:], place + count
        self._written(len(data))
        return self._last

    def move(self, offset: int, ref: TensorRef, on_bytes: OnBytes) -> None:
        """Let the kernel copy a range, as a reflink where the file system can. Not for a hashed file."""
        with ref.file.opened() as source:
            start, place = ref.start, self._start + offset
            while start < ref.end:
                count = min(ref.end - start, _MOVE)
                if (copied := _copy_range(source, self._file, count, start, place)) is None:
                    count = min(count, _BLOCK)
                    self.write(place - self._start, os.pread(source, count, start))
                else:
                    count = copied
                if count == 0:
                    raise ref.file.changed()
                start, place = start + count, place + count
                self._written(count)
                on_bytes(count)

    def flush(self) -> None:
        """Flush what was written to disk."""
        getattr(os, "fdatasync", os.fsync)(self._file)  # macOS has the second

    def record(self) -> dict[str, int | str]:
        """A manifest's entry, once everything is hashed."""
        if self._last is not None:
            self._last.result()
        return {"size": os.fstat(self._file).st_size, "sha256": self._digest.hexdigest()}

    def _written(self, count: int) -> None:
        self._unflushed += count
        if self._unflushed >= _MOVE:
            self._unflushed = 0
            start_writeback(self._file)


def _copy_range(source: int, target: int, count: int, start: int, place: int) -> int | None:
    """Return how many bytes the kernel copied; None where it can't: across file systems, or on macOS."""
    copy = getattr(os, "copy_file_range", None)
    if copy is None:
        return None
    try:
        return int(copy(source, target, count, start, place))
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
        return None


def write_steps(
    steps: Iterable[Copy | Task], files: Sequence[OutputFile], on_bytes: OnBytes = lambda count: None
) -> None:
    """Take the steps of a plan, in order; their targets are numbers of ``files``.

    ``on_bytes(count)`` is called for each block. KtbridgeError if a value can't be converted or an
    input file changed.
    """
    workers = min(_WORKERS, len(own_cpus()))
    pool = ThreadPoolExecutor(workers)
    jobs: deque[tuple[int, Future[None]]] = deque()
    ring: Ring = deque()

    def collect() -> None:
        count, job = jobs.popleft()
        job.result()
        on_bytes(count)

    try:
        for step in steps:
            if isinstance(step, Task):
                jobs.append((step.nbytes, pool.submit(_compute, step, files[step.file])))
                if len(jobs) > 4 * workers:
                    collect()
            elif _is_plain(step) and not files[step.targets[0].file].hashed:
                (target,), source = step.targets, step.source
                assert isinstance(source, TensorRef)
                files[target.file].move(target.offset, source, on_bytes)
            else:
                _copy(step, files, ring, on_bytes)
        while jobs:
            collect()
    finally:  # before the files are closed
        pool.shutdown(wait=True, cancel_futures=True)


def _compute(task: Task, file: OutputFile) -> None:
    for offset, data in task.make():
        file.write(offset, data)


def _is_plain(copy: Copy) -> bool:
    """Return whether bytes of a file go to one place as they are."""
    source = copy.source
    unchanged = isinstance(source, TensorRef) and source.dtype == copy.dtype and not copy.padding
    return unchanged and len(copy.targets) == 1 and copy.targets[0].factor == 1.0


def _copy(copy: Copy, files: Sequence[OutputFile], ring: Ring, on_bytes: OnBytes) -> None:
    """Read or compute once, write to each target."""
    if not ring:
        ring.extend((memoryview(bytearray(_BLOCK)), []) for _ in range(_BLOCKS))
    source, data = copy.source, memoryview(b"")
    if isinstance(source, Block):
        data = bytes_of(source.load())
        if len(data) != copy.nbytes:
            raise KtbridgeError(f"{len(data)} bytes were made, not {copy.nbytes}")
    offsets = [target.offset for target in copy.targets]
    for start in range(0, copy.nbytes, _BLOCK):
        size = min(_BLOCK, copy.nbytes - start)
        memory, busy = ring[0]
        ring.rotate(-1)
        while busy:
            busy.pop().result()
        block = memory[:size] if isinstance(source, TensorRef) else data[start : start + size]
        if isinstance(source, TensorRef):
            source.file.read_into(source.start + start, block)
        for number, target in enumerate(copy.targets):
            values: Buffer = block
            if isinstance(source, TensorRef):
                values = converted(block, source, source.start + start, copy.dtype, target.factor)
            job = files[target.file].write(offsets[number], values)
            offsets[number] += len(values)
            if job is not None:
                busy.append(job)
        on_bytes(size)
    if copy.padding:
        for target, offset in zip(copy.targets, offsets, strict=True):
            files[target.file].write(offset, bytes(copy.padding))


@contextmanager
def explained(stagings: list[Staging], need: int) -> Iterator[None]:
    """Raise an OSError as KtbridgeError; it and an interrupt then list the complete outputs.

    ``need`` is the number of bytes that all outputs take.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(_in_place(stagings)) from stop
    except OSError as error:
        left = _in_place(stagings)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KtbridgeError(
                f"the disk is full: {size_text(need)} are needed in all, {left}",
                "free space, or choose output directories on another disk",
            ) from error
        passing = error.errno in (errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)
        step = "try again" if passing else ELSEWHERE
        raise KtbridgeError(f"writing failed, {left}: {error}", step) from error


def _in_place(stagings: list[Staging]) -> str:
    done = [str(staging.target) for staging in stagings if staging.committed]
    if not done:
        return "nothing was written"
    return f"{'' if len(done) == len(stagings) else 'only '}{', '.join(done)} is in place"


@contextmanager
def guarded(stamps: Stamps, doing: str) -> Iterator[Callable[[], None]]:
    """Yields a function that raises ProblemsError if an input changed: call it before publishing.

    ``stamps`` (size, modification time, inode) were taken at the first read. If the block fails and a
    file has changed, that ProblemsError is raised instead. ``doing`` completes "... changed during".
    """
    message = f"nothing was written: a file changed during the {doing}"

    def check() -> None:
        if problems := list(_changed_files(stamps)):
            raise ProblemsError(message, problems)

    try:
        yield check
    except Exception as error:
        if problems := list(_changed_files(stamps)):
            raise ProblemsError(message, problems) from error
        raise


def _changed_files(stamps: Stamps) -> Iterator[Problem]:
    for path, before in stamps.items():
        if what := difference(before, stamp(path)):
            yield problem("KTB709", str(path), f"{what} while it was being read")
