"""The thin training core: expert layers on the kernels, their injection, and the recipe around trl.

``MoELoRAExperts`` and ``wrap_experts`` are the faces that others build on. Names are imported when they are
first used, so that reading a configuration needs no torch; ``ktbridge.sft.trainer`` is imported on its
own, because it needs trl.

A run goes through these modules:

- ``config``: the file. ``prepare``: all that can be refused without weights, by ``skeleton`` (the model),
  ``from_adapter`` (an adapter to go on from), ``data`` (the rows) and ``resume`` (whose checkpoint it is).
- ``trainer``: the recipe. ``loading``, ``mapped`` and ``placement``: the model, its experts left in the
  checkpoint. ``attach``: LoRA, where ``targets`` says; ``inject`` puts the experts onto the kernels.
- ``supervised`` and ``dpo``: trl's trainers with ``watch`` (pace, NaN), ``resumable`` (checkpoints) and
  ``distributed`` (several processes). ``raw_adapter``: what is left in the end.
- For a user's own script (docs/library.md): ``callback`` saves from any Trainer, ``load_adapter`` puts a raw
  adapter on a model, ``guard`` sees to it that the expert LoRA is trained and saved, ``peft_layer`` makes
  it one of PEFT's, ``trainable`` counts.
- ``experts`` and ``expert_call``: one layer and one call of it; ``crossing`` to the host and back; ``queued``
  in a GPU stream's own time; ``checkpointing`` is gradient checkpointing, not the run's checkpoints.

Import this before torch: it lets OpenMP's idle threads sleep (``ktbridge.sft.openmp``), which otherwise
compete with the kernels for their CPUs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ktbridge.sft.openmp import let_idle_threads_sleep

if TYPE_CHECKING:
    from ktbridge.sft.callback import RawAdapterCallback
    from ktbridge.sft.experts import MoELoRAExperts
    from ktbridge.sft.guard import freeze_expert_lora
    from ktbridge.sft.inject import (
        expert_layers,
        load_expert_lora,
        set_expert_lora,
        wrap_experts,
    )
    from ktbridge.sft.load_adapter import load_raw_adapter
    from ktbridge.sft.loading import load_for_kernels
    from ktbridge.sft.raw_adapter import save_raw_adapter
    from ktbridge.sft.trainable import Trainable, trainable_parameters
    from ktbridge.sft.weights import ExpertWeights

_HOMES = {
    "ExpertWeights": "weights",
    "MoELoRAExperts": "experts",
    "RawAdapterCallback": "callback",
    "Trainable": "trainable",
    "expert_layers": "inject",
    "freeze_expert_lora": "guard",
    "load_expert_lora": "inject",
    "load_for_kernels": "loading",
    "load_raw_adapter": "load_adapter",
    "save_raw_adapter": "raw_adapter",
    "set_expert_lora": "inject",
    "trainable_parameters": "trainable",
    "wrap_experts": "inject",
}
__all__ = [
    "ExpertWeights",
    "MoELoRAExperts",
    "RawAdapterCallback",
    "Trainable",
    "expert_layers",
    "freeze_expert_lora",
    "load_expert_lora",
    "load_for_kernels",
    "load_raw_adapter",
    "save_raw_adapter",
    "set_expert_lora",
    "trainable_parameters",
    "wrap_experts",
]

let_idle_threads_sleep()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
