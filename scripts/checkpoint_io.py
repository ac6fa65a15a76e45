"""Rewriting a checkpoint tensor by tensor: what quantising and dequantising share.

A script says of each tensor what becomes of it (``Part``); this module writes the shards under their own
names, the index, the configuration and the files beside them, and puts the directory in place whole or
not at all. ``ktbridge_checkpoint.json`` is written last; it says what was made from what, and marks the
directory as one that a later run may replace with ``--overwrite``.

Memory is bounded whatever the size of a shard: each worker holds one block of ``BLOCK`` values (about
30 bytes each), and the source is read through a memory map whose pages are let go every ``_HELD`` bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktbridge import __version__
from ktbridge.adapter.manifest import dump_json
from ktbridge.adapter.publish import explained
from ktbridge.errors import KtbridgeError
from ktbridge.model import Checkpoint, Entry
from ktbridge.model.replace import why_not_replaceable
from ktbridge.model.tensorfile import DTYPE_BITS, build_header
from ktbridge.publish import Staging

PROVENANCE = "ktbridge_checkpoint.json"
BLOCK = 1 << 17  # values a worker takes at a time: 512 KB in float32, to stay in its cache
_COPY = 1 << 24  # bytes a worker copies at a time
_HELD = 1 << 27  # bytes written until the source's pages are let go
_INDEX = "model.safetensors.index.json"
# The weights in other forms, what is written anew, and what tells loaders of the old storage.
_NOT_COPIED = re.compile(
    r".*\.(?:safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)|.*\.index\.json|\..*|config\.json"
    r"|(?:hf_quant|quant|quantize|quantization)_config\.json|recipe\.yaml|ktbridge_(?:merge|checkpoint)\.json"
)
_STORED: dict[str, Any] = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}

Buffer = Any
"""What has the buffer protocol: bytes, a memoryview, a contiguous array."""


@dataclass(frozen=True)
class Part:
    """One pass over a source: tensors of ``rows`` rows each, ``make(first, last)`` gives those rows of all.

    ``outputs`` are (name, dtype, shape); ``width`` is how many values a row costs in memory.
    """

    shard: str
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    rows: int
    width: int
    make: Callable[[int, int], Sequence[Buffer]]


@dataclass
class Rewrite:
    """Everything a run will do, and what to say of it. ``converted`` counts stored weights."""

    checkpoint: Checkpoint
    output: Path
    parts: list[Part]
    config: dict[str, Any]
    converted: int
    about: dict[str, Any]
    overwrite: bool = False
    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in sorted(self.checkpoint.path.iterdir()):
            if path.is_file() and not _NOT_COPIED.fullmatch(path.name):
                self.copied.append(path.name)
            elif path.name not in (*self.checkpoint.shards, _INDEX, "config.json", PROVENANCE):
                self.left_out.append(path.name)

    @property
    def bytes(self) -> int:
        """Bytes of the new tensors."""
        return sum(_nbytes(dtype, shape) for p in self.parts for _, dtype, shape in p.outputs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": str(self.checkpoint.path),
            "output": str(self.output),
            **self.about,
            "converted": self.converted,
            "tensors": sum(len(part.outputs) for part in self.parts),
            "shards": len({part.shard for part in self.parts}),
            "bytes": self.bytes,
            "source_bytes": sum(self.checkpoint.file(name).size for name in self.checkpoint.shards),
            "copied": self.copied,
            "left_out": self.left_out,
        }


def array(checkpoint: Checkpoint, entry: Entry) -> NDArray[Any]:
    """A tensor as a view into its mapped shard; BF16 as its bits in uint16, 8-bit floats in uint8."""
    data = checkpoint.tensor(entry.name).data
    return np.frombuffer(data, _STORED.get(entry.dtype, np.uint8)).reshape(entry.shape)


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """BF16 bits (uint16), F16 or F32 as float32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def copied(checkpoint: Checkpoint, entry: Entry) -> Part:
    """A tensor whose bytes stay."""
    data = checkpoint.file(checkpoint.shard(entry.name)).view(entry.start, entry.end)
    outputs = ((entry.name, entry.dtype, entry.shape),)
    return Part(checkpoint.shard(entry.name), outputs, entry.nbytes, 0, lambda a, b: (data[a:b],))


def check_place(plan: Rewrite) -> None:
    """KtbridgeError where the output may not be written, or its disk has too little space."""
    target, source = plan.output, Path(os.path.realpath(plan.checkpoint.path))
    if source == target or source in target.parents or target in source.parents:
        raise KtbridgeError(f"{target} overlaps {source}", "choose another output directory")
    if reason := why_not_writable(target, plan.overwrite):
        raise KtbridgeError(f"{target} {reason[0]}", reason[1])
    place = next(path for path in (target, *target.parents) if path.is_dir())
    free, need = shutil.disk_usage(place).free, plan.bytes
    if free < need:
        raise KtbridgeError(
            f"{place} has {free / 1e9:.2f} GB free, {need / 1e9:.2f} GB are needed",
            "free space, or choose an output directory on another disk",
        )


