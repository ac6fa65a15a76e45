"""Tiny random models of every family, and LoRA on all that can have it."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from expertmoe import to_mxfp4
from packaging.version import Version
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ktbridge.experts.lora_targets import find_lora_targets, own_names
from ktbridge.experts.modules import experts_modules
from ktbridge.sft.config import TrainConfig, parse_config

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
SEEN = {
    "image_token_id": 50,
    "video_token_id": 51,
    "vision_start_token_id": 52,
    "vision_end_token_id": 53,
}
DENSE_FIRST = {**SIZES, "first_k_dense_replace": 1, "n_shared_experts": 2}
SMALL = {**SIZES, "intermediate_size": 32, "shared_intermediate_size": 40}
MIXED = {**SIZES, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
SPARSE_ATTENTION = {**SIZES, **LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**SIZES, **LATENT},
    "deepseek_v3": {**SIZES, **LATENT},
    "ernie4_5_moe": {
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2,
    },
    "glm4_moe": DENSE_FIRST,
    "gpt_oss": {**SIZES, "intermediate_size": 32, "swiglu_limit": 2.0},
    "minimax_m2": SIZES,
    "mixtral": SIZES,
    "olmoe": {**SIZES, "intermediate_size": 32},
    "qwen2_moe": SIZES,
    "qwen3_5_moe": {"text_config": {**SIZES, **HYBRID}, "vision_config": VISION, **SEEN},
    "qwen3_5_moe_text": {**SIZES, **HYBRID},
    "qwen3_moe": {**SIZES, "mlp_only_layers": [0]},
    "qwen3_next": {**SIZES, **HYBRID},
    "qwen3_vl_moe": {"text_config": SIZES, "vision_config": VISION, **SEEN},
}  # fmt: skip
EXECUTED_ALIKE: dict[str, dict[str, Any]] = {
    "afmoe": {**SIZES, "num_dense_layers": 1, "layer_types": ["full_attention"] * 3},
    "axk1": {**SIZES, **LATENT},
    "axk2": SPARSE_ATTENTION,
    "bailing_hybrid": {**MIXED, **LATENT},
    "cohere2_moe": SIZES,
    "deepseek_v32": SPARSE_ATTENTION,
    "dots1": {**SIZES, **LATENT},
    "dots3_note_text": {**SIZES, **LATENT},
    "exaone_moe": SIZES,
    "flex_olmo": SIZES,
    "flint": SIZES,
    "glm4_moe_lite": {**SIZES, **LATENT},
    "glm4v_moe": {
        "text_config": {**DENSE_FIRST, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        }},
        "vision_config": {**VISION, "image_size": 28, "patch_size": 14}, **SEEN,
    },
    "glm5_next": {
        "text_config": {
            **SPARSE_ATTENTION, "layer_types": MIXED["layer_types"], "qk_rope_head_dim": 0,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limit": 1.0,
            "linear_head_dim": 8, "linear_num_heads": 4, "index_kpool": 4, "hc_mult": 2,
        },
        "vision_config": {
            **VISION, "projection_intermediate_size": 16, "image_size": 28, "patch_size": 14,
        }, **SEEN,
    },
    "glm_moe_dsa": SPARSE_ATTENTION,
    "granitemoe": SMALL,
    "granitemoe_swa": SMALL,
    "granitemoehybrid": {**SMALL, "layer_types": ["attention"] * 3},
    "granitemoeshared": SMALL,
    "hunyuan_v1_moe": {**SIZES, "moe_topk": 2, "num_shared_expert": 1},
    "hy_v3": SIZES,
    "hy_v4": {**SPARSE_ATTENTION, "swiglu_limit": 0.3},
    "jamba": {
        **SIZES, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "kimi_k2": {**SIZES, **LATENT},
    "kimi_linear": {**MIXED, **LATENT},
    "kolibri1": SIZES,
    "laguna": SIZES,
    "lfm2_moe": {**SIZES, "layer_types": ["conv", "full_attention", "full_attention"],
                 "num_dense_layers": 1},
    "mellum": SIZES,
    "mimo_v2_flash": SIZES,
    "minimax": SIZES,
    "phimoe": {**SMALL, "router_jitter_noise": 100.0},
    "solar_open": SIZES,
    "unlimited_ocr": {"text_config": {**SIZES, **LATENT}, "vision_config": {
        "sam_config": {
            "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "mlp_dim": 16, "image_size": 64, "global_attn_indexes": [0], "downsample_channels": [16, 16],
        },
        "encoder_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        },
    }},
}  # fmt: skip
"""Families whose experts differ from others' in nothing but name and place: the kernels alone are held."""
FAMILIES |= EXECUTED_ALIKE

