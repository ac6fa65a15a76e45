"""Table of MoE families and their expert storage: one row per family, used everywhere else.

A row defines how to read the family's ``config.json`` and its checkpoint's names. A new family is a
new row. Router conventions are left to transformers and are not recorded here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ExpertStorage = Literal["per-expert", "fused", "fused-transposed", "fused-interleaved"]


@dataclass(frozen=True)
class Family:
    """One MoE family.

    ``model_types`` are config.json's ``model_type`` values, text-only and wrapper alike; ``loaded_as`` those
    that transformers has under another name, the same architecture field by field.
    ``prefix`` precedes ``layers.N`` in checkpoint keys; ``block`` is the MoE module of a layer, which
    transformers calls ``mlp`` in memory where its experts are ``w1``, ``w3`` and ``w2`` (``in_memory``).
    ``storage``: "per-expert" = ``experts.E.{names}.weight`` 2-D; "fused" = ``experts.gate_up_proj``
    [E,2I,H] (gate rows first) and ``experts.down_proj`` [E,H,I]; "fused-transposed" = the same
    with the last two axes swapped; "fused-interleaved" = transposed, gate and up columns
    interleaved. ``names`` are gate, up and down of one expert, ``fused`` the two fused tensors within
    ``block``. ``whole``: the text model can't be loaded alone, the wrapper is, with its vision tower.

    ``modules_checked``: an adapter's other modules are compared with what the family's config.json says of
    them; else only with the hidden size. ``gated_attention``: q_proj also writes the gate of the output.
    ``heads_split_hidden``: a head is hidden / heads wide where config.json has no head_dim. ``sign`` is found
    in the names of its models, or in the keys of its adapters, and in no other family's.

    SGLang-KT: ``kt_classes`` are those architectures of config.json that its registry of models has (the
    same from 0.5.3 to 0.7.2). Of any other the engine runs transformers' own modules, which its expert LoRA
    never reaches. ``nonexpert_targets`` are the modules (path suffixes) whose LoRA it can apply; none if
    unknown. ``kt_unapplied`` are modules whose LoRA it reads and then never applies, or ends over at
    start-up, each with the last version that does so ("" for all). ``kt_rotates_since``: before that version
    it computes prompts without positions of keys, unless attention reads keys from the cache.
    ``kt_unbased``: it takes another base of rotary positions than config.json's, and no flag can tell it.
    ``kt_untied``: its class has an output head of its own, which stays as it was allocated where a checkpoint
    stores none.

    vLLM: ``vllm_fused``: it wraps the experts as PEFT's fused ones (``is_3d_moe_weight`` of its model
    classes). Upstream SGLang: ``sglang_run``: adapters were run through its code; ``sglang_hybrid``: it knows
    the sizes of linear attention's modules; ``sglang_fuses``: it makes the shared expert a routed one, in
    models of this architecture ("" for all) and number of experts (0 for all). ``llama_cpp`` is llama.cpp's
    name of the architecture, "" for one whose tensors can't be named in GGUF.
    """

    name: str
    model_types: tuple[str, ...]
    prefix: str = "model."
    block: str = "mlp"
    storage: ExpertStorage = "per-expert"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    expert_size: str = "moe_intermediate_size"
    whole: bool = False
    loaded_as: Mapping[str, str] = field(default_factory=dict)
    modules_checked: bool = True
    gated_attention: bool = False
    heads_split_hidden: bool = False
    sign: str = ""
    kt_classes: tuple[str, ...] = ()
    nonexpert_targets: tuple[str, ...] = ()
    kt_unapplied: Mapping[str, str] = field(default_factory=dict)
    kt_rotates_since: str = "0"
    kt_unbased: bool = False
    kt_untied: bool = False
    vllm_fused: bool = False
    sglang_run: bool = False
    sglang_hybrid: bool = False
    sglang_fuses: tuple[str, int] | None = None
    llama_cpp: str = ""

    @property
    def in_memory(self) -> str:
        """The MoE module's name in transformers' models, and so in PEFT's keys."""
        return "mlp" if self.block == "block_sparse_moe" and self.names == _W else self.block

    @property
    def vllm_names(self) -> tuple[str, str, str]:
        """Names of gate, up and down of an expert in vLLM: the checkpoint's, if it names any."""
        return _W if self.storage == "fused-interleaved" else self.names

    @property
    def vllm_prefixes(self) -> tuple[str, ...]:
        """Return what may precede ``layers.N`` in vLLM: a wrapper takes its text model's names too."""
        return (self.prefix, "model.", *(("language_model.model.",) if self.vllm_fused else ()))


