"""A raw adapter onto a transformers model, both halves: to train on, or to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel

from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.experts.attach import TunedModel
from ktbridge.experts.from_adapter import acting, copy_nonexpert, fit, read_raw
from ktbridge.experts.guard import has_peft, layers_of
from ktbridge.experts.inject import load_expert_lora, wrap_experts
from ktbridge.experts.targets import adaptable
from ktbridge.model import resolve_model


def load_raw_adapter(
    model: PreTrainedModel, directory: str | Path, *, trainable: bool = False, **options: Any
) -> PeftModel:
    """Put a raw adapter onto the base model it was trained on: the reverse of ``save_raw_adapter``.

    ``model`` is as it was loaded, neither wrapped nor PEFT's; it is changed in place. Returns a PeftModel
    with PEFT's LoRA on the modules that the adapter has and the experts wrapped, both float32 copies of
    what is stored. Without ``trainable`` nothing requires gradients and it is in eval mode; with it both
    halves are trained further. ``options`` are ``wrap_experts``'s, but for the LoRA's own.

    Raises ``ProblemsError`` naming everything that doesn't fit, ``KtbridgeError`` for another base model
    (where both are at hand), and ``UsageError`` for a wrapped model or a directory of another layout.
    """
    if layers_of(model) or has_peft(model):
        raise UsageError(
            "load_raw_adapter takes the base model, and this one has LoRA already.",
            "Load the model anew and give it without PEFT and without wrap_experts: both are done here.",
        )
    adapter, found = read_raw(directory), adaptable(model)
    start, problems = fit(adapter, _directory(model), model, found)
    if problems:
        raise ProblemsError(f"{adapter.path} can't be put on this model.", problems)
    lora = LoraConfig(
        **acting(adapter),
        lora_dropout=float(adapter.config.get("lora_dropout") or 0),
        base_model_name_or_path=adapter.base_model,
        inference_mode=not trainable,
        task_type="CAUSAL_LM",
    )
    tuned = TunedModel(model, lora, start.modules, found)
    for name, parameter in tuned.named_parameters():  # as get_peft_model makes them
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    trained = bool(adapter.experts)
    wrap_experts(tuned, adapter.rank if trained else 0, adapter.alpha if trained else 0, **options)
    copy_nonexpert(model, start)
    if trained:
        load_expert_lora(tuned, adapter)
    return tuned if trainable else tuned.requires_grad_(False).eval()


def _directory(model: PreTrainedModel) -> Path | None:
    """Where the model was loaded from, if it is still there."""
    name = str(model.config._name_or_path or "")
    try:
        return resolve_model(name) if name else None
    except KtbridgeError:
        return None
