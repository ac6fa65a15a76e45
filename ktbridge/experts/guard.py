"""Checks on a wrapped model: its expert LoRA is trained and saved, or a warning is raised.

PEFT, Trainer, trl, accelerate or a user's own loop may freeze what they didn't add, save what they know,
and be called in any order. ``watch`` is called once for each model, by ``wrap_experts``.
"""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ktbridge.errors import KtbridgeError
from ktbridge.experts import compat
from ktbridge.experts.layer import MERGE_STEP, MoELoRAExperts, find_layers, first_tuner
from ktbridge.experts.lora import LORA_NAMES
from ktbridge.experts.save_adapter import save_into

ORDERS = "docs/library.md lists the orders of calls that work."


def watch(base: PreTrainedModel) -> None:
    """Watch a transformers model whose experts have just been wrapped."""
    base.register_forward_pre_hook(_before_forward)
    vars(base).update(
        save_pretrained=MethodType(_save_pretrained, base),
        # PEFT asks each module for a way of its own to be unloaded, the model itself first of all, before it
        # has merged or taken away anything.
        unload_and_optionally_merge_module=_refuse_unload,
        ktbridge_layers=tuple(find_layers(base)),  # to be found without a walk in every forward
    )
    # PEFT warns for any model that has a tuner layer. A model it was really applied to before is
    # recognized by its configuration as well, which gives a second warning.
    warnings.filterwarnings(
        "ignore", "You are trying to modify a model with PEFT for a second time", UserWarning
    )
    _belong(base)


def has_peft(module: nn.Module) -> bool:
    """Return whether PEFT has put adapters into a module."""
    return first_tuner(module) is not None or bool(getattr(module, "peft_config", None))


def _before_forward(base: PreTrainedModel, _: object) -> None:
    if not _layers(base)[0].belongs_to(base):  # it is a copy, or PEFT has come since
        _belong(base)
    if base.training and torch.is_grad_enabled():
        _refuse_untrained(base)
    elif base.training:
        _refuse_half_reference(base)


def _layers(base: PreTrainedModel) -> tuple[MoELoRAExperts, ...]:
    found: tuple[MoELoRAExperts, ...] = vars(base)["ktbridge_layers"]
    return found


def _belong(base: PreTrainedModel) -> None:
    _watched.add(base)
    for layer in _layers(base):
        layer.belong_to(base)


def _asked(base: PreTrainedModel) -> list[MoELoRAExperts]:
    """Return the layers whose expert LoRA is on, and frozen by nobody."""
    on = [layer for layer in _layers(base) if layer.lora_names and layer.lora_enabled]
    return [layer for layer in on if not layer.lora_frozen and not layer.disable_adapters]


def _refuse_untrained(base: PreTrainedModel) -> None:
    """Raise ``KtbridgeError`` where other parameters train and an expert LoRA that nobody froze doesn't."""
    asked = _asked(base)
    inactive = [layer for layer in asked if not layer.on_in_peft]
    # Another process of the group may hold a layer's expert LoRA: nothing of it is here to train or freeze.
    own = [[*layer.parameters()] for layer in asked]
    frozen = [held for held in own if held and not any(p.requires_grad for p in held)]
    if not (inactive or frozen) or not any(p.requires_grad for p in base.parameters()):
        return
    if inactive:
        layer = inactive[0]
        raise KtbridgeError(
            f"the PEFT adapter {', '.join(layer.peft_active)!r} is trained, and the expert LoRA belongs "
            f"to {layer.peft_adapter!r}, which isn't active: it would not be trained.",
            f"model.set_adapter({layer.peft_adapter!r}), or ktbridge.sft.freeze_expert_lora(model) to train "
            "the other adapter alone.",
        )
    raise KtbridgeError(
        f"the expert LoRA of {len(frozen)} layers is frozen while other parameters are trained: something "
        "set requires_grad=False after wrap_experts.",
        "Before the optimizer is made, call ktbridge.sft.freeze_expert_lora(model, False) to train it, or "
        f"freeze_expert_lora(model) to leave it as it is on purpose. {ORDERS}",
    )


