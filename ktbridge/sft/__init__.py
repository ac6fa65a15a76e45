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
    from ktbridge.sft.experts import MoELoRAExperts
    from ktbridge.sft.inject import (
        expert_layers,
        load_expert_lora,
        set_expert_lora,
        wrap_experts,
    )
    from ktbridge.sft.raw_adapter import save_raw_adapter
    from ktbridge.sft.weights import ExpertWeights

_HOMES = {
    "ExpertWeights": "weights",
    "MoELoRAExperts": "experts",
    "expert_layers": "inject",
    "load_expert_lora": "inject",
    "save_raw_adapter": "raw_adapter",
    "set_expert_lora": "inject",
    "wrap_experts": "inject",
}
__all__ = [
    "ExpertWeights",
    "MoELoRAExperts",
    "expert_layers",
    "load_expert_lora",
    "save_raw_adapter",
    "set_expert_lora",
    "wrap_experts",
]

let_idle_threads_sleep()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
