"""Configurations and tensor names of published models, as far as they are known here.

``config``: the fields of the model's own config.json that say how large it is. ``names``: a MoE layer's
tensors in its weight index, under ``prefix``layers.N., of the experts only the first. ``billions``: of
weights, as the model's name or card says.

docs/models.md says which were read where public repositories repeat them, and which are inferred.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_GATED = tuple(f"experts.0.{name}_proj.weight" for name in ("gate", "up", "down"))
_W = tuple(f"experts.0.{name}.weight" for name in ("w1", "w2", "w3"))
_DEEPSEEK = (
    *(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_proj.weight", "self_attn.kv_a_proj_with_mqa.weight",
)  # fmt: skip
_INDEXER = (*_DEEPSEEK, "self_attn.indexer.wq_b.weight", "self_attn.indexer.weights_proj.weight")
_V3 = {
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rms_norm_eps": 1e-6, "rope_theta": 10000,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_V3, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "n_routed_experts": 256,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_KIMI = {
    **_V3, "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "vocab_size": 163840, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}  # fmt: skip
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]}  # fmt: skip
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "strategy": "group",
    }}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ]},
}  # fmt: skip
_GPT_OSS_NAMES = (
    *(f"mlp.experts.{name}_proj_{part}" for name in ("gate_up", "down")
      for part in ("bias", "blocks", "scales")),
    "mlp.router.bias", "mlp.router.weight", "self_attn.sinks", "self_attn.q_proj.bias",
)  # fmt: skip


class Published(NamedTuple):
    config: dict[str, Any]
    names: tuple[str, ...]
    billions: float
    storage: str = "bf16"
    prefix: str = "model."


MODELS = {
    "Mixtral-8x7B": Published(
        {
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "vocab_size": 32000, "tie_word_embeddings": False,
        }, (*(f"block_sparse_moe.{name}" for name in _W), "block_sparse_moe.gate.weight"), 46.7,
    ),
    "OLMoE-1B-7B": Published(
        {
            "model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 1024, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "norm_topk_prob": False, "vocab_size": 50304, "tie_word_embeddings": False,
        }, (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "self_attn.q_norm.weight"), 6.92,
    ),
    "Qwen3-30B-A3B": Published(
        {
            "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936,
            "tie_word_embeddings": False,
        }, (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "self_attn.q_norm.weight"), 30.5,
    ),
    "Qwen3-Next-80B-A3B": Published(
        {
            "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [],
            "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
            "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
            "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": 512, "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.shared_expert_gate.weight",
         "self_attn.q_norm.weight"), 79.7,
    ),
    "DeepSeek-V2-Lite": Published(
        {
            **_V3, "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
            "num_experts_per_tok": 6, "num_hidden_layers": 27, "q_lora_rank": None,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "self_attn.q_proj.weight",
         "self_attn.kv_a_proj_with_mqa.weight"), 15.7,
    ),
    "GLM-4.5": Published(
        {
            "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
            "routed_scaling_factor": 2.5, "topk_group": 1, "use_qk_norm": True,
            "vocab_size": 151552, "tie_word_embeddings": False,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
         "mlp.shared_experts.gate_proj.weight"), 353,
    ),
    "GLM-4.7-Flash": Published(
        {
            **_V3, "model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "hidden_size": 2048,
            "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
            "n_routed_experts": 64, "num_attention_heads": 20, "num_key_value_heads": 20,
            "num_experts_per_tok": 4, "num_hidden_layers": 47, "q_lora_rank": 768,
            "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0, "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.8,
        }, _DEEPSEEK, 30,
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        {
            "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.shared_expert_gate.weight",
         "mlp.shared_expert.gate_proj.weight", "self_attn.q_proj.bias"), 14.3,
    ),
    "DeepSeek-V3": Published(
        {"model_type": "deepseek_v3", **_DEEPSEEK_V3, "quantization_config": _FP8}, _DEEPSEEK, 671, "fp8"
    ),
    "DeepSeek-V3.2": Published(
        {"model_type": "deepseek_v32", **_DEEPSEEK_V3, "index_head_dim": 128, "index_n_heads": 64,
         "index_topk": 2048, "quantization_config": _FP8}, _INDEXER, 671, "fp8",
    ),
    "Kimi-K2-Instruct": Published({**_KIMI, "quantization_config": _FP8}, _DEEPSEEK, 1026, "fp8"),
    "Kimi-K2-Thinking": Published({**_KIMI, "quantization_config": _INT4}, _DEEPSEEK, 1026, "int4"),
    "GLM-5": Published(
        {
            **_V3, "model_type": "glm_moe_dsa", "first_k_dense_replace": 3, "head_dim": 192,
            "hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64,
            "num_key_value_heads": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 256,
            "num_hidden_layers": 78, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
            "v_head_dim": 256, "vocab_size": 154880, "index_head_dim": 128, "index_n_heads": 32,
            "index_topk": 2048, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
        }, _INDEXER, 744,
    ),
    "MiniMax-M2": Published(
        {
            "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072,
            "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256,
            "num_experts_per_tok": 8, "shared_intermediate_size": 0, "scoring_func": "sigmoid",
            "use_routing_bias": True, "use_qk_norm": True, "vocab_size": 200064,
            "rms_norm_eps": 1e-6, "rope_theta": 5000000, "tie_word_embeddings": False,
            "quantization_config": {**_FP8, "modules_to_not_convert": [
                "gate", "e_score_correction_bias", "lm_head"]},
        },
        (*(f"block_sparse_moe.{name}" for name in _W), "block_sparse_moe.gate.weight",
         "block_sparse_moe.e_score_correction_bias"), 229, "fp8",
    ),
    "dots.llm1": Published(
        {
            "model_type": "dots1", "hidden_size": 4096, "num_hidden_layers": 62,
            "intermediate_size": 10944, "num_attention_heads": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5, "vocab_size": 152064, "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "rope_theta": 10000000, "scoring_func": "sigmoid", "tie_word_embeddings": False,
            "n_group": 1, "topk_group": 1,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.gate.e_score_correction_bias"), 142,
    ),
    "Hunyuan-A13B": Published(
        {
            "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3072, "vocab_size": 128167, "num_experts": 64,
            "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32,
            "num_shared_expert": [1] * 32, "tie_word_embeddings": True,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.wg.weight", "mlp.shared_mlp.gate_proj.weight",
         "self_attn.query_layernorm.weight"), 80,
    ),
    "K-EXAONE": Published(
        {
            "model_type": "exaone_moe", "first_last_k_dense_replace": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 18432,
            "is_moe_layer": [False] + [True] * 47, "moe_intermediate_size": 2048, "n_group": 1,
            "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_shared_experts": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(48)],
            "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
            "topk_group": 1, "vocab_size": 153600,
        },
        (*(f"mlp.{name}" for name in _GATED), "mlp.gate.weight", "mlp.e_score_correction_bias"), 236,
    ),
    "Phi-3.5-MoE": Published(
        {
            "model_type": "phimoe", "vocab_size": 32064, "hidden_size": 4096,
            "intermediate_size": 6400, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
            "rope_theta": 10000.0, "attention_bias": True, "lm_head_bias": True,
            "input_jitter_noise": 0.01, "router_jitter_noise": 0.01, "tie_word_embeddings": False,
        }, (*(f"block_sparse_moe.{name}" for name in _W), "block_sparse_moe.gate.weight"), 42,
    ),
    "Granite-4.0-H-Small": Published(
        {
            "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72,
            "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "intermediate_size": 768,
            "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128,
            "mamba_d_head": 64, "mamba_n_groups": 1, "tie_word_embeddings": True, "vocab_size": 100352,
            "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
        },
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight",
         "block_sparse_moe.router.layer.weight", "shared_mlp.input_linear.weight"), 32,
    ),
    **{
        f"gpt-oss-{size}": Published(
            {
                **_GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts,
                "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
            },
            _GPT_OSS_NAMES, billions, "mxfp4",
        )
        for size, layers, experts, billions in (("20b", 24, 32, 20.91), ("120b", 36, 128, 116.83))
    },
}  # fmt: skip
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
    config = {
        key: value if value is None else CUT.get(key, value) for key, value in model.config.items()
    }
    if config["model_type"] in ("exaone_moe", "gpt_oss"):
        config["layer_types"] = ["sliding_attention", "full_attention"]
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key in config:
            config[key] = [64, 64] if isinstance(config[key], list) else 64
    return config
