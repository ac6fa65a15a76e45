"""Validation: each way to be wrong has its code, and what is right is left alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapterfaults import drop, edit, edit_config, edit_manifest, fill, swap_gate_and_up

from ktbridge.adapter import Tensor, read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, UsageError

Make = Callable[..., Path]
Tensors = dict[str, Tensor]
BASE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 3,
}


def codes(*dirs: Path, severity: str | None = "error", **kwargs: Any) -> set[str]:
    problems = validate_adapter(dirs, **kwargs).problems
    return {p.code for p in problems if severity in (None, p.severity)}


def test_experts_nothing_was_routed_to_are_no_fault(
    converted: Callable[..., dict[str, Path]], make_raw: Make, experts: Callable[..., Tensors]
) -> None:
    path = edit(converted()["e"], fill("experts.1.down_proj.lora_B", b"\x00"))
    assert codes(path, severity=None) == {"KTB404"}
    tensors = experts()
    fill("gate_lora_b", b"\x00")(tensors)
    assert codes(make_raw("half", expert=tensors), severity=None) == {"KTB403"}
    fill("lora_b", b"\x00")(tensors)
    assert codes(make_raw("none", expert=tensors)) == {"KTB402"}
    assert codes(make_raw("none", expert=tensors, overwrite=True), structure_only=True) == set()


def test_wide_floats_are_told_only_if_rounding_changes_them(
    make_raw: Make, nonexperts: Callable[..., Tensors]
) -> None:
    exact, rounded = {}, {}
    for name, t in nonexperts().items():
        words = [bytes(t.data)[i : i + 2] for i in range(0, t.nbytes, 2)]
        exact[name] = Tensor(name, "F32", t.shape, b"".join(b"\0\0" + word for word in words))
        rounded[name] = Tensor(name, "F32", t.shape, b"".join(b"\1\0" + word for word in words))
    assert codes(make_raw("exact", nonexpert=exact), severity=None) == set()
    assert codes(make_raw("rounded", nonexpert=rounded), severity="info") == {"KTB304"}


def test_files_and_manifest(
    converted: Callable[..., dict[str, Path]], make_raw: Make, tmp_path: Path
) -> None:
    paths = converted()
    weights = paths["n"] / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert codes(paths["n"]) == {"KTB012"}
    assert codes(paths["n"], structure_only=True) == set()
    weights.write_bytes(data[:-2])
    assert codes(paths["n"]) == {"KTB005"}
    shutil.copy(paths["e"] / "adapter_model.safetensors", paths["m"] / "extra.safetensors")
    assert codes(paths["m"]) == {"KTB007"}
    os.chmod(paths["e"] / "adapter_config.json", 0o600)
    assert codes(paths["e"], severity=None) == {"KTB009"}
    assert codes(edit_manifest(paths["e"], status="writing")) == {"KTB010"}
    assert codes(edit_manifest(make_raw("a"), lora={"rank": 8, "alpha": 8})) == {"KTB105"}
    assert codes(edit_manifest(make_raw("c"), lora={"rank": 4, "alpha": "x"})) == {"KTB010"}
    assert codes(edit_manifest(make_raw("d"), artifacts={"gone": {"size": 1}})) == {"KTB011"}
    assert codes(edit_manifest(make_raw("g"), artifacts={"../x": {"size": 1}})) == {"KTB010"}
    raw = make_raw("f")
    manifest = json.loads((raw / "kt_adapter_manifest.json").read_text())
    manifest["artifacts"]["fused_expert_lora.safetensors"]["tensors"].popitem()
    assert codes(edit_manifest(raw, **manifest)) == {"KTB013"}


def test_what_is_no_adapter_at_all(make_raw: Make, tmp_path: Path) -> None:
    assert codes(tmp_path / "nowhere") == {"KTB001"}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert codes(empty) == {"KTB001"}
    (empty / "adapter_config.json").write_text("[]")
    assert codes(empty) == {"KTB002"}
    (empty / "adapter_config.json").write_text("{}")
    assert codes(empty) == {"KTB003"}
    (empty / "adapter_model.bin").touch()
    assert codes(empty) == {"KTB004"}
    (empty / "kt_full_experts-00001.safetensors").touch()
    assert codes(empty) == {"KTB006"}
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
        ({"hidden_size": 32}, "error", {"KTB605"}),
        ({"moe_intermediate_size": 4}, "error", {"KTB605"}),
        ({"model_type": "newcomer"}, None, {"KTB602"}),
        (
            {"model_type": "qwen3_5_moe", "layer_types": ["linear_attention", "full_attention"]},
            "error",
            {"KTB610"},
        ),
    ],
)
def test_against_the_base_model(
    converted: Callable[..., dict[str, Path]],
    tmp_path: Path,
    base: dict[str, Any],
    severity: str | None,
    expected: set[str],
) -> None:
    model = tmp_path / "models" / "base"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({**BASE, **base}))
    paths = converted()
    for name in ("raw", "m"):
        assert codes(paths[name], severity=severity, base_model=model) == expected


def test_sets(converted: Callable[..., dict[str, Path]], make_raw: Make, tmp_path: Path) -> None:
    paths = converted()
    everything = list(paths.values())
    assert codes(*everything, severity=None) == set()
    assert codes(paths["raw"], paths["e"], severity=None) == {"KTB503"}
    copy = shutil.copytree(paths["e"], tmp_path / "copy")
    assert codes(paths["e"], copy, severity=None) == set()
    assert codes(paths["e"], copy, paths["n"]) == {"KTB506"}
    edit(copy, swap_gate_and_up)
    report = validate_adapter([paths["raw"], copy, paths["n"]])
    assert [(p.code, "swapped" in p.found) for p in report.problems] == [("KTB504", True)]
    shutil.rmtree(copy)
    shutil.copytree(paths["n"], copy)
    edit(copy, fill("layers.1.self_attn.q_proj.lora_B", b"\x3f"))
    assert codes(paths["raw"], paths["e"], copy) == {"KTB504"}
    assert codes(paths["raw"], paths["e"], copy, structure_only=True) == set()
    edit(copy, drop("k_proj"))
    assert codes(paths["raw"], paths["e"], copy, structure_only=True) == {"KTB504"}
    edit_config(paths["e"], lora_alpha=4)
    assert codes(paths["raw"], paths["e"], paths["n"]) == {"KTB505"}
    assert codes(paths["e"], paths["n"], severity="warning") == {"KTB501"}
    edit_config(paths["n"], base_model_name_or_path="models/another")
    assert codes(paths["e"], paths["n"]) == {"KTB502"}


def test_manifest_alpha_that_a_serving_directory_contradicts(
    converted: Callable[..., dict[str, Path]], make_raw: Make
) -> None:
    path = edit_manifest(converted()["e"], lora={"rank": 4, "alpha": 16.0})
    assert codes(path) == {"KTB104"}
    assert codes(make_raw("two", alpha=16.0), severity=None) == {"KTB104"}
    assert codes(make_raw("two", alpha=16.0, overwrite=True)) == set()


def test_report_is_json(converted: Callable[..., dict[str, Path]]) -> None:
    seen: list[int] = []
    report = validate_adapter(
        list(converted().values()), on_progress=lambda done, total: seen.append(total - done)
    )
    assert seen[-1] == 0
    document = json.loads(json.dumps(report.as_dict()))
    assert document["ok"] is True
    assert [adapter["layout"] for adapter in document["adapters"]] == [
        "raw", "expert", "nonexpert", "merged",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": ' + "9" * 400),
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": NaN'),
        ("adapter_config.json", '"lora_alpha": 8', '"lora_alpha": 5e-324'),
        ("adapter_config.json", '"r": 4', '"r": ' + "9" * 400),
        ("adapter_config.json", '"peft_type": "LORA"', '"peft_type": "\\ud800"'),
        ("kt_adapter_manifest.json", '"alpha": 8', '"alpha": 1e-320'),
        ("kt_adapter_manifest.json", '"alpha": 8', '"alpha": -Infinity'),
    ],
)
def test_numbers_and_text_that_break_arithmetic_are_reported(
    make_raw: Make, file: str, old: str, new: str
) -> None:
    path = make_raw() / file
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new))
    report = validate_adapter([path.parent])
    assert not report.ok
    json.dumps(report.as_dict(), allow_nan=False, ensure_ascii=False).encode()


def test_a_manifest_that_lists_no_table_of_tensors_is_reported(make_raw: Make) -> None:
    path = make_raw() / "kt_adapter_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["artifacts"]["fused_expert_lora.safetensors"]["tensors"] = 0
    path.write_text(json.dumps(manifest))
    assert "KTB013" in {problem.code for problem in validate_adapter([path.parent]).problems}
