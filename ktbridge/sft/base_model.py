"""Checks of a base model before its weights are loaded: whether it can be trained, and which modules.

The model is made by its own class on the meta device, in a second or less, so that a missing target, an
adapter that doesn't fit or weights that can't be trained on are reported at once, and by ``--dry-run`` as
well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.experts.loading import skeleton
from ktbridge.experts.modules import experts_modules
from ktbridge.experts.nonexpert_lora import (
    Adaptable,
    adaptable,
    chosen_modules,
    in_layer,
    is_named,
    left_out_of_all,
)
from ktbridge.model import open_checkpoint, read_model_config
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.start import read_start

_PACKED = (".weight_packed", ".qweight", ".weight.absmax")
"""What quantisers write in a weight's place: compressed-tensors, GPTQ and AWQ, bitsandbytes."""
_READ_PACKED = ".weight_packed"
"""The one that the kernels read, for routed experts."""


@dataclass(frozen=True)
class Trainable:
    """What a run will train. ``modules``: a path within its layer -> how many layers have LoRA there."""

    modules: dict[str, int]
    expert_layers: int
    expert_parameters: int
    nonexpert_parameters: int

    @property
    def parameters(self) -> int:
        return self.expert_parameters + self.nonexpert_parameters


def check_model(config: TrainConfig, base: Path) -> tuple[Trainable, list[Problem]]:
    """Check model, ``lora_target`` and ``adapter_name_or_path`` without weights; what is trained, and notes.

    Raises KtbridgeError for a model that can't be trained here, and what ``chosen_modules`` and
    ``read_start`` raise.
    """
    _check_packed(config, base)
    model = skeleton(base)
    found = _adaptable(model, base)
    start = read_start(config, model, found)
    if start is not None:
        return _trainable(config, model, start.modules), []
    names = chosen_modules(model, found, config.lora_target)
    return _trainable(config, model, names), _left_out(config, model, found)


def _trainable(config: TrainConfig, model: Any, names: Sequence[str]) -> Trainable:
    """Numbers of LoRA weights: r (in + out) for a module, that for each expert's three projections."""
    sizes = (model.get_submodule(name).weight.shape for name in names)
    experts = [module for _, module in experts_modules(model)]
    # down_proj is [E, H, I] or [E, I, H]; gate and up have as many weights.
    expert_sizes = (m.down_proj.shape[0] * 3 * sum(m.down_proj.shape[1:]) for m in experts)
    return Trainable(
        modules=dict(Counter(in_layer(name) for name in names)),
        expert_layers=len(experts),
        expert_parameters=config.expert_rank * sum(expert_sizes),
        nonexpert_parameters=config.lora_rank * sum(sum(size) for size in sizes),
    )


def _adaptable(model: Any, base: Path) -> Adaptable:
    try:
        return adaptable(model)
    except KtbridgeError:
        if read_model_config(base).is_moe:
            raise
        raise KtbridgeError(
            f"{base} is a dense model ({model.config.model_type}): it has no routed experts to train on the "
            "CPU.",
            "Use a mixture-of-experts model, or train this one with PEFT or LLaMA-Factory.",
        ) from None


def _check_packed(config: TrainConfig, base: Path) -> None:
    own_experts = config.kt_config.kt_weight_path is None
    packed = [
        name
        for name in open_checkpoint(base)
        if name.endswith(_PACKED)
        and (".experts." not in name or (own_experts and not name.endswith(_READ_PACKED)))
    ]
    if not packed:
        return
    first = min(packed)
    step = "Use the model's BF16 or FP8 release."
    if all(name.endswith(_READ_PACKED) for name in packed):
        step = "Make BF16 of it with scripts/dequantize_checkpoint.py, or use the model's BF16 release."
    raise KtbridgeError(
        f"{base} has quantised weights that can't be trained on: {first}"
        f"{f' and {len(packed) - 1:,} more' if len(packed) > 1 else ''}.",
        step,
    )


def _left_out(config: TrainConfig, model: Any, found: Adaptable) -> list[Problem]:
    """What ``lora_target: all`` doesn't mean in this family, and nothing else named."""
    if "all" not in config.lora_target:
        return []
    left = [
        name
        for name in left_out_of_all(model, found)
        if not any(is_named(target, name) for target in config.lora_target)
    ]
    if not left:
        return []
    return [
        problem(
            "KTC013",
            "lora_target",
            f"all leaves out {', '.join(left)}: SGLang-KT applies no LoRA there",
            next_step=f"Nothing, or lora_target: all, {', '.join(left)} if the adapter is served elsewhere.",
        )
    ]
