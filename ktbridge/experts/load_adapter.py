"""Loading a raw adapter onto a transformers model, expert and non-expert LoRA, to train on or to run."""

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
from ktbridge.adapter.lora_config import numbers_of, pattern_fields, peft_numbers
from ktbridge.adapter.manifest import trained_on
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.experts.guard import has_peft
from ktbridge.experts.inject import wrap_experts
from ktbridge.experts.layer import MoELoRAExperts, expert_layers, find_layers
from ktbridge.experts.lora import LORA_NAMES, to_torch
from ktbridge.experts.lora_targets import LoraTargets, TunedModel, find_lora_targets
from ktbridge.experts.weights import PROJECTIONS
from ktbridge.model import resolve_model
from ktbridge.model.identity import config_differences
from ktbridge.model.jsonfile import read_json_file

_EFFECTIVE = (
    "lora_alpha", "r", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """An adapter that fits: ``keys`` are its non-expert tensors by full module name, then "A" or "B"."""

    adapter: Adapter
    keys: dict[str, dict[str, str]]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.keys)

    def settings(self, found: LoraTargets) -> dict[str, Any]:
        """Return the part of adapter_config.json that decides how its tensors act, for the model's names.

        Those in its patterns may have another prefix, and PEFT knows a router by its weight.
        """
        adapter, config = self.adapter, self.adapter.config
        settings = {field: config[field] for field in _EFFECTIVE if config.get(field) is not None}
        own = {
            f"{name}.weight" if name in found.routers else name: numbers_of(adapter, parse_key(keys["A"]))
            for name, keys in self.keys.items()
        }
        if any(peft_numbers(config, name) != numbers for name, numbers in own.items()):
            usual = adapter.nonexpert_rank, adapter.nonexpert_alpha
            numbers = {name: (each.rank, each.alpha) for name, each in own.items()}
            settings |= {"rank_pattern": {}, "alpha_pattern": {}, **pattern_fields(numbers, usual)}
        return settings


def read_start(path: str | Path, from_format: str = "auto", base_model: str | Path | None = None) -> Adapter:
    """Open the adapter to put onto a model, of any format that is read, as a raw one.

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


def match_model(
    adapter: Adapter, base: Path | None, model: nn.Module, found: LoraTargets
) -> tuple[Start, list[Problem]]:
    """Match an adapter with a model; return what keeps it from being put there, too.

    ``base`` is the model's directory, where it is known. Raises KtbridgeError for another base model.
    """
    if base is not None:
        _check_base(adapter, base)
    # The keys of the non-expert LoRA decide where it goes, whatever its configuration lists.
    start = Start(adapter, _by_module(adapter, found))
    report = validate_adapter([adapter], base_model=base, read_here=True)
    errors = [item for item in report.problems if item.severity == "error"]
    return start, errors or list(_misplaced(start, model, found))


def match_modules(adapter: Adapter, model: nn.Module, found: LoraTargets) -> tuple[Start, list[Problem]]:
    """Match non-expert LoRA of a valid adapter with a model; return what has no place or shape there, too."""
    start = Start(adapter, _by_module(adapter, found))
    return start, list(_misplaced(start, model, found))


def copy_nonexpert(model: nn.Module, start: Start, name_in_peft: str = "default") -> None:
    """Copy the adapter's non-expert LoRA to where ``inject_lora`` has made place for it."""
    for name, keys in start.keys.items():
        layer = model.get_submodule(name)
        for half, key in keys.items():
            value = to_torch(start.adapter.nonexpert_tensor(key))
            with torch.no_grad():
                getattr(layer, f"lora_{half}")[name_in_peft].weight.copy_(value)


