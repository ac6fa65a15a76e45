"""Table of MoE families and their expert storage: one row per family, used everywhere else.

A row defines how to read the family's ``config.json`` and its checkpoint's names. A new family is a
new row. Router conventions are left to transformers and are not recorded here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

ExpertStorage = Literal["per-expert", "fused", "fused-transposed", "fused-interleaved"]


@dataclass(frozen=True)
class Family:
    """One MoE family.

    ``model_types`` are config.json's ``model_type`` values, text-only and wrapper alike.
    ``prefix`` precedes ``layers.N`` in checkpoint keys; ``block`` is the MoE module of a layer, which
    transformers calls ``mlp`` in memory where its experts are ``w1``, ``w3`` and ``w2`` (``in_memory``).
    ``storage``: "per-expert" = ``experts.E.{names}.weight`` 2-D; "fused" = ``experts.gate_up_proj``
    [E,2I,H] (gate rows first) and ``experts.down_proj`` [E,H,I]; "fused-transposed" = the same
    with the last two axes swapped; "fused-interleaved" = transposed, gate and up columns
    interleaved. ``names`` are gate, up and down of one expert, ``fused`` the two fused tensors within
    ``block``. ``nonexpert_targets`` are the modules (path suffixes) whose LoRA SGLang-KT can apply;
    none if unknown. ``modules_checked``: an adapter's other modules are compared with what the family's
    config.json says of them; else only with the hidden size. ``vllm_fused``: vLLM wraps the experts as
    PEFT's fused ones (``is_3d_moe_weight`` of its model classes). ``sglang_run``: adapters of the family were
    run through upstream SGLang's code.
    """

    name: str
    model_types: tuple[str, ...]
    prefix: str = "model."
    block: str = "mlp"
    storage: ExpertStorage = "per-expert"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    expert_size: str = "moe_intermediate_size"
    nonexpert_targets: tuple[str, ...] = ()
    modules_checked: bool = True
    vllm_fused: bool = False
    sglang_run: bool = False

    @property
    def in_memory(self) -> str:
        """The MoE module's name in transformers' models, and so in PEFT's keys."""
        return "mlp" if self.block == "block_sparse_moe" and self.names == _W else self.block


_W = ("w1", "w3", "w2")
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
"""What the MoE module of a layer may be called."""
ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.(?:wg|gate|layer))?$")
"""What chooses among experts, by the end of its path in a checkpoint or in memory."""
UNREACHED = re.compile(r"\.indexer\.|\.mamba\.dt_proj$")
"""Linear modules that LoRA can't change, by their path in memory: no gradient comes to what chooses among
tokens (DeepSeek-V3.2, GLM-5), and Jamba reads ``dt_proj``'s weight past PEFT's layer."""

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLA = (
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
)


