"""Both ways through a conversion (KT's own layouts, everything else) take options alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfaults import edit_config
from rawadapter import write_config, write_raw

from ktbridge.adapter import Adapter, ConvertReport, convert_adapter, read_adapter
from ktbridge.adapter.blocks import as_float32
from ktbridge.errors import ProblemsError

FORMATS = ("kt-merged", "raw", "vllm", "sglang-3d", "peft-fused", "gguf")
Deltas = dict[str, Any]


def deltas(adapter: Adapter) -> Deltas:
    """The product of every pair, unscaled: experts by layer and projection, the rest by module."""

    def product(a: Any, b: Any) -> Any:
        a, b = (as_float32(x.data, x.dtype).reshape(x.shape).astype(np.float64) for x in (a, b))
        return b @ a

    made = {
        f"{layer}.{projection}": product(
            *(adapter.expert_tensor(layer, f"{projection}_lora_{half}") for half in "ab")
        )
        for layer, projection, half in adapter.experts
        if half == "A"
    }
    for key in adapter.nonexpert_keys():
        if ".lora_A." in key:
            other = key.replace(".lora_A.", ".lora_B.")
            pair = adapter.nonexpert_tensor(key), adapter.nonexpert_tensor(other)
            made[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")] = product(*pair)
    return made


def served(path: Path) -> Deltas:
    """What a directory adds to the weights, at the one scale of its configuration."""
    adapter = read_adapter(path)
    return {
        name: value * (adapter.nonexpert_scale if "self_attn" in name else adapter.alpha / adapter.rank)
        for name, value in deltas(adapter).items()
    }


def through(raw: Path, to: str, **options: Any) -> tuple[Deltas, ConvertReport]:
    """What the adapter computes after a conversion to ``to``, and the report of that."""
    there, back = raw.parent / f"there-{to}", raw.parent / f"back-{to}"
    report = convert_adapter(raw, to=to, output_dir=there, **options)
    if to in ("raw", "kt-merged"):
        return served(there), report
    convert_adapter(there, to="raw", from_format=to, output_dir=back)
    return served(back), report


def equal(found: Deltas, expected: Deltas) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("config", "options", "expert", "rest"),
    [
        ({"lora_alpha": "absent"}, {"lora_alpha": 16}, 4.0, 4.0),
        ({}, {"lora_alpha": 16}, 4.0, 2.0),
        ({"alpha_pattern": {"q_proj": 8}}, {}, 2.0, 2.0),
        ({"alpha_pattern": {"q_proj": 16}, "rank_pattern": {"v_proj": 4}}, {}, 2.0, 2.0),
    ],
)
def test_alpha_wherever_it_is_given(tmp_path, to, config, options, expert, rest):
    base = write_config(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", base_model=str(base))
    doubled = 2.0 if config.get("alpha_pattern") == {"q_proj": 16} else 1.0
    expected = {
        name: value * ((rest if "self_attn" in name else expert) * (doubled if "q_proj" in name else 1))
        for name, value in deltas(read_adapter(raw)).items()
    }
    found, report = through(edit_config(raw, **config), to, **options)
    equal(found, expected)
    overrides = [item for item in report.findings if item.code == "KTB707"]
    assert len(overrides) == (1 if options and config == {} else 0)


@pytest.mark.parametrize("to", [*FORMATS, "nonexpert"])
@pytest.mark.parametrize(
    ("lora", "options", "rslora"),
    [
        ({}, {}, True),
        ({"rank": 8, "alpha": 16.0}, {}, False),
        ({"rank": 4, "alpha": 8.0}, {}, False),
        ({}, {"lora_alpha": 32}, False),
    ],
)
def test_without_experts_their_numbers_mean_nothing(tmp_path, to, lora, options, rslora):
    base = write_config(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", base_model=str(base), projections=(), rank=8, rslora=rslora)
    file = raw / "kt_adapter_manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "lora": {**manifest["lora"], **lora}}))
    scale = 8 / 8**0.5 if rslora else 1.0
    expected = {name: value * scale for name, value in deltas(read_adapter(raw)).items()}
    if to == "gguf" and rslora:  # alpha 8*sqrt(8) is no float32
        with pytest.raises(ProblemsError, match="can't be converted"):
            through(raw, to)
        return
    if to == "nonexpert":
        report = convert_adapter(raw, nonexpert_output_dir=tmp_path / "n", **options)
        found = served(tmp_path / "n")
    else:
        found, report = through(raw, to, **options)
    equal(found, expected)
    said = [(item.severity, item.found) for item in report.findings if item.code == "KTB707"]
    assert all(severity == "warning" and "not used" in text for severity, text in said)
    assert len(said) == len(options)


@pytest.mark.parametrize("to", FORMATS)
def test_per_expert_rslora_is_asked_about(tmp_path, to):
    """PEFT scales experts by alpha/sqrt(r) then, KT by alpha/r; peft_version without a manifest is PEFT's."""
    raw = write_raw(tmp_path / "raw", base_model=str(write_config(tmp_path / "base")))
    convert_adapter(raw, to="kt-merged", output_dir=tmp_path / "in")
    edit_config(tmp_path / "in", use_rslora=True)
    with pytest.raises(ProblemsError) as error:
        convert_adapter(tmp_path / "in", to=to, output_dir=tmp_path / "out")
    (step,) = [item.next_step for item in error.value.problems if item.severity == "error"]
    assert "--from vllm" in step
    assert "--from kt-merged" in step
    edit_config(tmp_path / "in", peft_version="0.17.1")
    found, _ = through(tmp_path / "in", to)
    expected = {name: value * 4.0 for name, value in deltas(read_adapter(raw)).items()}
    equal(found, expected)  # 8/sqrt(4) for both halves


