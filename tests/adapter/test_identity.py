"""The manifest records which base model an adapter was trained on: moved is fine, another is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rawadapter import random_bits, write_base, write_config, write_raw

from ktbridge.adapter import convert_adapter, merge_adapter, validate_adapter
from ktbridge.errors import ProblemsError
from ktbridge.model import fingerprint, open_tensor_file

MANIFEST = "kt_adapter_manifest.json"


def nested(depth: int) -> dict[str, Any]:
    return {"text_config": nested(depth - 1)} if depth else {}


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


@pytest.fixture
def raw(base, tmp_path):
    return write_raw(tmp_path / "raw", layers=(0, 1), base_model=str(base))


@pytest.fixture
def ktbridge(warm, tmp_path):
    return lambda *args: warm.run("-m", "ktbridge", *args, cwd=tmp_path)


def found(adapter: Path, base: Path, **options: Any) -> list[tuple[str, str]]:
    """(code, severity) of what validation against a base model finds."""
    report = validate_adapter([adapter], base_model=base, **options)
    return [(problem.code, problem.severity) for problem in report.problems]


def refused(raw: Path, base: Path, **options: Any) -> list[str]:
    """Codes of the errors for which a merge is refused."""
    with pytest.raises(ProblemsError) as caught:
        merge_adapter(raw, base_model=base, output=raw.parent / "out", **options)
    assert not (raw.parent / "out").exists()
    return [problem.code for problem in caught.value.problems if problem.severity == "error"]


def manifest_of(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / MANIFEST).read_text()))


def test_a_base_that_moved_and_was_split_anew_is_the_same(raw, base):
    base.rename(base.with_name("gone"))
    elsewhere = write_base(base.with_name("elsewhere"), shards=3)
    assert fingerprint(elsewhere) == fingerprint(base.with_name("gone"))
    assert found(raw, elsewhere) == []
    assert merge_adapter(raw, base_model=elsewhere, output=raw.parent / "out").findings == ()


def test_another_model_of_the_same_shape_is_refused(raw, base, tmp_path, ktbridge):
    (tmp_path / "other").mkdir()
    write_base(tmp_path / "other" / "base", seed=2)  # of the same name as well
    ran = ktbridge("merge", "raw", "--base-model", "other/base", "--output", "out")
    assert ran.returncode == 1
    assert "KTB612" in ran.stderr
    assert "--allow-other-base" in ran.stderr
    assert sorted(os.listdir(tmp_path)) == ["base", "other", "raw"]
    checked = ktbridge("validate", "raw", "--base-model", "other/base", "--json")
    assert checked.returncode == 1
    assert [item["code"] for item in json.loads(checked.stdout)["problems"]] == ["KTB612"]
    words = ("merge", "raw", "--base-model", "other/base", "--output", "out")
    meant = ktbridge(*words, "--allow-other-base", "--json")
    warned = [(item["code"], item["severity"]) for item in json.loads(meant.stdout)["findings"]]
    assert (meant.returncode, warned) == (0, [("KTB612", "warning")])
    assert found(raw, tmp_path / "other" / "base", allow_other_base=True) == [("KTB612", "warning")]
    assert ktbridge("merge", "raw", "--base-model", "base", "--output", "fine").returncode == 0


@pytest.mark.parametrize("kind", ["self_attn.k_proj", "experts.1.up_proj"])
def test_a_model_that_differs_in_one_kind_of_tensor_is_another(raw, base, tmp_path, kind):
    """As where LoRA was merged into attention alone, or experts alone were trained."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    for path in other.glob("*.safetensors"):
        for entry in open_tensor_file(path).entries.values():
            if kind in entry.name:
                with open(path, "r+b") as file:
                    file.seek(entry.start)
                    file.write(random_bits(np.random.default_rng(5), entry.shape))
    assert refused(raw, other) == ["KTB612"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "float32", "transformers_version": "9", "architectures": ["X"]}, []),
        ({"rope_theta": 5e5, "num_experts_per_tok": 3}, [("KTB613", "warning")]),
    ],
)
def test_the_same_weights_under_another_configuration(raw, tmp_path, changes, expected):
    raw = write_raw(
        tmp_path / "tuned", layers=(0, 1),
        base_model=str(write_base(tmp_path / "theirs", rope_theta=1e6, torch_dtype="bfloat16")),
    )  # fmt: skip
    other = write_base(tmp_path / "other", **{"rope_theta": 1e6, **changes})
    report = validate_adapter([raw], base_model=other)
    assert [(item.code, item.severity) for item in report.problems] == expected
    assert [item.found for item in report.problems] == ["differs in num_experts_per_tok, rope_theta"] * bool(
        expected
    )
    merged = merge_adapter(raw, base_model=other, output=tmp_path / "out")
    assert [(item.code, item.severity) for item in merged.findings] == expected