PROJECTIONS = ("gate", "up", "down")
"""The matrices of a routed expert, in the order of their names in a row of the table."""
_W = ("w1", "w3", "w2")
ROUTER = re.compile(r"(?:^|\.)(?:gate|router)(?:\.(?:wg|gate|layer))?$")
"""What chooses among experts, by the end of its path in a checkpoint or in memory."""
UNREACHED = re.compile(r"\.indexer\.|\.mamba\.dt_proj$")
"""Linear modules that LoRA can't change, by their path in memory: no gradient comes to what chooses among
tokens (DeepSeek-V3.2, GLM-5), and Jamba reads ``dt_proj``'s weight past PEFT's layer."""

_INNER = "intermediate_size"
_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_MLA = (
    *(f"self_attn.{name}_proj" for name in ("q", "q_a", "q_b")), "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate",
    *(f"mlp.shared_experts.{part}_proj" for part in PROJECTIONS),
)  # fmt: skip
_QWEN_MLP = (
    "mlp.gate", "mlp.shared_expert_gate",
    *(f"mlp.shared_expert.{part}_proj" for part in PROJECTIONS),
)  # fmt: skip
_LAST_SPLIT = "0.7.0.post3"
"""The last version of SGLang-KT with the split contract: it misses modules, or can't size their LoRA."""


def _stored(name: str, *model_types: str, **row: Any) -> Family:
    """A row of which experts and routers are held, and no inventory of other modules."""
    return Family(name, model_types, modules_checked=False, **row)


