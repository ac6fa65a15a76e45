"""Put a transformers model's routed experts onto our kernels.

transformers dispatches every fused-experts module through ``ALL_EXPERTS_FUNCTIONS``, after the model's own
router has done its work. We register one more implementation, "ktbridge", and give each experts module a
child ``kt`` that holds the kernels and the expert LoRA. Router conventions, shared experts and attention stay
transformers' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktbridge.adapter import Adapter
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError
from ktbridge.experts.expert_call import LORA_NAMES
from ktbridge.experts.guard import has_peft, watch
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.modules import (
    ExpertsModule,
    experts_modules,
    gated_experts,
    given_experts,
    take_experts,
    unserved_gating,
)
from ktbridge.experts.tensors import to_torch
from ktbridge.experts.weights import PROJECTIONS
from ktbridge.experts.wrapped_layers import expert_layers

IMPLEMENTATION = "ktbridge"


def wrap_experts(
    model: nn.Module,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    isa: str = "auto",
    threads: int | None = None,
    *,
    lora_targets: Sequence[str] = PROJECTIONS,
    activation: str = "retain",
    accumulate_grad: bool = False,
    lora_dropout: float = 0.0,
    freeze_rest: bool = True,
) -> nn.Module:
    """Run every experts module of a transformers model (or a PeftModel around one) on our kernels.

    Works in place and returns the model. The experts' own weights are used where they are and are frozen;
    they are no parameters of the model any more, so they stay where they are when it is moved, converted,
    copied or saved. LoRA starts at B = 0, so the model's outputs are unchanged until something is trained
    or loaded. ``lora_rank=0`` adds no LoRA. Weights must be bfloat16 on the CPU, or mapped from a
    checkpoint (``load_for_kernels``) in any storage that the kernels read.

    ``get_peft_model`` may come before or after. Without PEFT, ``freeze_rest`` freezes what isn't expert
    LoRA, as PEFT does; False leaves ``requires_grad`` of the rest as it is, also when PEFT comes later.

    The other options are ``MoELoRAExperts``'s.

    Raises ``KtbridgeError`` when the model has no experts module, ``ProblemsError`` naming every experts
    module that can't be served, and ``UsageError`` when the model is wrapped already, or isn't transformers'.
    """
    base = _base(model)
    found = _wrappable(base)
    layers = [
        MoELoRAExperts(
            *gated_experts(module),
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            isa=isa,
            threads=threads,
            lora_targets=lora_targets,
            activation=activation,
            accumulate_grad=accumulate_grad,
            lora_dropout=lora_dropout,
        )
        for _, module in found
    ]
    # Nothing has been changed so far, and nothing fails from here on.
    if freeze_rest and not has_peft(base):
        base.requires_grad_(False)
    for (_, module), layer in zip(found, layers, strict=True):
        take_experts(module, layer.weights)
        module.kt = layer.train(module.training)
    base.set_experts_implementation(IMPLEMENTATION)
    watch(base)
    return model


def _wrappable(base: PreTrainedModel) -> list[tuple[str, ExpertsModule]]:
    """Name and module of each experts module. Raises as ``wrap_experts`` for any that can't be wrapped."""
    found = list(experts_modules(base))
    if not found:
        raise KtbridgeError(
            f"{type(base).__name__} has no fused-experts module that transformers dispatches.",
            "Check that the model is a mixture-of-experts model and that transformers is 5.x.",
        )
    problems = [problem for name, module in found for problem in _unserved(name, module)]
    if problems and all(problem.code == "KTL004" for problem in problems):
        raise ProblemsError(
            "PEFT has put LoRA of its own on this model's routed experts.", problems
        )
    if problems:
        raise ProblemsError("the kernels don't serve this model's experts.", problems)
    if any(hasattr(module, "kt") for _, module in found):
        raise UsageError(
            "this model's experts are wrapped already.",
            "Call wrap_experts once, on a model as it was loaded.",
        )
    return found


def set_expert_lora(model: nn.Module, enabled: bool) -> None:
    """Switch the expert LoRA of every wrapped layer on or off (off is the base exactly)."""
    for layer in expert_layers(model).values():
        layer.lora_enabled = enabled


