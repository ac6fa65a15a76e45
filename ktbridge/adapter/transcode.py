"""Convert between dialects: losslessly, or refuse with the reason.

``plan_transcode`` reads headers (and, for PEFT's fused layout, the B matrices, whose zeros show how
gate and up are arranged) and raises all obstacles at once. ``execute_transcode`` then writes tensor
by tensor, holding one layer's tensor in memory, and publishes each directory atomically, manifest
last, if the input's hashes match and its files are unchanged. Tensors are read in the output's order,
so checking the input's hashes, if its manifest has any, is a second concurrent read. Conversion
between KT's own layouts has a faster path: ``plan_convert``.
"""

from __future__ import annotations

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

from ktbridge.adapter.adapter import CONFIG_FILE
from ktbridge.adapter.check_hashes import Hashes
from ktbridge.adapter.dialects import gguf as gguf_dialect
from ktbridge.adapter.dialects import kt, peft, peft_write
from ktbridge.adapter.dialects.draft import Draft, Piece, nonexpert_modules
from ktbridge.adapter.dialects.opened import local_config
from ktbridge.adapter.dialects.source import Source, bytes_of
from ktbridge.adapter.lora_config import peft_findings
from ktbridge.adapter.manifest import MANIFEST_FILE, build_manifest, dump_json, hash_file
from ktbridge.adapter.publish import (
    PathLike,
    check_halves,
    check_places,
    check_request,
    explained,
    stage_adapter,
)
from ktbridge.adapter.scales import overridden
from ktbridge.adapter.sources import guarded
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
from ktbridge.model import Fingerprint, ModelConfig
from ktbridge.model.tensorfile import DTYPE_BITS, build_header
from ktbridge.publish import Staging

OnProgress = Callable[[int, int], None]
_REPORT_EVERY = 1 << 25  # bytes between progress reports
_KT = ("raw", "kt-split", "kt-merged")
# Their reader applies an explicit alpha to the configuration itself.
_SCALED = ("kt", *_KT, "vllm")
_Reader = Callable[[Path, "ModelConfig | None", "float | None"], Source]
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
    """Everything a conversion will write, and the ``findings`` (no errors: those were raised).

    ``given`` is the requested path: a directory, whose manifest may have hashes, or a file.
    """

    given: Path
    source: Source
    drafts: list[tuple[Path, Draft]]
    findings: list[Problem]
    overwrite: bool

    @property
    def bytes_out(self) -> int:
        return sum(draft.nbytes for _, draft in self.drafts)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the outputs."""
        return {
            "source": str(self.source.path),
            "layout": self.source.format,
            "tensors_in": self.source.tensors_in,
            "bytes_in": self.source.bytes_in,
            "outputs": self.outputs(),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def outputs(self) -> list[dict[str, Any]]:
        """A summary of each output, for reports."""
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
    to its directory. ``from_format`` is a readable dialect's name, or ``detect_format``'s result.
    Raises UsageError if the dialect is ambiguous, and ProblemsError with every obstacle.
    """
    paths = check_request(path, outputs, lora_alpha)
    given = Path(path).expanduser()
    source = _READERS[from_format](given, local_config(base_model), lora_alpha)
    base = local_config(base_model, source.base_model)
    findings = source.findings
    if lora_alpha is not None and from_format not in _SCALED:
        findings += _override(source, lora_alpha)
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
    where = str(source.path)
    halves = {"experts": bool(source.experts), "nonexpert": bool(source.nonexpert)}
    findings += check_halves(where, paths, **halves)
    findings += check_places(source.path, paths, overwrite)
    findings += peft_findings(where, nonexpert_modules(source), paths)
    if has_errors(findings):
        raise ProblemsError(f"{path} can't be converted to {to}", findings)
    placed = [(paths[draft.layout], draft) for draft in drafts if draft.layout in paths]
    return TranscodePlan(given, source, placed, findings, overwrite)


def _override(source: Source, lora_alpha: float) -> list[Problem]:
    """Apply an explicit alpha to the experts; without experts it has no effect."""
    experts = bool(source.experts)
    configured = source.alpha if experts else source.nonexpert_alpha
    if experts:
        source.alpha = float(lora_alpha)
    return list(overridden(str(source.path), lora_alpha, configured, experts))


def _formats(to: str, outputs: Mapping[str, PathLike | None]) -> list[str]:
    """The formats to write: a merged directory may be requested in addition to the split ones."""
    if to != "kt-split":
        return [to]
    split = outputs.get("expert") is not None or outputs.get("nonexpert") is not None
    merged = outputs.get("merged") is not None
    return ["kt-split"] * split + ["kt-merged"] * merged


def execute_transcode(plan: TranscodePlan, on_progress: OnProgress | None = None) -> float:
    """Execute the plan of ``plan_transcode``; return the seconds it took.

    Every output is complete or unchanged; KtbridgeError when writing fails.
    """
    started = time.perf_counter()
    stagings: list[Staging] = []
    with explained(stagings, plan.bytes_out):
        _write(plan, on_progress, stagings)
    return time.perf_counter() - started


def _write(plan: TranscodePlan, on_progress: OnProgress | None, stagings: list[Staging]) -> None:
    done = reported = 0
    total = plan.bytes_out

    def on_bytes(count: int) -> None:
        nonlocal done, reported
        done += count
        if done - reported >= _REPORT_EVERY or done == total:
            reported = done
            if on_progress is not None:
                on_progress(done, total)

    with ExitStack() as stack:
        hashes = stack.enter_context(Hashes())
        hashes.start(plan.given)
        with guarded(plan.source.stamps, "conversion") as check_stamps:
            for path, draft in plan.drafts:
                staging = stage_adapter(path, overwrite=plan.overwrite, layout=draft.layout)
                stagings.append(stack.enter_context(staging))
                _fill(staging, draft, plan.source.trained_on, on_bytes)
            problems = list(hashes.check(plan.given))
            check_stamps()
        if problems:
            raise ProblemsError(f"{plan.given} does not match its manifest", problems)
        for staging in stagings:
            staging.commit()


def _fill(
    staging: Staging, draft: Draft, trained_on: Fingerprint | None, on_bytes: Callable[[int], None]
) -> None:
    artifacts: dict[str, dict[str, Any]] = {}
    for name, pieces in draft.pieces.items():
        path = staging.path / name
        if draft.gguf:
            gguf_dialect.save_gguf(path, draft, on_bytes)
            digest = hash_file(path)
        else:
            # PEFT's loader requires the format; KT's fused file has no metadata.
            metadata = {"format": "pt"} if name.startswith("adapter_model") else None
            digest = save_pieces(path, pieces, metadata, on_bytes)
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
        base_fingerprint=trained_on,
    )
    if draft.experts:
        manifest["experts"] = draft.experts
    staging.flush()
    staging.write_bytes(MANIFEST_FILE, dump_json(manifest))


def save_pieces(
    path: Path,
    pieces: list[Piece],
    metadata: Mapping[str, str] | None,
    on_bytes: Callable[[int], None],
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
            on_bytes(block.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
