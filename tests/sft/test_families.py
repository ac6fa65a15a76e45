"""Every family on our kernels, from its own mapped checkpoint: transformers' answers and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ktbridge.sft import expert_layers, wrap_experts
from ktbridge.sft.loading import load_mapped
from ktbridge.sft.modules import LAYER, experts_modules

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LATENT = {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "num_key_value_heads": 4, "n_shared_experts": 2, "head_dim": 8,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SIZES, **LATENT},
    "deepseek_v3": {**SIZES, **LATENT},
    "ernie4_5_moe": {
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    },
    "glm4_moe": {**SIZES, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "minimax_m2": SIZES,
    "mixtral": SIZES,
    "olmoe": {**SIZES, "intermediate_size": 32},
    "qwen2_moe": SIZES,
    "qwen3_5_moe": {"text_config": {**SIZES, **HYBRID}, "vision_config": VISION},
    "qwen3_5_moe_text": {**SIZES, **HYBRID},
    "qwen3_moe": {**SIZES, "mlp_only_layers": [0]},
    "qwen3_next": {**SIZES, **HYBRID},
    "qwen3_vl_moe": {"text_config": SIZES, "vision_config": VISION},
}  # fmt: skip
IDS = torch.arange(3, 43).reshape(2, 20)


def reference(model_type: str, path: Path) -> Any:
    """A random model of a family in float32 that is exact in bfloat16, saved in bfloat16 in ``path``."""
    torch.manual_seed(0)
    settings = FAMILIES[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    multimodal = "text_config" in settings
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    model = auto.from_config(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(4)  # experts that matter
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.mul_(10)  # and choices that no rounding turns over
    model.save_pretrained(path)
    return model.float()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family(model_type: str, tmp_path: Path) -> None:
    exact = reference(model_type, tmp_path)
    # Float32 around the experts, so that no token goes to another expert for a rounding.
    mapped = load_mapped(tmp_path, torch.float32)
    assert not [name for name, _ in mapped.named_parameters() if name.endswith("gate_up_proj")]
    wrap_experts(mapped, lora_rank=4, lora_alpha=8)
    layers = expert_layers(mapped)
    random = torch.Generator().manual_seed(3)
    weights, leaves = {}, {}
    for name, module in experts_modules(exact):
        layer = layers[int(LAYER.search(name)[1])]
        with torch.no_grad():
            for parameter in layer.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.copy_((0.3 * noise / parameter.shape[-1] ** 0.5).bfloat16())
        own = {
            key: value.detach().clone().requires_grad_() for key, value in layer.named_parameters()
        }
        delta = {
            part: 2 * own[f"{part}_lora_b"] @ own[f"{part}_lora_a"]
            for part in ("gate", "up", "down")
        }
        gate_up = torch.cat((delta["gate"], delta["up"]), 1)
        weights[f"{name}.gate_up_proj"] = module.gate_up_proj.detach() + gate_up
        weights[f"{name}.down_proj"] = module.down_proj.detach() + delta["down"]
        leaves[name] = own
    assert len(leaves) == len(layers)

    slope = torch.randn((2, 20, 64), generator=random)
    expected = outcome(functional_call(exact, weights, (IDS,)).logits, slope, leaves)
    for _, module in experts_modules(exact):
        module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))
        module.register_forward_hook(lambda _, __, made: rounded(made))
    noisy = outcome(functional_call(exact, weights, (IDS,)).logits, slope, leaves)
    own = {name: dict(layers[int(LAYER.search(name)[1])].named_parameters()) for name in leaves}
    found = outcome(mapped(IDS).logits, slope, own)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value.norm() > 0
        # What rounding at the experts' doors alone does; inside, they round a few times more.
        assert distance(found[key], value) < 4 * distance(noisy[key], value) + 1e-3, key


def outcome(logits: Any, slope: Any, leaves: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every leaf, which are left without."""
    logits.backward(slope, retain_graph=True)
    results = {"logits": logits.detach()}
    for name, own in leaves.items():
        for key, leaf in own.items():
            results[f"{name}.{key}"], leaf.grad = leaf.grad, None
    return results


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