FAMILIES: tuple[Family, ...] = (
    Family(
        "Qwen2-MoE", ("qwen2_moe",), heads_split_hidden=True, kt_classes=("Qwen2MoeForCausalLM",),
        kt_untied=True, sglang_run=True, llama_cpp="qwen2moe",
    ),
    Family(
        "Qwen3-MoE", ("qwen3_moe",), kt_classes=("Qwen3MoeForCausalLM",), kt_untied=True,
        nonexpert_targets=(*_ATTENTION, "mlp.gate"), kt_unapplied={"mlp.gate": _LAST_SPLIT},
        # Of the models that KT serves only this one's attention uses the fused kernel that before 0.7.0
        # rotates queries in place, and keys only on their way into the cache. Observed with 0.6.4 and triton:
        # logprobs 0.4 nats off, equal to those of a model without rotated keys to within rounding.
        kt_rotates_since="0.7.0", sglang_run=True, llama_cpp="qwen3moe",
    ),
    Family(
        "Qwen3-Next", ("qwen3_next",), gated_attention=True, kt_classes=("Qwen3NextForCausalLM",),
        kt_untied=True,
        # No version has room for q_proj's LoRA where a gate comes with q.
        kt_unapplied={"self_attn.q_proj": ""}, llama_cpp="qwen3next",
    ),
    Family(
        "Qwen3.5-MoE", ("qwen3_5_moe", "qwen3_5_moe_text"),
        prefix="model.language_model.", storage="fused", gated_attention=True,
        sign=r"qwen3[._]5.*-a\d+b|\.linear_attn\.in_proj_qkv\.",  # a MoE's name has its active parameters
        kt_classes=("Qwen3_5MoeForConditionalGeneration",),
        nonexpert_targets=(
            *_ATTENTION, *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
            "linear_attn.out_proj", *_QWEN_MLP,
        ),
        # The pattern for attention LoRA keys misses them.
        kt_unapplied=dict.fromkeys((*_ATTENTION, *_QWEN_MLP), _LAST_SPLIT),
        vllm_fused=True, sglang_run=True, sglang_hybrid=True, llama_cpp="qwen35moe",
    ),
    Family(
        "Qwen3-VL-MoE", ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        prefix="model.language_model.", storage="fused-transposed", whole=True,
        kt_classes=("Qwen3VLMoeForConditionalGeneration",), kt_unbased=True, nonexpert_targets=_ATTENTION,
        vllm_fused=True, sglang_run=True, llama_cpp="qwen3vlmoe",
    ),
    Family(
        "Mixtral", ("mixtral",), block="block_sparse_moe", names=_W, expert_size=_INNER,
        heads_split_hidden=True, kt_classes=("MixtralForCausalLM",),
        kt_untied=True, sglang_run=True, llama_cpp="llama",
    ),
    Family(
        "DeepSeek", ("deepseek_v2", "deepseek_v3", "kimi_k2"), loaded_as={"kimi_k2": "deepseek_v3"},
        kt_classes=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), nonexpert_targets=_MLA,
        kt_unapplied=dict.fromkeys(("mlp.gate", "self_attn.q_a_proj", "self_attn.q_b_proj"), _LAST_SPLIT),
        sglang_run=True, sglang_fuses=("DeepseekV3ForCausalLM", 256), llama_cpp="deepseek2",
    ),
    Family(
        "Kimi-K2.5", ("kimi_k25",), prefix="language_model.model.", whole=True,
        kt_classes=("KimiK25ForConditionalGeneration",), nonexpert_targets=_MLA, llama_cpp="deepseek2",
    ),
    Family(
        "GLM4-MoE", ("glm4_moe",), kt_classes=("Glm4MoeForCausalLM",),
        kt_untied=True, nonexpert_targets=_ATTENTION,
        sglang_run=True, sglang_fuses=("", 0), llama_cpp="glm4moe",
    ),
    Family(
        "MiniMax-M2", ("minimax_m2",), block="block_sparse_moe", names=_W, expert_size=_INNER,
        kt_classes=("MiniMaxM2ForCausalLM",), kt_untied=True, llama_cpp="minimax-m2",
    ),
    Family(
        "gpt-oss", ("gpt_oss",), storage="fused-interleaved", expert_size=_INNER,
        kt_classes=("GptOssForCausalLM",),
        kt_untied=True, vllm_fused=True, sglang_run=True, llama_cpp="gpt-oss",
    ),
    _stored("ERNIE 4.5", "ernie4_5_moe", kt_classes=("Ernie4_5_MoeForCausalLM",)),
    _stored("OLMoE", "olmoe", expert_size=_INNER, kt_classes=("OlmoeForCausalLM",),
            kt_untied=True, sglang_run=True, llama_cpp="olmoe"),
    _stored("FlexOlmo", "flex_olmo", expert_size=_INNER),
    _stored("DeepSeek-V3.2", "deepseek_v32", kt_classes=("DeepseekV32ForCausalLM",)),
    _stored("GLM-5", "glm_moe_dsa", kt_classes=("GlmMoeDsaForCausalLM",)),
    _stored("GLM-5-Next", "glm5_next", prefix="model.language_model.", whole=True),
    _stored("GLM-4.7-Flash", "glm4_moe_lite", kt_classes=("Glm4MoeLiteForCausalLM",)),
    _stored("MiniMax-01", "minimax", block="block_sparse_moe", names=_W, expert_size=_INNER),
    _stored("Hunyuan", "hunyuan_v1_moe", expert_size=_INNER, kt_classes=("HunYuanMoEV1ForCausalLM",)),
    _stored("Hunyuan 3", "hy_v3"),
    _stored("Hunyuan 4", "hy_v4", storage="fused"),
    _stored("dots1", "dots1"),
    _stored("EXAONE-MoE", "exaone_moe", kt_classes=("ExaoneMoEForCausalLM",)),
    _stored("Phi-MoE", "phimoe", block="block_sparse_moe", names=_W, expert_size=_INNER,
            kt_classes=("PhiMoEForCausalLM",)),
    _stored("Granite-MoE", "granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa",
            block="block_sparse_moe", storage="fused", fused=("input_linear", "output_linear"),
            expert_size=_INNER, kt_classes=("GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM")),
    _stored("AFMoE", "afmoe", kt_classes=("AfmoeForCausalLM",), kt_untied=True),
    _stored("A.X-K1", "axk1"),
    _stored("A.X-K2", "axk2"),
    _stored("Ling 2.5", "bailing_hybrid", kt_classes=("BailingMoeV2_5ForCausalLM",)),
    _stored("Cohere2-MoE", "cohere2_moe", expert_size=_INNER),
    _stored("Jamba", "jamba", block="feed_forward", expert_size=_INNER),
    _stored("Kolibri", "kolibri1"),
    _stored("Flint", "flint"),
    _stored("GLM-4.5V", "glm4v_moe", "glm4v_moe_text", prefix="model.language_model.", whole=True,
            kt_classes=("Glm4vMoeForConditionalGeneration",), kt_unbased=True),
    _stored("Kimi-Linear", "kimi_linear", block="block_sparse_moe", names=_W,
            kt_classes=("KimiLinearForCausalLM",)),
    _stored("Laguna", "laguna"),
    _stored("LFM2-MoE", "lfm2_moe", block="feed_forward", names=_W, kt_classes=("Lfm2MoeForCausalLM",)),
    _stored("Mellum", "mellum"),
    _stored("MiMo-V2-Flash", "mimo_v2_flash", kt_classes=("MiMoV2FlashForCausalLM",)),
    _stored("Solar Open", "solar_open"),
    _stored("dots3-note", "dots3_note_text", storage="fused"),
    _stored("Unlimited-OCR", "unlimited_ocr", storage="fused", whole=True),
)  # fmt: skip

BLOCKS = tuple(dict.fromkeys(family.block for family in FAMILIES))
"""What the MoE module of a layer may be called."""
PREFIXES = (*dict.fromkeys(family.prefix for family in FAMILIES), "language_model.", "")
"""What may precede ``layers.N`` of a text model in a checkpoint; not vision towers and draft layers."""


def family_of(model_type: str) -> Family | None:
    """The family of a config.json's ``model_type``; None for one that isn't in the table."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return None


def transformers_type(model_type: str) -> str:
    """The ``model_type`` under which transformers has a model: nearly always its own."""
    family = family_of(model_type)
    return family.loaded_as.get(model_type, model_type) if family else model_type


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
