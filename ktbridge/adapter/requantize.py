"""Rewriting a checkpoint tensor by tensor: what quantizing and dequantizing share.

A ``Part`` says what becomes of a tensor; this module lays out the shards, and ``ktbridge.adapter.rewrite``
writes them under their own names, with the index, the configuration and the files beside them, whole or not
at all. ``ktbridge_checkpoint.json`` marks the directory as one that a later run may replace.

Memory is bounded whatever the size of a shard: each worker holds one block of ``BLOCK`` values (about
30 bytes each), or as many as its part says, and the source is read through a memory map whose pages are let
go every ``_HELD`` bytes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.rewrite import CHECKPOINT_FILE, Rewrite, Shard
from ktbridge.adapter.storage import NUMPY_TYPES
from ktbridge.adapter.writer import Buffer, Copy, Target, Task
from ktbridge.model import Checkpoint, Entry, TensorRef
from ktbridge.model.checkpoint import INDEX_FILE
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

BLOCK = 1 << 17  # values a worker takes at a time: 512 KB in float32, to stay in its cache
_HELD = 1 << 27  # bytes written until the source's pages are let go
# Where loaders would find the old storage.
_OBSOLETE = r"(?:hf_quant|quant|quantize|quantization)_config\.json|recipe\.yaml"


@dataclass(frozen=True)
class Part:
    """One pass over a source: tensors of ``rows`` rows each, ``make(first, last)`` gives those rows of all.

    ``outputs`` are (name, dtype, shape); ``width`` is how many values a row costs in memory. A part
    without ``make`` is one tensor whose bytes stay. ``beside``: it only goes along with a converted weight.
    ``at_once``: values that a worker takes at a time.
    """

    shard: str
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    rows: int
    width: int
    make: Callable[[int, int], Sequence[NDArray[np.generic]]] | None = None
    beside: bool = False
    at_once: int = BLOCK


@dataclass
class Plan:
    """Everything a run will do, and its description. ``converted`` counts stored weights."""

    rewrite: Rewrite
    parts: list[Part]
    converted: int
    about: dict[str, object]

    @property
    def bytes(self) -> int:
        """Bytes of the new tensors."""
        return sum(_nbytes(dtype, shape) for p in self.parts for _, dtype, shape in p.outputs)

    @property
    def need(self) -> int:
        """Bytes to be written."""
        return self.bytes + self.rewrite.copied_bytes

    def as_dict(self) -> dict[str, object]:
        rewrite = self.rewrite
        checkpoint = rewrite.checkpoint
        return {
            "source": str(checkpoint.path),
            "output": str(rewrite.output),
            **self.about,
            "converted": self.converted,
            "tensors": sum(len(part.outputs) for part in self.parts),
            "shards": len({part.shard for part in self.parts}),
            "bytes": self.bytes,
            "source_bytes": sum(checkpoint.file(name).size for name in checkpoint.shards),
            "copied": rewrite.copied,
            "left_out": rewrite.left_out,
        }


def make_plan(
    checkpoint: Checkpoint,
    output: Path,
    parts: list[Part],
    config: Mapping[str, object],
    about: dict[str, object],
    overwrite: bool,
    alone: bool = False,
) -> Plan:
    """Plan to write ``parts`` and the ``config``; ``about`` goes into the report.

    ``alone``: without the files that lie beside the weights.
    """
    anew = {"config.json": _json(config)}
    if (checkpoint.path / INDEX_FILE).is_file():
        place = {name: part.shard for part in parts for name, _, _ in part.outputs}
        total = sum(_nbytes(dtype, shape) for part in parts for _, dtype, shape in part.outputs)
        anew[INDEX_FILE] = _json({"metadata": {"total_size": total}, "weight_map": place})
    rewrite = Rewrite(
        checkpoint,
        output.expanduser().resolve(),
        CHECKPOINT_FILE,
        "a checkpoint that these scripts wrote",
        overwrite,
        anew,
        r".*" if alone else _OBSOLETE,
    )
    converted = sum(part.make is not None and not part.beside for part in parts)
    return Plan(rewrite, parts, converted, about)


def array(checkpoint: Checkpoint, entry: Entry) -> NDArray[np.generic]:
    """A tensor as a view into its mapped shard; BF16 as its bits in uint16, 8-bit floats in uint8."""
    data = checkpoint.tensor(entry.name).data
    return np.frombuffer(data, NUMPY_TYPES.get(entry.dtype, np.uint8)).reshape(entry.shape)


def copied(checkpoint: Checkpoint, entry: Entry) -> Part:
    """A tensor whose bytes stay."""
    outputs = ((entry.name, entry.dtype, entry.shape),)
    return Part(checkpoint.shard(entry.name), outputs, entry.nbytes, 0)


def execute(plan: Plan, on_progress: Callable[[int, int], None]) -> dict[str, object]:
    """Do what was planned; returns the report. ``on_progress(done, total)`` counts bytes written.

    Raises KtbridgeError when a value can't be converted or writing fails; the output is then as it was.
    """
    started, checkpoint = time.perf_counter(), plan.rewrite.checkpoint
    shards: dict[str, list[Part]] = {}
    for part in plan.parts:
        shards.setdefault(part.shard, []).append(part)
    held = 0

    def report(done: int, total: int) -> None:
        nonlocal held
        if done - held > _HELD:
            held = done
            for name in checkpoint.shards:
                checkpoint.file(name).release()
        on_progress(done, total)

    plan.rewrite.write(
        (_shard(checkpoint, name, parts) for name, parts in shards.items()),
        plan.as_dict(),
        need=plan.need,
        stamps={file.path: file.stamp for file in map(checkpoint.file, shards)},
        doing="conversion",
        on_progress=report,
    )
    return {**plan.as_dict(), "seconds": round(time.perf_counter() - started, 3)}


def _shard(checkpoint: Checkpoint, name: str, parts: list[Part]) -> Shard:
    # Wider types first, so that every tensor is aligned: the kernels read scales where they lie.
    outputs = [output for part in parts for output in part.outputs]
    outputs.sort(key=lambda output: -DTYPE_BITS[output[1]])
    place, position = {}, 0
    for tensor, dtype, shape in outputs:
        place[tensor] = position
        position += _nbytes(dtype, shape)
    file = checkpoint.file(name)

    def steps() -> Iterator[Copy | Task]:
        for part in parts:
            if part.make is None:
                entry = file.entries[part.outputs[0][0]]
                yield Copy(TensorRef.of(file, entry), entry.dtype, (Target(0, place[entry.name]),))
                continue
            row = sum(_nbytes(dtype, shape) for _, dtype, shape in part.outputs) // part.rows
            step = max(1, part.at_once // part.width)
            for first in range(0, part.rows, step):
                last = min(part.rows, first + step)
                yield Task(0, (last - first) * row, partial(_rows, part, place, first, last))

    return Shard(name, build_header(outputs, {"format": "pt", **file.metadata}), steps())


def _rows(part: Part, place: Mapping[str, int], first: int, last: int) -> Iterator[tuple[int, Buffer]]:
    """Yield those rows of every tensor of a part, each with its place."""
    assert part.make is not None
    for (name, dtype, shape), data in zip(part.outputs, part.make(first, last), strict=True):
        yield place[name] + first * (_nbytes(dtype, shape) // part.rows), data.data.cast("B")


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def _json(value: Mapping[str, object]) -> bytes:
    """Keys in their own order: configurations are read by people."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
