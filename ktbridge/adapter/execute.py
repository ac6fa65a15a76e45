"""Execute a conversion plan: one pass over the input, every output atomic.

Each block is read once, written to every target output, and hashed from the same memory: by one
thread per output, and one more for the input if its manifest has hashes. A ring of blocks bounds
memory use, whatever the adapter's size. Write-back to disk is started during copying. An output's
manifest, with the hash, is written last; then, if the input's hashes match and its files are
unchanged, the directories are renamed into place.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ktbridge.adapter.adapter import CONFIG_FILE, MODEL_FILE
from ktbridge.adapter.check_hashes import ReadHashes
from ktbridge.adapter.convert import ConvertPlan, Copy, Output, describe
from ktbridge.adapter.manifest import MANIFEST_FILE, build_manifest, dump_json, trained_on
from ktbridge.adapter.publish import PathLike, explained, stage_adapter
from ktbridge.adapter.sources import guarded
from ktbridge.adapter.values import scaled_exactly, to_bf16
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.model import Fingerprint
from ktbridge.publish import Staging, start_writeback

OnProgress = Callable[[int, int], None]
Buffer = memoryview | bytes
_BLOCK = 1 << 19  # bytes: small enough to stay in the cache until written and hashed
_BLOCKS = 16  # how far copying may run ahead of hashing
_REPORT_EVERY = 1 << 25  # bytes between progress reports, and between requests for write-back


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
    output_dir: PathLike | None = None,
    to: str = "kt-split",
    from_format: str = "auto",
    base_model: str | None = None,
    lora_alpha: float | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> ConvertReport:
    """Convert an adapter from any format that is read into any that is written, in one pass.

    ``raw_dir`` is usually a raw adapter; a merged directory (or KT's per-expert training output,
    which looks the same) is split as well. ``from_format`` names the format of other tools'
    adapters where "auto" is ambiguous (``ktbridge.adapter.dialects`` lists them), ``to`` the format
    to write: "kt-split" goes to ``expert_output_dir`` and ``nonexpert_output_dir``, and beside them
    to ``merged_output_dir``; "kt-merged", "raw", "peft-fused", "vllm", "sglang-3d" and "gguf" go to
    ``output_dir``. ``base_model`` is what the configurations will name, by default what the input
    names; if it is a directory with config.json, it also provides prefixes and sizes. ``lora_alpha``
    is the alpha the experts were trained with, if neither manifest nor configuration has it.
    ``dtype`` "bf16" rounds wider tensors to bfloat16, "keep" leaves their bytes as they are. Modes
    follow the umask. ``on_progress(done, total)`` counts bytes.

    Raises UsageError for incompatible options or an ambiguous format; ProblemsError with every
    obstacle, before anything is written, or if a file doesn't match its manifest or changes
    meanwhile; KtbridgeError when writing fails. Whatever happens, an output directory is complete
    or unchanged.

    Example::

        report = convert_adapter("raw", expert_output_dir="expert", nonexpert_output_dir="rest")
        print(report.tensors_in, [output["tensors"] for output in report.outputs])
        convert_adapter("raw", to="peft-fused", output_dir="peft")
    """
    from ktbridge.adapter.conversion import execute_conversion, plan_conversion

    plan = plan_conversion(
        raw_dir,
        expert_output_dir=expert_output_dir,
        nonexpert_output_dir=nonexpert_output_dir,
        merged_output_dir=merged_output_dir,
        output_dir=output_dir,
        to=to,
        from_format=from_format,
        base_model=base_model,
        lora_alpha=lora_alpha,
        dtype=dtype,
        overwrite=overwrite,
    )
    return execute_conversion(plan, on_progress)


def execute_plan(plan: ConvertPlan, on_progress: OnProgress | None = None) -> ConvertReport:
    """Execute the plan of ``plan_convert``."""
    started = time.perf_counter()
    stagings: list[Staging] = []
    outputs = tuple(describe(output) for output in plan.outputs)
    with explained(stagings, sum(output["bytes"] for output in outputs)):
        _write(plan, on_progress, stagings)
    return ConvertReport(
        source=str(plan.source.path),
        layout=plan.source.layout,
        tensors_in=plan.tensors_in,
        bytes_in=plan.bytes_in,
        outputs=outputs,
        findings=tuple(plan.findings),
        seconds=time.perf_counter() - started,
    )


class _Sink:
    """One output's weight file: append-only, hashed by its own thread."""

    def __init__(
        self, staging: Staging, output: Output, base_fingerprint: Fingerprint | None
    ) -> None:
        self.staging = staging
        self.output = output
        self._base_fingerprint = base_fingerprint
        self._hasher = ThreadPoolExecutor(1)
        self._digest = hashlib.sha256()
        self._file = os.open(
            staging.path / MODEL_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        self._size = self._started = 0
        self._last = self.append(output.header())

    def append(self, data: Buffer) -> Future[None]:
        """Write a block; the future is done when its memory may be reused."""
        self._last = self._hasher.submit(self._digest.update, data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)
        if self._size - self._started >= _REPORT_EVERY:
            start_writeback(self._file, self._started, self._size - self._started)
            self._started = self._size
        return self._last

    def flush(self) -> None:
        """Flush the weights to disk, and write the configuration."""
        os.fsync(self._file)
        self.config = dump_json(self.output.config)
        self.staging.write_bytes(CONFIG_FILE, self.config)

    def finish(self) -> None:
        """Write the manifest, after everything else is flushed and hashed."""
        self._last.result()
        config = {"size": len(self.config), "sha256": hashlib.sha256(self.config).hexdigest()}
        manifest = build_manifest(
            base_model=self.output.config["base_model_name_or_path"],
            rank=self.output.config["r"],
            alpha=self.output.config["lora_alpha"],
            layout=self.output.layout,
            artifacts={
                MODEL_FILE: {"size": self._size, "sha256": self._digest.hexdigest()},
                CONFIG_FILE: config,
            },
            base_fingerprint=self._base_fingerprint,
        )
        self.staging.write_bytes(MANIFEST_FILE, dump_json(manifest))

    def close(self) -> None:
        self._hasher.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)