def _gated(name: str) -> tuple[str, ...]:
    return tuple(f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down"))


def _stored(name: str, *model_types: str, **row: Any) -> Family:
    """A row of which experts and routers are held, and no inventory of other modules."""
    return Family(name, model_types, modules_checked=False, **row)


FAMILIES: tuple[Family, ...] = (
    Family("Qwen2-MoE", ("qwen2_moe",), sglang_run=True),
    Family(
        "Qwen3-MoE", ("qwen3_moe",), nonexpert_targets=(*_ATTENTION, "mlp.gate"), sglang_run=True
    ),
    Family("Qwen3-Next", ("qwen3_next",)),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        prefix="model.language_model.",
        storage="fused",
        nonexpert_targets=(
            *_ATTENTION,
            *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
            "linear_attn.out_proj",
            "mlp.gate",
            "mlp.shared_expert_gate",
            *_gated("shared_expert"),
        ),
        vllm_fused=True,
        sglang_run=True,
    ),
    Family(
        "Qwen3-VL-MoE",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        prefix="model.language_model.",
        storage="fused-transposed",
        nonexpert_targets=_ATTENTION,
        vllm_fused=True,
        sglang_run=True,
    ),
    Family(
        "Mixtral",
        ("mixtral",),
        block="block_sparse_moe",
        names=_W,
        expert_size="intermediate_size",
        sglang_run=True,
    ),
    Family(
        "DeepSeek",
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        nonexpert_targets=(*_MLA, "mlp.gate", *_gated("shared_experts")),
        sglang_run=True,
    ),
    Family(
        "Kimi-K2.5",
        ("kimi_k25",),
        prefix="language_model.model.",
        nonexpert_targets=(*_MLA, "mlp.gate", *_gated("shared_experts")),
    ),
    Family("GLM4-MoE", ("glm4_moe",), nonexpert_targets=_ATTENTION, sglang_run=True),
    Family(
        "MiniMax-M2",
        ("minimax_m2",),
        block="block_sparse_moe",
        names=_W,
        expert_size="intermediate_size",
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        storage="fused-interleaved",
        expert_size="intermediate_size",
        vllm_fused=True,
        sglang_run=True,
    ),
    _stored("ERNIE 4.5", "ernie4_5_moe"),
    _stored("OLMoE", "olmoe", "flex_olmo", expert_size="intermediate_size", sglang_run=True),
    _stored("DeepSeek-V3.2", "deepseek_v32"),
    _stored("GLM-5", "glm_moe_dsa"),
    _stored("GLM-5-Next", "glm5_next", prefix="model.language_model."),
    _stored("GLM-4.7-Flash", "glm4_moe_lite"),
    _stored(
        "MiniMax-01",
        "minimax",
        block="block_sparse_moe",
        names=_W,
        expert_size="intermediate_size",
    ),
    _stored("Hunyuan", "hunyuan_v1_moe", expert_size="intermediate_size"),
    _stored("Hunyuan 3", "hy_v3"),
    _stored("Hunyuan 4", "hy_v4", storage="fused"),
    _stored("dots1", "dots1"),
    _stored("EXAONE-MoE", "exaone_moe"),
    _stored(
        "Phi-MoE",
        "phimoe",
        block="block_sparse_moe",
        names=_W,
        expert_size="intermediate_size",
    ),
    _stored(
        "Granite-MoE",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "granitemoe_swa",
        block="block_sparse_moe",
        storage="fused",
        fused=("input_linear", "output_linear"),
        expert_size="intermediate_size",
    ),
    _stored("AFMoE", "afmoe"),
    _stored("A.X-K1", "axk1"),
    _stored("A.X-K2", "axk2"),
    _stored("Ling 2.5", "bailing_hybrid"),
    _stored("Cohere2-MoE", "cohere2_moe", expert_size="intermediate_size"),
    _stored("Jamba", "jamba", block="feed_forward", expert_size="intermediate_size"),
    _stored("Kolibri", "kolibri1"),
    _stored("Flint", "flint"),
    _stored("GLM-4.5V", "glm4v_moe", "glm4v_moe_text", prefix="model.language_model."),
    _stored("Kimi-Linear", "kimi_linear", block="block_sparse_moe", names=_W),
    _stored("Laguna", "laguna"),
    _stored("LFM2-MoE", "lfm2_moe", block="feed_forward", names=_W),
    _stored("Mellum", "mellum"),
    _stored("MiMo-V2-Flash", "mimo_v2_flash"),
    _stored("Solar Open", "solar_open"),
    _stored("dots3-note", "dots3_note_text", storage="fused"),
    _stored("Unlimited-OCR", "unlimited_ocr", storage="fused"),
)


def family_of(model_type: str) -> Family | None:
    """The family of a config.json's ``model_type``; None for one that isn't in the table."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return None


UNSERVED = {
    "aria_text": "gate and up of its experts lie transposed",
    "deepseek_v4": "its first layers choose experts by a table of tokens, and its checkpoint has them in FP4 "
    "of a form that isn't read here",
    "diffusion_gemma": "its experts use GELU, and the kernels compute SiLU",
    "ernie4_5_vl_moe": "a layer has two sets of experts, for text and for images",
    "gemma4": "its experts use GELU, and the kernels compute SiLU",
    "gemma4_text": "its experts use GELU, and the kernels compute SiLU",
    "inkling2": "its experts cap gate and up softly, which the kernels don't",
    "llama4": "the router scales what goes into an expert, not what comes out, and transformers doesn't "
    "dispatch such experts",
    "minimax_m3_vl": "its dense MLPs and shared experts are fused in memory and apart in its checkpoint, so "
    "LoRA on them has no place there",
    "muse_spark": "its experts have a norm of their own",
    "nemotron_h": "its experts have no gate",
    "openai_privacy_filter": "it classifies tokens, and its experts have biases",
    "qwen3_omni_moe": "its language model lies within thinker_config, which isn't read",
}
"""Model types whose experts can't be computed here, each with the reason."""
UNSERVED["inkling2_loop"] = UNSERVED["inkling2"]
UNSERVED["llama4_text"] = UNSERVED["llama4"]
UNSERVED["minimax_m3_vl_text"] = UNSERVED["minimax_m3_vl"]