def load_expert_lora(model: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's expert LoRA into a wrapped model; every tensor must have a place and a source.

    Raises ``ProblemsError`` naming each layer or shape that doesn't fit.
    """
    layers, source = expert_layers(model), set(adapter.expert_layers())
    where = str(adapter.path)
    surplus = "expert LoRA for a layer that has no routed experts in the model"
    lacking = "no expert LoRA for a layer that has routed experts in the model"
    expected = f"layers {list(layers)}"
    problems = [
        problem("KTL001", f"{where}: layer {n}", surplus if n in source else lacking, expected)
        for n in sorted(source ^ set(layers))
    ]
    loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in sorted(source & set(layers)):
        problems += _untargeted(layers[index], adapter, index)
        for name in layers[index].lora_names:
            tensor, parameter = adapter.expert_tensor(index, name), getattr(layers[index], name)
            found, own = list(tensor.shape), list(parameter.shape)
            if found == own:
                loaded.append((parameter, to_torch(tensor)))
            else:
                place = f"{where}: layer {index} {name}"
                problems.append(problem("KTL002", place, f"shape {found}", f"{own}"))
    if problems:
        raise ProblemsError("the adapter's expert LoRA doesn't fit this model.", problems)
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)


def _untargeted(layer: MoELoRAExperts, adapter: Adapter, index: int) -> Iterator[Problem]:
    """Yield the projections that an adapter changes and the layer has no LoRA for."""
    names = set(LORA_NAMES) - set(layer.lora_names)
    for projection in PROJECTIONS:
        b = f"{projection}_lora_b"
        if b in names and bool(to_torch(adapter.expert_tensor(index, b)).any()):
            yield problem(
                "KTL005",
                f"{adapter.path}: layer {index} {projection}",
                "LoRA on a projection that the model has none for",
                f"only {', '.join(layer.lora_targets) or 'the base'}",
            )


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


def _by_module(adapter: Adapter, found: LoraTargets) -> dict[str, dict[str, str]]:
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


def _misplaced(start: Start, model: nn.Module, found: LoraTargets) -> Iterator[Problem]:
    """Yield modules that the model doesn't have, or has in another shape."""
    adapter, known = start.adapter, {*found.modules}
    for name, keys in start.keys.items():
        where = next(iter(keys.values()))
        if name not in known:
            lacking = "a module of the decoder layers"
            yield mismatch("KTL007", adapter, where, "no such module", lacking)
            continue
        wanted = model.get_parameter(f"{name}.weight").shape
        for half, axis in (("A", 1), ("B", 0)):
            shape = adapter.nonexpert_tensor(keys[half]).shape
            if shape[axis] != wanted[axis]:
                expected = f"{'in' if axis else 'out'} = {wanted[axis]}"
                found_shape = f"shape {list(shape)}"
                yield mismatch("KTL002", adapter, keys[half], found_shape, expected)


def mismatch(
    code: str, adapter: Adapter, where: str, found: str, expected: str, step: str | None = None
) -> Problem:
    """Make the problem of a place in an adapter that doesn't fit a model or a configuration."""
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
    are trained further. ``options`` are ``wrap_experts``'s, but for the LoRA's own.

    Raises ``ProblemsError`` naming everything that doesn't fit, ``KtbridgeError`` for another base model
    (where both are at hand), and ``UsageError`` for a wrapped model, half of a split pair, or an ambiguous
    format.
    """
    if find_layers(model) or has_peft(model):
        raise UsageError(
            "load_raw_adapter takes the base model, and this one has LoRA already.",
            "Load the model anew and give it without PEFT and without wrap_experts: both are done here.",
        )
    base, found = _directory(model), find_lora_targets(model)
    adapter = read_start(directory, from_format, base)
    start, problems = match_model(adapter, base, model, found)
    if problems:
        raise ProblemsError(f"{adapter.path} can't be put on this model.", problems)
    dropout = float(adapter.config.get("lora_dropout") or 0)
    lora = LoraConfig(
        **start.settings(found),
        lora_dropout=dropout,
        base_model_name_or_path=adapter.base_model,
        inference_mode=not trainable,
        task_type="CAUSAL_LM",
    )
    tuned = TunedModel(model, lora, start.modules, found)
    for name, parameter in tuned.named_parameters():  # as get_peft_model makes them
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    numbers = (adapter.rank, adapter.alpha) if adapter.experts else (0, 0)
    wrap_experts(tuned, *numbers, **{"lora_dropout": dropout if trainable else 0.0, **options})
    copy_nonexpert(model, start)
    if adapter.experts:
        load_expert_lora(tuned, adapter)
    return tuned if trainable else tuned.requires_grad_(False).eval()


def _directory(model: PreTrainedModel) -> Path | None:
    """Return where the model was loaded from, if it is still there."""
    name = str(model.config.name_or_path or "")
    try:
        return resolve_model(name) if name else None
    except KtbridgeError:
        return None
