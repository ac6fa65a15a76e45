"""Experts modules of a transformers model: finding them, and the states that their weights go through."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.experts import compat
from ktbridge.experts.weights import SILU, Gating, Triple, split_experts

if TYPE_CHECKING:
    from ktbridge.experts.layer import MoELoRAExperts

_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_WITHOUT_DEVICE_MAP = (
    "Load the model without device_map, wrap its experts, then move it: they stay on the CPU."
)


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
    """Its weights, where they are no parameters."""
    kt: MoELoRAExperts
    """The layer that computes the experts, where they are wrapped."""

    def __setattr__(self, name: str, value: object) -> None:
        """Accept anything: transformers' modules carry what is hung on them."""


def experts_modules(model: nn.Module) -> Iterator[tuple[str, ExpertsModule]]:
    """Yield name and module of each fused-experts module that transformers dispatches, wrapped or not."""
    # `use_experts_implementation` leaves these attributes on each instance of a decorated class.
    for name, module in model.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
            yield name, cast(ExpertsModule, module)


@dataclass(frozen=True)
class ModuleExperts:
    """The routed experts of one module, in one of four states.

    *Loaded*: their weights are the module's parameters. *Left out*: the model was built without them.
    *Attached*: they are a ``Triple`` that nothing moves, converts, copies or saves with the model. *Wrapped*:
    attached, and a layer of ours computes them.
    """

    module: ExpertsModule
    name: str = ""

    @property
    def attached(self) -> Triple | None:
        """Their weights, if they are no parameters of the module."""
        found: Triple | None = getattr(self.module, "mapped_experts", None)
        return found

    @property
    def is_wrapped(self) -> bool:
        return hasattr(self.module, "kt")

    def leave_out(self) -> None:
        """Put empty tensors in the place of the parameters, so that nothing is loaded into them."""
        for name, _ in list(self.module.named_parameters(recurse=False)):
            delattr(self.module, name)
            setattr(self.module, name, torch.empty(0, dtype=torch.bfloat16, device="cpu"))

    def attach(self, weights: Triple) -> None:
        """Hand the module ``weights`` in the place of the parameters that it loaded, if it did."""
        loaded = dict(self.module.named_parameters(recurse=False))
        for part in ("gate_up_proj", "down_proj"):
            for name in loaded.keys() & {part, f"{part}_bias"}:
                delattr(self.module, name)
        self.module.mapped_experts = weights

    def detach_loaded(self) -> None:
        """Attach what was loaded, in bfloat16. Experts without a gate stay, for ``problems`` to name them."""
        if self.module.has_gate:
            self.attach(self._loaded())

    def wrap(self, layer: MoELoRAExperts) -> None:
        """Have ``layer``, made of ``gated_weights``, compute the experts."""
        self.attach(layer.weights)
        self.module.kt = layer.train(self.module.training)

    def gated_weights(self) -> Triple:
        """Return gate, up and down, of which gate has the module's gating, for a module without problems."""
        gate, up, down = self.attached or self._loaded()
        gating = find_gating(self.module)
        assert gating is not None
        return replace(gate, gating=gating), up, down

    def _loaded(self) -> Triple:
        """Return the parameters in bfloat16: views, but copies of transposed ones."""
        module = self.module
        bias = None
        if module.has_bias:
            bias = module.gate_up_proj_bias.data, module.down_proj_bias.data
        whole, down = (each.data.to(torch.bfloat16) for each in (module.gate_up_proj, module.down_proj))
        if module.is_transposed:
            whole, down = (each.transpose(1, 2).contiguous() for each in (whole, down))
        return split_experts(whole, down, bias, not module.is_concatenated)

    def problems(self) -> Iterator[Problem]:
        """Yield why the kernels can't compute these experts, if they can't."""
        module, where = self.module, f"{self.name} ({type(self.module).__name__})"
        if ".base_layer" in self.name:
            found, expected = "PEFT's own LoRA on the fused experts", "experts that PEFT left alone"
            yield problem("KTL004", self.name, found, expected)
        elif not module.has_gate:
            yield problem("KTL003", where, "no gate", "gated experts")
        elif find_gating(module) is None:
            found = f"activation {_activation_name(module)}"
            if compat.find_own_gate(module) is not None:
                found = "a gating of its own"
            yield problem("KTL003", where, found, "silu(gate) * up, or gpt-oss's kind of it")
        elif getattr(module, "has_post_expert_norm", False):
            yield problem("KTL003", where, "a norm of its own behind each expert", "none")
        elif self.attached is None:
            weight = module.gate_up_proj
            if weight.dtype != torch.bfloat16:
                step = "Load the model with dtype=torch.bfloat16, then wrap its experts."
                yield problem("KTL003", where, str(weight.dtype), "torch.bfloat16", step)
            if weight.device.type != "cpu":
                found = f"weights on {weight.device}"
                yield problem("KTL003", where, found, "weights on the CPU", _WITHOUT_DEVICE_MAP)


def find_gating(module: ExpertsModule) -> Gating | None:
    """Return the gating that computes what the module does, found by asking it; None if there is none."""
    own = compat.find_own_gate(module)
    if own is None:
        return SILU if "silu" in _activation_name(module).lower() else None
    limits = [each for each in _numbers(module, _LIMITS) if each > 0]
    alphas = _numbers(module, _ALPHAS)
    reach = 2 * max((limit for limit in limits if math.isfinite(limit)), default=4.0)
    line = torch.linspace(-reach, reach, 41)
    gate, up = (each.flatten() for each in torch.meshgrid(line, line, indexing="ij"))
    joined = torch.cat((gate, up)) if module.is_concatenated else torch.stack((gate, up), 1).flatten()
    with torch.no_grad():
        theirs = own(joined[None])[0]
    for limit, alpha, offset in product((*limits, math.inf), (*alphas, 1.0), (0.0, 1.0)):
        gating = Gating(limit, alpha, offset)
        if theirs.shape == gate.shape and torch.allclose(gating(gate, up), theirs, 1e-4, 1e-4):
            return gating
    return None


def _activation_name(module: ExpertsModule) -> str:
    act = getattr(module, "act_fn", None)  # a function, or a module
    return str(getattr(act, "__name__", type(act).__name__))


def _numbers(module: ExpertsModule, names: Iterable[str]) -> list[float]:
    values = (getattr(module, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, int | float)]


def vision_towers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what makes embeddings of images in a multimodal model; none in a text model."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("visual", "vision_tower"):
            yield module
