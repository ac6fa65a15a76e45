"""The trainable parts of a run: PEFT's LoRA on the non-experts, ours on the experts."""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from ktbridge.errors import UsageError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.inject import wrap_experts
from ktbridge.sft.modules import LAYER


def attach_lora(model: PreTrainedModel, config: TrainConfig) -> PeftModel:
    """PEFT on the non-experts first, then the experts onto the kernels."""
    available = linear_names(model)
    targets = available if config.lora_target == ("all",) else list(config.lora_target)
    missing = [target for target in targets if target not in available]
    if missing:
        raise UsageError(
            f"lora_target names no linear module of this model: {', '.join(missing)}.",
            f'Use "all", or some of {", ".join(available)}.',
        )
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT takes fractions, its annotation doesn't
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    tuned = get_peft_model(model, lora)
    wrap_experts(
        tuned,
        config.expert_rank,
        config.expert_alpha,
        threads=config.kt_config.kt_num_threads,
        activation=config.kt_config.expert_activation,
        accumulate_grad=True,  # the Trainer reads .grad only, after whole backward passes
    )
    return tuned


def linear_names(model: nn.Module) -> list[str]:
    """Names of the linear modules inside decoder layers: what non-expert LoRA can attach to.

    PEFT's own "all-linear" is not used: for mixture-of-experts models it also claims the fused experts, whose
    LoRA is ours.
    """
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and LAYER.search(name)
        }
    )
