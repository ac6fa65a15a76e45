"""Published models' config.json, as far as a plan reads it; a run's plan."""

from published import MODELS

from ktbridge.sft.plan.inputs import read_plan_inputs
from ktbridge.sft.plan.report import make_plan


def plan_run(config, target, measure=True):
    return make_plan(read_plan_inputs(config, target, measure))


V2_LITE, QWEN3 = (MODELS[name].config for name in ("DeepSeek-V2-Lite", "Qwen3-30B-A3B"))
QWEN3_5 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": {
        "vocab_size": 248320, "hidden_size": 2048, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
