"""Saving the trained parameters of a model as a raw adapter."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.adapter.keys import PEFT_PREFIX, fused_key, is_named
from ktbridge.adapter.manifest import MANIFEST_FILE
from ktbridge.errors import KtbridgeError
from ktbridge.experts.layer import MoELoRAExperts, expert_layers, find_layers
from ktbridge.experts.lora import from_torch, lora_shapes
from ktbridge.files.publish import fsync_directory

Values = Mapping[str, torch.Tensor]
"""Parameters' values by name, where a model itself holds but shards of them."""


def expert_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return fused expert LoRA of a wrapped model: ``layers.{L}.experts.{gate,up,down}_lora_{a,b}``, bf16.

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


def nonexpert_tensors(
    model: nn.Module, adapter_name: str = "default", values: Values | None = None
) -> dict[str, Tensor]:
    """Return the LoRA that PEFT trained, under PEFT's own keys (``….lora_A.weight``), bf16."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if name.endswith((f".lora_A.{adapter_name}.weight", f".lora_B.{adapter_name}.weight")):
            # Where transformers' own add_adapter put it, there is no PeftModel around the model.
            key = PEFT_PREFIX + name.replace(f".{adapter_name}.", ".").removeprefix(PEFT_PREFIX)
            value = parameter if values is None else values[name]
            tensors[key] = from_torch(key, value.to(torch.bfloat16))
    return tensors


def save_raw_adapter(
    model: nn.Module,
    directory: str | Path,
    base_model: str | None = None,
    *,
    overwrite: bool = False,
    extra_files: Mapping[str, bytes] | None = None,
    training: Mapping[str, object] | None = None,
) -> None:
    """Write the expert LoRA and the PEFT LoRA of a wrapped model as one raw adapter directory.

    The model may have one of them alone. ``base_model`` is the base's name or path, by default the one that
    the model was loaded from. Published complete or not at all, ``extra_files`` with it (see
    ``ktbridge.adapter.write_raw_adapter``). ``overwrite`` replaces an adapter that is there. ``training`` is
    what the manifest says of the run.

    Warns of what was trained and is in neither half, and of an expert LoRA that is all zeros. Raises
    ``KtbridgeError`` where nothing is wrapped, the base model has no name, or the directory is occupied.
    """
    named = required_base_model(model, base_model, "save_raw_adapter")
    _write(model, directory, named, overwrite=overwrite, extra_files=extra_files, training=training)


def save_into(
    model: nn.Module,
    directory: str | Path,
    base_model: str | None = None,
    values: Values | None = None,
    training: Mapping[str, object] | None = None,
) -> None:
    """Write a raw adapter as ``save_pretrained`` does: beside what a directory holds, over an older one.

    The manifest is put in last, and an older one is taken away first. ``base_model`` is the base's name or
    path, by default the model's own, which may be empty; ``values`` the trained parameters', by default
    the model's.
    """
    named = base_model_name(model) if base_model is None else base_model
    target = Path(directory)
    if not target.is_dir() or not any(target.iterdir()):
        _write(model, target, named, values, training=training)
        return
    made = target / f".adapter-{secrets.token_hex(4)}"
    try:
        _write(model, made, named, values, training=training)
        (target / MANIFEST_FILE).unlink(missing_ok=True)
        for path in sorted(made.iterdir(), key=lambda path: path.name == MANIFEST_FILE):
            os.replace(path, target / path.name)
        fsync_directory(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(
    model: nn.Module, directory: str | Path, base_model: str, values: Values | None = None, **options: Any
) -> None:
    first = _first_layer(model)
    config = _peft_config(model, first)
    _warn(model)
    write_raw_adapter(
        directory,
        expert=expert_tensors(model),
        nonexpert=nonexpert_tensors(model, first.peft_adapter, values),
        config=config,
        base_model=base_model,
        rank=first.lora_rank or config["r"],
        alpha=first.lora_alpha if first.lora_rank else config["lora_alpha"],
        **options,
    )


def required_base_model(model: nn.Module, given: str | None, asked_by: str) -> str:
    """Return ``given``, else ``base_model_name(model)``. Raises ``KtbridgeError`` if there is neither.

    ``asked_by`` is the function or class that takes it as ``base_model``.
    """
    if named := given or base_model_name(model):
        return named
    raise KtbridgeError(
        "the model has no name of the base model it was loaded from.",
        f"Give {asked_by} its name or path: base_model=...",
    )


def base_model_name(model: nn.Module) -> str:
    """Return the name or path that a model, or the one in a PeftModel, was loaded from; "" if it has none."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        if config.base_model_name_or_path:
            return str(config.base_model_name_or_path)
    return str(getattr(model.config, "name_or_path", "") or "")


