"""Finding a transformers model's experts modules, and where mapped weights hang on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ktbridge.experts.weights import ExpertWeights

if TYPE_CHECKING:
    from ktbridge.experts.experts_layer import ExpertsLayer

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Triple = tuple[ExpertWeights, ExpertWeights, ExpertWeights]


class ExpertsModule(nn.Module):
    """The type of a module of fused experts as transformers' ``use_experts_implementation`` makes them.

    There is no such class at run time. ``mapped_experts`` and ``kt`` are ours.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    num_experts: int
    mapped_experts: Triple
    kt: ExpertsLayer
    """The layer that computes the experts, where they are wrapped."""

    def __setattr__(self, name: str, value: object) -> None:
        """Anything may be hung on one."""


def experts_modules(model: nn.Module) -> Iterator[tuple[str, ExpertsModule]]:
    """Name and module of each fused-experts module that transformers dispatches, wrapped or not."""
    # `use_experts_implementation` leaves these attributes on each instance of a decorated class.
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
            yield name, cast(ExpertsModule, module)


def give_experts(module: ExpertsModule, weights: Triple) -> None:
    """Hand a module that was built without experts its gate, up and down."""
    module.mapped_experts = weights


def given_experts(module: ExpertsModule) -> Triple | None:
    """The weights handed to a module that has none of its own; None for one that loaded them."""
    found: Triple | None = getattr(module, "mapped_experts", None)
    return found


def keep_on_cpu(module: ExpertsModule) -> None:
    """Turn a module's loaded experts into bfloat16 weights handed to it, which nothing moves any more.

    A layout that the kernels don't serve is left alone, for ``wrap_experts`` to refuse by name.
    """
    if odd_traits(module):
        return
    gate, up, down = (ExpertWeights.bf16(part.to(torch.bfloat16)) for part in own_experts(module))
    take_experts(module, (gate, up, down))


def take_experts(module: ExpertsModule, weights: Triple) -> None:
    """Give a module its weights as ``weights`` in the place of the parameters that it loaded, if it did.

    From then on nothing that moves, converts, copies or saves the model does so to them.
    """
    loaded = dict(module.named_parameters(recurse=False))
    for name in loaded.keys() & {"gate_up_proj", "down_proj"}:
        delattr(module, name)
    give_experts(module, weights)


def own_experts(module: ExpertsModule) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up [E, I, H] and down [E, H, I]: views of a module's loaded parameters, without gradients."""
    gate, up = module.gate_up_proj.data.chunk(2, dim=1)
    return gate, up, module.down_proj.data


def odd_traits(module: ExpertsModule) -> list[str]:
    """What sets a module's layout apart from the gated, bias-free [E, 2I, H] that the kernels serve."""
    traits = (
        ("no gate", not module.has_gate),
        ("biases", module.has_bias),
        ("transposed weights", module.is_transposed),
        ("interleaved gate and up", not module.is_concatenated),
    )
    return [trait for trait, present in traits if present]


def vision_towers(model: nn.Module) -> Iterator[nn.Module]:
    """What makes embeddings of images in a multimodal model; none in a text model."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("visual", "vision_tower"):
            yield module
