"""The training core: expert layers on the kernels, their injection, and the recipe around trl.

``MoELoRAExperts`` and ``wrap_experts`` are the public API. Names are imported when they are
first used, so that reading a configuration needs no torch; ``ktbridge.sft.train`` is imported on its
own, because it needs trl.

A run goes through these modules, and through those of ``ktbridge.experts`` below them:

- ``launch``: which of several processes this is. ``config``: the file.
- ``prepare``: all checks that need no weights, by ``model`` (can it be trained, and from the adapter
  that is given), ``data`` (the rows), ``plan.setting`` (is there room) and ``resume`` (whose checkpoint it
  is).
- ``train``: the recipe. ``model``: loading, LoRA on experts and non-experts. ``expert_device``: where the
  experts are computed.
- ``stages``: trl's trainers as ``trainer`` changes them: ``microbatch`` (a step's rows), ``evaluate``
  (held-out rows, the best step), ``checkpoint``, ``optimizer``; callbacks ``progress``, ``interrupts``.
  ``distributed``: several processes. ``compat``: private API.
- ``output``: the files of the output directory, and ``RawAdapterCallback``, which saves from any Trainer.
- ``plan``: memory and time of all this, before it starts.
- For a user's own script (docs/library.md): the public names, most of them those of ``ktbridge.experts``.

Import this before torch: ``ktbridge.experts``, which comes with it, lets OpenMP's idle threads sleep.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import ktbridge.experts  # noqa: F401  before torch, whichever name is used first

if TYPE_CHECKING:
    from ktbridge.experts.guard import freeze_expert_lora
    from ktbridge.experts.inject import Trainable, set_expert_lora, trainable_parameters, wrap_experts
    from ktbridge.experts.layer import MoELoRAExperts, expert_layers
    from ktbridge.experts.load_adapter import load_expert_lora, load_raw_adapter
    from ktbridge.experts.load_model import load_for_kernels
    from ktbridge.experts.save_adapter import save_raw_adapter
    from ktbridge.experts.weights import ExpertWeights
    from ktbridge.sft.output import RawAdapterCallback

_HOMES = {
    "ExpertWeights": "experts.weights",
    "MoELoRAExperts": "experts.layer",
    "RawAdapterCallback": "sft.output",
    "Trainable": "experts.inject",
    "expert_layers": "experts.layer",
    "freeze_expert_lora": "experts.guard",
    "load_expert_lora": "experts.load_adapter",
    "load_for_kernels": "experts.load_model",
    "load_raw_adapter": "experts.load_adapter",
    "save_raw_adapter": "experts.save_adapter",
    "set_expert_lora": "experts.inject",
    "trainable_parameters": "experts.inject",
    "wrap_experts": "experts.inject",
}
__all__ = [
    "ExpertWeights", "MoELoRAExperts", "RawAdapterCallback", "Trainable", "expert_layers",
    "freeze_expert_lora", "load_expert_lora", "load_for_kernels", "load_raw_adapter", "save_raw_adapter",
    "set_expert_lora", "trainable_parameters", "wrap_experts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "checkpointing":  # docs/library.md calls ktbridge.sft.checkpointing.enable
        return importlib.import_module("ktbridge.experts.recompute")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ktbridge.{_HOMES[name]}"), name)
