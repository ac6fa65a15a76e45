"""One grammar for every key: builders and parser agree, spellings meet, junk is harmless."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktbridge.adapter.keys import (
    expert_key,
    fused_key,
    is_expert_like,
    parse_key,
    peft_key,
    plain_name,
)

QUICK = settings(max_examples=150, deadline=None)
projection = st.sampled_from(["gate", "up", "down"])
half = st.sampled_from(["A", "B"])
number = st.integers(0, 9999)
segment = st.from_regex(r"[a-z][a-z0-9_]{0,11}", fullmatch=True).filter(
    lambda text: not text.startswith("lora_") and text not in ("experts", "orig_module")
)


@QUICK
@given(layer=number, expert=number, projection=projection, half=half)
def test_built_expert_keys_parse_back(layer: int, expert: int, projection: str, half: str) -> None:
    fused = parse_key(fused_key(layer, f"{projection}_lora_{half.lower()}"))
    assert (fused.kind, fused.layer, fused.projection, fused.half) == (
        "fused",
        layer,
        projection,
        half,
    )
    for prefix in ("", "base_model.model."):
        key = parse_key(prefix + expert_key(layer, expert, projection, half))
        assert key.kind == "expert"
        assert (key.layer, key.expert, key.projection, key.half) == (
            layer,
            expert,
            projection,
            half,
        )


@QUICK
@given(path=st.lists(segment, min_size=1, max_size=5), half=half)
def test_built_peft_keys_parse_back(path: list[str], half: str) -> None:
    module = ".".join(path)
    name = peft_key(module, half)
    for spelling in (name, name.removeprefix("base_model.model."), name[:-6] + "default.weight"):
        key = parse_key(spelling)
        assert (key.kind, key.module, key.half, key.leaf) == ("lora", module, half, path[-1])


@QUICK
@given(st.text(max_size=80) | st.from_regex(r"(layers|experts|lora_[AB]|weight|\d|\.|\n)*"))
def test_any_text_parses(name: str) -> None:
    key = parse_key(name)
    if key.kind in ("lora", "expert"):
        assert key.half in "AB"
        assert key.module in name.replace(".orig_module", "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.language_model.layers.3.mlp.experts.0.up_proj.lora_A.weight", "expert"),
        ("base_model.model.model.layers.3.block_sparse_moe.experts.0.w2.lora_B.weight", "expert"),
        ("layers.01.experts.gate_lora_a", "other"),
        ("layers.1.experts.gate_lora_c", "other"),
        ("layers.1.experts.gate_lora_a.weight", "other"),
        ("layers.\u0661.experts.gate_lora_a", "other"),
        ("model.layers.0.mlp.experts.lora_A.weight", "peft-fused"),
        ("model.layers.0.mlp.experts.base_layer.lora_B.weight", "peft-fused"),
        ("model.layers.0.mlp.lora_experts.1.le_gate.weight", "lora-experts"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "dora"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "lora-bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding"),
        ("base_model.model.lm_head.weight", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert parse_key(name).kind == kind


def test_spellings_of_one_projection_meet() -> None:
    names = [
        "model.layers.3.mlp.experts.7.down_proj.lora_A.weight",
        "base_model.model.model.layers.3.mlp.experts.7.down_proj.lora_A.default.weight",
        "model.layers.3.mlp.orig_module.experts.7.down_proj.lora_A.weight",
        "model.language_model.layers.3.block_sparse_moe.experts.7.w2.lora_A.weight",
    ]
    assert {parse_key(name)._replace(module="") for name in names} == {
        parse_key(names[0])._replace(module="")
    }


def test_vision_and_draft_modules_are_told_apart() -> None:
    vision = parse_key("base_model.model.model.visual.layers.1.attn.q_proj.lora_A.weight")
    assert vision.is_vision
    draft = parse_key("base_model.model.mtp.layers.0.self_attn.q_proj.lora_A.weight")
    assert draft.is_draft
    text = parse_key("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight")
    assert not text.is_vision
    assert not text.is_draft


EXPERT = "model.layers.3.mlp.experts.7.up_proj"
QUERY = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize("module", [EXPERT, QUERY], ids=["expert", "other"])
@pytest.mark.parametrize(
    ("change", "wrappers", "adapter"),
    [
        (lambda key: f"_orig_mod.{key}", {"_orig_mod"}, ""),
        (lambda key: f"module.{key}", {"module"}, ""),
        (lambda key: f"model.{key}", {"model"}, ""),
        (lambda key: f"actor.pretrained_model.{key}", {"actor.pretrained_model"}, ""),
        (lambda key: f"base_model.model.{key}", {"base_model.model"}, ""),
        (lambda key: f"_forward_module.module.{key}", {"_forward_module", "module"}, ""),
        (lambda key: key.replace("model.layers", "module._orig_mod.model.layers"),
         {"module", "_orig_mod"}, ""),
        (lambda key: key.replace("layers.3.", "layers.3._checkpoint_wrapped_module."),
         {"_checkpoint_wrapped_module"}, ""),
        (lambda key: key.replace("layers.3.", "layers.3.module."), {"module"}, ""),
        (lambda key: key.replace("_proj.", "_proj._fsdp_wrapped_module."),
         {"_fsdp_wrapped_module"}, ""),
        (lambda key: key.replace("_proj.", "_proj.module."), {"module"}, ""),
        (lambda key: key.replace(".weight", ".sft._fsdp_wrapped_module.weight"),
         {"_fsdp_wrapped_module"}, "sft"),
        (lambda key: key.replace(".weight", ".default.weight"), set(), "default"),
        (lambda key: key.replace(".lora_A", "_A"), set(), ""),
    ],
)  # fmt: skip
def test_wrappers_and_names_are_read_past(
    module: str, change: Callable[[str], str], wrappers: set[str], adapter: str
) -> None:
    plain = peft_key(module, "A")
    spelling = plain_name(change(plain))
    assert (spelling.name, {*spelling.wrappers}, spelling.adapter) == (plain, wrappers, adapter)
    assert parse_key(change(plain)) == parse_key(plain)


@pytest.mark.parametrize(
    "module",
    ["model.layers.0.temporal.module.dense", "model.layers.0.module", "head.module.layers_norm"],
)
def test_a_module_that_is_called_module_stays(module: str) -> None:
    assert plain_name(peft_key(module, "A")) == (peft_key(module, "A"), (), "", False)


@pytest.mark.parametrize(
    ("path", "like"),
    [
        *((path, True) for path in (
            "mlp.experts.gate_up_projs.0", "mlp.experts.3", "mlp.local_experts.0.up_proj",
            "mlp.expert_3.up_proj", "mlp.switch_mlp.up_proj", "ffn.experts.1.w1", "moe.gate_proj",
            "mlp.0.gate_proj", "block_sparse_moe.input_linear", "ffn_gate_exps", "experts.0.up_proj",
        )),
        *((path, False) for path in (
            "mlp.gate", "mlp.router", "moe.gate", "block_sparse_moe.router.layer",
            "mlp.shared_experts.up_proj", "mlp.shared_expert_gate", "share_expert.up_proj",
            "self_attn.q_proj", "feed_forward.w1", "shared_mlp.input_linear", "mlp.gate_up_proj",
        )),
    ],
)  # fmt: skip
def test_what_looks_like_an_expert(path: str, like: bool) -> None:
    assert is_expert_like(f"model.layers.5.{path}") is like
