"""One grammar for every key: kinds, wrappers that are read past, and what looks like an expert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktbridge.adapter.keys import is_expert_like, parse_key, peft_key, plain_name


@given(st.text(max_size=80) | st.from_regex(r"(layers|experts|lora_[AB]|weight|\d|\.|\n)*"))
def test_any_text_parses(name):
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
def test_kinds(name, kind):
    assert parse_key(name).kind == kind


def test_spellings_of_one_projection_meet():
    names = [
        "model.layers.3.mlp.experts.7.down_proj.lora_A.weight",
        "base_model.model.model.layers.3.mlp.experts.7.down_proj.lora_A.default.weight",
        "model.layers.3.mlp.orig_module.experts.7.down_proj.lora_A.weight",
        "model.language_model.layers.3.block_sparse_moe.experts.7.w2.lora_A.weight",
    ]
    assert len({parse_key(name)._replace(module="") for name in names}) == 1


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
def test_wrappers_and_names_are_read_past(module, change, wrappers, adapter):
    plain = peft_key(module, "A")
    spelling = plain_name(change(plain))
    assert (spelling.name, {*spelling.wrappers}, spelling.adapter) == (plain, wrappers, adapter)
    assert parse_key(change(plain)) == parse_key(plain)


@pytest.mark.parametrize(
    "module",
    ["model.layers.0.temporal.module.dense", "model.layers.0.module", "head.module.layers_norm"],
)
def test_a_module_that_is_called_module_stays(module):
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
def test_what_looks_like_an_expert(path, like):
    assert is_expert_like(f"model.layers.5.{path}") is like
