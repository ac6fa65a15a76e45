"""Experts modules of a transformers model: finding them, their weights, and how they combine gate and up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ktbridge.experts import compat
from ktbridge.experts.weights import SILU, ExpertWeights, Gating, Triple

if TYPE_CHECKING:
    from ktbridge.experts.layer import MoELoRAExperts


LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ExpertsModule(nn.Module):
    """The type of a module of fused experts as transformers' ``use_experts_implementation`` makes them.

    There is no such class at run time. ``mapped_experts`` and ``kt`` are ours.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    num_experts: int
    mapped_experts: Triple
    kt: MoELoRAExperts
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
    if module.has_gate:
        take_experts(module, own_experts(module))


def take_experts(module: ExpertsModule, weights: Triple) -> None:
    """Give a module its weights as ``weights`` in the place of the parameters that it loaded, if it did.

    From then on nothing that moves, converts, copies or saves the model does so to them.
    """
    loaded = dict(module.named_parameters(recurse=False))
    for part in ("gate_up_proj", "down_proj"):
        for name in loaded.keys() & {part, f"{part}_bias"}:
            delattr(module, name)
    give_experts(module, weights)


def own_experts(module: ExpertsModule) -> Triple:
    """gate, up and down of a module's loaded parameters, in bfloat16: views, where they lie as kernels read.

    Transposed ones are turned round, which copies.
    """
    bias = (module.gate_up_proj_bias.data, module.down_proj_bias.data) if module.has_bias else None
    whole, down = (each.data.to(torch.bfloat16) for each in (module.gate_up_proj, module.down_proj))
    if module.is_transposed:
        whole, down = (each.transpose(1, 2).contiguous() for each in (whole, down))
    return split_experts(whole, down, bias, not module.is_concatenated)


def split_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor] | None,
    interleaved: bool,
) -> Triple:
    """gate, up and down of fused bfloat16 experts [E, 2I, H] and [E, H, I]: views.

    ``bias`` is [E, 2I] and [E, H]; ``interleaved``: gate and up rows take turns, and the bias's elements.
    """
    gate, up = (ExpertWeights.bf16(part) for part in halves(gate_up, interleaved))
    return with_biases((gate, up, ExpertWeights.bf16(down)), bias, interleaved)


def with_biases(
    weights: Triple, bias: tuple[torch.Tensor, torch.Tensor] | None, interleaved: bool
) -> Triple:
    """``weights`` with the biases of gate and up together [E, 2I], and of down [E, H]."""
    if bias is None:
        return weights
    gate, up, down = weights
    of_gate, of_up = halves(bias[0], interleaved)
    return replace(gate, bias=of_gate), replace(up, bias=of_up), replace(down, bias=bias[1])


def halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """gate's and up's part of [E, 2I, ...]: views."""
    if interleaved:
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def vision_towers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what makes embeddings of images in a multimodal model; none in a text model."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("visual", "vision_tower"):
            yield module


_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")


def gated_experts(module: ExpertsModule) -> Triple:
    """A module's gate, up and down, mapped or its own; gate has its gating, which must be a served one."""
    gate, up, down = given_experts(module) or own_experts(module)
    gating = gating_of(module)
    assert gating is not None  # by unserved_gating
    return replace(gate, gating=gating), up, down


def unserved_gating(module: ExpertsModule) -> str:
    """Return what a module does with gate and up that the kernels don't; "" if nothing."""
    if gating_of(module) is not None:
        return ""
    if compat.own_gate(module) is not None:
        return "a gating of its own"
    act = getattr(module, "act_fn", None)
    return f"activation {getattr(act, '__name__', type(act).__name__)}"  # a function, or a module


def gating_of(module: ExpertsModule) -> Gating | None:
    """The gating that gives what the module's own gives, for values within and beyond its limits; or None."""
    own = compat.own_gate(module)
    if own is None:
        act = getattr(module, "act_fn", None)
        name: str = getattr(act, "__name__", type(act).__name__)
        return SILU if "silu" in name.lower() else None
    numbers = [[_number(module, name) for name in names] for names in (_LIMITS, _ALPHAS)]
    limits = [each for each in numbers[0] if each is not None and each > 0]
    alphas = [each for each in numbers[1] if each is not None]
    reach = 2 * max((limit for limit in limits if math.isfinite(limit)), default=4.0)
    line = torch.linspace(-reach, reach, 41)
    gate, up = (each.flatten() for each in torch.meshgrid(line, line, indexing="ij"))
    joined = (
        torch.cat((gate, up)) if module.is_concatenated else torch.stack((gate, up), 1).flatten()
    )
    with torch.no_grad():
        theirs = own(joined[None])[0]
    for limit, alpha, offset in product((*limits, math.inf), (*alphas, 1.0), (0.0, 1.0)):
        gating = Gating(limit, alpha, offset)
        if theirs.shape == gate.shape and torch.allclose(gating(gate, up), theirs, 1e-4, 1e-4):
            return gating
    return None


def _number(module: ExpertsModule, name: str) -> float | None:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, int | float) else None