def _write(plan: ConvertPlan, on_progress: OnProgress | None, stagings: list[Staging]) -> None:
    """Write all outputs; each is appended to ``stagings`` when started."""
    source = plan.source
    used = {copy.file.path for copy in plan.copies}
    with ExitStack() as stack:
        sinks: list[_Sink] = []
        for output in plan.outputs:
            staging = stage_adapter(output.path, overwrite=plan.overwrite, layout=output.layout)
            stagings.append(stack.enter_context(staging))
            sinks.append(_Sink(staging, output, trained_on(source.manifest)))
            stack.callback(sinks[-1].close)
        hashes = stack.enter_context(ReadHashes(source.path, source.manifest, used))
        with guarded(source.stamps, "conversion") as check_stamps:
            _copy_all(plan, sinks, hashes, on_progress)
            for sink in sinks:
                sink.flush()
            for sink in sinks:
                sink.finish()
            problems = hashes.problems()
            check_stamps()
        if problems:
            raise ProblemsError(f"{source.path} does not match its manifest", problems)
        for sink in sinks:
            sink.staging.commit()


def _copy_all(
    plan: ConvertPlan, sinks: list[_Sink], hashes: ReadHashes, on_progress: OnProgress | None
) -> None:
    ring = [memoryview(bytearray(_BLOCK)) for _ in range(_BLOCKS)]
    busy: list[list[Future[None]]] = [[] for _ in ring]
    done = reported = turn = 0
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for copy in plan.copies:
            path = copy.file.path
            if path not in files:
                files[path] = stack.enter_context(open(path, "rb", buffering=0))
            for start in range(copy.start, copy.end, _BLOCK):
                for job in busy[turn]:
                    job.result()
                block = ring[turn][: min(_BLOCK, copy.end - start)]
                _read(files[path], path, block, start)
                busy[turn] = [
                    sinks[target].append(_changed(copy, block, factor))
                    for target, factor in zip(copy.targets, copy.factors, strict=True)
                ]
                if (hashed := hashes.take(path, start, block)) is not None:
                    busy[turn].append(hashed)
                turn = (turn + 1) % _BLOCKS
                done += len(block)
                if on_progress is not None and (
                    done - reported >= _REPORT_EVERY or done == plan.bytes_in
                ):
                    on_progress(done, plan.bytes_in)
                    reported = done


def _read(file: BinaryIO, path: Path, block: memoryview, start: int) -> None:
    """Fill ``block``, starting at byte ``start``."""
    filled = 0
    while filled < len(block):
        count = os.preadv(file.fileno(), [block[filled:]], start + filled)
        if count == 0:
            raise KtbridgeError(
                f"{path} became shorter while it was being read",
                "wait until nothing writes to it, then run again",
            )
        filled += count


def _changed(copy: Copy, block: memoryview, factor: float) -> Buffer:
    """``block`` as an output stores it: rounded and scaled as planned."""
    data: Buffer = block
    if copy.written_dtype != copy.dtype:
        rounded = to_bf16(block, copy.dtype)
        if rounded is None:
            raise KtbridgeError(
                f"{copy.file.path} has finite values beyond bfloat16's range", "use --dtype keep"
            )
        data = rounded
    if factor != 1.0:
        scaled = scaled_exactly(memoryview(data), copy.written_dtype, factor)
        if scaled is None:
            raise KtbridgeError(
                f"{copy.file.path} has non-expert values that can't be scaled by {factor:g} "
                f"in {copy.written_dtype} without rounding",
                "write the split layout: --expert-output-dir and --nonexpert-output-dir",
            )
        data = scaled
    return data
