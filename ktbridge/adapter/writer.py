"""Write adapter directories: one pass over the input, every directory atomic.

Each block is read (or computed) once, appended to every output file that needs it, and hashed from
the same memory: by one thread per file, and one more for the input if its manifest has hashes. A
ring of blocks bounds memory use, whatever the adapter's size. Write-back to disk is started during
copying. A directory's manifest, with the hashes, is written last.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ktbridge.adapter.adapter import CONFIG_FILE, FUSED_FILE
from ktbridge.adapter.blocks import Copy, Output, Span, bytes_of, converted
from ktbridge.adapter.manifest import (
    MANIFEST_FILE,
    build_manifest,
    dump_json,
    fused_record,
)
from ktbridge.errors import KtbridgeError
from ktbridge.model import Fingerprint
from ktbridge.publish import Staging, start_writeback

Buffer = memoryview | bytes
# Hashes what was read of a file; the future is done when its memory may be reused.
OnRead = Callable[[Path, int, memoryview], "Future[None] | None"]
_BLOCK = 1 << 19  # bytes: small enough to stay in the cache until written and hashed
_BLOCKS = 16  # how far copying may run ahead of hashing
_WRITEBACK = 1 << 25  # bytes between requests for write-back


class OutputFile:
    """One weight file: append-only, hashed by its own thread."""

    def __init__(self, path: Path, header: bytes) -> None:
        self._hasher = ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._size = self._started = 0
        self._last = self.append(header)

    def append(self, data: Buffer) -> Future[None]:
        """Write a block; the future is done when its memory may be reused."""
        self._last = self._hasher.submit(self._digest.update, data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)
        if self._size - self._started >= _WRITEBACK:
            start_writeback(self._file, self._started, self._size - self._started)
            self._started = self._size
        return self._last

    def flush(self) -> None:
        """Flush what was written to disk."""
        os.fsync(self._file)

    def record(self) -> dict[str, Any]:
        """The manifest's entry, once everything is hashed."""
        self._last.result()
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._hasher.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)


class OutputDirectory:
    """One staged adapter directory, whose steps ``plan_copies`` made.

    Call ``flush``, then ``finish``, after all files are filled.
    """

    def __init__(self, staging: Staging, output: Output) -> None:
        self.staging = staging
        self._output = output
        self._stack = ExitStack()
        self.files: dict[str, OutputFile] = {}
        with self._stack:  # closes what is open if a file can't be made
            for name in output.files:
                header = output.header(name, output.rows(name))
                self.files[name] = OutputFile(staging.path / name, header)
                self._stack.callback(self.files[name].close)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> OutputDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def flush(self) -> None:
        """Flush the weights to disk, and write the configuration."""
        for file in self.files.values():
            file.flush()
        self._config = dump_json(self._output.config)
        self.staging.write_bytes(CONFIG_FILE, self._config)

    def finish(self, base_fingerprint: Fingerprint | None) -> None:
        """Write the manifest. ``base_fingerprint`` is that of the model trained on."""
        output = self._output
        artifacts = {name: file.record() for name, file in self.files.items()}
        digest = hashlib.sha256(self._config).hexdigest()
        artifacts[CONFIG_FILE] = {"size": len(self._config), "sha256": digest}
        if FUSED_FILE in artifacts:
            artifacts[FUSED_FILE].update(fused_record(output.rows(FUSED_FILE)))
        manifest = build_manifest(
            base_model=output.config["base_model_name_or_path"],
            rank=output.rank,
            alpha=output.alpha,
            layout=None if output.layout == "raw" else output.layout,
            artifacts=artifacts,
            expert_weight_format=output.weight_format,
            base_fingerprint=base_fingerprint,
        )
        if output.experts:
            manifest["experts"] = output.experts
        self.staging.write_bytes(MANIFEST_FILE, dump_json(manifest))


def copy_all(
    copies: Sequence[Copy],
    files: Sequence[OutputFile],
    on_read: OnRead | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Take the steps of a plan, in order; the targets of ``copies`` are indices of ``files``.

    ``on_bytes(count)`` is called for each block. KtbridgeError if a value can't be converted or an
    input file became shorter.
    """
    ring = [memoryview(bytearray(_BLOCK)) for _ in range(_BLOCKS)]
    busy: list[list[Future[None]]] = [[] for _ in ring]
    turn = 0
    with ExitStack() as stack:
        inputs: dict[Path, int] = {}
        for copy in copies:
            source, first, data = copy.source, 0, memoryview(b"")
            if isinstance(source, Span):
                first, path = source.start, source.file.path
                if path not in inputs:
                    inputs[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    stack.callback(os.close, inputs[path])
            else:
                data = bytes_of(source.load())
                if len(data) != copy.nbytes:
                    raise KtbridgeError(f"{len(data)} bytes were made, not {copy.nbytes}")
            for start in range(first, first + copy.nbytes, _BLOCK):
                for job in busy[turn]:
                    job.result()
                size = min(_BLOCK, first + copy.nbytes - start)
                if isinstance(source, Span):
                    block = ring[turn][:size]
                    _read(inputs[path], path, block, start)
                    jobs = _append(files, copy, source, start, block)
                    if on_read is not None and (hashed := on_read(path, start, block)) is not None:
                        jobs.append(hashed)
                else:
                    jobs = [
                        files[target].append(data[start : start + size]) for target in copy.targets
                    ]
                busy[turn] = jobs
                turn = (turn + 1) % _BLOCKS
                if on_bytes is not None:
                    on_bytes(size)
            if copy.padding:
                for target in copy.targets:
                    files[target].append(bytes(copy.padding))


def _append(
    files: Sequence[OutputFile], copy: Copy, source: Span, start: int, block: memoryview
) -> list[Future[None]]:
    """Append what was read at ``start`` to each target, as that stores it."""
    return [
        files[target].append(converted(block, source, start, copy.dtype, factor))
        for target, factor in zip(copy.targets, copy.factors, strict=True)
    ]


def _read(descriptor: int, path: Path, block: memoryview, start: int) -> None:
    """Fill ``block``, starting at byte ``start``."""
    filled = 0
    while filled < len(block):
        count = os.preadv(descriptor, [block[filled:]], start + filled)
        if count == 0:
            raise KtbridgeError(
                f"{path} became shorter while it was being read",
                "wait until nothing writes to it, then run again",
            )
        filled += count
