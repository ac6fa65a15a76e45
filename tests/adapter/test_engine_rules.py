"""`validate --engine vllm` and `sglang` without them; `make test-loaders` holds it against their code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapterfaults import edit_config
from rawadapter import convert_to, write_config, write_raw

from ktbridge.adapter import convert_adapter, validate_adapter

LATENT = {"self_attn.q_proj": (24, 16), "self_attn.kv_b_proj": (24, 16)}
KV_B = {"self_attn.kv_b_proj": (24, 16)}
SHARED = {"mlp.shared_experts.down_proj": (16, 8)}
WRAPPED = {"prefix": "model.language_model."}


def found(*directories: Path, **options) -> dict[str, str]:
    problems = validate_adapter(directories, **options).problems
    return {problem.code: problem.severity for problem in problems}


@pytest.mark.parametrize(
    ("engine", "to", "model_type", "kind", "code", "severity"),
    [
        ("vllm", "vllm", "qwen3_moe", {}, None, None),
        ("vllm", "vllm", "qwen3_moe", {"rslora": True, "other_alpha": 4.0}, None, None),
        ("vllm", "vllm", "qwen3_moe", WRAPPED, None, None),
        ("vllm", "vllm", "qwen3_vl_moe", WRAPPED, "KTB640", "warning"),
        ("vllm", "kt-merged", "mixtral", {}, "KTB641", "error"),
        ("vllm", "kt-merged", "qwen3_moe", WRAPPED, "KTB641", "error"),
        ("vllm", "vllm", "qwen3_moe", {"rank": 24, "alpha": 24.0}, "KTB642", "warning"),
        ("vllm", "vllm", "qwen3_moe", {"rank": 520, "alpha": 520.0}, "KTB642", "error"),
        ("vllm", "vllm", "deepseek_v2", {"modules": KV_B, "block": ""}, "KTB643", "error"),
        ("sglang", "sglang-3d", "qwen3_moe", {}, None, None),
        ("sglang", "sglang-3d", "qwen3_moe", {"modules": {"mlp.gate": (3, 16)}, "block": ""},
         "KTB644", "error"),
        ("sglang", "sglang-3d", "qwen3_next",
         {"modules": {"linear_attn.in_proj_ba": (8, 16)}, "block": ""}, "KTB644", "error"),
        ("sglang", "sglang-3d", "qwen3_moe", {"projections": ("gate", "up")}, "KTB645", "error"),
        ("sglang", "sglang-3d", "qwen3_moe", {"modules": {"q_proj": (24, 16)}}, "KTB646", "error"),
        ("sglang", "sglang-3d", "deepseek_v2", {"modules": LATENT, "block": ""}, "KTB646", "error"),
        ("sglang", "sglang-3d", "ernie4_5_moe", {}, "KTB647", "info"),
        ("sglang", "sglang-3d", "glm4_moe", {"modules": SHARED, "block": ""}, "KTB648", "warning"),
    ],
)  # fmt: skip
def test_what_an_engine_would_not_serve(tmp_path, engine, to, model_type, kind, code, severity):
    model = write_config(tmp_path / "base", model_type, n_shared_experts=1, kv_lora_rank=16)
    raw = write_raw(tmp_path / "raw", base_model=str(model), **kind)
    converted = convert_adapter(raw, to=to, output_dir=tmp_path / "out")
    if engine == "sglang":  # which a conversion for it says already
        said = {p.code: p.severity for p in converted.findings if p.code[:5] == "KTB64"}
        assert said == ({code: "warning"} if severity == "error" else {})
    told = found(tmp_path / "out", base_model=model, engine=engine)
    ours = {name: level for name, level in told.items() if name[:5] == "KTB64" or name[3] == "9"}
    if code != "KTB647":  # that a family was not run stands beside whatever else is wrong
        ours.pop("KTB647", None)
    assert ours == ({code: severity} if code else {})


@pytest.mark.parametrize(
    ("engine", "to", "other"), [("vllm", "vllm", "0.20"), ("sglang", "sglang-3d", "0.5.9")]
)
def test_layouts_and_versions_that_an_engine_is_not_known_to_serve(tmp_path, engine, to, other):
    raw = write_raw(tmp_path / "raw")
    convert_adapter(raw, to=to, output_dir=tmp_path / "out")
    assert "KTB901" in found(raw, engine=engine)
    halves = convert_to(raw, "en")
    assert "KTB901" in found(*halves.values(), engine=engine)
    assert "KTB901" in found(halves["e"], halves["e"], engine=engine)
    assert "KTB902" in found(tmp_path / "out", engine=f"{engine}=={other}")


def test_rslora_is_honored_by_vllm_and_not_by_sglang_kt(tmp_path):
    convert_adapter(write_raw(tmp_path / "raw"), to="vllm", output_dir=tmp_path / "out")
    edit_config(tmp_path / "out", use_rslora=True)
    assert "KTB107" in found(tmp_path / "out")
    assert "KTB107" not in found(tmp_path / "out", engine="vllm")


@pytest.mark.parametrize("to", ["peft-fused", "vllm"])
def test_two_alphas_in_a_version_of_vllm_that_reads_one(tmp_path, to):
    """--to peft-fused writes the second one as alpha_pattern, --to vllm scales by it."""
    for alpha, codes in ((8.0, set()), (16.0, {"KTB109"} if to == "peft-fused" else set())):
        raw, out = tmp_path / f"raw-{alpha}", tmp_path / f"out-{alpha}"
        write_raw(raw, other_alpha=alpha)
        convert_adapter(raw, to=to, output_dir=out)
        for version, expected in (("0.27.1", codes), ("0.33.0", set())):
            told = found(out, engine=f"vllm=={version}")
            assert {code for code, severity in told.items() if severity == "error"} == expected


def test_stacked_tensors_are_compared_with_the_raw_ones(tmp_path):
    raw = write_raw(tmp_path / "raw")
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    report = validate_adapter([raw, tmp_path / "out"], engine="sglang")
    assert not report.problems
    assert [row["num_experts"] for row in report.adapters] == [3, 3]
    other = write_raw(tmp_path / "other", seed=1)
    assert found(other, tmp_path / "out", engine="sglang") == {"KTB504": "error"}
    edit_config(tmp_path / "out", alpha_pattern={"up_proj": 64}, rank_pattern={"down_proj": 2})
    assert {"KTB108", "KTB109"} <= found(tmp_path / "out", engine="sglang").keys()


@pytest.mark.parametrize(
    ("added", "based", "said"),
    [
        ({"<a>": 30, "<b>": 31}, True, None),
        ({"<a>": 31, "<b>": 32}, True, "error"),
        ({"<a>": 31}, False, "warning"),
        ({}, False, None),
    ],
)
def test_added_tokens(tmp_path, added, based, said):
    model = write_config(tmp_path / "base", vocab_size=32)
    raw = write_raw(tmp_path / "raw", base_model=str(model))
    convert_adapter(raw, to="sglang-3d", output_dir=tmp_path / "out")
    (tmp_path / "out" / "added_tokens.json").write_text(json.dumps(added))
    options = {"base_model": model} if based else {}
    assert found(tmp_path / "out", engine="sglang", **options).get("KTB649") == said
