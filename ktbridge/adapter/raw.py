"""Write a raw adapter: the three files of KT-SFT and their manifest.

The layout is reference KT's, so that KT's, LLaMA-Factory's and our tools can read it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ktbridge.adapter.adapter import FUSED_FILE, MODEL_FILE
from ktbridge.adapter.blocks import block_in_memory
from ktbridge.adapter.keys import parse_key
from ktbridge.adapter.manifest import WEIGHT_FORMATS
from ktbridge.adapter.outputs import Output, OutputDirectory, Piece, piece, plan_copies, stage_adapter
from ktbridge.adapter.writer import write_steps
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.model import Fingerprint, Tensor, find_model
from ktbridge.model import fingerprint as fingerprint_of
from ktbridge.model.hub import name_of


def write_raw_adapter(
    directory: str | os.PathLike[str],
    *,
    expert: Mapping[str, Tensor],
    nonexpert: Mapping[str, Tensor],
    config: Mapping[str, object],
    base_model: str,
    rank: int,
    alpha: float,
    expert_weight_format: str = "bf16",
    fingerprint: Fingerprint | bool = True,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
    training: Mapping[str, object] | None = None,
) -> None:
    """Write a raw adapter directory atomically.

    ``expert``: ``layers.{L}.experts.{gate,up,down}_lora_{a,b}`` -> BF16 tensor, gate/up a [E,r,H],
    b [E,I,r]; down a [E,r,I], b [E,H,r]. ``nonexpert``: PEFT keys with ``base_model.model.`` ->
    tensor. Either may be empty, not both; without experts there is no fused file. ``config`` is
    PEFT's LoraConfig as a dictionary; its sets are sorted and base_model_name_or_path is filled in: of a
    directory in the Hub cache org/name, with its commit as revision.
    ``rank`` and ``alpha`` are the experts'. ``fingerprint`` is that of the base model trained on: True
    computes it from ``base_model`` if that is a directory or in the local Hub cache, False omits
    it. ``overwrite`` replaces an existing adapter directory.
    ``extra_files`` (a log, a plot) are written along and are not part of the adapter; ``training`` is what
    the manifest says of the run.

    Raises UsageError for unknown keys and KtbridgeError when the directory is occupied.
    """
    if not expert and not nonexpert:
        raise UsageError("an adapter without tensors can't be written", "train something first")
    if expert_weight_format not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise UsageError(f"{expert_weight_format!r} is not one of {known}", "correct it")
    _check_keys(expert, nonexpert)
    settings = {key: _plain(value) for key, value in config.items()}
    settings["base_model_name_or_path"], commit = name_of(base_model)
    if commit is not None:
        settings["revision"] = commit
    settings["peft_type"] = "LORA"
    files = {MODEL_FILE: _pieces(nonexpert)}
    if expert:
        files[FUSED_FILE] = _pieces(expert)
    # By its weight format SGLang-KT takes an adapter for experts'.
    stored = expert_weight_format if expert else None
    output = Output("raw", settings, files, rank, alpha, weight_format=stored)
    trained_on = _taken(base_model) if fingerprint is True else fingerprint or None
    copies = plan_copies([output])
    with stage_adapter(directory, overwrite=overwrite) as staging, OutputDirectory(staging, output) as target:
        write_steps(copies, [*target.files.values()])
        for name, data in (extra_files or {}).items():
            staging.write_bytes(name, data)
        target.finish(trained_on, training)
        staging.commit()


def _check_keys(expert: Iterable[str], nonexpert: Iterable[str]) -> None:
    for kind, names in (("fused", expert), ("lora", nonexpert)):
        # Per-expert modules trained by PEFT itself stay in adapter_model.safetensors.
        right = (kind, "expert" if kind == "lora" else kind)
        wrong = [name for name in names if parse_key(name).kind not in right]
        if wrong:
            raise UsageError(
                f"{wrong[0]!r} is not a {kind} LoRA key",
                "use KT's fused keys for experts, PEFT's for the rest",
            )


def _taken(base_model: str) -> Fingerprint | None:
    """The base model's fingerprint; None if unavailable: that must not cost a finished training."""
    if not base_model:
        return None
    try:
        return fingerprint_of(find_model(base_model))
    except (KtbridgeError, OSError, ValueError, RuntimeError):
        return None


def _pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    return [piece(name, block_in_memory(tensor)) for name, tensor in sorted(tensors.items())]


def _plain(value: object) -> object:
    """A LoraConfig value for JSON: sets become sorted lists, enums their value."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return getattr(value, "value", value)
