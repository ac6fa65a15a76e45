"""Multi-process training of one model: each process runs attention and other non-experts on its own rows.

PEFT's LoRA is averaged over the ranks by DDP or FSDP2 as in any other model. The routed experts are computed
in one of two ways (``assign_experts``):

* On the CPU they and their LoRA are rank 0's. At each experts module the ranks send their tokens to rank 0,
  whose kernels run once on all of them, and get their outputs back. The expert LoRA has one owner and one
  gradient, scaled as the others.
* On the GPU each rank computes its own rows, from the weights that all of them map. The expert LoRA is the
  same on all ranks, and its gradients are averaged once a step.
"""

from ktbridge.sft.distributed.dispatch import (
    assign_experts,
    copy_into,
    gather_trained,
    local,
    replicated_lora,
    whole_tensor,
)
from ktbridge.sft.distributed.group import (
    add,
    agree,
    barrier,
    finish,
    from_main,
    made_by_main,
    start,
)
from ktbridge.sft.distributed.optimizer import (
    average_and_clip,
    average_gradients,
    leave_experts_whole,
    load_optimizer,
    parallel_arguments,
    save_names,
    save_optimizer,
    separate_experts,
    shard_on_the_cpu,
)
from ktbridge.sft.launch import is_main, world

__all__ = [
    "add",
    "agree",
    "assign_experts",
    "average_and_clip",
    "average_gradients",
    "barrier",
    "copy_into",
    "finish",
    "from_main",
    "gather_trained",
    "is_main",
    "leave_experts_whole",
    "load_optimizer",
    "local",
    "made_by_main",
    "parallel_arguments",
    "replicated_lora",
    "save_names",
    "save_optimizer",
    "separate_experts",
    "shard_on_the_cpu",
    "start",
    "whole_tensor",
    "world",
]  # fmt: skip