def test_configurations_and_rounding_are_alike(tmp_path):
    base = write_config(tmp_path / "base")
    raw = write_raw(tmp_path / "raw", base_model=str(base), dtype="F32")
    edit_config(raw, lora_dropout=0.05, task_type="CAUSAL_LM", layers_to_transform=[1, 2])
    for to in FORMATS:
        out = tmp_path / f"out-{to}"
        report = convert_adapter(raw, to=to, output_dir=out, dtype="bf16")
        config = json.loads((out / "adapter_config.json").read_text())
        # PEFT refuses dropout on parameters.
        assert config["lora_dropout"] == (0.0 if to == "peft-fused" else 0.05)
        assert config["layers_to_transform"] == [1, 2]
        rounded = [item.found for item in report.findings if item.code == "KTB304"]
        assert rounded == ["has 28 tensors in F32, which are rounded to bfloat16 as asked for"]


def test_what_peft_would_take_for_experts_is_said(tmp_path):
    shared = {"shared_expert.gate_proj": (24, 16), "shared_expert.down_proj": (16, 24)}
    raw = write_raw(tmp_path / "raw", block="mlp", modules=shared)
    for number, (options, outputs) in enumerate(
        (
            ({"nonexpert_output_dir": "n", "merged_output_dir": "m"}, "merged, nonexpert"),
            ({"to": "vllm", "output_dir": "v"}, "vllm"),
            ({"to": "peft-fused", "output_dir": "p"}, ""),
            ({"expert_output_dir": "e"}, ""),
        )
    ):
        places = {
            name: tmp_path / f"{number}{value}" if name.endswith("dir") else value
            for name, value in options.items()
        }
        report = convert_adapter(raw, **places)
        said = [item for item in report.findings if "PEFT" in item.found]
        assert [item.severity for item in said] == ["info"] * bool(outputs)  # --strict passes
        for item in said:
            assert "down_proj, gate_proj: " in item.found
            assert f"can't load the {outputs} output" in item.found
            assert "--to peft-fused" in item.next_step
