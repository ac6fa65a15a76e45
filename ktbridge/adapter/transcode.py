"""Conversion between dialects: read one, write another, exactly or with the reason why not.

``plan_transcode`` reads headers (and, for PEFT's fused layout, the B matrices whose zeros tell how
gate and up are arranged) and raises everything that stands in the way at once. ``execute_transcode``
then writes tensor after tensor, in memory for one layer's tensor, and publishes each directory
whole, manifest last. KT's own layouts among each other have a faster path: ``plan_convert``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ktbridge.adapter.adapter import CONFIG_FILE, is_number
from ktbridge.adapter.dialects import gguf as gguf_dialect
from ktbridge.adapter.dialects import kt, peft, peft_write
from ktbridge.adapter.dialects.draft import Draft, Piece
from ktbridge.adapter.dialects.opened import local_config
from ktbridge.adapter.dialects.source import Source, bytes_of
from ktbridge.adapter.manifest import MANIFEST_FILE, build_manifest, dump_json, hash_file
from ktbridge.adapter.publish import stage_adapter, why_not_writable
from ktbridge.adapter.rules import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.model import ModelConfig
from ktbridge.model.tensorfile import DTYPE_BITS, build_header
from ktbridge.publish import Staging

OnProgress = Callable[[int, int], None]
PathLike = str | os.PathLike[str]
_RELEASE_BYTES = 1 << 25
_KT = ("raw", "kt-split", "kt-merged")
_Reader = Callable[[Path, "ModelConfig | None"], Source]
_Writer = Callable[[Source, "ModelConfig | None"], "tuple[list[Draft], list[Problem]]"]
_READERS: Mapping[str, _Reader] = {
    **dict.fromkeys(("kt", *_KT), kt.read_kt),
    "vllm": kt.read_vllm,
    "sglang-3d": kt.read_sglang_3d,
    "gguf": gguf_dialect.read_gguf,
    "peft": partial(peft.read_peft, dialect="auto"),
    **{name: partial(peft.read_peft, dialect=name) for name in peft.PEFT_DIALECTS},
}
_WRITERS: Mapping[str, _Writer] = {
    "raw": kt.write_raw,
    "kt-split": kt.write_split,
    "kt-merged": kt.write_merged,
    "vllm": kt.write_vllm,
    "sglang-3d": kt.write_sglang_3d,
    "peft-fused": peft_write.write_peft,
    "gguf": gguf_dialect.write_gguf,
}


@dataclass
class TranscodePlan:
    """Everything a conversion will write, and the ``findings`` (no errors: those were raised)."""

    source: Source
    drafts: list[tuple[Path, Draft]]
    findings: list[Problem]
    overwrite: bool

    @property
    def bytes_out(self) -> int:
        return sum(draft.nbytes for _, draft in self.drafts)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: what will be written."""
        return {
            "source": str(self.source.path),
            "layout": self.source.format,
            "tensors_in": self.source.tensors_in,
            "bytes_in": self.source.bytes_in,
            "outputs": self.outputs(),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def outputs(self) -> list[dict[str, Any]]:
        """What each output is, for reports."""
        return [
            {
                "layout": draft.layout,
                "path": str(path),
                "tensors": draft.tensors,
                "bytes": draft.nbytes,
                "rank": draft.rank,
                "alpha": draft.alpha,
                "target_modules": draft.config["target_modules"]
                + sorted({name.rpartition(".")[2] for name in _parameters(draft)}),
            }
            for path, draft in self.drafts
        ]


def _parameters(draft: Draft) -> list[str]:
    return [name.removesuffix(".weight") for name in draft.config.get("target_parameters", [])]


def plan_transcode(
    path: PathLike,
    outputs: Mapping[str, PathLike | None],
    *,
    to: str,
    from_format: str,
    base_model: str | None = None,
    lora_alpha: float | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
) -> TranscodePlan:
    """Plan a conversion without writing anything.

    ``outputs`` maps each output's layout ("expert", "nonexpert" and "merged" for KT's, else ``to``)
    to its directory. ``from_format`` is a readable dialect's name, or what ``detect_format`` says.
    Raises UsageError where the dialect can't be told, and ProblemsError with everything that stands
    in the way.
    """
    if lora_alpha is not None and not is_number(lora_alpha):
        raise UsageError(f"lora_alpha is {lora_alpha}, not a positive number", "correct it")
    place = Path(path).expanduser()
    source = _READERS[from_format](place, local_config(base_model))
    base = local_config(base_model, source.base_model)
    findings = source.findings
    if lora_alpha is not None and float(lora_alpha) != source.alpha:
        found = f"alpha {lora_alpha:g} is used for the experts instead of {source.alpha:g}"
        findings.append(problem("KTB707", str(source.path), found))
        source.alpha = float(lora_alpha)
    source.base_model = base_model or source.base_model
    if not source.base_model:
        findings.append(problem("KTB705", str(source.path), "names no base model"))
    if dtype == "bf16":
        source = source.in_bf16()
    drafts: list[Draft] = []
    for name in _formats(to, outputs):
        made, refusals = _WRITERS[name](source, base)
        drafts += made
        findings += refusals
    placed = _placed(source, drafts, outputs, findings)
    findings += _check_places(source.path, [p for p, _ in placed], overwrite)
    if has_errors(findings):
        raise ProblemsError(f"{path} can't be converted to {to}", findings)
    return TranscodePlan(source, placed, findings, overwrite)


def _formats(to: str, outputs: Mapping[str, PathLike | None]) -> list[str]:
    """The formats to write: a merged directory may be asked for beside the split ones."""
    if to != "kt-split":
        return [to]
    split = outputs.get("expert") is not None or outputs.get("nonexpert") is not None
    merged = outputs.get("merged") is not None
    return ["kt-split"] * split + ["kt-merged"] * merged


def _placed(
    source: Source, drafts: list[Draft], outputs: Mapping[str, PathLike | None],
    findings: list[Problem],
) -> list[tuple[Path, Draft]]:  # fmt: skip
    wanted = {
        layout: Path(os.path.realpath(os.path.expanduser(target)))
        for layout, target in outputs.items()
        if target is not None
    }
    made = {draft.layout for draft in drafts}
    if not has_errors(findings):
        for layout in sorted(wanted.keys() - made):
            found = f"has nothing for the {layout} output"
            findings.append(problem("KTB704", str(source.path), found))
    return [(wanted[draft.layout], draft) for draft in drafts if draft.layout in wanted]


def _check_places(source: Path, paths: list[Path], overwrite: bool) -> list[Problem]:
    findings = []
    for path in paths:
        reason = why_not_writable(path, overwrite)
        if reason:
            findings.append(problem("KTB701", str(path), reason[0], next_step=reason[1]))
    places = [Path(os.path.realpath(source)), *paths]
    for number, first in enumerate(places):
        for second in places[number + 1 :]:
            if first == second or first in second.parents or second in first.parents:
                findings.append(problem("KTB706", str(second), f"overlaps {first}"))
    return findings


def execute_transcode(plan: TranscodePlan, on_progress: OnProgress | None = None) -> float:
    """Do what ``plan_transcode`` planned; seconds it took.

    Every output is complete or as it was before; KtbridgeError when writing fails.
    """
    started = time.perf_counter()
    finished: list[str] = []
    try:
        _write(plan, on_progress, finished)
    except OSError as error:
        left = f"only {', '.join(finished)} is in place" if finished else "nothing was written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KtbridgeError(
                f"the disk is full: {plan.bytes_out / 1e9:.2f} GB are needed in all, {left}",
                "free space, or choose output directories on another disk",
            ) from error
        raise KtbridgeError(f"writing failed, {left}: {error}", "try again") from error
    return time.perf_counter() - started


