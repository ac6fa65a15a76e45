"""liger-kernel's RMSNorm in place of transformers', on a GPU: one launch for eight.

A norm is replaced only if, for random input and weights, it returns the very bits of a formula that
liger-kernel has, so an unknown one is left as it is. Weights, names of modules and what is saved don't
change. Results differ from transformers' by the order of float32 sums, so now and then by one step of
bfloat16.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from types import MethodType

import torch
from torch import nn

from ktbridge.codes import problem
from ktbridge.errors import Problem

_DEVICES = ("cuda",)
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Formula:
    """A norm's product with its weight plus ``offset``; ``casting``: liger-kernel's word for the rounding."""

    offset: float
    casting: str

    def compute(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the norm of ``x`` [..., H], rounded before the product ("llama") or behind it ("gemma")."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        if self.casting == "llama":
            return weight * normed.to(x.dtype)
        return (normed * (self.offset + weight.float())).to(x.dtype)


FORMULAS = (Formula(0.0, "llama"), Formula(0.0, "gemma"), Formula(1.0, "gemma"))


def is_installed() -> bool:
    return bool(find_spec("liger_kernel") and find_spec("triton"))


def use_liger(model: nn.Module) -> Problem | None:
    """Have liger-kernel compute the norms of ``model`` on a GPU; a note of what it computes, if anything.

    Does nothing where it isn't installed.
    """
    if not is_installed():
        return None
    formulas: dict[type[nn.Module], Formula | None] = {}
    used: Counter[str] = Counter()
    for module in model.modules():
        if not _looks_like_a_norm(module):
            continue
        cls = type(module)
        if cls not in formulas:
            formulas[cls] = formula_of(module)
        formula = formulas[cls]
        if formula:
            _replace(module, formula)
            used[cls.__name__] += 1
    if not used:
        return None
    norms = " and ".join(f"{count} {name}" for name, count in used.items())
    return problem("KTC026", "liger-kernel", norms, "enable_liger_kernel: false for transformers' own")


def formula_of(norm: nn.Module) -> Formula | None:
    """The formula whose bits a norm returns for random weights; None for one that isn't known."""
    probe = copy.deepcopy(norm).to("cpu", torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    weight = probe.get_parameter("weight")
    x = torch.randn(4, len(weight), generator=draw).bfloat16()
    x[2:] *= 1e-3  # so small that epsilon counts
    with torch.no_grad():
        weight.copy_(torch.randn(len(weight), generator=draw))
        out = probe(x)
        for formula in FORMULAS:
            expected = formula.compute(x, weight, _epsilon(probe))
            if isinstance(out, torch.Tensor) and out.dtype == x.dtype and torch.equal(out, expected):
                return formula
    return None


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Return whether it has one frozen vector as its weight, an epsilon, and a forward of one argument."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or isinstance(module, nn.LayerNorm) or _epsilon(module) <= 0:
        return False
    weight = module.get_parameter("weight")
    arguments = inspect.signature(type(module).forward).parameters
    plain = "forward" not in vars(module) and not any(module.children())
    return plain and weight.ndim == 1 and not weight.requires_grad and len(arguments) == 2


def _epsilon(module: nn.Module) -> float:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return value if isinstance(value, float) else 0.0


def _replace(module: nn.Module, formula: Formula) -> None:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    own = type(module).forward

    def forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.get_parameter("weight")
        here = (hidden_states.dtype, hidden_states.device) == (weight.dtype, weight.device)
        if not here or weight.dtype not in _HALF or weight.device.type not in _DEVICES:
            out: torch.Tensor = own(self, hidden_states)
            return out
        if formula.offset:
            weight = _raised(self, weight, formula.offset)
        in_place = False  # its gradient's buffer may be that of the residual's
        result: torch.Tensor = LigerRMSNormFunction.apply(
            hidden_states, weight, _epsilon(self), 0.0, formula.casting, in_place
        )
        return result

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _raised(norm: nn.Module, weight: torch.Tensor, offset: float) -> torch.Tensor:
    """A frozen weight plus a number, in float32, made once: liger-kernel's own backward rounds the sum."""
    state = weight.data_ptr(), weight._version
    kept = getattr(norm, "_raised", None)
    if kept is None or kept[0] != state:
        with torch.inference_mode(False), torch.no_grad():
            kept = state, weight.float() + offset
        norm._raised = kept  # type: ignore[assignment]
    raised: torch.Tensor = kept[1]
    return raised
