"""LoRA on attention and experts of further families, through the engine's own model classes and loaders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from findings import codes
from launchfacts import facts_for
from rawadapter import write_config, write_raw
from realengine import EXPERTS, HIDDEN, INNER, LAYERS, MERGED, MODULES, RANK, SPLIT, trained

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.model import family_of
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import convert, read_sources
from ktbridge.serve.sglang.facts import read_installed
from ktbridge.serve.sglang.launch import MODEL_OVERRIDE, Launch
from ktbridge.serve.sglang.preflight import plan_launch

pytestmark = pytest.mark.timeout(600)  # the first test of a version starts its engine

SMALL = {"intermediate_size": INNER}
EVEN = {"hidden_size": 64}  # where heads have hidden_size / num_attention_heads
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", {"num_dense_layers": 0, "num_shared_experts": 1}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": EXPERTS, "moe_k": 2, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0, "moe_layer_end_index": LAYERS - 1, "moe_layer_interval": 1,
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
            "partial_rotary_factor": 0.5, "use_qk_norm": True,
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {**SMALL, "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {**SMALL, "rotary_dim": 8, "use_qk_norm": True, "scoring_func": "sigmoid",
         "use_routing_bias": True},
    ),
    "mixtral": ("MixtralForCausalLM", {**SMALL, **EVEN}),
    "olmoe": ("OlmoeForCausalLM", {**SMALL, **EVEN, "norm_topk_prob": False}),
    "phimoe": ("PhiMoEForCausalLM", SMALL),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EVEN, "shared_expert_intermediate_size": 24}),
}  # fmt: skip
GATED = (
    "Qwen3NextForCausalLM",
    {
        "layer_types": ["full_attention"] * LAYERS, "full_attention_interval": 1,
        "shared_expert_intermediate_size": 24,
    },
)  # fmt: skip


def prepared(
    path: Path, version: str, model_type: str, family: tuple[str, dict[str, Any]], **changed: Any
) -> tuple[Path, Path, Launch]:
    """A base of which only config.json is there, an adapter of it, and the plan with its conversions made."""
    architecture, settings = family
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER,
        "intermediate_size": 56, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
        "torch_dtype": "bfloat16", "norm_topk_prob": True, "architectures": [architecture], **settings,
    }  # fmt: skip
    model, hidden = write_config(path / "base", model_type, **sizes), sizes["hidden_size"]
    modules = {
        name: tuple(hidden if size == HIDDEN else size for size in shape)
        for name, shape in ({**MODULES, **changed}).items()
        if name != "mlp.gate"
    }
    raw = write_raw(
        path / "raw", layers=tuple(range(LAYERS)), experts=EXPERTS, rank=RANK, hidden=hidden,
        inter=INNER, modules=modules, block="", base_model=str(model), seed=3,
    )  # fmt: skip
    request = SglangRequest(model=str(model), adapters={"neko": str(raw)})
    sources, problems = read_sources(request)
    facts = facts_for(
        model,
        installed=replace(read_installed(), python="python", engine=version, kernel=version),
        sources=sources,
        source_problems=tuple(problems),
        cache=path / "cache",
    )
    made = plan_launch(request, facts)
    for step in made.conversions:
        convert(step)
    return model, raw, made


@pytest.mark.quick("(mixtral|glm4_moe|olmoe)-0")
@pytest.mark.parametrize("version", [SPLIT, MERGED])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_and_experts_arrive(engines, tmp_path, version, model_type) -> None:
    model, raw, made = prepared(tmp_path, version, model_type, FAMILIES[model_type])
    assert made.ok, made.problems
    engine = f"sglang-kt=={version}"
    assert validate_adapter([*made.directories], base_model=model, engine=engine).ok
    loaded = engines(version).run(made)
    assert (loaded.error, loaded.stage) == ("", "done")
    expected = trained(read_adapter(raw))
    assert loaded.pairs.keys() == expected.keys()
    for path, (a, b) in expected.items():
        np.testing.assert_array_equal(loaded.pairs[path][0], a, err_msg=path)
        np.testing.assert_array_equal(loaded.pairs[path][1], b, err_msg=path)


BASED = {
    **FAMILIES,
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 1, "mlp_only_layers": []}),
}


@pytest.mark.quick("(mixtral|qwen3_moe)-0.7.2")
@pytest.mark.parametrize("version", [SPLIT, MERGED])
@pytest.mark.parametrize("model_type", BASED)
def test_positions_have_the_models_base_and_the_head_is_its_embedding_where_it_says_so(
    engines, tmp_path, version, model_type
) -> None:
    """Our flag does it: without it the engine takes 10000, but where a configuration keeps its own."""
    architecture, settings = BASED[model_type]
    settings = {**settings, "rope_theta": 123456.0, "tie_word_embeddings": True}
    family = family_of(model_type)
    _, _, made = prepared(tmp_path, version, model_type, (architecture, settings))
    with_it = engines(version).run(made)
    assert with_it.model["rope_bases"] == [123456.0]
    assert with_it.model["tied"] is not family.kt_untied
    place = made.argv.index(MODEL_OVERRIDE)
    without = made.argv[:place] + made.argv[place + 2 :]
    alone = 123456.0 if model_type == "afmoe" else 10000.0
    assert engines(version).run(made, argv=without).model["rope_bases"] == [alone]


@pytest.mark.parametrize("version", [SPLIT, MERGED])
def test_a_gate_beside_q_ends_the_engine(engines, tmp_path, version) -> None:
    q = {"self_attn.q_proj": (128, HIDDEN)}
    model, _, made = prepared(tmp_path, version, "qwen3_next", GATED, **q)
    engine = f"sglang-kt=={version}"
    found = validate_adapter([*made.directories], base_model=model, engine=engine)
    assert codes(found, "error") == {"KTB903"}
    assert "LoRA buffer shape" in engines(version).run(made).error
