"""With the real PEFT: what it writes is accepted, what we write it loads, to the same logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter, write_raw_adapter
from ktbridge.model import open_tensor_file

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 16, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "qwen3_moe": ({}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "qwen2_moe": ({}, ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]),
    "qwen3_5_moe_text": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj", "shared_expert_gate",
         "gate_proj", "up_proj", "down_proj"],
    ),
    "mixtral": ({}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "deepseek_v3": (
        {
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    ),
    "glm4_moe": ({"first_k_dense_replace": 1}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
}  # fmt: skip


def tuned(model_type: str, base: Path, **lora: Any) -> tuple[Any, list[str]]:
    """A tiny model of a family with random, nonzero LoRA."""
    extra, targets = FAMILIES[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(base)
    model.name_or_path = str(base)
    settings = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **lora}
    )
    wrapped = peft.get_peft_model(model, settings).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped, targets


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_false_alarm_on_what_peft_saves(tmp_path: Path, model_type: str) -> None:
    model, _ = tuned(model_type, tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    report = validate_adapter([tmp_path / "adapter"], base_model=tmp_path / "base")
    alarms = {(p.code, p.severity) for p in report.problems if p.severity != "info"}
    # Modules the engine won't apply in this family are a true finding, and only that.
    assert alarms <= {("KTB608", "warning")}


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}])
def test_peft_loads_the_nonexpert_directory(
    tmp_path: Path, lora: dict[str, Any], experts: Callable[..., dict[str, Tensor]]
) -> None:
    model, targets = tuned("qwen3_moe", tmp_path / "base", **lora)
    model.save_pretrained(tmp_path / "peft")
    saved = open_tensor_file(tmp_path / "peft" / "adapter_model.safetensors")
    write_raw_adapter(
        tmp_path / "raw",
        expert=experts(layers=(0, 1), experts=4),
        nonexpert={name: saved.tensor(name) for name in saved.entries},
        config=model.peft_config["default"].to_dict(),
        base_model=str(tmp_path / "base"),
        rank=4,
        alpha=8.0,
    )
    convert_adapter(
        tmp_path / "raw",
        nonexpert_output_dir=tmp_path / "n",
        merged_output_dir=tmp_path / "m",
    )
    config = json.loads((tmp_path / "n" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(targets)
    assert validate_adapter([tmp_path / name for name in ("raw", "n", "m")]).ok
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "n").eval()
    tokens = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        expected, got = model(tokens).logits, loaded(tokens).logits
        with loaded.disable_adapter():
            plain = loaded(tokens).logits
    torch.testing.assert_close(got, expected)
    assert (plain - expected).abs().max() > 0.01


def test_peft_output_without_a_manifest_converts(tmp_path: Path) -> None:
    model, _ = tuned("qwen3_moe", tmp_path / "base")
    model.save_pretrained(tmp_path / "peft")
    convert_adapter(tmp_path / "peft", nonexpert_output_dir=tmp_path / "n")
    before = open_tensor_file(tmp_path / "peft" / "adapter_model.safetensors")
    after = open_tensor_file(tmp_path / "n" / "adapter_model.safetensors")
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        assert before.tensor(name).data == after.tensor(name).data
    shutil.rmtree(tmp_path / "peft")
    assert validate_adapter([tmp_path / "n"]).ok