def test_the_same_model_in_another_format_is_to_be_meant(raw, tmp_path):
    wide = write_base(tmp_path / "wide", dtype="F32")
    assert found(raw, wide) == [("KTB612", "warning")]  # as one may serve from FP8
    assert refused(raw, wide) == ["KTB612"]
    merge_adapter(raw, base_model=wide, output=tmp_path / "out", allow_other_base=True)


def test_a_base_without_weights_or_with_damaged_ones(raw, base, tmp_path):
    config = write_config(tmp_path / "configured", num_hidden_layers=2)
    assert found(raw, config) == [("KTB601", "warning")]  # by name, as without a fingerprint
    shard = base / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    assert found(raw, base) == [("KTB614", "warning")]


def test_conversion_carries_it_on(raw, base, tmp_path):
    recorded = manifest_of(raw)["base_fingerprint"]
    # KT's own loader compares these two as a whole with what it expects.
    assert manifest_of(raw)["base"] == {"model_name_or_path": str(base)}
    assert manifest_of(raw)["lora"] == {"rank": 4, "alpha": 8.0}
    other, split = write_base(tmp_path / "other", seed=2), {}
    for name in ("expert", "nonexpert", "merged"):
        split[f"{name}_output_dir"] = tmp_path / name
    convert_adapter(raw, **split, base_model=str(other))  # whatever the configuration names
    for path in split.values():
        assert manifest_of(path)["base_fingerprint"] == recorded
        assert ("KTB612", "error") in found(path, other)
    assert refused(tmp_path / "merged", other) == ["KTB612"]
    source = raw
    for to in ("peft-fused", "raw", "vllm"):
        convert_adapter(source, to=to, output_dir=tmp_path / f"to-{to}")
        source = tmp_path / f"to-{to}"
        assert manifest_of(source)["base_fingerprint"] == recorded


@pytest.mark.parametrize(
    "recorded",
    [
        None, "0123456789abcdef", 3, [], {}, {"version": 2, "config_sha256": "", "config": {}},
        {"version": 1, "config_sha256": 3, "config": {}},
        {"version": 1, "config_sha256": "", "config": {}, "tensors_sha256": 5, "values_sha256": "x"},
        {"version": 1, "config_sha256": "", "config": nested(700)},
    ],
)  # fmt: skip
def test_a_fingerprint_of_another_kind_says_nothing(raw, base, tmp_path, recorded):
    """KT's own is text under another name; a later version of ours may have other fields."""
    manifest = {**manifest_of(raw), "base_fingerprint": recorded}
    (raw / MANIFEST).write_text(json.dumps(manifest))
    other = write_base(tmp_path / "other", seed=2)
    assert found(raw, base) == []
    assert found(raw, other) == [("KTB601", "warning")]


def test_an_adapter_is_saved_whatever_its_base_is_like(base, tmp_path):
    (base / "model-0.safetensors").write_bytes(b"damaged")
    for number, name in enumerate((str(base), "/gone", "org/model", "~nobody/x", "a\0b")):
        raw = write_raw(tmp_path / f"raw-{number}", layers=(0, 1), base_model=name)
        assert "base_fingerprint" not in manifest_of(raw)
        assert validate_adapter([raw]).ok