def _write(plan: TranscodePlan, on_progress: OnProgress | None, finished: list[str]) -> None:
    done = unreleased = 0

    def tell(count: int) -> None:
        nonlocal done, unreleased
        done += count
        unreleased += count
        if unreleased > _RELEASE_BYTES:
            plan.source.release()
            unreleased = 0
        if on_progress is not None:
            on_progress(done, plan.bytes_out)

    with ExitStack() as stack:
        stagings = []
        for path, draft in plan.drafts:
            staging = stack.enter_context(stage_adapter(path, overwrite=plan.overwrite))
            _fill(staging, draft, tell)
            stagings.append(staging)
        for staging in stagings:
            staging.commit()
            finished.append(str(staging.target))


def _fill(staging: Staging, draft: Draft, tell: Callable[[int], None]) -> None:
    artifacts: dict[str, dict[str, Any]] = {}
    for name, pieces in draft.pieces.items():
        path = staging.path / name
        if draft.gguf:
            gguf_dialect.save_gguf(path, draft, tell)
            digest = hash_file(path)
        else:
            # PEFT's loader asks for the format; KT's fused file has no metadata.
            metadata = {"format": "pt"} if name.startswith("adapter_model") else None
            digest = save_pieces(path, pieces, metadata, tell)
        artifacts[name] = {"size": path.stat().st_size, "sha256": digest}
        if draft.record is not None and name.startswith("fused"):
            artifacts[name].update(draft.record(path))
    config = dump_json(draft.config)
    staging.write_bytes(CONFIG_FILE, config)
    digest = hashlib.sha256(config).hexdigest()
    artifacts[CONFIG_FILE] = {"size": len(config), "sha256": digest}
    manifest = build_manifest(
        base_model=draft.config["base_model_name_or_path"],
        rank=draft.rank,
        alpha=draft.alpha,
        artifacts=artifacts,
        layout=None if draft.layout == "raw" else draft.layout,
        expert_weight_format=draft.weight_format,
    )
    if draft.experts:
        manifest["experts"] = draft.experts
    staging.flush()
    staging.write_bytes(MANIFEST_FILE, dump_json(manifest))


def save_pieces(
    path: Path, pieces: list[Piece], metadata: Mapping[str, str] | None, tell: Callable[[int], None]
) -> str:
    """Write a safetensors file tensor by tensor; returns its SHA-256.

    Wider types come first, so that every tensor is aligned.
    """
    ordered = sorted(pieces, key=lambda piece: -DTYPE_BITS[piece.block.dtype])
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        header = build_header([(p.key, p.block.dtype, p.block.shape) for p in ordered], metadata)
        file.write(header)
        digest.update(header)
        for key, block in ordered:
            bits = np.ascontiguousarray(block.load())
            if bits.shape != block.shape or bits.nbytes != block.nbytes:
                raise KtbridgeError(f"{key} was planned as {block.shape}, not {bits.shape}")
            data = bytes_of(bits)
            file.write(data)
            digest.update(data)
            tell(block.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
