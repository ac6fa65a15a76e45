"""Configurations and tensor names of published models, as far as they are known here (published.yaml).

``config``: the fields of the model's own config.json that say how large it is. ``names``: a MoE layer's
tensors in its weight index, under ``prefix``layers.N., of the experts only the first. ``billions``: of
weights, as the model's name or card says.

docs/models.md says which were read where public repositories repeat them, and which are inferred.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Published(NamedTuple):
    config: dict[str, Any]
    names: list[str]
    billions: float
    storage: str = "bf16"
    prefix: str = "model."


MODELS = {
    name: Published(**fields)
    for name, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).items()
}
"""``layer_types`` of Granite is by the counts of its card; which layers they are is inferred."""

CUT = {
    "full_attention_interval": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "rotary_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_head_dim": 32,
    "index_n_heads": 2, "index_topk": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "shared_intermediate_size": 64, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4,
    "moe_topk": [2, 2], "num_shared_expert": [1, 1], "is_moe_layer": [False, True],
    "layer_types": ["mamba", "attention"], "sliding_window": 8,
}  # fmt: skip
"""Sizes of the cut of two layers; only those that a configuration has are changed."""


def cut(model: Published) -> dict[str, Any]:
    config = {key: value if value is None else CUT.get(key, value) for key, value in model.config.items()}
    if config["model_type"] in ("exaone_moe", "gpt_oss"):
        config["layer_types"] = ["sliding_attention", "full_attention"]
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key in config:
            config[key] = [64, 64] if isinstance(config[key], list) else 64
    return config
