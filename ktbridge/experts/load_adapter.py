"""A raw adapter onto a transformers model, both halves, to train on or to run; and why it may not fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from ktbridge.adapter import Adapter, open_adapter, validate_adapter
from ktbridge.adapter.adapter import last_part
from ktbridge.adapter.keys import parse_key
from ktbridge.adapter.manifest import trained_on
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.experts.guard import has_peft
from ktbridge.experts.inject import load_expert_lora, wrap_experts
from ktbridge.experts.lora_targets import Adaptable, TunedModel, adaptable
from ktbridge.experts.tensors import to_torch
from ktbridge.experts.wrapped_layers import layers_of
from ktbridge.model import resolve_model
from ktbridge.model.identity import config_differences
from ktbridge.model.jsonfile import read_json_file

_ACTING = (
    "lora_alpha",
    "r",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)


def acting(adapter: Adapter) -> dict[str, Any]:
    """Return what decides how its tensors act, of adapter_config.json; the rest is about training."""
    config = adapter.config
    return {field: config[field] for field in _ACTING if config.get(field) is not None}


@dataclass(frozen=True)
class Start:
    """An adapter that fits: ``keys`` are its non-expert tensors by full module name and half."""

    adapter: Adapter
    keys: dict[str, dict[str, str]]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.keys)

    @property
    def rslora(self) -> bool:
        return bool(self.adapter.config.get("use_rslora"))


def read_start(
    path: str | Path, from_format: str = "auto", base_model: str | Path | None = None
) -> Adapter:
    """The adapter to put onto a model, of any format that is read, as a raw one.

    A raw adapter may have no expert LoRA, and then looks like any adapter of PEFT's. Raises UsageError for
    one half of a split pair, without which the other half would be lost, and as ``open_adapter``.
    """
    adapter = open_adapter(path, from_format, base_model)
    half = (adapter.manifest or {}).get("layout") in ("expert", "nonexpert")
    if half and not adapter.format:
        raise UsageError(
            f"{adapter.path} is one half of a split pair ({adapter.layout}): the other would be lost.",
            "Give what both were converted from, or a directory with both.",
        )
    if adapter.layout in ("merged", "expert"):
        return open_adapter(path, from_format, base_model, as_raw=True)
    return adapter


def fit(
    adapter: Adapter, base: Path | None, model: nn.Module, found: Adaptable
) -> tuple[Start, list[Problem]]:
    """Return where the non-expert LoRA goes in a model, and what keeps the adapter from being put on it.

    ``base`` is the model's directory, where it is known. Raises KtbridgeError for another base model.
    """
    if base is not None:
        _check_base(adapter, base)
    # The keys of PEFT's half decide where it goes, whatever its configuration lists.
    problems = [
        problem
        for problem in validate_adapter([adapter], base_model=base).problems
        if problem.severity == "error"
    ]
    if problems:
        return Start(adapter, _by_module(adapter, found)), problems
    return place(adapter, model, found)


def place(adapter: Adapter, model: nn.Module, found: Adaptable) -> tuple[Start, list[Problem]]:
    """Where the non-expert LoRA of a valid adapter goes, and what has no place there or another shape."""
    start = Start(adapter, _by_module(adapter, found))
    return start, list(_misplaced(start, model, found))


def copy_nonexpert(model: nn.Module, start: Start, name_in_peft: str = "default") -> None:
    """Copy the adapter's non-expert LoRA to where ``inject_lora`` has made place for it."""
    for name, halves in start.keys.items():
        layer: Any = model.get_submodule(name)
        for half, key in halves.items():
            value = to_torch(start.adapter.nonexpert_tensor(key))
            with torch.no_grad():
                getattr(layer, f"lora_{half}")[name_in_peft].weight.copy_(value)


def _check_base(adapter: Adapter, base: Path) -> None:
    """Compare the base model that the adapter names with the one it is to be trained on.

    The configurations; ``validate_adapter`` compares the weights where the manifest has their hashes.
    """
    named, recorded = adapter.base_model, trained_on(adapter.manifest)
    if recorded is not None:
        theirs = recorded.config
    elif named is None:
        return
    else:
        try:
            theirs = read_json_file(resolve_model(named) / "config.json")
        except KtbridgeError:  # it was trained elsewhere: the names, and then the shapes, are left
            if last_part(named) not in (last_part(str(base)), last_part(str(base.resolve()))):
                warnings.warn(
                    f"{adapter.path} was trained on {named}, which isn't here: that {base} is the same "
                    "model was seen from its shapes only.",
                    stacklevel=2,
                )
            return
    different = sorted(config_differences(theirs, read_json_file(base / "config.json")))
    if different:
        raise KtbridgeError(
            f"{adapter.path} was trained on {named}, whose config.json differs from that of {base} "
            f"in {', '.join(different[:6])}.",
            "Use the base model that the adapter was trained on.",
        )


