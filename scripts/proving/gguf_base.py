"""A transformers checkpoint as a GGUF model in float32, by the gguf package's writer.

    gguf_base.py BASE FILE [PRE]      # PRE: llama.cpp's name of the tokenizer's splitting ("smollm")

So that llama.cpp's logprobs can be held against transformers' own: rearranged is what llama.cpp's graphs
want rearranged, and nothing else. FILE appears when it is whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktbridge.errors import KtbridgeError
from ktbridge.model import family_of

FAMILIES = ("qwen3_moe", "deepseek_v2", "mixtral", "olmoe")
"""Families whose tensors ``_stored`` knows, by model_type."""


def write_gguf(base: Path, file: Path, *, bos: bool = False, pre: str = "gpt-2") -> Path:
    """Write the checkpoint in ``base`` to ``file`` and return it. ``bos``: prompts begin with that token.

    Raises KtbridgeError for a family that isn't in ``FAMILIES``.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = model.config
    family = family_of(config.model_type)
    if config.model_type not in FAMILIES or family is None:
        raise KtbridgeError(
            f"{base} is {config.model_type}, not one of {', '.join(FAMILIES)}.",
            "Use llama.cpp's own converter.",
        )
    architecture = family.llama_cpp
    part = file.with_name(file.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    _add_parameters(writer, config)
    _add_vocabulary(writer, base, bos, pre)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for key, values in _stored(name, tensor, config):
            writer.add_tensor(f"{names.get_name(key)}.weight", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.replace(file)


def _add_parameters(writer: gguf.GGUFWriter, config: Any) -> None:
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
    writer.add_expert_count(
        next(
            getattr(config, name)
            for name in ("num_local_experts", "n_routed_experts", "num_experts")
            if hasattr(config, name)
        )
    )
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
        width = _head_width(config)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)


def _head_width(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _add_vocabulary(writer: gguf.GGUFWriter, base: Path, bos: bool, pre: str) -> None:
    model = json.loads((base / "tokenizer.json").read_text())["model"]
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    words = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([kinds[word in special] for word in words])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_bos_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(tokenizer.chat_template)


def _stored(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of transformers' model as llama.cpp's graphs read it: whole, or two parts of it."""
    module = name.removesuffix(".weight")
    place = module.rpartition(".")[0]
    if module.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        yield f"{place}.gate_proj", gate
        yield f"{place}.up_proj", up
    elif module.endswith(".kv_b_proj"):
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        nope, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield f"{place}.k_b_proj", nope.transpose(1, 2)
        yield f"{place}.v_b_proj", value
    elif config.model_type == "mixtral" and module.endswith((".q_proj", ".k_proj")):
        # ggml's rotary embedding for this architecture turns neighbors, transformers' the two halves.
        halves = tensor.view(-1, 2, _head_width(config) // 2, tensor.shape[1])
        yield module, halves.transpose(1, 2).reshape(tensor.shape)
    else:
        yield module, tensor


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), pre=(sys.argv[3:] or ["gpt-2"])[0])
