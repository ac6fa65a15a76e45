"""Put a transformers model's routed experts onto our kernels.

transformers dispatches every fused-experts module through ``ALL_EXPERTS_FUNCTIONS``, after the model's own
router has done its work. We register one more implementation, "ktbridge", and give each experts module a
child ``kt`` that holds the kernels and the expert LoRA. Router conventions, shared experts and attention stay
transformers' business.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftMixedModel, PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.experts.gpu.copying import make_copier, make_staged_copier
from ktbridge.experts.gpu.executor import GpuBinding, GpuExperts
from ktbridge.experts.gpu.layout import group_experts
from ktbridge.experts.gpu.placement import ExpertSizes, Placement
from ktbridge.experts.gpu.ring import Copier
from ktbridge.experts.guard import has_peft, watch
from ktbridge.experts.layer import ExpertOptions, MoELoRAExperts, expert_layers, find_layers
from ktbridge.experts.load_model import release_layers
from ktbridge.experts.modules import ModuleExperts, experts_modules
from ktbridge.experts.pieces import split_mlps
from ktbridge.experts.recompute import layer_inputs
from ktbridge.experts.save_adapter import find_unsaved_parameters

IMPLEMENTATION = "ktbridge"


def wrap_experts(model: nn.Module, *options: Any, freeze_rest: bool = True, **named: Any) -> nn.Module:
    """Run every experts module of a transformers model (or a PeftModel around one) on our kernels.

    Works in place and returns the model. The experts' own weights are used where they are and are frozen;
    they are no parameters of the model any more, so they stay where they are when it is moved, converted,
    copied or saved. LoRA starts at B = 0, so the model's outputs are unchanged until something is trained
    or loaded. ``lora_rank=0`` adds no LoRA. Weights must be bfloat16 on the CPU, or mapped from a
    checkpoint (``load_for_kernels``) in any storage that the kernels read.

    ``get_peft_model`` may come before or after. Without PEFT, ``freeze_rest`` freezes what isn't expert
    LoRA, as PEFT does; False leaves ``requires_grad`` of the rest as it is, also when PEFT comes later.

    The rest are the fields of ``ExpertOptions``: lora_rank, lora_alpha, isa and threads also by their place,
    lora_targets, activation, accumulate_grad and lora_dropout by name.

    Raises ``KtbridgeError`` when the model has no experts module, ``ProblemsError`` naming every experts
    module that can't be served, and ``UsageError`` when the model is wrapped already, or isn't transformers'.
    """
    base = _base(model)
    found = _find_wrappable(base)
    chosen = ExpertOptions(*options, **named)
    layers = [MoELoRAExperts(*experts.gated_weights(), chosen) for experts in found]
    # Nothing has been changed so far, and nothing fails from here on.
    if freeze_rest and not has_peft(base):
        base.requires_grad_(False)
    for experts, layer in zip(found, layers, strict=True):
        experts.wrap(layer)
    base.set_experts_implementation(IMPLEMENTATION)
    watch(base)
    return model


def _find_wrappable(base: PreTrainedModel) -> list[ModuleExperts]:
    """Return the experts of each module. Raises as ``wrap_experts`` for any that can't be wrapped."""
    found = [ModuleExperts(module, name) for name, module in experts_modules(base)]
    if not found:
        raise KtbridgeError(
            f"{type(base).__name__} has no fused-experts module that transformers dispatches.",
            "Check that the model is a mixture-of-experts model and that transformers is 5.x.",
        )
    problems = [problem for experts in found for problem in experts.problems()]
    if problems and all(problem.code == "KTL004" for problem in problems):
        raise ProblemsError("PEFT has put LoRA of its own on this model's routed experts.", problems)
    if problems:
        raise ProblemsError("the kernels don't serve this model's experts.", problems)
    if any(experts.is_wrapped for experts in found):
        raise UsageError(
            "this model's experts are wrapped already.",
            "Call wrap_experts once, on a model as it was loaded.",
        )
    return found


def set_expert_lora(model: nn.Module, enabled: bool) -> None:
    """Switch the expert LoRA of every wrapped layer on or off (off is the base exactly)."""
    for layer in expert_layers(model).values():
        layer.lora_enabled = enabled


def _experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute experts, as registered: [T, H], [T, K], [T, K] -> [T, H] in the caller's dtype."""
    layer = getattr(module, "kt", None)
    if layer is None:
        raise KtbridgeError(
            "an experts module asked for the ktbridge kernels but was never wrapped.",
            "Call ktbridge.sft.wrap_experts(model) instead of set_experts_implementation.",
        )
    out = layer(hidden_states.to(torch.bfloat16), top_k_index.to(torch.int64), top_k_weights.float())
    return out.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)


