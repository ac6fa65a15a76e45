"""Continue training an adapter: it is refused unless it fits configuration and model completely."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ktbridge.adapter import Adapter
from ktbridge.errors import KtbridgeError, Problem, ProblemsError
from ktbridge.experts.load_adapter import Start, fit, misfit, read_raw
from ktbridge.experts.nonexpert_lora import Adaptable, chosen_modules, in_layer, own_names
from ktbridge.model import resolve_model
from ktbridge.sft.config import TrainConfig


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
            yield misfit("KTL006", adapter, name, f"{theirs:g}", f"{ours:g}, as configured", step)


def _chosen(
    start: Start, config: TrainConfig, model: nn.Module, found: Adaptable
) -> Iterator[Problem]:
    """Modules with unrequested LoRA, and requested modules without it."""
    adapter, keys = start.adapter, start.keys
    if config.lora_target != ("all",):
        asked = {*chosen_modules(model, found, config.lora_target)}
        for names, expected, actual in (
            ({*keys} - asked, "no LoRA, as configured", "LoRA"),
            (asked - {*keys}, "LoRA, as configured", "no LoRA"),
        ):
            if names:
                ends = sorted({in_layer(name) for name in names})
                step = f"Set lora_target: {', '.join(own_names(keys))}, or all."
                yield misfit("KTL006", adapter, ", ".join(ends), actual, expected, step)