def _by_module(adapter: Adapter, found: Adaptable) -> dict[str, dict[str, str]]:
    """The adapter's keys by the model's module and by half, in the model's order.

    A text model alone and the same in a multimodal model differ in what precedes ``layers.N``.
    """
    keys: dict[str, dict[str, str]] = {}
    for key in adapter.nonexpert_keys():
        parsed = parse_key(key)
        name = f"{found.decoder}.{parsed.layer}.{parsed.suffix}"
        if parsed.layer < 0 or parsed.is_vision or parsed.is_draft:
            name = parsed.module
        keys.setdefault(name, {})[parsed.half] = key
    order = {name: place for place, name in enumerate(found.modules)}
    return dict(sorted(keys.items(), key=lambda item: order.get(item[0], len(order))))


def _misplaced(start: Start, model: nn.Module, found: Adaptable) -> Iterator[Problem]:
    """Modules that the model doesn't have, or has in another shape."""
    adapter, known = start.adapter, {*found.modules}
    for name, halves in start.keys.items():
        where = next(iter(halves.values()))
        if name not in known:
            lacking = "a module of the decoder layers"
            yield misfit("KTL007", adapter, where, "no such module", lacking)
            continue
        weight: Any = model.get_submodule(name).weight
        for half, axis in (("A", 1), ("B", 0)):
            shape = adapter.nonexpert_tensor(halves[half]).shape
            if shape[axis] != weight.shape[axis]:
                expected = f"{'in' if axis else 'out'} = {weight.shape[axis]}"
                found_shape = f"shape {list(shape)}"
                yield misfit("KTL002", adapter, halves[half], found_shape, expected)


def misfit(
    code: str, adapter: Adapter, where: str, found: str, expected: str, step: str | None = None
) -> Problem:
    """A place in an adapter at which it doesn't go with a model or a configuration."""
    return problem(code, f"{adapter.path}: {where}", found, expected, step)


def load_raw_adapter(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    trainable: bool = False,
    from_format: str = "auto",
    **options: Any,
) -> PeftModel:
    """Put an adapter onto the base model it was trained on: the reverse of ``save_raw_adapter``.

    It may have any format that ``convert_adapter`` reads; ``from_format`` names it where it is ambiguous.
    ``model`` is as it was loaded, neither wrapped nor PEFT's; it is changed in place. Returns a PeftModel
    with PEFT's LoRA on the modules that the adapter has and the experts wrapped, both float32 copies of
    what is stored. Without ``trainable`` nothing requires gradients and it is in eval mode; with it both
    halves are trained further. ``options`` are ``wrap_experts``'s, but for the LoRA's own.

    Raises ``ProblemsError`` naming everything that doesn't fit, ``KtbridgeError`` for another base model
    (where both are at hand), and ``UsageError`` for a wrapped model, half of a split pair, or an ambiguous
    format.
    """
    if layers_of(model) or has_peft(model):
        raise UsageError(
            "load_raw_adapter takes the base model, and this one has LoRA already.",
            "Load the model anew and give it without PEFT and without wrap_experts: both are done here.",
        )
    base, found = _directory(model), adaptable(model)
    adapter = read_start(directory, from_format, base)
    start, problems = fit(adapter, base, model, found)
    if problems:
        raise ProblemsError(f"{adapter.path} can't be put on this model.", problems)
    dropout = float(adapter.config.get("lora_dropout") or 0)
    lora = LoraConfig(
        **acting(adapter),
        lora_dropout=dropout,
        base_model_name_or_path=adapter.base_model,
        inference_mode=not trainable,
        task_type="CAUSAL_LM",
    )
    tuned = TunedModel(model, lora, start.modules, found)
    for name, parameter in tuned.named_parameters():  # as get_peft_model makes them
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    trained = bool(adapter.experts)
    numbers = (adapter.rank, adapter.alpha) if trained else (0, 0)
    wrap_experts(tuned, *numbers, **{"lora_dropout": dropout if trainable else 0.0, **options})
    copy_nonexpert(model, start)
    if trained:
        load_expert_lora(tuned, adapter)
    return tuned if trainable else tuned.requires_grad_(False).eval()


def _directory(model: PreTrainedModel) -> Path | None:
    """Return where the model was loaded from, if it is still there."""
    name = str(model.config.name_or_path or "")
    try:
        return resolve_model(name) if name else None
    except KtbridgeError:
        return None
