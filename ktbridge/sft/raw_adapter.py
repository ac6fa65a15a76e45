"""What a finished run leaves: the trained parameters of a model as a raw adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.adapter.keys import fused_key
from ktbridge.sft.backends import lora_shapes
from ktbridge.sft.inject import expert_layers
from ktbridge.sft.tensors import from_torch


def expert_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The fused expert LoRA of a wrapped model: ``layers.{L}.experts.{gate,up,down}_lora_{a,b}``, bf16.

    Layouts know all six or none, so a projection outside ``lora_targets`` is written as zeros, which is
    what it adds.
    """
    tensors = {}
    for index, layer in expert_layers(model).items():
        if layer.lora_rank == 0:
            continue
        sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.lora_rank
        for name, shape in lora_shapes(*sizes).items():
            parameter = getattr(layer, name, None)
            value = torch.zeros(shape) if parameter is None else parameter
            key = fused_key(index, name)
            tensors[key] = from_torch(key, value.to(torch.bfloat16))
    return tensors


def nonexpert_tensors(model: nn.Module, adapter_name: str = "default") -> dict[str, Tensor]:
    """The LoRA that PEFT trained, under PEFT's own keys (``….lora_A.weight``), bf16."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if f".lora_A.{adapter_name}." in name or f".lora_B.{adapter_name}." in name:
            key = name.replace(f".{adapter_name}.", ".")
            tensors[key] = from_torch(key, parameter.to(torch.bfloat16))
    return tensors


def save_raw_adapter(
    model: nn.Module,
    directory: str | Path,
    base_model: str,
    *,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the expert LoRA and the PEFT LoRA of a trained model as one raw adapter directory.

    Published whole or not at all, ``extra_files`` with it (see ``ktbridge.adapter.write_raw_adapter``).
    """
    layers = expert_layers(model)
    first = next(iter(layers.values()))
    write_raw_adapter(
        directory,
        expert=expert_tensors(model),
        nonexpert=nonexpert_tensors(model),
        config=_peft_config(model),
        base_model=base_model,
        rank=first.lora_rank,
        alpha=first.lora_alpha,
        overwrite=overwrite,
        extra_files=extra_files,
    )


def _peft_config(model: Any) -> dict[str, Any]:
    """PEFT's LoraConfig as it would be saved: JSON types, target_modules a sorted list.

    It is in PEFT's own terms, and PEFT finds by it what was trained: modules whose names it takes for
    routed experts' are in target_parameters (see ``ktbridge.sft.targets``). Conversion lists all names.
    """
    config = model.peft_config["default"].to_dict()
    config["inference_mode"] = True
    if config.get("target_parameters"):
        config["lora_dropout"] = 0.0  # PEFT loads no dropout beside parameters, and needs none

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))

    return json.loads(json.dumps(config, default=plain))
