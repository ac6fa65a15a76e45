"""Give a model's experts to the GPU: its pages registered, the ring made, what is resident brought there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ktbridge.experts.gpu.copying import copied_once, copier_for
from ktbridge.experts.gpu.executor import GpuExperts, OnGpu
from ktbridge.experts.gpu.layout import layer_groups
from ktbridge.experts.gpu.placement import Placement, Sizes
from ktbridge.experts.gpu.ring import Copier
from ktbridge.experts.load_model import release_layers
from ktbridge.experts.wrapped_layers import expert_layers


@dataclass(frozen=True)
class Placed:
    """Experts that were given to the GPU."""

    experts: GpuExperts
    how: str
    """How the weights cross, in words."""
    copier: Copier
    """To be closed before the checkpoint's maps go."""
    numbers: tuple[int, ...]
    """The layers' numbers, by place."""


def sizes_of(model: nn.Module, top_k: int) -> Sizes:
    """The sizes of a wrapped model's routed experts."""
    layers = expert_layers(model)
    first = next(iter(layers.values()))
    stored = sum(each.stored_bytes for each in first.weights)
    return Sizes(
        len(layers),
        first.num_experts,
        top_k,
        first.hidden_size,
        first.intermediate_size,
        first.lora_rank,
        stored,
    )


def give_to_gpu(model: nn.Module, device: torch.device, placement: Placement) -> Placed:
    """Have the experts of a wrapped model computed on ``device``, following ``placement``.

    Expert LoRA moves there where ``placement.masters``: make the optimizer after this. On the CPU as device
    the same is computed there, without streams. Raises ``UsageError`` where a layer can't cross.
    """
    layers = expert_layers(model)
    numbers = list(layers)
    first = next(iter(layers.values()))
    resident = [numbers[place] for place in placement.resident]
    groups = [
        group
        for index, layer in layers.items()
        for group in layer_groups(layer.weights, placement.slot_bytes, f"layer {index}")
        if index not in resident
    ]
    copier, how = copier_for(groups, device)
    loader = copied_once(device) if resident and device.type == "cuda" else copier
    experts = GpuExperts(
        {index: layer.weights for index, layer in layers.items()},
        device,
        first.lora_rank,
        slot_bytes=placement.slot_bytes,
        slots=max(placement.slots, 1),
        copier=copier,
        resident=resident,
        loader=loader,
        loaded=lambda index: release_layers(model, [index]),
        outputs_on_host=placement.outputs_on_host,
        keep_gate_up=placement.keep_gate_up,
        rows_at_once=placement.rows_at_once or None,
    )
    if loader is not copier:
        loader.close()
    for index, layer in layers.items():
        layer.gpu = OnGpu(experts, index)
        if placement.masters:
            layer.move_lora(device)
        elif device.type == "cuda":
            layer.move_lora(torch.device("cpu"))
    return Placed(experts, how, copier, tuple(numbers))
