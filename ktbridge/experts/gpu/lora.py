"""A layer's LoRA as one call on the GPU uses it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Lora:
    """A layer's LoRA as a call uses it: tensors [E, ...] on the device by name, and α / r."""

    tensors: dict[str, torch.Tensor]
    scale: float
