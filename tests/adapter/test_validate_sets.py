"""A conversion's input beside its outputs: what convert wrote is right, whatever else is not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from adapterfaults import each, edit, edit_config, edit_manifest, rename, swap_gate_and_up
from rawadapter import convert_to, write_raw

from ktbridge.adapter import validate_adapter

MANIFEST = "kt_adapter_manifest.json"


def split(source: Path, layouts: str = "enm", **options) -> list[Path]:
    return [*convert_to(source, layouts, prefix=f"{source.name}-", **options).values()]


def found(*dirs: Path, **options) -> list[str]:
    return [f"{p.code} {p.severity}" for p in validate_adapter(dirs, **options).problems]


def flip(directory: Path) -> None:
    """The lowest bit of each value, in every tensor."""
    low = bytes.maketrans(bytes(range(256)), bytes(byte ^ 1 for byte in range(256)))

    def flipped(t):
        data = bytearray(t.data)
        data[::2] = data[::2].translate(low)
        return replace(t, data=bytes(data))

    edit(directory, each("", flipped))


@pytest.fixture
def per_expert(tmp_path):
    """KT's other training output: expert LoRA inside adapter_model.safetensors, rsLoRA beside it."""
    fused = write_raw(tmp_path / "fused", rslora=True)
    (path,) = split(fused, "m")
    edit_config(path, use_rslora=True)
    shutil.copy(fused / MANIFEST, path)
    return edit_manifest(path, artifacts={})


def test_a_source_without_a_fused_file_is_compared_with(per_expert):
    expert, nonexpert, merged = split(per_expert)
    told = ["KTB107 info"]
    for dirs in ((merged,), (expert, nonexpert), (merged, nonexpert, expert)):
        assert found(per_expert, *dirs) == told
    edit(expert, swap_gate_and_up)
    problems = validate_adapter([per_expert, expert, nonexpert]).problems
    assert [(p.code, p.found) for p in problems if p.severity == "error"] == [
        ("KTB504", "gate and up are swapped")
    ]
    assert found(per_expert, expert, nonexpert, structure_only=True) == told


def test_a_conversion_may_rename_the_base_model(per_expert):
    outputs = split(per_expert, "en", base_model="models/renamed")
    assert found(per_expert, *outputs).count("KTB502 warning") == 2
    edit_config(outputs[1], base_model_name_or_path="models/base")
    assert found(per_expert, *outputs).count("KTB502 error") == 1


@pytest.mark.parametrize("layout", ["e", "n", "m"])
def test_a_serving_directory_may_be_the_source(tmp_path, layout):
    (first,) = split(write_raw(tmp_path / "raw"), layout)
    (second,) = split(first, layout)
    assert found(first, second) == []
    flip(second)
    assert found(first, second) == ["KTB504 error"] * (2 if layout == "m" else 1)


@pytest.mark.parametrize(
    ("trained", "options", "told"),
    [
        ({"dtype": "F32"}, {"dtype": "bf16"}, {"KTB304 info"}),
        ({"dtype": "F16"}, {"dtype": "bf16"}, {"KTB304 info"}),
        ({"rslora": True}, {}, {"KTB107 info"}),
        ({"rslora": True, "dtype": "F32"}, {"dtype": "bf16"}, {"KTB107 info", "KTB304 info"}),
        ({"alpha_pattern": {"q_proj": 32, "layers.1.self_attn.k_proj": 4}}, {}, {"KTB109 info"}),
        ({"alpha_pattern": {"nothing": 3}, "rank_pattern": {"zzz": 2}}, {}, set()),
    ],
)
def test_what_convert_wrote_is_right(tmp_path, trained, options, told):
    raw = write_raw(tmp_path / "raw", **trained)
    outputs = split(raw, **options)
    assert set(found(raw, *outputs)) == told
    assert [found(output) for output in outputs] == [[], [], []]
    flip(outputs[1])
    assert "KTB504 error" in found(raw, *outputs)


@pytest.mark.parametrize("layout", ["e", "n", "m"])
def test_another_alpha_is_one_fault(tmp_path, layout):
    raw = write_raw(tmp_path / "raw", other_alpha=16.0)
    (output,) = split(raw, layout)
    edit_config(output, lora_alpha=2)
    assert {line for line in found(raw, output) if "error" in line} == {"KTB505 error"}


def test_paths_in_next_steps_can_be_pasted(tmp_path):
    """Each finding that a conversion mends says which, in the shell's quotes; and it does."""
    for layout, flag in (("e", "expert"), ("n", "nonexpert"), ("m", "merged")):
        (path,) = split(write_raw(tmp_path / f"a raw {layout}"), layout)
        edit_config(path, use_rslora=True)
        steps = [p.next_step for p in validate_adapter([path]).problems]
        assert steps == [f"ktbridge convert '{path}' --{flag}-output-dir D"]
    (path,) = split(write_raw(tmp_path / "prefixed"), "e")
    edit(path, rename("model.layers", "model.language_model.layers"))
    assert found(path) == ["KTB205 warning"]
    (mended,) = split(path, "e")
    assert found(path, mended) == ["KTB205 warning"]


def test_progress_ends_when_the_work_does(tmp_path):
    raw = write_raw(tmp_path / "raw")
    seen = []
    validate_adapter([raw, *split(raw)], on_progress=lambda *numbers: seen.append(numbers))
    assert len({total for _, total in seen}) == 1
    done = [value for value, _ in seen]
    assert done == sorted(done)
    assert [value for value, total in seen if value == total] == [done[-1]]
