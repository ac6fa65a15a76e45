"""A conversion's input beside its outputs: what convert wrote is right, whatever else is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from adapterfaults import Tensors, edit, edit_config, edit_manifest, rename, swap_gate_and_up
from rawadapter import write_raw

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter


def split(source: Path, *, layouts: str = "enm", **options: Any) -> list[Path]:
    paths = {name: source.parent / f"{source.name}-{name}" for name in layouts}
    convert_adapter(
        source,
        expert_output_dir=paths.get("e"),
        nonexpert_output_dir=paths.get("n"),
        merged_output_dir=paths.get("m"),
        **options,
    )
    return list(paths.values())


def found(*dirs: Path, **kwargs: Any) -> list[str]:
    return [f"{p.code} {p.severity}" for p in validate_adapter(dirs, **kwargs).problems]


def thrice(table: Tensors) -> None:
    for name, t in table.items():
        data = bytes(byte ^ (0x01 if n % 2 == 0 else 0) for n, byte in enumerate(bytes(t.data)))
        table[name] = Tensor(name, t.dtype, t.shape, data)


@pytest.fixture
def per_expert(tmp_path: Path) -> Path:
    """KT's other training output: expert LoRA inside adapter_model.safetensors, rsLoRA beside it."""
    write_raw(tmp_path / "fused", rslora=True)
    (path,) = split(tmp_path / "fused", layouts="m")
    edit(path, lambda table: None)
    shutil.copy(tmp_path / "fused" / "kt_adapter_manifest.json", path)
    edit_manifest(path, artifacts={})
    edit_config_keeping_manifest(path)
    return path


def edit_config_keeping_manifest(path: Path) -> None:
    manifest = (path / "kt_adapter_manifest.json").read_bytes()
    edit_config(path, use_rslora=True)
    (path / "kt_adapter_manifest.json").write_bytes(manifest)


def test_a_source_without_a_fused_file_is_compared_with(per_expert: Path) -> None:
    expert, nonexpert, merged = split(per_expert)
    told = ["KTB107 info"]
    assert found(per_expert, merged) == told
    assert found(per_expert, expert, nonexpert) == told
    assert found(per_expert, merged, nonexpert, expert) == told
    edit(expert, swap_gate_and_up)
    report = validate_adapter([per_expert, expert, nonexpert])
    assert [(p.code, p.found) for p in report.problems if p.severity == "error"] == [
        ("KTB504", "gate and up are swapped")
    ]
    assert found(per_expert, expert, nonexpert, structure_only=True) == told


def test_a_conversion_may_rename_the_base_model(per_expert: Path) -> None:
    outputs = split(per_expert, layouts="en", base_model="models/renamed")
    assert found(per_expert, *outputs).count("KTB502 warning") == 2
    edit_config(outputs[1], base_model_name_or_path="models/base")
    assert found(per_expert, *outputs).count("KTB502 error") == 1


@pytest.mark.parametrize("layout", ["e", "n", "m"])
def test_a_serving_directory_may_be_the_source(tmp_path: Path, layout: str) -> None:
    (first,) = split(write_raw(tmp_path / "raw"), layouts=layout)
    (second,) = split(first, layouts=layout)
    assert found(first, second) == []
    edit(second, thrice)
    assert found(first, second) == ["KTB504 error"] * (2 if layout == "m" else 1)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({"dtype": "F32"}, {"dtype": "bf16"}, {"KTB304 info"}),
        ({"dtype": "F16"}, {"dtype": "bf16"}, {"KTB304 info"}),
        ({"rslora": True}, {}, {"KTB107 info"}),
        ({"rslora": True, "dtype": "F32"}, {"dtype": "bf16"}, {"KTB107 info", "KTB304 info"}),
        ({"alpha_pattern": {"q_proj": 32, "layers.1.self_attn.k_proj": 4}}, {}, {"KTB109 info"}),
        ({"alpha_pattern": {"nothing": 3}, "rank_pattern": {"zzz": 2}}, {}, set()),
    ],
)
def test_what_convert_wrote_is_right(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], told: set[str]
) -> None:
    patterns = {name: config.pop(name) for name in list(config) if "pattern" in name}
    raw = write_raw(tmp_path / "raw", **config)
    if patterns:
        edit_config_with(raw, patterns)
    outputs = split(raw, **options)
    assert set(found(raw, *outputs)) == told
    for output in outputs:
        assert found(output) == []
    edit(outputs[1], thrice)
    assert "KTB504 error" in found(raw, *outputs)


def edit_config_with(raw: Path, changes: dict[str, Any]) -> None:
    manifest = (raw / "kt_adapter_manifest.json").read_bytes()
    edit_config(raw, **changes)
    (raw / "kt_adapter_manifest.json").write_bytes(manifest)
    edit_manifest(raw, artifacts={})


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        ({"alpha_pattern": {"q_proj": 12}}, "KTB109"),
        ({"rank_pattern": {"q_proj": 2}}, "KTB301"),
        ({"alpha_pattern": ["q_proj"]}, "KTB109"),
    ],
)
def test_patterns_that_no_conversion_folds_are_errors(
    tmp_path: Path, pattern: dict[str, Any], code: str
) -> None:
    raw = write_raw(tmp_path / "raw")
    edit_config_with(raw, pattern)
    assert [line for line in found(raw) if "error" in line] == [f"{code} error"]


@pytest.mark.parametrize("layout", ["e", "n", "m"])
def test_another_alpha_is_one_fault(tmp_path: Path, layout: str) -> None:
    raw = write_raw(tmp_path / "raw", other_alpha=16.0)
    (output,) = split(raw, layouts=layout)
    edit_config(output, lora_alpha=2)
    codes = {line for line in found(raw, output) if "error" in line}
    assert codes == {"KTB505 error"}


def test_paths_in_next_steps_can_be_pasted(tmp_path: Path) -> None:
    """Each finding that a conversion mends says which, in the shell's quotes; and it does."""
    for layout, flag in (("e", "expert"), ("n", "nonexpert"), ("m", "merged")):
        (path,) = split(write_raw(tmp_path / f"a raw {layout}"), layouts=layout)
        edit_config(path, use_rslora=True)
        steps = [p.next_step for p in validate_adapter([path]).problems]
        assert steps == [f"ktbridge convert '{path}' --{flag}-output-dir D"]
    (path,) = split(write_raw(tmp_path / "prefixed"), layouts="e")
    edit(path, rename("model.layers", "model.language_model.layers"))
    assert found(path) == ["KTB205 warning"]
    (mended,) = split(path, layouts="e")
    assert found(path, mended) == ["KTB205 warning"]


def test_progress_ends_when_the_work_does(tmp_path: Path) -> None:
    raw = write_raw(tmp_path / "raw")
    seen: list[tuple[int, int]] = []
    validate_adapter([raw, *split(raw)], on_progress=lambda *numbers: seen.append(numbers))
    assert len({total for _, total in seen}) == 1
    done = [value for value, _ in seen]
    assert done == sorted(done)
    assert [value for value, total in seen if value == total] == [done[-1]]
