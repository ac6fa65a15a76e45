"""Validation: each way to be wrong has its code, and what is right is left alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from adapterfaults import drop, edit, edit_config, edit_manifest, fill, swap_gate_and_up, widen
from findings import codes
from rawadapter import expert_tensors, write_config

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, UsageError

MANIFEST, FUSED = "kt_adapter_manifest.json", "fused_expert_lora.safetensors"


def found(*dirs: Path, severity: str | None = None, **options) -> set[str]:
    return codes(validate_adapter(dirs, **options), severity)


def errors(*dirs: Path, **options) -> set[str]:
    return found(*dirs, severity="error", **options)


def test_experts_nothing_was_routed_to_are_no_fault(converted, make_raw):
    path = edit(converted()["e"], fill("experts.1.down_proj.lora_B", b"\x00"))
    assert found(path) == {"KTB404"}
    tensors = expert_tensors()
    fill("gate_lora_b", b"\x00")(tensors)
    assert found(make_raw("half", expert=tensors)) == {"KTB403"}
    fill("lora_b", b"\x00")(tensors)
    assert errors(make_raw("none", expert=tensors)) == {"KTB402"}
    assert errors(make_raw("none", expert=tensors, overwrite=True), structure_only=True) == set()


def test_wide_floats_are_told_only_if_rounding_changes_them(make_raw):
    assert found(edit(make_raw("exact"), widen("lora_A", b"\x00\x00"))) == set()
    assert found(edit(make_raw("rounded"), widen("lora_A"))) == {"KTB304"}


def test_files_and_manifest(converted, make_raw):
    paths = converted()
    weights = paths["n"] / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert errors(paths["n"]) == {"KTB012"}
    assert errors(paths["n"], structure_only=True) == set()
    weights.write_bytes(data[:-2])
    assert errors(paths["n"]) == {"KTB005"}
    shutil.copy(paths["e"] / "adapter_model.safetensors", paths["m"] / "extra.safetensors")
    assert errors(paths["m"]) == {"KTB007"}
    os.chmod(paths["e"] / "adapter_config.json", 0o600)
    assert found(paths["e"]) == {"KTB009"}
    table = json.loads((paths["raw"] / MANIFEST).read_text())["artifacts"]
    less = {
        **table,
        FUSED: {**table[FUSED], "tensors": dict([*table[FUSED]["tensors"].items()][1:])},
    }
    for number, (changes, code) in enumerate(
        (
            ({"status": "writing"}, "KTB010"),
            ({"lora": {"rank": 8, "alpha": 8}}, "KTB105"),
            ({"lora": {"rank": 4, "alpha": "x"}}, "KTB010"),
            ({"artifacts": {"gone": {"size": 1}}}, "KTB011"),
            ({"artifacts": {"../x": {"size": 1}}}, "KTB010"),
            ({"artifacts": {"x" * 5000: {"size": 1}}}, "KTB011"),
            ({"artifacts": {"a\0b": {"size": 1}}}, "KTB011"),
            ({"artifacts": less}, "KTB013"),
            ({"artifacts": {**table, FUSED: {**table[FUSED], "tensors": 0}}}, "KTB013"),
        )
    ):
        assert errors(edit_manifest(make_raw(f"raw{number}"), **changes)) == {code}
    (paths["raw"] / MANIFEST).unlink()
    os.mkfifo(paths["raw"] / MANIFEST)
    assert errors(paths["raw"]) == {"KTB010"}


def test_alphas_of_a_manifest_that_a_serving_directory_contradicts(converted, make_raw):
    path = edit_manifest(converted()["e"], lora={"rank": 4, "alpha": 16.0})
    assert errors(path) == {"KTB104"}
    two = make_raw("two", alpha=16.0)
    assert (found(two), errors(two)) == ({"KTB104"}, set())


def test_what_is_no_adapter_at_all(tmp_path):
    assert errors(tmp_path / "nowhere") == {"KTB001"}
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, text, code in (
        ("", "", "KTB001"),
        ("adapter_config.json", "[]", "KTB002"),
        ("adapter_config.json", "{}", "KTB003"),
        ("adapter_model.bin", "", "KTB004"),
        ("kt_full_experts-00001.safetensors", "", "KTB006"),
    ):
        if name:
            (empty / name).write_text(text)
        assert errors(empty) == {code}
    for path in (empty, tmp_path / "nowhere"):
        with pytest.raises(KtbridgeError) as caught:
            read_adapter(path)
        assert caught.value.next_step
    with pytest.raises(UsageError):
        validate_adapter([])


@pytest.mark.parametrize(
    ("base", "severity", "expected"),
    [
        ({}, None, set()),
        ({"num_hidden_layers": 3}, "error", {"KTB603", "KTB607"}),
        ({"num_hidden_layers": 1}, "error", {"KTB603", "KTB606"}),
        ({"mlp_only_layers": [0]}, "error", {"KTB603"}),
        ({"num_experts": 4}, "error", {"KTB604"}),
        ({"num_experts": 0}, "error", {"KTB609"}),
        ({"moe_intermediate_size": 4}, "error", {"KTB605"}),
        ({"model_type": "newcomer"}, None, {"KTB602"}),
        ({"model_type": "qwen3_5_moe", "layer_types": ["linear_attention", "full_attention"]},
         "error", {"KTB610"}),
    ],
)  # fmt: skip
def test_against_the_base_model(converted, tmp_path, base, severity, expected):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": None, "num_key_value_heads": None}
    (tmp_path / "models").mkdir()
    model = write_config(tmp_path / "models" / "base", **{**sizes, **base})
    paths = converted()
    for name in ("raw", "m"):
        assert found(paths[name], severity=severity, base_model=model) == expected


def test_sets(converted, tmp_path):
    raw, e, n, m = converted().values()
    assert found(raw, e, n, m) == set()
    assert found(raw, e) == {"KTB503"}
    copy = shutil.copytree(e, tmp_path / "copy")
    assert found(e, copy) == set()
    assert errors(e, copy, n) == {"KTB506"}
    edit(copy, swap_gate_and_up)
    problems = validate_adapter([raw, copy, n]).problems
    assert [(p.code, "swapped" in p.found) for p in problems] == [("KTB504", True)]
    shutil.rmtree(copy)
    shutil.copytree(n, copy)
    edit(copy, fill("layers.1.self_attn.q_proj.lora_B", b"\x3f"))
    assert errors(raw, e, copy) == {"KTB504"}
    assert errors(raw, e, copy, structure_only=True) == set()
    edit(copy, drop("k_proj"))
    assert errors(raw, e, copy, structure_only=True) == {"KTB504"}
    edit_config(e, lora_alpha=4)
    assert errors(raw, e, n) == {"KTB505"}
    assert found(e, n, severity="warning") == {"KTB501"}
    edit_config(n, base_model_name_or_path="models/another")
    assert errors(e, n) == {"KTB502"}


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": ' + "9" * 400),
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": NaN'),
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": 5e-324'),
        ("adapter_config.json", '"r": 4', '"r": ' + "9" * 400),
        ("adapter_config.json", '"peft_type": "LORA"', '"peft_type": "\\ud800"'),
        (MANIFEST, '"alpha": 8', '"alpha": 1e-320'),
        (MANIFEST, '"alpha": 8', '"alpha": -Infinity'),
    ],
)
def test_numbers_and_text_that_break_arithmetic_are_reported(make_raw, file, old, new):
    path = make_raw() / file
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new))
    report = validate_adapter([path.parent])
    assert not report.ok
    json.dumps(report.as_dict(), allow_nan=False, ensure_ascii=False).encode()