def why_not_writable(target: Path, overwrite: bool) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step): only an output of ours may."""
    what = "a checkpoint that these scripts wrote"
    return why_not_replaceable(target, PROVENANCE, what, overwrite)


def execute(plan: Rewrite, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Do what was planned; returns the report. ``on_progress(done, total)`` counts bytes written.

    Raises KtbridgeError when a value can't be converted or writing fails; the output is then as it was.
    """
    started, total = time.perf_counter(), plan.bytes
    shards: dict[str, list[Part]] = {}
    for part in plan.parts:
        shards.setdefault(part.shard, []).append(part)
    workers = min(8, len(os.sched_getaffinity(0)))
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    stagings: list[Staging] = []
    with (
        explained(stagings, total),
        Staging(plan.output, lambda path: why_not_writable(path, plan.overwrite)) as staging,
    ):
        stagings.append(staging)
        weight_map: dict[str, str] = {}
        with ThreadPoolExecutor(workers) as pool:
            for shard, parts in shards.items():
                file = plan.checkpoint.file(shard)
                to = staging.path / shard
                _write_shard(to, parts, file.metadata, pool, on_bytes, file.release)
                file.release()
                weight_map |= {name: shard for part in parts for name, _, _ in part.outputs}
        for name in plan.copied:
            shutil.copyfile(plan.checkpoint.path / name, staging.path / name)
        staging.write_bytes("config.json", _json(plan.config))
        if set(shards) != {"model.safetensors"}:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            staging.write_bytes(_INDEX, _json(index))
        staging.flush()
        files = {path.name: path.stat().st_size for path in sorted(staging.path.iterdir())}
        said = {"version": 1, "made_by": f"ktbridge {__version__}", **plan.as_dict()}
        staging.write_bytes(PROVENANCE, dump_json({**said, "files": files}))
        staging.commit()
    return {**plan.as_dict(), "seconds": round(time.perf_counter() - started, 3)}


def _write_shard(
    path: Path,
    parts: list[Part],
    metadata: dict[str, str],
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
    release: Callable[[], None],
) -> None:
    # Wider types first, so that every tensor is aligned: the kernels read scales where they lie.
    outputs = [output for part in parts for output in part.outputs]
    outputs.sort(key=lambda output: -DTYPE_BITS[output[1]])
    header = build_header(outputs, {"format": "pt", **metadata})
    place, position = {}, len(header)
    for name, dtype, shape in outputs:
        place[name] = position
        position += _nbytes(dtype, shape)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    jobs: deque[Future[int]] = deque()
    held = 0

    def block(part: Part, first: int, last: int) -> int:
        count = 0
        for (name, dtype, shape), data in zip(part.outputs, part.make(first, last), strict=True):
            view = memoryview(data).cast("B")
            start = place[name] + first * (_nbytes(dtype, shape) // part.rows)
            while view:
                written = os.pwrite(descriptor, view, start)
                view, start, count = view[written:], start + written, count + written
        return count

    try:
        os.pwrite(descriptor, header, 0)
        for part, first, last in _blocks(parts):
            jobs.append(pool.submit(block, part, first, last))
            while len(jobs) > 16:
                count = jobs.popleft().result()
                on_bytes(count)
                held += count
            if held > _HELD:
                release()
                held = 0
        while jobs:
            on_bytes(jobs.popleft().result())
        os.fsync(descriptor)
    finally:
        for job in jobs:
            job.cancel()
        # Workers that are still at it write to this descriptor: not to the next file of its number.
        for job in jobs:
            job.cancelled() or job.exception()
        os.close(descriptor)


def _blocks(parts: list[Part]) -> Iterator[tuple[Part, int, int]]:
    for part in parts:
        step = max(1, BLOCK // part.width) if part.width else _COPY
        for first in range(0, part.rows, step):
            yield part, first, min(part.rows, first + step)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def _json(value: dict[str, Any]) -> bytes:
    """Keys in their own order: configurations are read by people."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def run(plan: Rewrite, label: str, dry_run: bool, as_json: bool) -> None:
    """Check the place, do the work under a progress bar, and say what was done."""
    from ktbridge.cli._app import terminable
    from ktbridge.cli._ui import emit_json, progress_bar, stderr

    check_place(plan)
    if dry_run:
        report = plan.as_dict()
    else:
        with terminable(), progress_bar(label, "bytes") as bar:
            report = execute(plan, bar)
    if as_json:
        emit_json({"ok": True, "dry_run": dry_run, **report})
        return
    if plan.left_out:
        stderr.print(f"left out: {' '.join(plan.left_out)}", soft_wrap=True, markup=False)
    tail = "dry run: nothing was written" if dry_run else f"done in {report['seconds']:.2f} s"
    stderr.print(
        f"{report['converted']:,} weights, {report['source_bytes'] / 1e9:.2f} GB to "
        f"{report['bytes'] / 1e9:.2f} GB in {report['shards']} shards, {report['output']}; {tail}",
        soft_wrap=True,
        markup=False,
    )
