"""What the engine's loaders do with a damaged adapter, and that validation never lets one through.

Each row is one damage to a directory that was right. ``does`` is what the real loader makes of it: refuses
it, drops (serves without a part of the adapter, silently), ignores (serves as if the damage weren't there,
which is not what the adapter says), rescales, or takes (serves other values). Only "refuses" can be heard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adapterfaults import Tensors, add, drop, edit, edit_config, fill, rename, swap_gate_and_up
from realengine import EXPERTS, HIDDEN, MERGED, RANK, SPLIT, Loaded, Pairs

from ktbridge.adapter import convert_adapter, validate_adapter

P = "base_model.model.model.layers."
UP = "mlp.experts.0.up_proj"
FURTHER = f"{P}0.mlp.experts.{EXPERTS}.up_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.weight"
OUT = "self_attn.o_proj"
MAGNITUDE = f"{P}0.{OUT}.lora_magnitude_vector"

pytestmark = pytest.mark.timeout(600)  # the first test of a version starts its engine


def config(**changes: object) -> Callable[[Path], Path]:
    return lambda directory: edit_config(directory, **changes)


def tensors(*changes: Callable[[Tensors], None]) -> Callable[[Path], Path]:
    def damage(directory: Path) -> Path:
        for change in changes:
            edit(directory, change)
        return directory

    return damage


def another(directory: Path) -> Path:
    """A second file of tensors beside the first."""
    shutil.copy(directory / "adapter_model.safetensors", directory / "old.safetensors")
    return edit_to(directory / "old.safetensors", fill("o_proj.lora_B", b"\x80\x3f"))


def edit_to(path: Path, change: Callable[[Tensors], None]) -> Path:
    scratch = path.parent.parent / f"{path.parent.name}-scratch"
    scratch.mkdir()
    shutil.move(path, scratch / "adapter_model.safetensors")
    edit(scratch, change)
    shutil.move(scratch / "adapter_model.safetensors", path)
    return path.parent


vision = tensors(drop(f"layers.1.{OUT}"), rename(f"layers.0.{OUT}", f"visual.layers.1.{OUT}"))

EXPERT = [
    # what, damage, what both versions do, what `ktbridge validate` calls it
    ("a missing layer", tensors(drop("layers.1.")), "refuses", "KTB603"),
    ("a missing expert", tensors(drop("layers.1.mlp.experts.1.")), "refuses", "KTB203"),
    ("a missing projection", tensors(drop("layers.1.mlp.experts.1.up_proj")), "refuses", "KTB203"),
    ("A without B", tensors(drop("experts.1.up_proj.lora_B")), "refuses", "KTB203"),
    ("B without A", tensors(drop("experts.1.up_proj.lora_A")), "refuses", "KTB203"),
    ("an extra layer", tensors(add(f"{P}7.{UP}.lora_A.weight", (RANK, HIDDEN))), "ignores", "KTB603"),
    ("an extra expert", tensors(add(FURTHER, (RANK, HIDDEN))), "ignores", "KTB604"),
    ("rsLoRA", config(use_rslora=True), "ignores", "KTB107"),
    ("alpha_pattern", config(alpha_pattern={"up_proj": 64}), "ignores", "KTB109"),
    ("rank_pattern", config(rank_pattern={"up_proj": 2}), "ignores", "KTB108"),
    ("another r", config(r=2 * RANK), "refuses", "KTB301"),
    ("no r", config(r="absent"), "ignores", "KTB102"),
    ("no alpha", config(lora_alpha="absent"), "rescales", "KTB103"),
    ("DoRA", config(use_dora=True), "ignores", "KTB110"),
    ("a magnitude", tensors(add(f"{P}0.{UP}.lora_magnitude_vector", (40,))), "ignores", "KTB110"),
    ("a bias", tensors(add(f"{P}0.{UP}.lora_B.bias", (40,))), "ignores", "KTB111"),
    ("lora_bias", config(lora_bias=True), "ignores", "KTB111"),
    ("a whole module", tensors(add(HEAD, (128, HIDDEN))), "ignores", "KTB112"),
    ("fan_in_fan_out", config(fan_in_fan_out=True), "ignores", "KTB113"),
    ("NaN", tensors(fill("experts.0.up_proj.lora_B", b"\xff")), "takes", "KTB401"),
    ("all B zero", tensors(fill("lora_B", b"\x00")), "drops", "KTB402"),
    ("gate and up swapped", tensors(swap_gate_and_up), "takes", "KTB504"),
    ("a draft layer's", tensors(rename("model.layers.1", "mtp.layers.1")), "refuses", "KTB207"),
    ("another block", tensors(rename(".mlp.ex", ".block_sparse_moe.ex")), "refuses", "KTB214"),
]  # fmt: skip

REST = [
    # what, damage, what 0.6.4 does, what 0.7.2 does, what `ktbridge validate` calls it
    ("a missing layer", tensors(drop("layers.1.")), "drops", "drops", "KTB607"),
    ("a missing module", tensors(drop("layers.1.self_attn.o_proj")), "drops", "drops", "KTB607"),
    ("A without B", tensors(drop("layers.1.self_attn.o_proj.lora_B")), "drops", "drops", "KTB202"),
    ("B without A", tensors(drop("layers.1.self_attn.o_proj.lora_A")), "drops", "drops", "KTB202"),
    ("k without q and v", tensors(drop("q_proj"), drop("v_proj")), "refuses", "refuses", "KTB209"),
    ("layer 7 too", tensors(add(f"{P}7.{OUT}.lora_A.weight", (RANK, 64))), "refuses", "refuses", "KTB606"),
    ("rsLoRA", config(use_rslora=True), "ignores", "ignores", "KTB107"),
    ("alpha_pattern", config(alpha_pattern={"o_proj": 64}), "ignores", "ignores", "KTB109"),
    ("rank_pattern", config(rank_pattern={"o_proj": 2}), "ignores", "ignores", "KTB108"),
    ("a larger r", config(r=2 * RANK), "refuses", "refuses", "KTB301"),
    ("a smaller r", config(r=RANK // 2), "refuses", "refuses", "KTB301"),
    ("no alpha", config(lora_alpha="absent"), "refuses", "refuses", "KTB103"),
    ("DoRA", config(use_dora=True), "ignores", "ignores", "KTB110"),
    ("a magnitude", tensors(add(MAGNITUDE, (HIDDEN,))), "refuses", "refuses", "KTB110"),
    ("a bias", tensors(add(f"{P}0.{OUT}.lora_B.bias", (HIDDEN,))), "ignores", "refuses", "KTB111"),
    ("lora_bias", config(lora_bias=True), "ignores", "ignores", "KTB111"),
    ("a whole module", tensors(add(HEAD, (128, HIDDEN))), "ignores", "refuses", "KTB112"),
    ("fan_in_fan_out", config(fan_in_fan_out=True), "ignores", "ignores", "KTB113"),
    ("target_modules in words", config(target_modules="all-linear"), "refuses", "refuses", "KTB106"),
    ("a target left out", config(target_modules=["q_proj"]), "refuses", "refuses", "KTB118"),
    ("LoHa", config(peft_type="LOHA"), "refuses", "refuses", "KTB101"),
    ("NaN", tensors(fill("layers.0.self_attn.o_proj.lora_B", b"\xff")), "takes", "takes", "KTB401"),
    ("all B zero", tensors(fill("lora_B", b"\x00")), "drops", "drops", "KTB402"),
    ("a vision tower's", vision, "takes", "takes", "KTB206"),
    ("a second file", another, "takes", "takes", "KTB007"),
]  # fmt: skip


def outcome(loaded: Loaded, whole: Pairs) -> str:
    """One word for what became of a directory that once held ``whole``."""
    if loaded.error:
        assert loaded.stage != "arguments" or "LoRA" in loaded.error  # not for another reason
        return "refuses"
    assert loaded.pairs.keys() == whole.keys()
    changed = {
        path: loaded.pairs[path]
        for path, pair in whole.items()
        if not all(map(np.array_equal, loaded.pairs[path], pair))
    }
    if not changed:
        return "ignores"
    if all(not a.any() or not b.any() for a, b in changed.values()):
        return "drops"
    factor = next(b[0, 0] / whole[path][1][0, 0] for path, (_, b) in changed.items())
    scaled = all(
        np.array_equal(a, whole[path][0]) and np.array_equal(b, factor * whole[path][1])
        for path, (a, b) in changed.items()
    )
    return "rescales" if scaled else "takes"


ROWS = [("expert", what, damage, (does, does), code) for what, damage, does, code in EXPERT]
ROWS += [("nonexpert", what, damage, (old, new), code) for what, damage, old, new, code in REST]


@pytest.mark.quick(r"0\.7\.2$")
@pytest.mark.parametrize("version", [SPLIT, MERGED])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1].replace(' ', '-')}")
def test_damaged_directories(engines, make_plan, raws, as_trained, model, tmp_path, version, row) -> None:
    half, _, damage, (split, merged), code = row
    does = split if version == SPLIT else merged
    directory = tmp_path / half
    convert_adapter(raws[version], **{f"{half}_output_dir": directory})
    served = {"nonexpert_adapters": {"neko": str(directory)}}
    made = make_plan(version, **{"expert_adapter": str(directory)} if half == "expert" else served)
    damage(directory)
    loaded = engines(version).run(made)
    whole = {
        path: pair
        for path, pair in as_trained[version].items()
        if (".experts." in path) == (half == "expert")
    }
    assert outcome(loaded, whole) == does
    said = severity(code, raws[version], directory, model, version)
    assert said == "error" or (does == "refuses" and said)


def severity(code: str, raw: Path, directory: Path, model: Path, version: str) -> str | None:
    """How badly validation for that version takes the finding ``code``; None where it has none.

    Swapped gate and up have the same shapes: only the raw adapter beside tells.
    """
    directories = [raw, directory] if code == "KTB504" else [directory]
    report = validate_adapter(directories, base_model=model, engine=f"sglang-kt=={version}")
    return next((found.severity for found in report.problems if found.code == code), None)
