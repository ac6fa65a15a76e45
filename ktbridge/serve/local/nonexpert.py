"""Load non-expert LoRA into a model with PEFT; a tensor without a target module is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from ktbridge.adapter import Adapter
from ktbridge.adapter.keys import parse_key
from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError
from ktbridge.experts.load_adapter import ACTING
from ktbridge.experts.nonexpert_lora import Adaptable, adaptable, inject_lora
from ktbridge.experts.tensors import to_torch


def load_nonexpert(model: Any, adapters: Mapping[str, Adapter]) -> list[LoraLayer]:
    """Put the non-expert LoRA of each adapter on ``model``, in place, for inference.

    ``adapters``: PEFT's name for it -> adapter. Returns the layers that now have LoRA, each with a
    switch of its own. Raises ProblemsError.
    """
    places = adaptable(model)
    for slot, adapter in adapters.items():
        pairs = _pairs(adapter, places)
        settings = {field: adapter.config[field] for field in ACTING if field in adapter.config}
        # The modules come from the tensors' keys, not from target_modules, so that a pattern
        # cannot reach more or fewer modules than were trained.
        config = LoraConfig(inference_mode=True, **settings)
        inject_lora(model, sorted(pairs), places, config, slot)
        _copy(model, adapter, pairs, slot)
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _pairs(adapter: Adapter, places: Adaptable) -> dict[str, dict[str, str]]:
    """Module -> half ("A", "B") -> key, for keys that all have a linear module or router to go to."""
    problems: list[Problem] = []
    pairs: dict[str, dict[str, str]] = {}
    for key in adapter.nonexpert_keys():
        parsed = parse_key(key)
        if parsed.kind != "lora":
            problems.append(_problem(adapter, key, "not a LoRA tensor that PEFT can serve"))
        elif parsed.module not in places.modules:
            problems.append(
                _problem(adapter, key, "the base model has no linear layer or router there")
            )
        else:
            pairs.setdefault(parsed.module, {})[parsed.half] = key
    for name, halves in pairs.items():
        if missing := {"A", "B"} - set(halves):
            problems.append(_problem(adapter, name, f"lora_{missing.pop()} is missing"))
    if problems:
        _fail(adapter, problems)
    return pairs


def _copy(model: Any, adapter: Adapter, pairs: dict[str, dict[str, str]], slot: str) -> None:
    problems: list[Problem] = []
    for name, halves in pairs.items():
        layer = model.get_submodule(name)
        for half, key in halves.items():
            linear = getattr(layer, f"lora_{half}")[slot]
            value = to_torch(adapter.nonexpert_tensor(key))
            if value.shape != linear.weight.shape:
                needed = list(linear.weight.shape)
                found = f"shape {list(value.shape)}, the base model needs {needed}"
                problems.append(_problem(adapter, key, found))
                continue
            with torch.no_grad():
                linear.weight.copy_(value)
            # As engines on GPUs do: the LoRA computes in the base's own dtype.
            linear.to(model.dtype)
    if problems:
        _fail(adapter, problems)


def _problem(adapter: Adapter, key: str, found: str) -> Problem:
    return problem("KTS001", f"{adapter.path}: {key}", found)


def _fail(adapter: Adapter, problems: list[Problem]) -> None:
    raise ProblemsError(
        f"the non-expert LoRA in {adapter.path} does not match the base model.", problems
    )
