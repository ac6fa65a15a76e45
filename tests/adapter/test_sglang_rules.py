"""`validate --engine sglang` without SGLang; `make test-loaders` holds the same findings against its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapterfaults import edit_config
from rawadapter import write_config, write_raw

from ktbridge.adapter import convert_adapter, validate_adapter

SHARED = {"mlp.shared_experts.down_proj": (16, 8)}
LATENT = {"self_attn.q_proj": (24, 16), "self_attn.kv_b_proj": (24, 16)}


def found(*directories: Path, **options) -> dict[str, str]:
    problems = validate_adapter(directories, engine="sglang", **options).problems
    return {problem.code: problem.severity for problem in problems}


@pytest.mark.parametrize(
    ("model_type", "kind", "code", "severity"),
    [
        ("qwen3_moe", {}, None, None),
        ("qwen3_moe", {"modules": {"mlp.gate": (3, 16)}, "block": ""}, "KTB644", "error"),
        ("qwen3_next", {"modules": {"linear_attn.in_proj_ba": (8, 16)}, "block": ""}, "KTB644", "error"),
        ("qwen3_moe", {"projections": ("gate", "up")}, "KTB645", "error"),
        ("qwen3_moe", {"modules": {"q_proj": (24, 16)}}, "KTB646", "error"),
        ("deepseek_v2", {"modules": LATENT, "block": ""}, "KTB646", "error"),
        ("glm4_moe", {"modules": SHARED, "block": ""}, "KTB648", "warning"),
    ],
)  # fmt: skip
def test_what_sglang_would_not_serve(tmp_path: Path, model_type, kind, code, severity) -> None:
    model = write_config(tmp_path / "base", model_type, n_shared_experts=1, kv_lora_rank=16)
    raw = write_raw(tmp_path / "raw", base_model=str(model), **kind)
    converted = convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    said = {p.code: p.severity for p in converted.findings if p.code[:5] == "KTB64"}
    assert said == ({code: "warning"} if severity == "error" else {})
    ours = {
        name: level
        for name, level in found(tmp_path / "out", base_model=model).items()
        if name[:5] == "KTB64" and name != "KTB647"
    }
    assert ours == ({code: severity} if code else {})


def test_a_family_that_was_not_run(tmp_path: Path) -> None:
    model = write_config(tmp_path / "base", "ernie4_5_moe")
    raw = write_raw(tmp_path / "raw", base_model=str(model))
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    assert found(tmp_path / "out", base_model=model)["KTB647"] == "info"


def test_stacked_tensors_are_compared_with_the_raw_ones(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    report = validate_adapter([raw, tmp_path / "out"], engine="sglang")
    assert not report.problems
    assert [row["num_experts"] for row in report.adapters] == [3, 3]
    other = write_raw(tmp_path / "other", seed=1)
    assert found(other, tmp_path / "out") == {"KTB504": "error"}


def test_only_the_layout_is_said_where_another_engine_is_meant(tmp_path: Path) -> None:
    """target_modules names modules that have tensors."""
    raw = write_raw(tmp_path / "raw")
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    takers = {None: "kt-merged", "sglang-kt==0.7.2": "kt-merged", "vllm": "vllm"}
    for engine, to in takers.items():
        problems = validate_adapter([tmp_path / "out"], engine=engine).problems
        assert [problem.code for problem in problems] == ["KTB216"]
        assert problems[0].severity == ("error" if engine else "info")
        assert f"--from sglang-3d --to {to}" in problems[0].next_step
    assert found(tmp_path / "out") == {}


def test_a_raw_adapter_two_halves_and_another_version(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    assert "KTB901" in found(raw)
    halves = tmp_path / "e", tmp_path / "n"
    convert_adapter(raw, expert_output_dir=halves[0], nonexpert_output_dir=halves[1])
    assert "KTB901" in found(*halves)
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    codes = {p.code for p in validate_adapter([tmp_path / "out"], engine="sglang==0.5.9").problems}
    assert codes == {"KTB902"}


def test_patterns_of_stacked_experts(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    edit_config(tmp_path / "out", alpha_pattern={"up_proj": 64}, rank_pattern={"down_proj": 2})
    assert {"KTB108", "KTB109"} <= found(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("added", "based", "said"),
    [
        ({"<a>": 30, "<b>": 31}, True, None),
        ({"<a>": 31, "<b>": 32}, True, "error"),
        ({"<a>": 31}, False, "warning"),
        ({}, False, None),
    ],
)
def test_added_tokens(tmp_path: Path, added: dict[str, int], based: bool, said: str | None) -> None:
    model = write_config(tmp_path / "base", vocab_size=32)
    raw = write_raw(tmp_path / "raw", base_model=str(model))
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    (tmp_path / "out" / "added_tokens.json").write_text(json.dumps(added))
    options = {"base_model": model} if based else {}
    assert found(tmp_path / "out", **options).get("KTB649") == said
