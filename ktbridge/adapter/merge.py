"""``merge_adapter``: merge an adapter into its base weights; any engine can serve the result.

The output has the base's files: shards of the same names and headers, in which only the adapted
tensors' bytes differ, the same index, configuration and tokenizer. ``ktbridge_merge.json`` is
written last; it records adapter and base model, and marks the directory as replaceable by a later
merge.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.adapter.adapter import Adapter
from ktbridge.adapter.checks.base import Base, check_identity
from ktbridge.adapter.checks.files import check_tokenizer, require_hashes
from ktbridge.adapter.merge_plan import Delta, Deltas, plan_deltas
from ktbridge.adapter.opening import scan_any
from ktbridge.adapter.outputs import PathLike
from ktbridge.adapter.rewrite import MERGE_FILE, Rewrite, Shard
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, Severity, has_errors
from ktbridge.files.digests import Stamps, take_stamps
from ktbridge.files.publish import OnProgress
from ktbridge.kernel_choice import has_kernels
from ktbridge.model import open_checkpoint, read_model_config
from ktbridge.model.jsonfile import read_json_file

if TYPE_CHECKING:
    from ktbridge.adapter.merge_values import Loss


@dataclass
class MergePlan:
    """Everything a merge will do. ``findings`` are warnings and infos; errors were raised.

    ``deltas`` by shard; ``rewrite``: the base and its output. ``stamps``: size, time and inode of all
    files read.
    """

    adapter: Adapter
    rewrite: Rewrite
    deltas: Deltas
    findings: list[Problem]
    stamps: Stamps

    @property
    def bytes(self) -> int:
        """Bytes of the output."""
        checkpoint = self.rewrite.checkpoint
        shards = sum(checkpoint.file(name).size for name in checkpoint.shards)
        return shards + self.rewrite.copied_bytes

    def modules(self) -> list[dict[str, object]]:
        """One row for all weights of one module, rank and scale, with the number of their matrices."""
        groups: Counter[tuple[str, int, float, str]] = Counter()
        matrices: Counter[tuple[str, int, float, str]] = Counter()
        for delta in self.deltas:
            found: Counter[tuple[str, int, float, str]] = Counter()
            for matrix in delta.matrices:
                numbers = {(pair.a.shape[0], pair.scale) for pair in matrix.pairs}
                found.update((delta.label, *each, delta.storage.label) for each in numbers)
            groups.update(found.keys())
            matrices += found
        return [
            {"module": label, "weights": count, "matrices": matrices[label, rank, scale, dtype],
             "rank": rank, "scale": scale, "dtype": dtype}
            for (label, rank, scale, dtype), count in groups.items()
        ]  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        """JSON-ready: the output, and the delta of each weight."""
        rewrite = self.rewrite
        return {
            "adapter": str(self.adapter.path),
            "layout": self.adapter.format or self.adapter.layout,
            "base_model": str(rewrite.checkpoint.path),
            "output": str(rewrite.output),
            "bytes": self.bytes,
            "shards": list(rewrite.checkpoint.shards),
            "tensors": len(rewrite.checkpoint),
            "modules": self.modules(),
            "deltas": [_describe(shard, d) for shard, ds in self.deltas.by_shard.items() for d in ds],
            "copied": rewrite.copied,
            "left_out": rewrite.left_out,
            "findings": [item.as_dict() for item in self.findings],
        }  # fmt: skip


@dataclass(frozen=True)
class MergeReport:
    """Report of a merge. ``values`` are in the adapted weights; ``changed`` of them moved.

    The rest of the delta is below the resolution of the checkpoint's dtype. ``losses``: what requantizing
    did, layer by layer.
    """

    adapter: str
    base_model: str
    output: str
    bytes: int
    shards: int
    tensors: int
    modules: tuple[dict[str, object], ...]
    values: int
    changed: int
    losses: tuple[Loss, ...]
    left_out: tuple[str, ...]
    findings: tuple[Problem, ...]
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """The report as JSON-ready values."""
        return {
            **vars(self),
            "modules": list(self.modules),
            "losses": [loss.as_dict() for loss in self.losses],
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
    from_format: str = "auto",
    on_progress: OnProgress | None = None,
) -> MergeReport:
    """Write a checkpoint with the adapter's weights added: W + scale·B·A, rounded once.

    ``raw_dir`` is an adapter of any format that ``convert_adapter`` reads; ``from_format`` names the format
    where "auto" is ambiguous. ``base_model`` is a directory with safetensors
    (one file or sharded), in BF16, F16 or F32 where the adapter has a delta; each sum is computed
    in float32 and rounded to nearest even to that dtype. scale is each module's own alpha/r, as it was
    trained. Memory is bounded by a block per core, not by a shard
    (``ktbridge.adapter.merge_values``). ``overwrite`` replaces an earlier merge, nothing else.
    ``allow_other_base`` also permits a model other than the one trained on.
    ``on_progress(done, total)`` counts bytes of the output.

    Raises ProblemsError with every obstacle before anything is written (a tensor without a weight, a
    quantized weight, a tied one, another base model, an occupied output, a file that doesn't match
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
        from_format=from_format,
    )
    return execute_merge(plan, on_progress)