def load_expert_lora(model: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's expert LoRA into a wrapped model; every tensor must have a place and a source.

    Raises ``ProblemsError`` naming each layer or shape that doesn't fit.
    """
    layers, source = expert_layers(model), set(adapter.expert_layers())
    where = str(adapter.path)
    problems = [
        problem(
            "KTL001",
            f"{where}: layer {layer}",
            "expert LoRA for a layer that has no routed experts in the model"
            if layer in source
            else "no expert LoRA for a layer that has routed experts in the model",
            f"layers {list(layers)}",
        )
        for layer in sorted(source ^ set(layers))
    ]
    loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in sorted(source & set(layers)):
        problems += _untargeted(layers[index], adapter, index)
        for name in layers[index].lora_names:
            tensor, parameter = adapter.expert_tensor(index, name), getattr(layers[index], name)
            if tuple(tensor.shape) == tuple(parameter.shape):
                loaded.append((parameter, to_torch(tensor)))
            else:
                problems.append(
                    problem(
                        "KTL002",
                        f"{where}: layer {index} {name}",
                        f"shape {list(tensor.shape)}",
                        f"{list(parameter.shape)}",
                    )
                )
    if problems:
        raise ProblemsError("the adapter's expert LoRA doesn't fit this model.", problems)
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)


def _untargeted(layer: MoELoRAExperts, adapter: Adapter, index: int) -> Iterator[Problem]:
    """The projections that an adapter changes and the layer has no LoRA for."""
    names = set(LORA_NAMES) - set(layer.lora_names)
    for projection in PROJECTIONS:
        b = f"{projection}_lora_b"
        if b in names and bool(to_torch(adapter.expert_tensor(index, b)).any()):
            yield problem(
                "KTL005",
                f"{adapter.path}: layer {index} {projection}",
                "LoRA on a projection that the model has none for",
                f"only {', '.join(layer.lora_targets) or 'the base'}",
            )


def _experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The registered implementation: [T, H], [T, K], [T, K] -> [T, H] in the caller's dtype."""
    layer = getattr(module, "kt", None)
    if layer is None:
        raise KtbridgeError(
            "an experts module asked for the ktbridge kernels but was never wrapped.",
            "Call ktbridge.sft.wrap_experts(model) instead of set_experts_implementation.",
        )
    out = layer(
        hidden_states.to(torch.bfloat16), top_k_index.to(torch.int64), top_k_weights.float()
    )
    return out.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _base(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PeftModel, or the model itself. Raises ``UsageError`` for any other."""
    base = model.get_base_model() if isinstance(model, PeftModel | PeftMixedModel) else model
    if isinstance(base, PreTrainedModel):
        return base
    raise UsageError(
        f"{type(base).__name__} is no transformers model.",
        "Wrap the experts before torch.compile, DDP or FSDP wrap the model, or unwrap it: "
        "accelerator.unwrap_model(model).",
    )


def _unserved(name: str, module: ExpertsModule) -> Iterator[Problem]:
    """Why the kernels can't compute this experts module, if they can't."""
    where = f"{name} ({type(module).__name__})"
    if ".base_layer" in name:
        yield problem(
            "KTL004", name, "PEFT's own LoRA on the fused experts", "experts that PEFT left alone"
        )
        return
    if not module.has_gate:
        yield problem("KTL003", where, "no gate", "gated experts")
        return
    if found := unserved_gating(module):
        yield problem("KTL003", where, found, "silu(gate) * up, or gpt-oss's kind of it")
    if getattr(module, "has_post_expert_norm", False):
        yield problem("KTL003", where, "a norm of its own behind each expert", "none")
    if given_experts(module) is not None:
        return
    weight = module.gate_up_proj
    if weight.dtype != torch.bfloat16:
        step = "Load the model with dtype=torch.bfloat16, then wrap its experts."
        yield problem("KTL003", where, str(weight.dtype), "torch.bfloat16", step)
    if weight.device.type != "cpu":
        step = "Load the model without device_map, wrap its experts, then move it: they stay on the CPU."
        yield problem("KTL003", where, f"weights on {weight.device}", "weights on the CPU", step)
