"""Carrying out a conversion plan: one pass over the input, every output whole or not at all.

The kernel copies ranges from file to file (``sendfile``), while a thread per output reads back and
hashes what was written; memory doesn't depend on the adapter's size. An output's manifest, with
the hash, is written last; then everything is flushed and the directories are renamed into place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ktbridge.adapter.adapter import CONFIG_FILE, MODEL_FILE
from ktbridge.adapter.convert import ConvertPlan, Copy, Output, PathLike, describe, plan_convert
from ktbridge.adapter.manifest import MANIFEST_FILE, build_manifest, dump_json
from ktbridge.adapter.publish import stage_adapter
from ktbridge.adapter.values import scaled_exactly
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.publish import Staging

OnProgress = Callable[[int, int], None]
_COPY_BYTES = 1 << 25  # a call; also how often progress is told
_HASH_BYTES = 1 << 18  # small enough to stay in the cache between reading and hashing


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. ``outputs`` has layout, path, tensors, bytes, rank, alpha, modules."""

    source: str
    layout: str
    tensors_in: int
    bytes_in: int
    outputs: tuple[dict[str, Any], ...]
    findings: tuple[Problem, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "source": self.source,
            "layout": self.layout,
            "tensors_in": self.tensors_in,
            "bytes_in": self.bytes_in,
            "outputs": list(self.outputs),
            "findings": [finding.as_dict() for finding in self.findings],
            "seconds": self.seconds,
        }


