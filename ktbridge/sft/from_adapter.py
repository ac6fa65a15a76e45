"""Going on from a trained adapter: it must fit configuration and model in all it has, or is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktbridge.adapter import Adapter, read_adapter, validate_adapter
from ktbridge.adapter.adapter import last_part
from ktbridge.adapter.keys import parse_key
from ktbridge.adapter.manifest import trained_on
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.model import resolve_model
from ktbridge.model.identity import config_differences
from ktbridge.model.jsonfile import read_json_file
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.targets import Adaptable, chosen_modules, in_layer, own_names
from ktbridge.sft.tensors import to_torch

_ANOTHER_BASE = "Use the base model that the adapter was trained on."
# Of adapter_config.json, what decides how tensors act; the rest is about training.
ACTING = (
    "lora_alpha",
    "r",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)


@dataclass(frozen=True)
class Start:
    """A raw adapter that fits: ``keys`` are its non-expert tensors by full module name and half."""

    adapter: Adapter
    keys: dict[str, dict[str, str]]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.keys)

    @property
    def rslora(self) -> bool:
        return bool(self.adapter.config.get("use_rslora"))


def read_start(config: TrainConfig, model: nn.Module, found: Adaptable) -> Start | None:
    """The adapter of ``config.adapter_name_or_path``, checked; None if there is none to go on from.

    Ranks and alphas must be the configuration's. ``lora_target: all`` takes the modules that the adapter
    has; names must mean just those. Raises KtbridgeError for a directory that is no raw adapter or has
    another base model, and ProblemsError naming everything else that doesn't fit.
    """
    if config.adapter_name_or_path is None:
        return None
    adapter = read_raw(config.adapter_name_or_path)
    if not adapter.experts:
        raise KtbridgeError(
            f"{adapter.path} has no expert LoRA to go on from.",
            "Give an adapter that was trained with LoRA on the routed experts.",
        )
    base = resolve_model(config.model_name_or_path)
    start, problems = fit(adapter, base, model, found)
    if not problems:
        problems += _settings(adapter, config)
        problems += _chosen(start, config, model, found)
    if problems:
        raise ProblemsError(f"training can't go on from {adapter.path}.", problems)
    return start


def read_raw(path: str | Path) -> Adapter:
    """The raw adapter in a directory; it may have no expert LoRA, and then looks like any adapter of PEFT's.

    Raises UsageError for another layout, and as ``read_adapter``.
    """
    adapter = read_adapter(path)
    half = adapter.layout == "nonexpert" and not (adapter.manifest or {}).get("layout")
    if adapter.layout != "raw" and not half:
        raise UsageError(
            f"{adapter.path} is a serving directory ({adapter.layout}), not what training left.",
            "Give the output_dir of a training run, or convert it: ktbridge convert DIR --to raw.",
        )
    return adapter


def fit(
    adapter: Adapter, base: Path | None, model: nn.Module, found: Adaptable
) -> tuple[Start, list[Problem]]:
    """Where the non-expert LoRA goes in a model, and what keeps the adapter from being put on it.

    ``base`` is the model's directory, where it is known. Raises KtbridgeError for another base model.
    """
    if base is not None:
        _check_base(adapter, base)
    # Where PEFT's half goes is told by its keys, whatever its configuration calls the places.
    problems = [
        problem
        for problem in validate_adapter([adapter.path], base_model=base).problems
        if problem.severity == "error"
    ]
    start = Start(adapter, _by_module(adapter, found))
    return start, problems or list(_misplaced(start, model, found))


def copy_nonexpert(model: nn.Module, start: Start) -> None:
    """Copy the adapter's non-expert LoRA to where ``inject_lora`` has made place for it."""
    for name, halves in start.keys.items():
        layer: Any = model.get_submodule(name)
        for half, key in halves.items():
            value = to_torch(start.adapter.nonexpert_tensor(key))
            with torch.no_grad():
                getattr(layer, f"lora_{half}")["default"].weight.copy_(value)


def _check_base(adapter: Adapter, base: Path) -> None:
    """Compare the base model that the adapter names with the one it is to be trained on.

    The configurations; ``validate_adapter`` compares the weights where the manifest tells of them.
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
            _ANOTHER_BASE,
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


def _settings(adapter: Adapter, config: TrainConfig) -> Iterator[Problem]:
    """Ranks and alphas in which adapter and configuration differ."""
    pairs = [
        ("kt_lora_rank", adapter.rank, config.expert_rank),
        ("kt_lora_alpha", adapter.alpha, config.expert_alpha),
    ]
    if adapter.nonexpert:
        pairs += [
            ("lora_rank", adapter.nonexpert_rank, config.lora_rank),
            ("lora_alpha", adapter.nonexpert_alpha, config.alpha),
        ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            step = f"Set {name}: {theirs:g}."
            yield _problem("KTL006", adapter, name, f"{theirs:g}", f"{ours:g}, as configured", step)


def _misplaced(start: Start, model: nn.Module, found: Adaptable) -> Iterator[Problem]:
    """Modules that the model doesn't have, or has in another shape."""
    adapter, known = start.adapter, {*found.modules}
    for name, halves in start.keys.items():
        where = next(iter(halves.values()))
        if name not in known:
            lacking = "a module of the decoder layers"
            yield _problem("KTL007", adapter, where, "no such module", lacking, _ANOTHER_BASE)
            continue
        weight: Any = model.get_submodule(name).weight
        for half, axis in (("A", 1), ("B", 0)):
            shape = adapter.nonexpert_tensor(halves[half]).shape
            if shape[axis] != weight.shape[axis]:
                expected = f"{'in' if axis else 'out'} = {weight.shape[axis]}"
                found_shape = f"shape {list(shape)}"
                yield _problem(
                    "KTL002", adapter, halves[half], found_shape, expected, _ANOTHER_BASE
                )


def _chosen(
    start: Start, config: TrainConfig, model: nn.Module, found: Adaptable
) -> Iterator[Problem]:
    """Modules that have LoRA and weren't asked for, and that were and have none."""
    adapter, keys = start.adapter, start.keys
    if config.lora_target != ("all",):
        asked = {*chosen_modules(model, found, config.lora_target)}
        for names, expected, said in (
            ({*keys} - asked, "no LoRA, as configured", "LoRA"),
            (asked - {*keys}, "LoRA, as configured", "no LoRA"),
        ):
            if names:
                ends = sorted({in_layer(name) for name in names})
                step = f"Set lora_target: {', '.join(own_names(keys))}, or all."
                yield _problem("KTL006", adapter, ", ".join(ends), said, expected, step)


def _problem(
    code: str, adapter: Adapter, where: str, found: str, expected: str, step: str
) -> Problem:
    return Problem(code, "error", f"{adapter.path}: {where}", found, expected, step)
