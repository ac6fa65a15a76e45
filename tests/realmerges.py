"""Tiny MoE models of transformers' own classes, and LoRA on attention and fused experts as PEFT saves it.

Only torch, transformers and PEFT are needed, so that a process with another release of a tool runs it, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MODULES = {"deepseek_v3": ("q_a_proj", "o_proj")}
_ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24, "eos_token_id": 1},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24, "eos_token_id": 1},
    "glm4_moe": _ROUTED,
    "deepseek_v3": {
        **_ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def write_base(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """Save a random model of two layers."""
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts_per_tok": 2, "pad_token_id": 0, **_SIZES[family], **sizes,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(path)
    return path


def load(path: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    model.name_or_path = model.config._name_or_path = str(path)
    return model


def tune(base: Path, path: Path, *, seed: int = 1, model: Any = None, **settings: Any) -> Any:
    """Return the base as PEFT's model with random LoRA, which is saved at ``path``."""
    model = load(base) if model is None else model
    settings = {
        "r": 4, "lora_alpha": 12, "target_parameters": list(EXPERTS),
        "target_modules": list(MODULES.get(model.config.model_type, ("q_proj", "o_proj"))), **settings,
    }  # fmt: skip
    tuned = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(path)
    return tuned