def _base(model: nn.Module) -> PreTrainedModel:
    """Return transformers' model inside a PeftModel, or itself. Raises ``UsageError`` for any other."""
    base = model.get_base_model() if isinstance(model, PeftModel | PeftMixedModel) else model
    if isinstance(base, PreTrainedModel):
        return base
    raise UsageError(
        f"{type(base).__name__} is no transformers model.",
        "Wrap the experts before torch.compile, DDP or FSDP wrap the model, or unwrap it: "
        "accelerator.unwrap_model(model).",
    )


@dataclass(frozen=True)
class PlacedExperts:
    """Experts that were given to the GPU."""

    experts: GpuExperts
    how: str
    """The way of the weights' transfer, in words."""
    copier: Copier
    """To be closed before the checkpoint's maps go."""


def read_sizes(model: nn.Module, top_k: int) -> ExpertSizes:
    """Read the sizes of a wrapped model's routed experts."""
    layers = expert_layers(model)
    first = next(iter(layers.values()))
    stored = sum(each.stored_bytes for each in first.weights)
    counts = len(layers), first.num_experts, top_k
    widths = first.hidden_size, first.intermediate_size, first.lora_rank
    return ExpertSizes(*counts, *widths, stored, dropout=first.lora_dropout.p > 0)


def give_to_gpu(model: nn.Module, device: torch.device, placement: Placement) -> PlacedExperts:
    """Have the experts of a wrapped model computed on ``device``, following ``placement``.

    MLPs beside them are computed in pieces where the placement says so.
    Expert LoRA moves there where ``placement.masters``: make the optimizer after this. On the CPU as device
    the same is computed there, without streams. Raises ``UsageError`` where a layer can't be transferred.
    """
    layers = expert_layers(model)
    numbers = list(layers)
    first = next(iter(layers.values()))
    resident = [numbers[place] for place in placement.resident]
    groups = [
        group
        for index, layer in layers.items()
        for group in group_experts(layer.weights, placement.slot_bytes, f"layer {index}")
        if index not in resident
    ]
    copier, how = make_copier(groups, device)
    loader = make_staged_copier(device) if resident and device.type == "cuda" else copier
    try:
        experts = GpuExperts(
            {index: layer.weights for index, layer in layers.items()},
            device,
            first.lora_rank,
            placement,
            copier,
            loader=loader,
            loaded=lambda index: release_layers(model, [index]),
            inputs=layer_inputs(model),
        )
    except BaseException:
        copier.close()
        raise
    finally:
        if loader is not copier:
            loader.close()
    # The driver refuses copies out of what is mapped next where pages are still registered.
    weakref.finalize(experts, copier.release_pages).atexit = False
    split_mlps(model, placement.pieces_from)
    for index, layer in layers.items():
        layer.gpu = GpuBinding(experts, index)
        if placement.masters:
            layer.move_lora(device)
        elif device.type == "cuda":
            layer.move_lora(torch.device("cpu"))
    return PlacedExperts(experts, how, copier)


@dataclass(frozen=True)
class Trainable:
    """Numbers of parameters. ``str()`` is a line to print."""

    expert_lora: int
    """Trained ones of the expert LoRA."""
    other_lora: int
    """Trained ones of PEFT's LoRA."""
    others: int
    """Trained ones that are no LoRA; a raw adapter doesn't hold them."""
    total: int
    """Of the whole model, the experts' frozen weights with it."""

    @property
    def trained(self) -> int:
        return self.expert_lora + self.other_lora + self.others

    def __str__(self) -> str:
        return (
            f"trained: {self.trained:,} of {self.total:,} parameters "
            f"({100 * self.trained / max(self.total, 1):.2f} %): expert LoRA {self.expert_lora:,}, "
            f"other LoRA {self.other_lora:,}, others {self.others:,}"
        )


def trainable_parameters(model: nn.Module) -> Trainable:
    """Count what is trained in a model, wrapped or not, PEFT's or not.

    ``print_trainable_parameters()`` of PEFT has the same number of trained ones, and a smaller total: the
    frozen weights of wrapped experts are no parameters of the model.
    """
    layers = find_layers(model)
    frozen = sum(w.count * w.rows * w.columns for layer in layers for w in layer.weights)
    total = frozen + sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    expert = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
    others = sum(parameter.numel() for _, parameter in find_unsaved_parameters(model))
    return Trainable(expert, trained - expert - others, others, total)
