"""Turn a conversion request into a plan: detect the formats, check the options, choose the path.

Conversion between KT's layouts takes the fast path (``plan_convert``: a new header over the same
bytes); everything else uses ``plan_transcode``, which is imported only then.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.adapter.convert import ConvertPlan, plan_convert
from ktbridge.adapter.dialects import DIALECTS, READABLE, WRITABLE
from ktbridge.adapter.execute import ConvertReport, OnProgress, execute_plan
from ktbridge.adapter.publish import PathLike
from ktbridge.errors import UsageError
from ktbridge.model.tensorfile import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from ktbridge.adapter.transcode import TranscodePlan

_KT = ("auto", "raw", "kt-split", "kt-merged")
_SIGNS = {
    "peft": re.compile(rb"\.experts\.(?:base_layer\.)?lora_[AB]\."),
    "sglang-3d": re.compile(rb"\.experts\.(?:gate|up|down)_proj\.lora_[AB]\."),
}


def plan_conversion(
    path: PathLike,
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
) -> ConvertPlan | TranscodePlan:
    """Plan any conversion without writing anything; arguments as for ``convert_adapter``.

    Raises UsageError for incompatible options, with the ones to pass instead, and
    ProblemsError with every obstacle.
    """
    check_names(to, from_format, dtype)
    split = {"expert": expert_output_dir, "nonexpert": nonexpert_output_dir}
    outputs = _outputs(to, split, merged_output_dir, output_dir)
    options: dict[str, Any] = {
        "base_model": base_model, "lora_alpha": lora_alpha, "dtype": dtype, "overwrite": overwrite,
    }  # fmt: skip
    found = detect_format(path) if from_format == "auto" else from_format
    if to in ("kt-split", "kt-merged") and found in ("kt", *_KT):
        return plan_convert(
            path,
            expert_output_dir=outputs.get("expert"),
            nonexpert_output_dir=outputs.get("nonexpert"),
            merged_output_dir=outputs.get("merged"),
            **options,
        )
    from ktbridge.adapter.transcode import plan_transcode

    return plan_transcode(path, outputs, to=to, from_format=found, **options)


def execute_conversion(
    plan: ConvertPlan | TranscodePlan, on_progress: OnProgress | None = None
) -> ConvertReport:
    """Do what ``plan_conversion`` planned."""
    if isinstance(plan, ConvertPlan):
        return execute_plan(plan, on_progress)
    from ktbridge.adapter.transcode import execute_transcode

    seconds = execute_transcode(plan, on_progress)
    return ConvertReport(
        source=str(plan.source.path),
        layout=plan.source.format,
        tensors_in=plan.source.tensors_in,
        bytes_in=plan.source.bytes_in,
        outputs=tuple(plan.outputs()),
        findings=tuple(plan.findings),
        seconds=seconds,
    )


def _outputs(
    to: str, split: dict[str, PathLike | None], merged: PathLike | None, whole: PathLike | None
) -> dict[str, PathLike]:
    """Layout -> directory; UsageError if the directories don't match the format."""
    outputs = {layout: target for layout, target in split.items() if target is not None}
    if to == "kt-split":
        if whole is not None:
            raise UsageError(
                "kt-split is two directories, not one",
                "name them with --expert-output-dir and --nonexpert-output-dir, or choose another --to",
            )
        if merged is not None:
            outputs["merged"] = merged
        return outputs
    if to == "kt-merged" and merged is not None and whole is None:
        merged, whole = None, merged
    if outputs or merged is not None:
        raise UsageError(
            f"--to {to} writes one directory", "name it with --output and leave the others out"
        )
    if whole is None:
        raise UsageError(f"--to {to} has nowhere to write", "name a directory with --output")
    return {"merged" if to == "kt-merged" else to: whole}


def check_names(to: str, from_format: str, dtype: str) -> None:
    """UsageError, listing the valid names, unless these are known formats and dtypes."""
    for value, flag, known in (
        (to, "--to", WRITABLE),
        (from_format, "--from", ("auto", *READABLE)),
        (dtype, "--dtype", ("keep", "bf16")),
    ):
        if value not in known:
            raise UsageError(_unknown(flag, value), f"use {', '.join(known)}")


def _unknown(flag: str, value: str) -> str:
    dialect = next((row for row in DIALECTS if row.name == value), None)
    if dialect is not None:  # a read-only format
        return f"{flag} {value} can't be done: it is {dialect.exact.rpartition('; ')[2]}"
    return f"{flag} {value} is not a name we know"


def detect_format(path: PathLike) -> str:
    """ "kt" (raw, split, merged, vLLM), "peft" (one of three fused dialects), "sglang-3d", "gguf".

    Detected by names in the headers' text: parsing tens of thousands of keys is left to the reader.
    An unreadable input counts as "kt", whose reader reports the cause.
    """
    place = Path(path).expanduser()
    if place.suffix == ".gguf" or (place.is_dir() and any(place.glob("*.gguf"))):
        return "gguf"
    for file in sorted(place.glob("adapter_model*.safetensors")) if place.is_dir() else ():
        if not file.is_file():  # opening a pipe would block forever
            continue
        try:
            with open(file, "rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                header = handle.read(min(length, MAX_HEADER_BYTES))
        except OSError:
            continue
        for name, pattern in _SIGNS.items():
            if pattern.search(header):
                return name
    return "kt"