def _refuse_half_reference(base: PreTrainedModel) -> None:
    """Raise ``KtbridgeError`` where a training compares with another trained adapter and experts are trained.

    A copy of a new adapter, which trl's DPOTrainer makes for its reference, is the base model: B is 0 in it.
    """
    inactive = [layer for layer in _asked(base) if not layer.on_in_peft]
    others = [f".lora_B.{name}." for layer in inactive[:1] for name in layer.peft_active]
    named = base.named_parameters() if others else ()
    if any(bool(p.any()) for name, p in named if any(other in name for other in others)):
        raise KtbridgeError(
            f"a forward without gradients has the PEFT adapter {', '.join(inactive[0].peft_active)!r} alone: "
            f"the expert LoRA is {inactive[0].peft_adapter!r}'s, so a reference would be half an adapter.",
            "Start from a trained adapter with `ktbridge train`, stage: dpo; or call "
            "ktbridge.sft.freeze_expert_lora(model) where the other adapter has no expert LoRA.",
        )


# --- the optimizer ---------------------------------------------------------------------------------------

STEPS_UNCHANGED = 8
"""Steps of an optimizer after which an unchanged expert LoRA with gradients is a mistake."""
_watched: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_seen: weakref.WeakKeyDictionary[Optimizer, dict[int, tuple[int, list[float]]]] = weakref.WeakKeyDictionary()


def _before_step(optimizer: Optimizer, _: object, __: object) -> None:
    """Raise ``KtbridgeError`` where an optimizer trains a wrapped model and nothing trains its expert LoRA.

    The LoRA may be another optimizer's, so it is looked at for some steps whether anything changes it.
    """
    watched = list(_watched)
    mine = {id(each) for group in optimizer.param_groups for each in group["params"] if watched}
    for base in watched:
        waiting = [
            parameter
            for layer in _layers(base)
            for parameter in layer.parameters()
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in mine
        ]
        if not waiting or not any(id(parameter) in mine for parameter in base.parameters()):
            continue
        seen = _seen.setdefault(optimizer, {})
        # By value, because fused optimizers don't count the versions up.
        value = [float(parameter.detach().sum()) for parameter in waiting[: len(LORA_NAMES)]]
        steps, before = seen.get(id(base), (0, value))
        if steps >= STEPS_UNCHANGED and value == before:
            raise KtbridgeError(
                "the optimizer doesn't have the expert LoRA among its parameters: it was made before "
                "wrap_experts, or without them.",
                f"Call wrap_experts first, then make the optimizer of all that requires gradients. {ORDERS}",
            )
        seen[id(base)] = steps + 1, before


register_optimizer_step_pre_hook(_before_step)


# --- freezing ----------------------------------------------------------------------------------


def freeze_expert_lora(model: nn.Module, frozen: bool = True) -> None:
    """Keep the expert LoRA of a wrapped model, or of a part of one, from training; or let it train again.

    Frozen it still acts. Without this, an expert LoRA that doesn't require gradients while other parameters
    do is taken for a mistake, and the next forward pass in training raises ``KtbridgeError``. Call it before
    the optimizer is made. Raises ``KtbridgeError`` where nothing is wrapped.
    """
    layers = find_layers(model)
    if not layers:
        raise KtbridgeError(
            f"{type(model).__name__} has no wrapped experts.", "Call wrap_experts(model) first."
        )
    for layer in layers:
        layer.lora_frozen = frozen
        layer.requires_grad_(not frozen)


# --- saving and unloading --------------------------------------------------------------------------------


def _save_pretrained(
    base: PreTrainedModel,
    save_directory: str | Path,
    is_main_process: bool = True,
    *args: Any,
    **options: Any,
) -> None:
    """Save the expert LoRA, in the place of transformers' method: the model's weights lack the experts'."""
    if compat.is_adapted_by_transformers(base):  # the adapter alone is saved
        type(base).save_pretrained(base, save_directory, is_main_process, *args, **options)
    elif has_peft(base):
        raise KtbridgeError(
            "save_pretrained was called on the model inside of a PeftModel: it would save neither half of "
            "the adapter.",
            "Call save_pretrained of the PeftModel, or ktbridge.sft.save_raw_adapter(peft_model, directory).",
        )
    elif is_main_process:
        save_into(base, save_directory)
        warnings.warn(
            f"{save_directory} has the expert LoRA alone, as a raw adapter, and is no model that "
            "from_pretrained could load; ktbridge.sft.load_raw_adapter(base_model, directory) can.",
            stacklevel=2,
        )


def _refuse_unload(merge: bool = True, **_: object) -> None:
    what = "merge_and_unload can't merge" if merge else "unload would leave"
    step = "`with model.disable_adapter():` runs the base model; or load it again."
    raise KtbridgeError(f"PEFT's {what} the expert LoRA.", MERGE_STEP if merge else step)
