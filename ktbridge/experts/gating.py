"""How a transformers module of experts combines gate and up, found out by asking it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import torch

from ktbridge.experts import compat
from ktbridge.experts.modules import ExpertsModule, given_experts, own_experts
from ktbridge.experts.weights import SILU, Gating, Triple

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
