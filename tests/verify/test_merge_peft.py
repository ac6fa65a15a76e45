"""``verify --merged`` of checkpoints that PEFT's own code merged, rightly and wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ktbridge.adapter import open_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.verify.merge_check import check_merge
from ktbridge.verify.merge_verdict import MergeVerdict, judge_merge

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from realmerges import load, tune, write_base  # noqa: E402

ADAPTER = "adapter"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base and an adapter of each family, made once."""
    places: dict[str, Path] = {}

    def make(family):
        if family not in places:
            places[family] = path = tmp_path_factory.mktemp(family)
            tune(write_base(family, path / "base"), path / ADAPTER)
        return places[family]

    return make


def with_adapter(model: Any, path: Path) -> Any:
    return peft.PeftModel.from_pretrained(model, path)


def verified(base: Path, merged: Path, adapter: Path) -> MergeVerdict:
    return judge_merge(check_merge(base, merged, open_adapter(adapter, base_model=base)))


RIGHT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # how: family, how it is loaded, how it is saved
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "deepseek_v3": ("deepseek_v3", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "glm4_moe": ("glm4_moe", {}, {}),
    "in float32": ("qwen3_moe", {"dtype": torch.float32}, {}),
    "in float16": ("gpt_oss", {"dtype": torch.float16}, {}),
    "in many shards": ("deepseek_v3", {}, {"max_shard_size": "20KB"}),
    "experts fused": ("qwen3_moe", {}, {"save_original_format": False}),
    "mixtral's experts fused": ("mixtral", {}, {"save_original_format": False}),
}


@pytest.mark.quick("mixtral|gpt_oss|qwen3_moe")
@pytest.mark.parametrize("how", RIGHT)
def test_right_merges_are_applied(tmp_path, made, how):
    family, loaded, saved = RIGHT[how]
    path = made(family)
    merged = with_adapter(load(path / "base", **loaded), path / ADAPTER).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged", **saved)
    verdict = verified(path / "base", tmp_path / "merged", path / ADAPTER)
    assert (verdict.ok, verdict.verdict) == (True, "applied"), verdict.sentence
    assert 0.99 < verdict.kept < 1.01


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}},
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"layers_to_transform": [1], "target_parameters": None},
    ],
)
def test_settings_of_an_adapter_are_its_own(tmp_path, settings):
    base = write_base("qwen3_moe", tmp_path / "base")
    merged = tune(base, tmp_path / ADAPTER, **settings).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    verdict = verified(base, tmp_path / "merged", tmp_path / ADAPTER)
    assert verdict.verdict == "applied", verdict.sentence


def _configured(path: Path, copy: Path, **changes: Any) -> Path:
    """The adapter with another configuration, as an edit or another release leaves it."""
    shutil.copytree(path / ADAPTER, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | changes))
    return copy


def _in_blocks(path: Path, copy: Path) -> Path:
    """The adapter as Unsloth before 2026.9.6 packs it: B's columns expert by expert."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(path / ADAPTER, copy)
    tensors = load_file(copy / "adapter_model.safetensors")
    for name, b in tensors.items():
        if "experts" in name and "lora_B" in name:
            tensors[name] = b.reshape(len(b), -1, 4).transpose(1, 2).reshape(len(b), -1).contiguous()
    save_file(tensors, copy / "adapter_model.safetensors")
    return copy


FAULTS = {
    "alpha/r read as rsLoRA's": ("another scale", "(×2): it was added twice, or alpha doubled, or alpha/√r"),
    "layers left out": ("in part", "not applied: self_attn.o, self_attn.q in layers 1"),
    "unload without merging": ("not applied", "all 28 matrices with LoRA: the base's"),
    "Unsloth's order": ("B packed otherwise", "stored expert by expert, read rank by rank"),
    "two adapters": ("further changes", "all 28 matrices with LoRA: the adapter's delta, and"),
}  # fmt: skip


def _merge(path: Path, copy: Path, mistake: str) -> Any:
    """PEFT's merge with a mistake that PEFT doesn't object to; most others: tests/verify/test_merged.py."""
    model = load(path / "base")
    if mistake == "unload without merging":
        return with_adapter(model, path / ADAPTER).unload()
    if mistake == "two adapters":
        tune(path / "base", copy, seed=5)
        both = with_adapter(model, path / ADAPTER)
        both.load_adapter(copy, "second")
        return both.merge_and_unload(adapter_names=["default", "second"])
    if mistake == "Unsloth's order":
        changed = _in_blocks(path, copy)
    elif mistake == "layers left out":
        changed = _configured(path, copy, layers_to_transform=[0])
    else:
        changed = _configured(path, copy, use_rslora=True)
    return with_adapter(model, changed).merge_and_unload()


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mistake", FAULTS)
def test_mistakes_by_pefts_own_merge_are_named(tmp_path, made, family, mistake):
    path = made(family)
    _merge(path, tmp_path / "copy", mistake).save_pretrained(tmp_path / "merged")
    verdict = verified(path / "base", tmp_path / "merged", path / ADAPTER)
    expected, said = FAULTS[mistake]
    assert (verdict.ok, verdict.verdict) == (False, expected), verdict.sentence
    assert said in verdict.sentence


def test_merging_in_place_saves_names_that_nothing_reads(tmp_path, made):
    """merge_adapter() leaves PEFT's wrappers: transformers loads such a file with random experts."""
    path = made("qwen3_moe")
    tuned = with_adapter(load(path / "base"), path / ADAPTER)
    tuned.merge_adapter()
    tuned.base_model.model.save_pretrained(tmp_path / "merged")
    with pytest.raises(KtbridgeError, match="has PEFT's wrapped modules") as caught:
        verified(path / "base", tmp_path / "merged", path / ADAPTER)
    assert "merge_and_unload" in caught.value.next_step