def _first_layer(model: nn.Module) -> MoELoRAExperts:
    layers = expert_layers(model)
    if not layers:
        raise KtbridgeError(
            f"{type(model).__name__} has no wrapped experts, so there is no raw adapter to save.",
            "Call ktbridge.sft.wrap_experts before training.",
        )
    return next(iter(layers.values()))


def _warn(model: nn.Module) -> None:
    """Warn of what a user would miss in the adapter."""
    others = list(find_unsaved_parameters(model))
    if others:
        size = sum(parameter.numel() for _, parameter in others)
        warnings.warn(
            f"{size:,} trained parameters ({others[0][0]}{', …' if len(others) > 1 else ''}) belong to "
            "neither half of a raw adapter and are not saved with it; model.state_dict() has them.",
            stacklevel=4,
        )
    layers = [layer for layer in expert_layers(model).values() if layer.lora_names]
    if layers and not any(
        bool(getattr(layer, name).any())
        for layer in layers
        for name in layer.lora_names
        if name.endswith("_b")
    ):
        warnings.warn(
            "the expert LoRA that is saved changes nothing: every B in it is zero, as it was made.",
            stacklevel=4,
        )


def _peft_config(model: nn.Module, first: MoELoRAExperts) -> dict[str, Any]:
    """PEFT's LoraConfig as it would be saved: JSON types, target_modules a sorted list.

    It is in PEFT's own terms, and PEFT finds by it what was trained: modules whose names it takes for
    routed experts' are in target_parameters (see ``lora_targets``). Conversion lists all names.
    What PEFT looked for and didn't find is left out: for "all-linear" or gate_proj it names the experts'
    parameters, with a rank of their own, and finds none where they were wrapped before.
    """
    configs = getattr(model, "peft_config", None) or {}
    if not configs:
        lora = LoraConfig(
            r=first.lora_rank,
            lora_alpha=first.lora_alpha,  # type: ignore[arg-type]  # fractions are fine
            lora_dropout=first.lora_dropout.p,
            target_modules=DUMMY_TARGET_MODULES,
            task_type="CAUSAL_LM",
        )
        configs = {first.peft_adapter: lora}
    config = configs[first.peft_adapter].to_dict()
    config["inference_mode"] = True
    adapted = list(_adapted(model))
    config["target_parameters"] = [
        target
        for target in config.get("target_parameters") or ()
        if any(is_named(target, name) for name in adapted)
    ] or None
    for field in ("rank_pattern", "alpha_pattern"):
        config[field] = {
            pattern: value
            for pattern, value in (config.get(field) or {}).items()
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted)
        }
    if config["target_parameters"]:
        config["lora_dropout"] = 0.0  # PEFT loads no dropout beside parameters, and needs none

    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))

    return json.loads(json.dumps(config, default=plain))


def _adapted(model: nn.Module) -> Iterator[str]:
    """Yield names in the base of the modules that have PEFT's LoRA, and of the parameters that it is on."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            name = name.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
            yield name
            # peft's ParamWrapper names its own; a linear module may be asked for by its parameter as well.
            yield f"{name}.{getattr(module, 'parameter_name', 'weight')}"


def find_unsaved_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters that are trained and are in no file of a raw adapter."""
    experts = {id(parameter) for layer in find_layers(model) for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        lora = (".lora_A." in name or ".lora_B." in name) and not name.endswith(".bias")
        if parameter.requires_grad and id(parameter) not in experts and not lora:
            yield name, parameter
