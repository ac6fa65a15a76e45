"""PEFT's LoRA of a linear module on a GPU, computed in the model's dtype from float32 masters.

PEFT converts the module's input to the masters' dtype, and output and gradients back: with a bfloat16 model
that is several passes over float32 copies of all hidden states, kept for backward, and products without
tensor cores. Here the masters are converted, which are thin, and the output is added up in the product.
So A and B are rounded to bfloat16 before they are used, as the expert LoRA's are and as they are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn
from torch.nn import functional

_DEVICES = ("cuda",)  # many CPUs multiply bfloat16 more slowly than float32


class MasterLinear(Linear):
    """``peft.tuners.lora.Linear`` whose forward converts A and B instead of the hidden states."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As PEFT's, but for rounding; PEFT's own for whatever isn't plain LoRA."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or not self._converts(x, names):
            return super().forward(x, *args, **kwargs)
        result: torch.Tensor = self.base_layer(x)
        for name in names:
            a, b = (
                each[name].get_parameter("weight").to(x.dtype)
                for each in (self.lora_A, self.lora_B)
            )
            thin = functional.linear(self.lora_dropout[name](x), a)
            whole = torch.addmm(
                result.flatten(0, -2), thin.flatten(0, -2), b.T, alpha=self.scaling[name]
            )
            result = whole.view(result.shape)
        return result

    def _converts(self, x: torch.Tensor, names: list[str]) -> bool:
        if self.disable_adapters or self.merged or x.device.type not in _DEVICES:
            return False
        return all(
            name not in self.lora_variant
            and self.lora_A[name].weight.dtype != x.dtype
            and self.lora_B[name].bias is None
            for name in names
        )


def convert_masters(model: nn.Module) -> None:
    """Make each plain LoRA linear in ``model`` a ``MasterLinear``, in place; parameters and names stay."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = MasterLinear
