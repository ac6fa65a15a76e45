"""Write a raw adapter: the three files of KT-SFT and their manifest.

The layout is reference KT's, so that KT's, LLaMA-Factory's and our tools can read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ktbridge.adapter.adapter import CONFIG_FILE, FUSED_FILE, MODEL_FILE
from ktbridge.adapter.keys import parse_key
from ktbridge.adapter.manifest import (
    MANIFEST_FILE,
    build_manifest,
    dump_json,
    fused_record,
    hash_file,
)
from ktbridge.adapter.publish import stage_adapter
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model import Fingerprint, Tensor, find_model, open_tensor_file
from ktbridge.model import fingerprint as fingerprint_of
from ktbridge.model.tensorfile import write_tensor_file

_FORMATS = ("bf16", "int8", "fp8", "rawint4", "mxfp4")


def write_raw_adapter(
    directory: str | os.PathLike[str],
    *,
    expert: Mapping[str, Tensor],
    nonexpert: Mapping[str, Tensor],
    config: Mapping[str, Any],
    base_model: str,
    rank: int,
    alpha: float,
    expert_weight_format: str = "bf16",
    fingerprint: Fingerprint | bool = True,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a raw adapter directory atomically.

    ``expert``: ``layers.{L}.experts.{gate,up,down}_lora_{a,b}`` -> BF16 tensor, gate/up a [E,r,H],
    b [E,I,r]; down a [E,r,I], b [E,H,r]. ``nonexpert``: PEFT keys with ``base_model.model.`` ->
    tensor. Either may be empty, not both; without experts there is no fused file. ``config`` is
    PEFT's LoraConfig as a dictionary; its sets are sorted and base_model_name_or_path is filled in.
    ``rank`` and ``alpha`` are the experts'. ``fingerprint`` is that of the base model trained on: True
    computes it from ``base_model`` if that is a directory or in the local Hub cache, False omits
    it. ``overwrite`` replaces an existing adapter directory.
    ``extra_files`` (a log, a plot) are written along and are not part of the adapter.

    Raises UsageError for unknown keys and KtbridgeError when the directory is occupied.
    """
    if not expert and not nonexpert:
        raise UsageError("an adapter without tensors can't be written", "train something first")
    if expert_weight_format not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise UsageError(f"{expert_weight_format!r} is not one of {known}", "correct it")
    for kind, tensors in (("fused", expert), ("lora", nonexpert)):
        wrong = [name for name in tensors if parse_key(name).kind not in (kind, _also(kind))]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} is not a {kind} LoRA key",
                "use KT's fused keys for experts, PEFT's for the rest",
            )
    settings = {key: _plain(value) for key, value in config.items()}
    settings["base_model_name_or_path"] = base_model
    settings["peft_type"] = "LORA"
    with stage_adapter(directory, overwrite=overwrite) as staging:
        staging.write_bytes(CONFIG_FILE, dump_json(settings))
        write_tensor_file(staging.path / MODEL_FILE, _named(nonexpert), {"format": "pt"})
        files = [CONFIG_FILE, MODEL_FILE]
        if expert:
            write_tensor_file(staging.path / FUSED_FILE, _named(expert))
            files.append(FUSED_FILE)
        artifacts: dict[str, dict[str, Any]] = {}
        for name in files:
            path = staging.path / name
            artifacts[name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
        if expert:
            artifacts[FUSED_FILE].update(fused_record(open_tensor_file(staging.path / FUSED_FILE)))
        manifest = build_manifest(
            base_model=base_model,
            rank=rank,
            alpha=alpha,
            artifacts=artifacts,
            expert_weight_format=expert_weight_format,
            base_fingerprint=_taken(base_model) if fingerprint is True else fingerprint or None,
        )
        for name, data in (extra_files or {}).items():
            staging.write_bytes(name, data)
        staging.write_bytes(MANIFEST_FILE, dump_json(manifest))
        staging.commit()


def _taken(base_model: str) -> Fingerprint | None:
    """The base model's fingerprint; None if unavailable: that must not cost a finished training."""
    if not base_model:
        return None
    try:
        return fingerprint_of(find_model(base_model))
    except (KtbridgeError, OSError, ValueError, RuntimeError):
        return None


def _also(kind: str) -> str:
    # Per-expert modules trained by PEFT itself stay in adapter_model.safetensors.
    return "expert" if kind == "lora" else kind


def _named(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [Tensor(name, t.dtype, t.shape, t.data) for name, t in sorted(tensors.items())]


def _plain(value: Any) -> Any:
    """A LoraConfig value for JSON: sets become sorted lists, enums their value."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)
