"""Multi-process training of one model: each process runs attention and other non-experts on its own rows.

PEFT's LoRA is averaged over the ranks by DDP or FSDP2 as in any other model. The routed experts are computed
in one of two ways (``prepare``):

* On the CPU they and their LoRA are rank 0's. At each experts module the ranks send their tokens to rank 0,
  whose kernels run once on all of them, and get their outputs back. The expert LoRA has one owner and one
  gradient, scaled as the others.
* On the GPU each rank computes its own rows, from the weights that all of them map. The expert LoRA is the
  same on all ranks, and its gradients are averaged once a step.

Names are imported when they are first used: asking for the rank needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ktbridge.sft.distributed.world import World, is_main, world

if TYPE_CHECKING:
    from ktbridge.sft.distributed.average import average_gradients
    from ktbridge.sft.distributed.dispatch import run_experts
    from ktbridge.sft.distributed.group import agree, barrier, finish, from_main, start
    from ktbridge.sft.distributed.model import (
        fill,
        full,
        gather_trained,
        local,
        prepare,
        replicated_lora,
    )
    from ktbridge.sft.distributed.trainer import DistributedTrainer, trainer_arguments

_HOMES = {
    "DistributedTrainer": "trainer",
    "agree": "group",
    "average_gradients": "average",
    "barrier": "group",
    "finish": "group",
    "fill": "model",
    "from_main": "group",
    "full": "model",
    "gather_trained": "model",
    "local": "model",
    "prepare": "model",
    "replicated_lora": "model",
    "run_experts": "dispatch",
    "start": "group",
    "trainer_arguments": "trainer",
}
__all__ = [
    "DistributedTrainer",
    "World",
    "agree",
    "average_gradients",
    "barrier",
    "fill",
    "finish",
    "from_main",
    "full",
    "gather_trained",
    "is_main",
    "local",
    "prepare",
    "replicated_lora",
    "run_experts",
    "start",
    "trainer_arguments",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
