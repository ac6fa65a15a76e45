"""Tiny random bases as GGUF for llama.cpp, by the gguf package's writer, and adapters for them.

The weights are a transformers checkpoint's, in float32, so that llama.cpp's logprobs can be held against
transformers' own. Rearranged is what llama.cpp's graphs want rearranged, and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tinyserver import ASCII, save_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

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
# model_type -> (llama.cpp's architecture, sizes of its own, modules beside experts that its LoRA reaches).
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen3_moe": ("qwen3moe", {}, ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")),
    "deepseek_v2": ("deepseek2", LATENT, ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate")),
    "mixtral": ("llama", {}, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj")),
    "olmoe": ("olmoe", {"num_key_value_heads": 4, "norm_topk_prob": False},
              ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
}  # fmt: skip
RANK, ALPHA = 4, 8


def save_base(model_type: str, directory: Path, seed: int = 0, **sizes: int) -> Path:
    """A checkpoint in bfloat16 with a tokenizer of its own; ``sizes`` go before ours."""
    from transformers import AutoConfig

    # So that servers' texts of tokens tell which ones they are.
    tokenizer = save_tokenizer(directory, ASCII)
    config = AutoConfig.for_model(
        model_type, **SIZES | FAMILIES[model_type][1] | sizes, vocab_size=len(tokenizer),
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def save_lora(
    base: Path, directory: Path, *, expert: bool = True, nonexpert: bool = True,
    modules: tuple[str, ...] | None = None, strength: float = 0.3,
) -> Path:  # fmt: skip
    """A raw adapter for ``base``: either half as it would be in the whole."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)

    def draw(name: str, *shape: int, scale: float) -> Tensor:
        values = (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)
        return Tensor(name, "BF16", shape, values.view(torch.int16).numpy().tobytes())

    fused, plain = {}, {}
    wanted = FAMILIES[model.config.model_type][2] if modules is None else modules
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


def write_base(base: Path, file: Path, *, bos: bool = False) -> Path:
    """The checkpoint in ``base`` as a GGUF model in float32. ``bos``: prompts begin with that token."""
    import gguf

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config, architecture = model.config, FAMILIES[model.config.model_type][0]
    writer = gguf.GGUFWriter(file, architecture)
    _parameters(writer, config)
    _vocabulary(gguf, writer, base, bos)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for key, part in _stored(name, tensor, config):
            writer.add_tensor(f"{names.get_name(key)}.weight", part.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _parameters(writer: Any, config: Any) -> None:
    latent = hasattr(config, "kv_lora_rank")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if latent else config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_count(SIZES["num_experts"])
    if config.model_type in ("qwen3_moe", "deepseek_v2"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if latent:
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
    else:
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_dimension_count(16)


def _vocabulary(gguf: Any, writer: Any, base: Path, bos: bool) -> None:
    model = json.loads((base / "tokenizer.json").read_text())["model"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    words = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([kinds[word in special] for word in words])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_bos_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(tokenizer.chat_template)


def _stored(name: str, tensor: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """A tensor of transformers' model as llama.cpp's graphs read it: one, or two or three parts of it."""
    module = name.removesuffix(".weight")
    if module.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        place = module.removesuffix("gate_up_proj")
        return [(f"{place}gate_proj", gate), (f"{place}up_proj", up)]
    if module.endswith(".kv_b_proj"):
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        nope, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        place = module.removesuffix("kv_b_proj")
        return [(f"{place}k_b_proj", nope.transpose(1, 2)), (f"{place}v_b_proj", value)]
    if config.model_type == "mixtral" and module.endswith((".q_proj", ".k_proj")):
        # ggml's rotary embedding for this architecture turns neighbours, transformers' the two halves.
        return [
            (module, tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape))
        ]
    return [(module, tensor)]
