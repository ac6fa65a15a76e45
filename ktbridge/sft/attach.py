"""The trainable parts of a run: PEFT's LoRA on the non-experts, ours on the experts."""

from __future__ import annotations

import os

import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from ktbridge.errors import KtbridgeError
from ktbridge.experts.inject import wrap_experts
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.load_adapter import copy_nonexpert, load_expert_lora
from ktbridge.experts.lora_targets import (
    TunedModel,
    choose_modules,
    convert_masters,
    find_lora_targets,
)
from ktbridge.experts.modules import experts_modules
from ktbridge.kernel_choice import choose_threads
from ktbridge.sft.base_model import Start, find_start
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.launch import shards_parameters


def attach_lora(model: PreTrainedModel, config: TrainConfig) -> TunedModel:
    """PEFT on the non-experts, then the experts onto the kernels; both from an adapter if one is given.

    ``config.lora_target``: "all" is every linear module of the decoder layers outside the routed experts,
    shared experts included, but for those whose LoRA SGLang-KT is known not to apply in this
    family (``left_out_of_all``); with ``config.adapter_name_or_path`` it is what that adapter has.
    Else names of modules, or the ends of their paths: "gate_proj" is that of shared experts and dense
    layers, "mlp.gate_proj" of dense layers alone, "gate" the router. Routed experts have LoRA whatever
    is named ("experts": they alone), but with ``kt_skip_expert_lora_adaptation``. A router's LoRA has no
    dropout.

    Raises UsageError naming every target that the model doesn't have, ProblemsError naming everything in
    which an adapter to go on from doesn't fit configuration or model, and what ``wrap_experts`` does.
    """
    device = attention_device(model)
    start = find_start(config, model, find_lora_targets(model))
    tuned = attach_linear_lora(model, config, start)
    wrap_experts(
        tuned,
        config.expert_rank,
        config.expert_alpha,
        threads=config.kt_config.kt_num_threads or threads_beside_python(device),
        activation=config.activation,
        lora_dropout=config.expert_dropout,
        accumulate_grad=True,  # the Trainer reads .grad only, after whole backward passes
    )
    for layer in expert_layers(tuned).values():
        layer.run_ahead = True  # the LoRA changes after whole backward passes only
    without = sum(1 for _ in experts_modules(tuned)) - len(expert_layers(tuned))
    if without:  # a layer's LoRA is known by the layer's index
        raise KtbridgeError(
            f"{without} experts modules of {type(model).__name__} belong to no decoder layer of their own.",
            "Report the model, please: its expert LoRA could not be saved.",
        )
    if start:
        copy_nonexpert(model, start)
        if config.expert_rank:
            load_expert_lora(tuned, start.adapter)
    return tuned


def attach_linear_lora(
    model: PreTrainedModel, config: TrainConfig, start: Start | None = None
) -> TunedModel:
    """PEFT on the non-experts alone; on the modules of ``start``, if an adapter is given."""
    found = find_lora_targets(model)
    names = start.modules if start else choose_modules(model, found, config.lora_target)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # PEFT takes fractions, its annotation doesn't
        lora_dropout=config.lora_dropout,
        # An adapter to go on from may have it; where the configuration asks for it, alpha has it in it.
        use_rslora=start is not None and start.rslora and not config.use_rslora,
        task_type="CAUSAL_LM",
    )
    tuned = TunedModel(model, lora, names, found)
    if not config.pure_bf16:  # masters, as PEFT makes them of whole models and the experts' LoRA is
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    convert_masters(tuned, keep_copies=not shards_parameters())
    return tuned


def attention_device(model: nn.Module) -> torch.device:
    """The first device beside the CPU that a part of ``model`` is on, else the CPU.

    Embeddings may stay on the CPU while what follows is on a GPU.
    """
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def threads_beside_python(device: torch.device) -> int:
    """Default number of kernel threads; 0 leaves it to the kernels.

    With attention on a GPU, Python queues its work while the kernels run, and needs a CPU of its own.
    """
    threads = choose_threads()
    spare = device.type == "cuda" and threads >= 4 and "KTBRIDGE_THREADS" not in os.environ
    return threads - 1 if spare else 0