REPRESENTATIVES = {
    "deepseek_v3": "latent attention, shared experts",
    "gpt_oss": "interleaved and transposed gate and up, biases",
    "mixtral": "experts alone",
    "qwen3_5_moe_text": "linear attention",
    "qwen3_moe": "dense layers between",
    "qwen3_vl_moe": "a vision tower",
}
"""Families that stand for the others in `make test`, and for what; all of them are in `make test-all`."""


KIMI = {"kimi_k2": "deepseek_v3"}
_TESTED = (Path(__file__).parents[1] / "constraints-tested.txt").read_text()
OLDER = Version(version("transformers")) < Version(re.findall(r"^transformers==(\S+)", _TESTED, re.M)[0])
"""Whether the installed transformers is older than the tested one, so that it may lack families."""


def parametrize_families(*executors: str) -> list[Any]:
    """Return a parameter for each family and executor; those of no representative are slow."""
    return [
        pytest.param(*((name, executor) if executors else (name,)), marks=_marks(name))
        for name in sorted(FAMILIES)
        for executor in (executors[:1] if name in EXECUTED_ALIKE else executors) or (None,)
    ]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    lacking = OLDER and KIMI.get(name, name) not in CONFIG_MAPPING
    skip = pytest.mark.skipif(lacking, reason=f"transformers {version('transformers')} has no {name}")
    return [skip] if name in REPRESENTATIVES else [skip, pytest.mark.slow]


SEEING = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
"""Families with a vision tower."""
IDS = torch.arange(3, 43).reshape(2, 20)


def with_images(model: Any) -> dict[str, torch.Tensor]:
    """``IDS`` with an image of four tokens and one of one, and what the vision tower of ``model`` reads."""
    image, vision = model.config.image_token_id, model.config.vision_config
    ids = IDS.clone()
    ids[0, 4:8] = ids[1, 10] = image
    patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(20, patch, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 2]]),
        "mm_token_type_ids": (ids == image).int(),
    }


def made(model_type: str, settings: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(KIMI.get(model_type, model_type), **settings)
    multimodal = "text_config" in settings
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return auto.from_config(config)


def reference(model_type: str, path: Path) -> Any:
    """A random model of a family in float32 that is exact in bfloat16, saved in bfloat16 in ``path``."""
    torch.manual_seed(0)
    model = made(model_type, FAMILIES[model_type]).eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):  # of experts, which start at zero
                parameter.normal_(std=0.2)
            elif ".experts." in name:
                parameter.mul_(4)  # experts that matter
            if name.endswith((".gate.weight", ".router.weight", ".gate.wg.weight")):
                parameter.mul_(10)  # and choices that no rounding turns over
    if model_type == "gpt_oss":
        model.config.quantization_config = MXFP4
        model.config.save_pretrained(path)
        del model.config.quantization_config
        save_file(mxfp4_tensors(model), path / "model.safetensors", {"format": "pt"})
    else:
        model.save_pretrained(path)
    if model_type == "kimi_k2":  # as it is published: DeepSeek-V3 under a name of its own
        file = path / "config.json"
        theirs = {"model_type": model_type, "auto_map": {"AutoConfig": "configuration_deepseek.X"}}
        file.write_text(json.dumps(json.loads(file.read_text()) | theirs))
    return model.float()


MXFP4 = {
    "quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def mxfp4_tensors(model: Any) -> dict[str, torch.Tensor]:
    """gpt-oss's tensors as they are published; ``model`` gets the values that this rounds to."""
    made: dict[str, torch.Tensor] = {}
    for name, module in experts_modules(model):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(module, part).data
            packed, scales, values = to_mxfp4(weight.float().mT)
            weight.copy_(values.mT)
            made[f"{name}.{part}_blocks"] = packed.unflatten(-1, (-1, 16))
            made[f"{name}.{part}_scales"] = scales
    rest = model.state_dict().items()
    return made | {key: value for key, value in rest if f"{key}_blocks" not in made}


def everything(model: Any, path: Path, **settings: Any) -> TrainConfig:
    """A configuration that adapts all that can be: attention, shared experts, dense MLPs, routers."""
    found = find_lora_targets(model)
    assert len(found.routers) == len(list(experts_modules(model)))
    return parse_config(
        {
            "model_name_or_path": str(path), "dataset": "none", "output_dir": "none",
            "lora_rank": 4, "lora_alpha": 8, "lora_target": own_names(found.modules), **settings,
        }
    )  # fmt: skip


def randomize(model: Any, random: torch.Generator) -> None:
    """Trained parameters that aren't zero, exact in bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=random)
                parameter.copy_((0.3 * noise / parameter.shape[-1] ** 0.5).bfloat16())
