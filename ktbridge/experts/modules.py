"""Finding a transformers model's experts modules, and where mapped weights hang on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ktbridge.experts.weights import ExpertWeights

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Triple = tuple[ExpertWeights, ExpertWeights, ExpertWeights]


def experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each fused-experts module that transformers dispatches, wrapped or not."""
    # `use_experts_implementation` leaves these attributes on each instance of a decorated class.
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
            yield name, module


def give_experts(module: Any, weights: Triple) -> None:
    """Hand a module that was built without experts its gate, up and down."""
    module.mapped_experts = weights


def given_experts(module: Any) -> Triple | None:
    """The weights handed to a module that has none of its own; None for one that loaded them."""
    found: Triple | None = getattr(module, "mapped_experts", None)
    return found


def keep_on_cpu(module: Any) -> None:
    """Turn a module's loaded experts into bfloat16 weights handed to it, which nothing moves any more.

    A layout that the kernels don't serve is left alone, for ``wrap_experts`` to refuse by name.
    """
    if odd_traits(module):
        return
    gate, up, down = (ExpertWeights.bf16(part.to(torch.bfloat16)) for part in own_experts(module))
    take_experts(module, (gate, up, down))


def take_experts(module: Any, weights: Triple) -> None:
    """Give a module its weights as ``weights`` in the place of the parameters that it loaded, if it did.

    From then on nothing that moves, converts, copies or saves the model does so to them.
    """
    loaded = dict(module.named_parameters(recurse=False))
    for name in loaded.keys() & {"gate_up_proj", "down_proj"}:
        delattr(module, name)
    give_experts(module, weights)


def own_experts(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [E, I, H] and down [E, H, I]: views of a module's loaded parameters, without gradients."""
    gate, up = module.gate_up_proj.data.chunk(2, dim=1)
    return gate, up, module.down_proj.data


def odd_traits(module: Any) -> list[str]:
    """What sets a module's layout apart from the gated, bias-free [E, 2I, H] that the kernels serve."""
    traits = (
        ("no gate", not module.has_gate),
        ("biases", module.has_bias),
        ("transposed weights", module.is_transposed),
        ("interleaved gate and up", not module.is_concatenated),
    )
    return [trait for trait, present in traits if present]