def plan_merge(
    raw_dir: PathLike,
    *,
    base_model: PathLike,
    output: PathLike,
    overwrite: bool = False,
    allow_other_base: bool = False,
    from_format: str = "auto",
) -> MergePlan:
    """Plan a merge without writing anything; arguments and errors as for ``merge_adapter``."""
    base = Path(os.path.expanduser(base_model))
    adapter, findings = scan_any(raw_dir, from_format, base)
    if adapter is None:
        raise ProblemsError(f"{raw_dir} can't be merged", findings)
    stamps = take_stamps(base.iterdir() if base.is_dir() else ())
    config = read_model_config(base)
    checkpoint = open_checkpoint(base)
    checkpoint.check()
    target = Path(os.path.realpath(os.path.expanduser(output)))
    rewrite = Rewrite(checkpoint, target, MERGE_FILE, "a merged checkpoint", overwrite)
    known = Base(base, str(base), checkpoint)
    findings += check_identity(adapter, known, merging=True, allowed=allow_other_base)
    findings += [*_merged_before(adapter, base, allow_other_base), *check_tokenizer(adapter, base)]
    deltas = plan_deltas(adapter, checkpoint, config)
    findings += deltas.problems
    if not has_kernels():
        found = "numpy adds the adapter's deltas, some 20 times slower than kernels"
        findings.append(problem("KTB912", str(base), found))
    read = [base / name for name in (*checkpoint.shards, *rewrite.copied)]
    taken = {path: stamps.get(path) for path in read}
    plan = MergePlan(adapter, rewrite, deltas, findings, {**adapter.stamps, **taken})
    findings += rewrite.problems(plan.bytes, adapter.path)
    if has_errors(findings):
        raise ProblemsError(f"{raw_dir} can't be merged into {base}", findings)
    return plan


def _merged_before(adapter: Adapter, base: Path, allowed: bool) -> Iterator[Problem]:
    """Yield a problem where ``base`` is itself a merge: an error for this adapter, if not ``allowed``."""
    own = (adapter.manifest or {}).get("artifacts")
    for each in _merged(base):
        path, artifacts = each.get("path"), each.get("artifacts")
        same = isinstance(path, str) and os.path.realpath(path) == os.path.realpath(adapter.path)
        if artifacts and own:  # the directory may have another adapter by now
            same = artifacts == own
        severity: Severity = ("warning" if allowed else "error") if same else "info"
        found = f"{'this adapter' if same else path} was merged into it"
        yield problem("KTB615", str(base), found, "a model without it", severity=severity)


def _merged(base: Path) -> list[Mapping[str, object]]:
    """Return what is recorded of the adapters that were merged into ``base``, in order."""
    try:
        told = read_json_file(base / MERGE_FILE)
    except KtbridgeError:  # it is no merge
        return []
    before = told.get("before")
    found = [*(before if isinstance(before, list) else []), told.get("adapter")]
    return [each for each in found if isinstance(each, dict)]


def execute_merge(plan: MergePlan, on_progress: OnProgress | None = None) -> MergeReport:
    """Execute the plan of ``plan_merge``."""
    started = time.perf_counter()
    # These need numpy; planning doesn't.
    from ktbridge.adapter.merge_values import Merger, losses, swallowed

    rewrite, checkpoint = plan.rewrite, plan.rewrite.checkpoint
    merger = Merger(checkpoint, plan.deltas)

    def shards() -> Iterator[Shard]:
        for name in checkpoint.shards:
            yield Shard(name, b"", merger.steps(name))

    def check() -> None:
        if not merger.changed:
            raise KtbridgeError(
                f"{plan.adapter.path} changes no weight: every delta is zero, or too small "
                "for the checkpoint's dtype",
                "check that training updated it: after one step, B is no longer zero",
            )

    require_hashes(plan.adapter.path)  # first: writing a checkpoint takes far longer
    rewrite.write(
        shards(), _provenance(plan), need=plan.bytes, stamps=plan.stamps, doing="merge",
        on_progress=on_progress, check=check,
    )  # fmt: skip
    lost = losses(merger.changes)
    return MergeReport(
        adapter=str(plan.adapter.path),
        base_model=str(checkpoint.path),
        output=str(rewrite.output),
        bytes=plan.bytes,
        shards=len(checkpoint.shards),
        tensors=len(checkpoint),
        modules=tuple(plan.modules()),
        values=merger.values,
        changed=merger.changed,
        losses=lost,
        left_out=tuple(rewrite.left_out),
        findings=(*plan.findings, *swallowed(lost)),
        seconds=time.perf_counter() - started,
    )


def _provenance(plan: MergePlan) -> dict[str, object]:
    adapter = plan.adapter
    artifacts = (adapter.manifest or {}).get("artifacts")
    return {
        "base": {"path": str(plan.rewrite.checkpoint.path), "model_name_or_path": adapter.base_model},
        "adapter": {
            "path": os.path.abspath(adapter.path),
            "layout": adapter.format or adapter.layout,
            "artifacts": artifacts if isinstance(artifacts, dict) else {},
        },
        "before": _merged(plan.rewrite.checkpoint.path),
        "modules": plan.modules(),
    }


def _describe(shard: str, delta: Delta) -> dict[str, object]:
    return {
        "weight": delta.entry.name,
        "shard": shard,
        "dtype": delta.storage.label,
        "shape": list(delta.entry.shape),
        "module": delta.label,
        "layer": delta.layer,
        "rank": delta.rank,
        "scale": delta.scale,
        "transposed": delta.transposed,
    }
