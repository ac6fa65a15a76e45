"""Tiny random bases of the families that the proof's writer makes GGUF models of, and adapters for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tinyserver import ASCII, save_tokenizer
from transformers import AutoModelForCausalLM

from ktbridge.adapter import Tensor, write_raw_adapter

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "initializer_range": 0.12, "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
LATENT = {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "num_key_value_heads": 4,
    "n_shared_experts": 2, "head_dim": 8, "norm_topk_prob": False,
}  # fmt: skip
# model_type -> (sizes of its own, modules beside experts that its LoRA reaches).
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_moe": ({}, ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")),
    "deepseek_v2": (LATENT, ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate")),
    "mixtral": ({}, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj")),
    "olmoe": ({"num_key_value_heads": 4, "norm_topk_prob": False},
              ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
}  # fmt: skip
RANK, ALPHA = 4, 8


def save_base(model_type: str, directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """A checkpoint in bfloat16 with a tokenizer of its own; ``sizes`` go before ours."""
    from transformers import AutoConfig

    # So that servers' texts of tokens tell which ones they are.
    tokenizer = save_tokenizer(directory, ASCII)
    config = AutoConfig.for_model(
        model_type, **SIZES | FAMILIES.get(model_type, ({}, ()))[0] | sizes, vocab_size=len(tokenizer),
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def save_lora(
    base: Path, directory: Path, *, expert: bool = True, nonexpert: bool = True,
    modules: tuple[str, ...] | None = None, strength: float = 0.3, seed: int = 7,
) -> Path:  # fmt: skip
    """A raw adapter for ``base``: either half as it would be in the whole."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, *shape: int, scale: float) -> Tensor:
        values = (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)
        return Tensor(name, "BF16", shape, values.view(torch.int16).numpy().tobytes())

    fused, plain = {}, {}
    wanted = FAMILIES[model.config.model_type][1] if modules is None else modules
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            experts, inner, hidden = block.mlp.experts.down_proj.transpose(1, 2).shape
            for name in ("gate", "up", "down"):
                inputs, outputs = (inner, hidden) if name == "down" else (hidden, inner)
                key = f"layers.{layer}.experts.{name}_lora_"
                fused[key + "a"] = draw(key + "a", experts, RANK, inputs, scale=inputs**-0.5)
                fused[key + "b"] = draw(key + "b", experts, outputs, RANK, scale=strength)
        for name in wanted:
            module = dict(block.named_modules()).get(name)
            if module is not None:
                outputs, inputs = module.weight.shape
                key = f"base_model.model.model.layers.{layer}.{name}.lora_"
                for half, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                    scale = inputs**-0.5 if half == "A" else strength
                    full = f"{key}{half}.weight"
                    plain[full] = draw(full, *shape, scale=scale)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in wanted}),
    }  # fmt: skip
    write_raw_adapter(
        directory, expert=fused if expert else {}, nonexpert=plain if nonexpert else {},
        config=config, base_model=str(base), rank=RANK, alpha=ALPHA,
    )  # fmt: skip
    return directory
