"""Kernels of libraries in place of what transformers computes with torch outside the experts, on a GPU.

liger-kernel computes RMSNorm in one launch instead of eight. flash-linear-attention, from which transformers
takes the delta rule itself, computes the norm with a gate behind it in one launch instead of nine, and the
convolution before it without torch's copies for it, and without causal-conv1d, which has to be compiled.

A norm is replaced only if, for random input and weights, it returns the very bits of a known formula, so
another one is left as it is. Weights, names of modules and what is saved don't change. Results differ from
transformers' by the order of float32 sums, and where a gated norm rounds in between, so now and then by one
step of bfloat16.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.model import choose_device

_DEVICES = ("cuda",)
_HALF = (torch.bfloat16, torch.float16)
_CONVOLVE = "causal_conv1d_fn"
"""Global function by which classes of transformers convolve."""


@dataclass(frozen=True)
class Formula:
    """A norm's product with its weight plus ``offset``; ``casting``: liger-kernel's word for the rounding."""

    offset: float
    casting: str
    gated: bool = False

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, *gate: torch.Tensor
    ) -> torch.Tensor:
        """Return the norm of ``x`` [..., H], rounded before the product ("llama") or behind it ("gemma").

        With a ``gate`` like it, the product of that with silu(gate).
        """
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        if self.casting == "gemma":
            return (normed * (self.offset + weight.float())).to(x.dtype)
        product = weight * normed.to(x.dtype)
        return (product * functional.silu(gate[0].float())).to(x.dtype) if gate else product


Kernel = Callable[..., torch.Tensor]
"""Of a norm, its formula, input and weight, and of a gate if it has one."""
FORMULAS = (Formula(0.0, "llama"), Formula(0.0, "gemma"), Formula(1.0, "gemma"))
GATED = Formula(0.0, "llama", gated=True)


def is_installed(package: str) -> bool:
    return bool(find_spec(package) and find_spec("triton"))


def use_kernels(model: nn.Module, config: TrainConfig) -> list[Problem]:
    """Have installed libraries compute parts of a run's ``model`` on its GPU; notes of what, if anything."""
    if choose_device(config).type not in _DEVICES:
        return []
    notes = [use_liger(model) if config.enable_liger_kernel else None, use_fla(model)]
    return [each for each in notes if each]


def use_liger(model: nn.Module) -> Problem | None:
    """Have liger-kernel compute the norms of ``model`` on a GPU; a note of what it computes, if anything."""
    used = _replace_norms(model, FORMULAS, _liger_norm) if is_installed("liger_kernel") else Counter()
    return _note(used, "liger-kernel", "enable_liger_kernel: false for transformers' own")


def use_fla(model: nn.Module) -> Problem | None:
    """Have flash-linear-attention compute gated norms and convolutions, as ``use_liger`` does norms."""
    if not is_installed("fla"):
        return None
    try:
        import_module("fla.modules.causal_conv1d")
    except Exception:  # older than 0.6; or its own start raises, which KTC092 says
        return None
    used = _replace_norms(model, (GATED,), _fla_norm)
    for cls, count in Counter(map(type, model.modules())).items():
        if _convolves(cls):
            _replace_convolution(vars(sys.modules[cls.__module__]))
            used[f"{_CONVOLVE} of {cls.__name__}"] = count
    return _note(used, "flash-linear-attention", "")


def _note(used: Counter[str], library: str, next_step: str) -> Problem | None:
    what = " and ".join(f"{count} {name}" for name, count in used.items())
    return problem("KTC026", library, what, next_step) if what else None


def _replace_norms(model: nn.Module, formulas: tuple[Formula, ...], kernel: Kernel) -> Counter[str]:
    """Have ``kernel`` compute norms of one of ``formulas`` on a GPU; returns how many of each class."""
    known: dict[type[nn.Module], Formula | None] = {}
    used: Counter[str] = Counter()
    for module in model.modules():
        if not _looks_like_a_norm(module, 3 if formulas[0].gated else 2):
            continue
        cls = type(module)
        if cls not in known:
            known[cls] = formula_of(module, formulas)
        if formula := known[cls]:
            _replace(module, formula, kernel)
            used[cls.__name__] += 1
    return used