def convert_adapter(
    raw_dir: PathLike,
    *,
    expert_output_dir: PathLike | None = None,
    nonexpert_output_dir: PathLike | None = None,
    merged_output_dir: PathLike | None = None,
    base_model: str | None = None,
    lora_alpha: float | None = None,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> ConvertReport:
    """Convert an adapter into any of the serving layouts, in one pass over it.

    ``raw_dir`` is usually a raw adapter; a merged directory (or KT's per-expert training output,
    which looks the same) is split as well. ``base_model`` is what the configurations will name,
    by default what the input names. ``lora_alpha`` is the alpha the experts were trained with, if
    neither manifest nor configuration tells. Tensor bytes are the input's; modes follow the umask.
    ``on_progress(done, total)`` counts bytes.

    Raises UsageError without outputs; ProblemsError with all that stands in the way, before
    anything is written; KtbridgeError when writing fails. Whatever happens, an output directory is
    complete or as it was before.

    Example::

        report = convert_adapter("raw", expert_output_dir="expert", nonexpert_output_dir="rest")
        print(report.tensors_in, [output["tensors"] for output in report.outputs])
    """
    plan = plan_convert(
        raw_dir,
        expert_output_dir=expert_output_dir,
        nonexpert_output_dir=nonexpert_output_dir,
        merged_output_dir=merged_output_dir,
        base_model=base_model,
        lora_alpha=lora_alpha,
        overwrite=overwrite,
    )
    return execute_plan(plan, on_progress)


def execute_plan(plan: ConvertPlan, on_progress: OnProgress | None = None) -> ConvertReport:
    """Do what ``plan_convert`` planned."""
    started = time.perf_counter()
    finished: list[str] = []
    try:
        _write(plan, on_progress, finished)
    except OSError as error:
        left = f"only {', '.join(finished)} is in place" if finished else "nothing was written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = sum(describe(output)["bytes"] for output in plan.outputs)
            raise KtbridgeError(
                f"the disk is full: {need / 1e9:.2f} GB are needed in all, {left}",
                "free space, or choose output directories on another disk",
            ) from error
        raise KtbridgeError(f"writing failed, {left}: {error}", "try again") from error
    return ConvertReport(
        source=str(plan.source.path),
        layout=plan.source.layout,
        tensors_in=plan.tensors_in,
        bytes_in=plan.bytes_in,
        outputs=tuple(describe(output) for output in plan.outputs),
        findings=tuple(plan.findings),
        seconds=time.perf_counter() - started,
    )


class _Sink:
    """One output's weight file: grows at its end, and a thread of its own hashes behind."""

    def __init__(self, staging: Staging, output: Output) -> None:
        self.staging = staging
        self.output = output
        self._pool = ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._file = os.open(
            staging.path / MODEL_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        self._size = 0
        self._jobs: list[Future[None]] = []
        self.append(output.header())

    def append(self, data: bytes) -> None:
        """Write bytes that are in memory."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._grown(len(data))

    def append_range(self, source: int, start: int, end: int) -> None:
        """Let the kernel copy the bytes ``start:end`` of the file descriptor ``source``."""
        position = start
        while position < end:
            count = os.sendfile(self._file, source, position, end - position)
            if count == 0:
                raise _Shrunk
            position += count
        self._grown(end - start)

    def _grown(self, count: int) -> None:
        self._jobs.append(self._pool.submit(self._hash, self._size, self._size + count))
        self._size += count

    def _hash(self, start: int, end: int) -> None:
        for position in range(start, end, _HASH_BYTES):
            data = os.pread(self._file, min(_HASH_BYTES, end - position), position)
            self._digest.update(data)

    def flush(self) -> None:
        """Start flushing the weights to disk, behind the last hash."""
        self._jobs.append(self._pool.submit(os.fsync, self._file))

    def finish(self) -> None:
        """With the weights flushed, write configuration and, last, the manifest."""
        for job in self._jobs:
            job.result()
        config = dump_json(self.output.config)
        self.staging.write_bytes(CONFIG_FILE, config)
        manifest = build_manifest(
            base_model=self.output.config["base_model_name_or_path"],
            rank=self.output.config["r"],
            alpha=self.output.config["lora_alpha"],
            layout=self.output.layout,
            artifacts={
                MODEL_FILE: {"size": self._size, "sha256": self._digest.hexdigest()},
                CONFIG_FILE: {"size": len(config), "sha256": hashlib.sha256(config).hexdigest()},
            },
        )
        self.staging.write_bytes(MANIFEST_FILE, dump_json(manifest))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)


class _Shrunk(Exception):
    """The input became shorter than its header says."""


def _write(plan: ConvertPlan, on_progress: OnProgress | None, finished: list[str]) -> None:
    """Write all outputs; the paths of those in place are appended to ``finished``."""
    with ExitStack() as stack:
        sinks: list[_Sink] = []
        for output in plan.outputs:
            staging = stack.enter_context(stage_adapter(output.path, overwrite=plan.overwrite))
            sinks.append(_Sink(staging, output))
            stack.callback(sinks[-1].close)
        done = 0
        for copy in plan.copies:
            with open(copy.file.path, "rb", buffering=0) as file:
                for start in range(copy.start, copy.end, _step(copy)):
                    end = min(start + _step(copy), copy.end)
                    try:
                        _copy(copy, file.fileno(), start, end, sinks)
                    except _Shrunk:
                        raise KtbridgeError(
                            f"{copy.file.path} became shorter while it was being read",
                            "wait until nothing writes to it, then run again",
                        ) from None
                    done += end - start
                    if on_progress is not None:
                        on_progress(done, plan.bytes_in)
        for sink in sinks:
            sink.flush()
        for sink in sinks:
            sink.finish()
        for sink in sinks:
            sink.staging.commit()
            finished.append(str(sink.output.path))


def _step(copy: Copy) -> int:
    """A scaled range is one tensor and is taken whole; others go in pieces."""
    return _COPY_BYTES if set(copy.factors) == {1.0} else max(1, copy.end - copy.start)


def _copy(copy: Copy, source: int, start: int, end: int, sinks: list[_Sink]) -> None:
    for target, factor in zip(copy.targets, copy.factors, strict=True):
        if factor == 1.0:
            sinks[target].append_range(source, start, end)
            continue
        data = os.pread(source, end - start, start)
        if len(data) != end - start:
            raise _Shrunk
        scaled = scaled_exactly(memoryview(data), copy.dtype, factor)
        if scaled is None:
            raise KtbridgeError(
                f"{copy.file.path} has non-expert values that can't be scaled by {factor:g} "
                f"in {copy.dtype} without rounding",
                "write the split layout: --expert-output-dir and --nonexpert-output-dir",
            )
        sinks[target].append(scaled)
