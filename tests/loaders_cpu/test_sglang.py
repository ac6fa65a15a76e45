"""Adapters of every family through upstream SGLang's loader, pool and layers, and what it ends over."""

from __future__ import annotations

import pytest
from loaders import FAMILIES, deltas_of, make_raw, outcome, same

from ktbridge.adapter import convert_adapter, validate_adapter

VERSION = "0.5.23"
pytestmark = pytest.mark.timeout(600)  # the first test starts SGLang
GATES = ["mlp.gate", "mlp.shared_expert_gate"]
INPUTS = [f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")]
WITHOUT_RANK = ["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"]
# Of each family all modules but those of REFUSED below.
WITHOUT = {
    "qwen3_5_moe": [*GATES, *INPUTS],
    "deepseek_v2": WITHOUT_RANK,
}
UNSIZED, UNHELD = "KTB644", "KTB646"
REFUSED = [
    # family, the only other modules, code, what SGLang says
    ("qwen3_moe", ["mlp.gate"], UNSIZED, "get_hidden_dim not implemented for gate"),
    ("qwen2_moe", ["mlp.shared_expert_gate"], UNSIZED, "No corresponding LoRA layer"),
    *(("qwen3_5_moe", [name], UNSIZED, "get_hidden_dim not implemented") for name in INPUTS),
    *(("deepseek_v2", [name], UNHELD, "") for name in WITHOUT_RANK),
    ("deepseek_v3", ["self_attn.q_a_proj"], UNHELD, "does not match weight shape"),
    ("deepseek_v3", ["self_attn.kv_a_proj_with_mqa"], UNHELD, "Cannot find target module"),
]


def errors(report):
    return {finding.code for finding in report.problems if finding.severity == "error"}


@pytest.mark.parametrize(
    ("model_type", "to"),
    [
        *((name, "sglang-3d") for name in FAMILIES),
        ("qwen3_moe", "vllm"),
        ("olmoe", "vllm"),
        ("qwen3_moe", "kt-merged"),
    ],
)
def test_every_tensor_arrives(loaders, models, tmp_path, model_type, to):
    model = models(model_type)
    without = WITHOUT.get(model_type, GATES)
    raw = make_raw(tmp_path / "raw", model_type, model, without=without)
    convert_adapter(raw, to=to, output_dir=tmp_path / to)
    found = loaders("sglang", VERSION).load(model, tmp_path / to)
    same(found, deltas_of(raw))
    report = validate_adapter([raw, tmp_path / to], base_model=model, engine="sglang")
    assert not errors(report), report.problems


@pytest.mark.parametrize(("model_type", "modules", "code", "says"), REFUSED)
def test_modules_that_end_the_server(loaders, models, tmp_path, model_type, modules, code, says):
    model = models(model_type)
    without = [name for name in FAMILIES[model_type][3] if name not in modules]
    raw = make_raw(tmp_path / "raw", model_type, model, without=without)
    converted = convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    assert (code, "warning") in {(p.code, p.severity) for p in converted.findings}
    found = loaders("sglang", VERSION).load(model, tmp_path / "out")
    assert says in str(found)
    assert outcome(found, {}) == "refuses"
    report = validate_adapter([tmp_path / "out"], base_model=model, engine="sglang")
    assert errors(report) == {code}


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_w1_w2_and_w3_among_target_modules_end_the_start(loaders, models, tmp_path, model_type):
    """Which is how vLLM has them, and what --to sglang-3d is for."""
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    found = loaders("sglang", VERSION).load(model, tmp_path / "vllm")
    assert "get_hidden_dim not implemented for w" in str(found)
    report = validate_adapter([tmp_path / "vllm"], base_model=model, engine="sglang")
    assert errors(report) == {UNSIZED}
    assert "--to sglang-3d" in report.problems[0].next_step


def test_a_fused_shared_experts_lora_is_dropped(loaders, models, tmp_path):
    """What SGLang does of itself on NVIDIA's GPUs, asked for here."""
    model = models("deepseek_v3")
    raw = make_raw(tmp_path / "raw", "deepseek_v3", model)
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    loader, whole = loaders("sglang", VERSION), deltas_of(raw)
    found = loader.load(model, tmp_path / "out", enforce_shared_experts_fusion=True)
    shared = {path: delta for path, delta in whole.items() if ".shared_experts." in path}
    assert outcome(found, shared) == "drops"
    assert not found.keys() & shared.keys()
    flags = {"enforce_shared_experts_fusion": True, "disable_shared_experts_fusion": True}
    same(loader.load(model, tmp_path / "out", **flags), whole)