def formula_of(norm: nn.Module, formulas: tuple[Formula, ...] = FORMULAS) -> Formula | None:
    """The one of ``formulas`` whose bits a norm returns for random weights; None for one that isn't known."""
    probe = copy.deepcopy(norm).to("cpu", torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    weight = probe.get_parameter("weight")
    x = torch.randn(4, len(weight), generator=draw).bfloat16()
    x[2:] *= 1e-3  # so small that epsilon counts
    with torch.no_grad():
        weight.copy_(torch.randn(len(weight), generator=draw))
        gate = (torch.randn(x.shape, generator=draw).bfloat16(),) if formulas[0].gated else ()
        out = probe(x, *gate)
        for formula in formulas:
            expected = formula.compute(x, weight, _epsilon(probe), *gate)
            if isinstance(out, torch.Tensor) and out.dtype == x.dtype and torch.equal(out, expected):
                return formula
    return None


def _looks_like_a_norm(module: nn.Module, count: int) -> bool:
    """Return whether it has one frozen vector as weight, an epsilon, and a forward of ``count`` arguments."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or isinstance(module, nn.LayerNorm) or _epsilon(module) <= 0:
        return False
    weight = module.get_parameter("weight")
    arguments = inspect.signature(type(module).forward).parameters
    plain = "forward" not in vars(module) and not any(module.children())
    return plain and weight.ndim == 1 and not weight.requires_grad and len(arguments) == count


def _epsilon(module: nn.Module) -> float:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return value if isinstance(value, float) else 0.0


def _replace(module: nn.Module, formula: Formula, kernel: Kernel) -> None:
    own = type(module).forward

    def forward(self: nn.Module, hidden_states: torch.Tensor, gate: object = None) -> torch.Tensor:
        given = () if gate is None else (gate,)
        weight: torch.Tensor = self.get_parameter("weight")
        here = (hidden_states.dtype, hidden_states.device) == (weight.dtype, weight.device)
        if not here or weight.dtype not in _HALF or weight.device.type not in _DEVICES:
            out: torch.Tensor = own(self, hidden_states, *given)
            return out
        return kernel(self, formula, hidden_states, weight, *given)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _liger_norm(norm: nn.Module, formula: Formula, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if formula.offset:
        weight = _raised(norm, weight, formula.offset)
    how = 0.0, formula.casting, False  # not in place: its gradient's buffer may be that of the residual's
    result: torch.Tensor = LigerRMSNormFunction.apply(x, weight, _epsilon(norm), *how)
    return result


def _fla_norm(
    norm: nn.Module, _: Formula, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    result: torch.Tensor = rms_norm_gated(x, gate, weight, None, eps=_epsilon(norm))
    return result


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


def _convolves(cls: type[nn.Module]) -> bool:
    """Return whether forward of a class calls transformers' causal convolution of [B, D, T]."""
    function = vars(sys.modules[cls.__module__]).get(_CONVOLVE)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if function is None or code is None or _CONVOLVE not in code.co_names:
        return False
    return [*inspect.signature(function).parameters][:4] == ["hidden_states", "weight", "bias", "activation"]


def _replace_convolution(scope: dict[str, Any]) -> None:
    """Have flash-linear-attention convolve where a module's global function is called, on a GPU."""
    own = scope[_CONVOLVE]
    if hasattr(own, "by_fla"):
        return

    @wraps(own)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: object,
    ) -> torch.Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        here = hidden_states.device.type in _DEVICES and hidden_states.dtype == weight.dtype
        if not here or activation not in (None, "silu") or others.get("seq_idx") is not None:
            out: torch.Tensor = own(hidden_states, weight, bias, activation=activation, **others)
            return out
        out, _ = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation)
        return out.transpose(1, 2)

    convolve.by_fla = True  # type: ignore[attr-defined]
    scope[_CONVOLVE] = convolve
