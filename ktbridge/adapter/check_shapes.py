"""Sizes of the non-expert linear modules that an architecture has, from config.json alone.

For every family in ``ktbridge.model.families``; the names and formulas are transformers'. Sizes
that config.json doesn't give are None and are not compared.
"""

from __future__ import annotations

from dataclasses import replace

from ktbridge.model import ModelConfig

Size = int | None
# A module's (columns, rows): input and output size.
Linear = tuple[Size, Size]
_GATED = ("Qwen3.5-MoE", "Qwen3-Next")  # q_proj also writes the gate of the output


def linear_sizes(base: ModelConfig) -> dict[str, Linear]:
    """(in, out) of each module, by its path within a layer ("self_attn.q_proj").

    With H hidden, I intermediate, h heads of d: q is [H, h·d], twice as wide where a gate comes
    with it (Qwen3.5), k and v are [H, h_kv·d]. Latent attention (DeepSeek, Kimi) goes through
    q_lora_rank and kv_lora_rank. Gated DeltaNet has h_k·d_k twice and h_v·d_v in in_proj_qkv.
    For a family not in the table only H is compared: its other names may have other meanings.
    """
    if base.family is None:
        base = replace(base, text={}, num_experts=0)
    attention = _latent(base) if _get(base, "kv_lora_rank") else _plain(base)
    return {**attention, **_linear_attention(base), **_mlps(base)}


def _plain(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    family = base.family.name if base.family is not None else ""
    head = _get(base, "head_dim")
    if head is None and family in ("Qwen2-MoE", "Mixtral") and heads:
        head = hidden // heads
    wide, narrow = _times(heads, head), _times(_get(base, "num_key_value_heads"), head)
    gated = family in _GATED and base.text.get("attn_output_gate", True)
    return {
        "self_attn.q_proj": (hidden, _times(wide, 2) if gated else wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
    }


def _latent(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "num_attention_heads")
    query, key = _get(base, "q_lora_rank"), _get(base, "kv_lora_rank")
    rotary, plain = _get(base, "qk_rope_head_dim"), _get(base, "qk_nope_head_dim")
    value = _get(base, "v_head_dim")
    return {
        "self_attn.q_proj": (hidden, _times(heads, _plus(plain, rotary))),
        "self_attn.q_a_proj": (hidden, query),
        "self_attn.q_b_proj": (query, _times(heads, _plus(plain, rotary))),
        "self_attn.kv_a_proj_with_mqa": (hidden, _plus(key, rotary)),
        "self_attn.kv_b_proj": (key, _times(heads, _plus(plain, value))),
        "self_attn.o_proj": (_times(heads, value), hidden),
    }


def _linear_attention(base: ModelConfig) -> dict[str, Linear]:
    hidden, heads = base.hidden_size, _get(base, "linear_num_value_heads")
    keys = _times(_get(base, "linear_num_key_heads"), _get(base, "linear_key_head_dim"))
    values = _times(heads, _get(base, "linear_value_head_dim"))
    return {
        "linear_attn.in_proj_qkv": (hidden, _plus(_times(keys, 2), values)),
        "linear_attn.in_proj_qkvz": (hidden, _plus(_times(keys, 2), _times(values, 2))),
        "linear_attn.in_proj_ba": (hidden, _times(heads, 2)),
        "linear_attn.in_proj_z": (hidden, values),
        "linear_attn.in_proj_b": (hidden, heads),
        "linear_attn.in_proj_a": (hidden, heads),
        "linear_attn.out_proj": (values, hidden),
    }


def _mlps(base: ModelConfig) -> dict[str, Linear]:
    hidden = base.hidden_size
    sizes: dict[str, Linear] = {
        "mlp.gate": (hidden, base.num_experts or None),
        "mlp.shared_expert_gate": (hidden, 1),
    }
    shared = _times(_get(base, "n_shared_experts"), base.intermediate_size)
    for block, inner in (
        ("mlp", _get(base, "intermediate_size")),
        ("mlp.shared_expert", _get(base, "shared_expert_intermediate_size")),
        ("mlp.shared_experts", shared),
    ):
        sizes[f"{block}.gate_proj"] = sizes[f"{block}.up_proj"] = (hidden, inner)
        sizes[f"{block}.down_proj"] = (inner, hidden)
    return sizes


def _get(base: ModelConfig, name: str) -> Size:
    value = base.text.get(name)
    return value if type(value) is int and value > 0 else None


def _times(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one * other


def _plus(one: Size, other: Size) -> Size:
    return None if one is None or other is None else one + other
