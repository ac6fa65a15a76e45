"""``merge_adapter``: merge an adapter into its base weights; any engine can serve the result.

The output has the base's files: shards of the same names and headers, in which only the adapted
tensors' bytes differ, the same index, configuration and tokenizer. ``ktbridge_merge.json`` is
written last; it records adapter and base model, and marks the directory as replaceable by a later
merge.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge import __version__
from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks.hashes import require_hashes
from ktbridge.adapter.checks.identity import Base, check_identity
from ktbridge.adapter.manifest import dump_json
from ktbridge.adapter.merge_plan import Delta, Deltas, plan_deltas
from ktbridge.adapter.publish import PathLike, explained, guarded
from ktbridge.adapter.scan import scan_adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.model import Checkpoint, open_checkpoint, read_model_config
from ktbridge.model.replace import why_not_replaceable
from ktbridge.model.stamps import Stamps, take_stamps
from ktbridge.publish import OnProgress, Staging
from ktbridge.units import size_text

MERGE_FILE = "ktbridge_merge.json"
# Copies of the weights in other formats would be unmerged.
_OTHER_WEIGHTS = re.compile(
    r".*\.(?:safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|npz)|.*\.index\.json|\..*"
    rf"|{re.escape(MERGE_FILE)}"
)
_INDEX = "model.safetensors.index.json"


@dataclass
class MergePlan:
    """Everything a merge will do. ``findings`` are warnings and infos; errors were raised.

    ``deltas`` by shard; ``copied`` are files beside the shards, ``left_out`` those that hold
    weights in another format (or are directories) and would stay unmerged. ``stamps``: size, time and
    inode of all files read (``ktbridge.adapter.publish``).
    """

    adapter: Adapter
    checkpoint: Checkpoint
    output: Path
    deltas: Deltas
    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    findings: list[Problem]
    overwrite: bool
    stamps: Stamps

    @property
    def bytes(self) -> int:
        """Bytes of the output."""
        shards = sum(self.checkpoint.file(name).size for name in self.checkpoint.shards)
        return shards + sum((self.checkpoint.path / name).stat().st_size for name in self.copied)

    def modules(self) -> list[dict[str, Any]]:
        """One row for all weights of one module: label, weights, matrices, rank, scale, dtype."""
        groups: Counter[tuple[str, int, float, str]] = Counter()
        matrices: Counter[tuple[str, int, float, str]] = Counter()
        for delta in self.deltas:
            key = (delta.label, delta.rank, delta.scale, delta.entry.dtype)
            groups[key] += 1
            matrices[key] += len(delta.matrices)
        return [
            {"module": label, "weights": count, "matrices": matrices[label, rank, scale, dtype],
             "rank": rank, "scale": scale, "dtype": dtype}
            for (label, rank, scale, dtype), count in groups.items()
        ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the output, and the delta of each weight."""
        return {
            "adapter": str(self.adapter.path),
            "layout": self.adapter.layout,
            "base_model": str(self.checkpoint.path),
            "output": str(self.output),
            "bytes": self.bytes,
            "shards": list(self.checkpoint.shards),
            "tensors": len(self.checkpoint),
            "modules": self.modules(),
            "deltas": [_describe(shard, d) for shard, ds in self.deltas.by_shard.items() for d in ds],
            "copied": list(self.copied),
            "left_out": list(self.left_out),
            "findings": [item.as_dict() for item in self.findings],
        }  # fmt: skip


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. ``values`` are in the adapted weights; ``changed`` of them moved.

    The rest of the delta is below the resolution of the checkpoint's dtype.
    """

    adapter: str
    base_model: str
    output: str
    bytes: int
    shards: int
    tensors: int
    modules: tuple[dict[str, Any], ...]
    values: int
    changed: int
    left_out: tuple[str, ...]
    findings: tuple[Problem, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        table = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **table,
            "modules": list(self.modules),
            "left_out": list(self.left_out),
            "findings": [item.as_dict() for item in self.findings],
        }


def merge_adapter(
    raw_dir: PathLike,
    *,
    base_model: PathLike,
    output: PathLike,
    overwrite: bool = False,
    allow_other_base: bool = False,
    on_progress: OnProgress | None = None,
) -> MergeReport:
    """Write a checkpoint with the adapter's weights added: W + scale·B·A, rounded once.

    ``raw_dir`` is an adapter of any layout. ``base_model`` is a directory with safetensors
    (one file or sharded), in BF16, F16 or F32 where the adapter has a delta; each sum is computed
    in float32 and rounded to nearest even to that dtype. scale = alpha/r for routed experts, what
    PEFT applied for the rest. Memory is bounded by a block per core, not by a shard
    (``ktbridge.adapter.merge_write``). ``overwrite`` replaces an earlier merge, nothing else.
    ``allow_other_base`` also permits a model other than the one trained on.
    ``on_progress(done, total)`` counts bytes of the output.

    Raises ProblemsError with every obstacle before anything is written (a tensor without a weight, a
    quantised weight, a tied one, another base model, an occupied output, a file that doesn't match
    its manifest), or if a file changes meanwhile, and KtbridgeError when writing fails. Whatever
    happens, ``output`` is complete or unchanged.

    Example::

        report = merge_adapter("raw", base_model="models/base", output="merged")
        print(f"{report.changed} of {report.values} values moved")
    """
    plan = plan_merge(
        raw_dir,
        base_model=base_model,
        output=output,
        overwrite=overwrite,
        allow_other_base=allow_other_base,
    )
    return execute_merge(plan, on_progress)


def plan_merge(
    raw_dir: PathLike,
    *,
    base_model: PathLike,
    output: PathLike,
    overwrite: bool = False,
    allow_other_base: bool = False,
) -> MergePlan:
    """Plan a merge without writing anything; arguments and errors as for ``merge_adapter``."""
    adapter, findings = scan_adapter(raw_dir)
    if adapter is None:
        raise ProblemsError(f"{raw_dir} can't be merged", findings)
    base = Path(os.path.expanduser(base_model))
    stamps = take_stamps(base.iterdir() if base.is_dir() else ())
    config = read_model_config(base)
    checkpoint = open_checkpoint(base)
    checkpoint.check()
    target = Path(os.path.realpath(os.path.expanduser(output)))
    findings += _check_output(target, adapter.path, base, overwrite)
    known = Base(base, str(base), checkpoint)
    findings += check_identity(adapter, known, merging=True, allowed=allow_other_base)
    deltas = plan_deltas(adapter, checkpoint, config)
    findings += deltas.problems
    copied, left_out = _beside(checkpoint)
    taken = {base / name: stamps.get(base / name) for name in (*checkpoint.shards, *copied)}
    plan = MergePlan(
        adapter, checkpoint, target, deltas, copied, left_out, findings, overwrite,
        {**adapter.stamps, **taken},
    )  # fmt: skip
    findings += _check_space(plan)
    if has_errors(findings):
        raise ProblemsError(f"{raw_dir} can't be merged into {base}", findings)
    return plan


def execute_merge(plan: MergePlan, on_progress: OnProgress | None = None) -> MergeReport:
    """Execute the plan of ``plan_merge``."""
    started = time.perf_counter()
    from ktbridge.adapter.merge_write import Writer  # needs numpy; planning doesn't

    total, done = plan.bytes, 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    stagings: list[Staging] = []
    with (
        explained(stagings, total),
        Staging(plan.output, lambda path: why_not_writable(path, plan.overwrite)) as staging,
    ):
        stagings.append(staging)
        require_hashes(plan.adapter.path)  # first: writing a checkpoint takes far longer
        workers = min(8, len(os.sched_getaffinity(0)))
        with (
            guarded(plan.stamps, "merge") as check_stamps,
            Writer(staging.path, workers, on_bytes) as writer,
        ):
            for name in plan.copied:
                writer.copy(plan.checkpoint.path / name)
            for shard in plan.checkpoint.shards:
                file = plan.checkpoint.file(shard)
                writer.write(file, plan.deltas.by_shard.get(shard, []))
            writer.finish()
            check_stamps()
        if not writer.changed:
            raise KtbridgeError(
                f"{plan.adapter.path} changes no weight: every delta is zero, or too small "
                "for the checkpoint's dtype",
                "check that training updated it: after one step, B is no longer zero",
            )
        staging.write_bytes(MERGE_FILE, dump_json(_provenance(plan)))
        staging.commit()
    return MergeReport(
        adapter=str(plan.adapter.path),
        base_model=str(plan.checkpoint.path),
        output=str(plan.output),
        bytes=total,
        shards=len(plan.checkpoint.shards),
        tensors=len(plan.checkpoint),
        modules=tuple(plan.modules()),
        values=writer.values,
        changed=writer.changed,
        left_out=plan.left_out,
        findings=tuple(plan.findings),
        seconds=time.perf_counter() - started,
    )


def why_not_writable(target: Path, overwrite: bool) -> tuple[str, str] | None:
    """Why ``target`` may not be (re)placed, as (found, next step): only an earlier merge may."""
    return why_not_replaceable(target, MERGE_FILE, "a merged checkpoint", overwrite)


def _check_output(target: Path, adapter: Path, base: Path, overwrite: bool) -> Iterator[Problem]:
    reason = why_not_writable(target, overwrite)
    if reason:
        yield problem("KTB736", str(target), reason[0], next_step=reason[1])
    for place in (adapter, base):
        real = Path(os.path.realpath(place))
        if real == target or real in target.parents or target in real.parents:
            yield problem("KTB736", str(target), f"overlaps {place}")


def _check_space(plan: MergePlan) -> Iterator[Problem]:
    place = next(path for path in (plan.output, *plan.output.parents) if path.is_dir())
    free, need = shutil.disk_usage(place).free, plan.bytes
    if free < need:
        found = f"has {size_text(free)} free"
        yield problem("KTB737", str(place), found, f"{size_text(need)}, the size of the checkpoint")


def _beside(checkpoint: Checkpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of files to copy along with the shards, and of those left out."""
    copied: list[str] = []
    left_out: list[str] = []
    for path in sorted(checkpoint.path.iterdir()):
        if path.name in checkpoint.shards or path.name == MERGE_FILE:
            continue
        usable = path.name == _INDEX or not _OTHER_WEIGHTS.fullmatch(path.name)
        (copied if usable and path.is_file() else left_out).append(path.name)
    return tuple(copied), tuple(left_out)


def _provenance(plan: MergePlan) -> dict[str, Any]:
    adapter = plan.adapter
    files = [*plan.copied, *plan.checkpoint.shards]
    artifacts = (adapter.manifest or {}).get("artifacts")
    return {
        "version": 1,
        "made_by": f"ktbridge {__version__}",
        "base": {
            "path": str(plan.checkpoint.path),
            "model_name_or_path": adapter.base_model,
        },
        "adapter": {
            "path": str(adapter.path),
            "layout": adapter.layout,
            "artifacts": artifacts if isinstance(artifacts, dict) else {},
        },
        "modules": plan.modules(),
        "files": {name: (plan.checkpoint.path / name).stat().st_size for name in files},
    }


def _describe(shard: str, delta: Delta) -> dict[str, Any]:
    return {
        "weight": delta.entry.name,
        "shard": shard,
        "dtype": delta.entry.dtype,
        "shape": list(delta.entry.shape),
        "module": delta.label,
        "layer": delta.layer,
        "rank": delta.rank,
        "scale": delta.scale,
        "transposed": delta.transposed,
    }
