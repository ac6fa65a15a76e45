"""The thin training core: expert layers on the kernels, their injection, and the recipe around trl.

``MoELoRAExperts`` and ``wrap_experts`` are the faces that others build on. ``ktbridge.sft.trainer`` is
imported on its own, because it needs trl.
"""

from ktbridge.sft.checkpoint import save_raw_adapter
from ktbridge.sft.experts import MoELoRAExperts
from ktbridge.sft.inject import expert_layers, load_expert_lora, set_expert_lora, wrap_experts

__all__ = [
    "MoELoRAExperts",
    "expert_layers",
    "load_expert_lora",
    "save_raw_adapter",
    "set_expert_lora",
    "wrap_experts",
]
