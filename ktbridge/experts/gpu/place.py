"""Give a model's experts to the GPU: choose what is resident, register the checkpoint's pages, make the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ktbridge.experts.gpu.copying import InPlace, Registered, Registration, Staged, register
from ktbridge.experts.gpu.executor import GpuExperts, OnGpu, Triple
from ktbridge.experts.gpu.layout import layer_groups
from ktbridge.experts.gpu.ring import Copier


def evenly(layers: Sequence[int], count: int) -> list[int]:
    """``count`` of ``layers``, spread evenly, so that what is streamed has time to cross beside them."""
    return [layers[(2 * n + 1) * len(layers) // (2 * count)] for n in range(count)]


def copier_for(
    layers: Mapping[int, Triple], slot_bytes: int, device: torch.device, threads: int
) -> tuple[Copier, str]:
    """What moves these layers' weights to ``device``, and how, in words."""
    if device.type == "cpu":
        return InPlace(), "copied in RAM"
    groups = [g for triple in layers.values() for g in layer_groups(triple, slot_bytes)]
    done = register(groups)
    if isinstance(done, Registration):
        copier = Registered(device)
        copier.registration = done
        return copier, f"{done.bytes / 1e9:.1f} GB registered in place"
    return Staged(device, threads), f"through pinned memory ({done})"
