"""`validate --engine vllm` without vLLM; `make test-loaders` holds the same findings against its code."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapterfaults import edit_config
from rawadapter import write_config, write_raw

from ktbridge.adapter import convert_adapter, validate_adapter

MLA = {"self_attn.kv_b_proj": (24, 16)}


@pytest.mark.parametrize(
    ("model_type", "kind", "to", "code", "severity"),
    [
        ("qwen3_moe", {}, "vllm", None, None),
        ("qwen3_moe", {"rslora": True, "other_alpha": 4.0}, "vllm", None, None),
        ("qwen3_vl_moe", {"prefix": "model.language_model."}, "vllm", "KTB640", "warning"),
        ("mixtral", {}, "merged", "KTB641", "error"),
        ("qwen3_moe", {"prefix": "model.language_model."}, "vllm", None, None),
        ("qwen3_moe", {"prefix": "model.language_model."}, "merged", "KTB641", "error"),
        ("qwen3_moe", {"rank": 24, "alpha": 24.0}, "vllm", "KTB642", "warning"),
        ("qwen3_moe", {"rank": 520, "alpha": 520.0}, "vllm", "KTB642", "error"),
        ("deepseek_v2", {"modules": MLA, "block": ""}, "vllm", "KTB643", "error"),
    ],
)
def test_what_vllm_would_not_serve(tmp_path: Path, model_type, kind, to, code, severity) -> None:
    model = write_config(tmp_path / "base", model_type)
    raw = write_raw(tmp_path / "raw", base_model=str(model), **kind)
    convert_adapter(raw, to=f"kt-{to}" if to == "merged" else to, output_dir=tmp_path / "out")
    report = validate_adapter([tmp_path / "out"], base_model=model, engine="vllm==0.33.0")
    ours = {
        p.code: p.severity for p in report.problems if p.code[:5] == "KTB64" or p.code[3] == "9"
    }
    assert ours == ({code: severity} if code else {})


def test_a_raw_adapter_another_version_and_a_merged_directorys_rslora(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    assert "KTB901" in {p.code for p in validate_adapter([raw], engine="vllm").problems}
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "out")
    found = validate_adapter([tmp_path / "out"], engine="vllm==0.20").problems
    assert "KTB902" in {p.code for p in found}
    edit_config(tmp_path / "out", use_rslora=True)  # which vLLM honors, and SGLang-KT doesn't
    assert "KTB107" in {p.code for p in validate_adapter([tmp_path / "out"]).problems}
    assert not [
        p
        for p in validate_adapter([tmp_path / "out"], engine="vllm").problems
        if p.code == "KTB107"
    ]


@pytest.mark.parametrize("to", ["peft-fused", "vllm"])
def test_two_alphas_in_a_version_that_reads_one(tmp_path: Path, to) -> None:
    """--to peft-fused writes the second one as alpha_pattern, --to vllm scales by it."""
    for alpha, codes in ((8.0, set()), (16.0, {"KTB109"} if to == "peft-fused" else set())):
        raw, out = tmp_path / f"raw-{alpha}", tmp_path / f"out-{alpha}"
        write_raw(raw, other_alpha=alpha)
        convert_adapter(raw, to=to, output_dir=out)
        for version, expected in (("0.27.1", codes), ("0.33.0", set())):
            problems = validate_adapter([out], engine=f"vllm=={version}").problems
            assert {p.code for p in problems if p.severity == "error"} == expected
