"""Adapters of trainers that have forms of their own: what is found by itself, what is asked, and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreignadapter import INTER, E, H, R, back, delta, peft_tensors, random, save
from rawadapter import write_config

from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter
from ktbridge.errors import ProblemsError, UsageError


def small_base(path: Path, family: str = "qwen3_moe", inter: int = INTER) -> Path:
    """config.json of a base that these adapters fit."""
    return write_config(
        path / "base", family, hidden_size=H, num_experts=E, num_local_experts=E,
        moe_intermediate_size=inter, intermediate_size=inter,
    )  # fmt: skip


STEM = "base_model.model.model.layers.4.mlp.experts"
SIZES = {"gate": (H, INTER), "up": (H, INTER), "down": (INTER, H)}
Stacks = dict[str, tuple[np.ndarray, np.ndarray]]


def stacks(*, one_a: tuple[str, ...] = (), one_b: tuple[str, ...] = (), same: bool = False) -> Stacks:
    """A [E,r,in] and B [E,out,r] by projection; ``one_a``, ``one_b``: alike for all experts.

    ``same``: gate and up have one A.
    """
    made = {}
    for name, (wide, high) in SIZES.items():
        a, b = random(E, R, wide), random(E, high, R)
        a = made["gate"][0] if same and name == "up" else a
        made[name] = (
            a[:1].repeat(E, 0) if name in one_a else a,
            b[:1].repeat(E, 0) if name in one_b else b,
        )
    if same and "up" in one_a:
        made["up"] = (made["gate"][0], made["up"][1])
    return made


def named(parts: dict[str, tuple[np.ndarray, np.ndarray]], suffix: str = ".weight") -> dict[str, np.ndarray]:
    """Tensors of modules below the experts, by the modules' names."""
    return {
        f"{STEM}.{name}.lora_{half}{suffix}": tensor
        for name, pair in parts.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


def numbered(module: str, half: str, stack: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{STEM}.{e}.{module}.lora_{half}.weight": each for e, each in enumerate(stack)}


def fused_pair(made: Stacks) -> tuple[np.ndarray, np.ndarray]:
    return made["gate"][0], np.concatenate([made["gate"][1], made["up"][1]], 1)


def shared_outer(made: Stacks) -> dict[str, np.ndarray]:
    """SGLang's: gate and up share A over the experts, down shares B; the other sides are numbered."""
    tensors = {}
    for name, (a, b) in made.items():
        module, (one, each) = f"{name}_proj", ("BA" if name == "down" else "AB")
        shared, own = (b, a) if name == "down" else (a, b)
        tensors[f"{STEM}.{module}.lora_{one}.weight"] = shared[:1]
        tensors |= numbered(module, each, own)
    return tensors


OUTER = {"one_a": ("gate", "up"), "one_b": ("down",)}
# form -> (what its experts have in common, its tensors)
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "SGLang shared-outer, numbered": (OUTER, shared_outer),
    "SGLang shared-outer, stacked": (OUTER, lambda made: named({
        f"{n}_proj": (a if n == "down" else a[:1], b[:1] if n == "down" else b)
        for n, (a, b) in made.items()})),
    "SGLang gate_up": ({**OUTER, "same": True}, lambda made: named({
        "gate_up_proj": (made["gate"][0][:1], fused_pair(made)[1]),
        "down_proj": (made["down"][0], made["down"][1][:1])})),
    "SGLang gate_up with an A of each": (OUTER, lambda made: named({
        "gate_up_proj": (np.concatenate([made[n][0][:1] for n in ("gate", "up")], 1), fused_pair(made)[1]),
        "down_proj": (made["down"][0], made["down"][1][:1])})),
    "Megatron-Bridge streamed": ({"same": True}, lambda made: named(
        {"gate_up_proj": fused_pair(made), "down_proj": made["down"]}, "")),
    "Tinker": ({"one_b": ("down",), "one_a": ("up",)}, lambda made: named({
        "w1": made["gate"], "w3": (made["up"][0][:1], made["up"][1]),
        "w2": (made["down"][0], made["down"][1][:1])})),
    "VeOmni shared": ({"one_a": tuple(SIZES), "one_b": tuple(SIZES)}, lambda made: named({
        f"{n}_proj": (a[0], b[0]) for n, (a, b) in made.items()})),
    "mcore-bridge": ({"same": True}, lambda made: {
        **numbered("gate_up_proj", "A", made["gate"][0]),
        **numbered("gate_up_proj", "B", fused_pair(made)[1]),
        **numbered("down_proj", "A", made["down"][0]), **numbered("down_proj", "B", made["down"][1])}),
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_other_trainers(tmp_path, form, family):
    """Found by themselves; each expert gets its own pair, and gpt-oss's gate and up don't take turns."""
    common, tensors = FORMS[form]
    made = stacks(**common)
    base = small_base(tmp_path, family)
    path = save(tmp_path / "in", {k: np.ascontiguousarray(v) for k, v in tensors(made).items()},
                target_parameters=None, rank_pattern={"q_proj": 5})  # fmt: skip
    raw = back(path, base_model=str(base))
    for name, (a, b) in made.items():
        np.testing.assert_array_equal(delta(raw, 4, name), 3.0 * b @ a, err_msg=name)
    assert validate_adapter([path]).problems  # never taken for LoRA of other modules


def packed(made: Stacks) -> dict[str, np.ndarray]:
    """Megatron-Bridge's: A row e*R+k is column k of B, B column e*R+k is row k of A."""
    tensors = {}
    for place, (a, b) in ((f"{STEM}.base_layer", fused_pair(made)), (STEM, made["down"])):
        flat_a, flat_b = np.zeros((E * R, b.shape[1])), np.zeros((a.shape[2], E * R))
        for e in range(E):
            for k in range(R):
                flat_a[e * R + k], flat_b[:, e * R + k] = b[e, :, k], a[e, k]
        tensors[f"{place}.lora_A.weight"] = flat_a.astype(np.float32)
        tensors[f"{place}.lora_B.weight"] = flat_b.astype(np.float32)
    return tensors


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_megatrons_packed_form_is_asked_for(tmp_path, family):
    made = stacks(same=True)
    base = small_base(tmp_path, family)
    targets = [f"model.layers.4.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]
    path = save(tmp_path / "in", packed(made), auto_mapping=None, inference_mode=True, use_rslora=False,
                target_parameters=targets, rank_pattern={}, alpha_pattern={})  # fmt: skip
    with pytest.raises(UsageError, match="ambiguous") as error:
        back(path, base_model=str(base))
    assert "--from megatron-packed" in error.value.next_step
    assert "--from peft-0.18" in error.value.next_step
    raw = back(path, base_model=str(base), from_format="megatron-packed")
    for name, (a, b) in made.items():
        np.testing.assert_array_equal(delta(raw, 4, name), 3.0 * b @ a, err_msg=name)


@pytest.mark.parametrize(
    ("version", "family", "format_name"),
    [
        ("0.17.1", "qwen3_moe", "peft-0.18"), ("0.18.1", "qwen3_moe", "peft-0.18"),
        ("0.18.1", "gpt_oss", "peft-fused"), ("0.19.0", "qwen3_moe", "peft-0.18"),
        ("0.19.0", "gpt_oss", "peft-0.18"), ("0.19.1", "gpt_oss", "peft-fused"),
        ("0.19.1", "qwen3_moe", "peft-fused"), ("0.21.2", "gpt_oss", "peft-fused"),
        ("0.19.1.dev0", "qwen3_moe", ""),
    ],
)  # fmt: skip
def test_square_parameters_by_release(tmp_path, version, family, format_name):
    down = (random(E, R, H), random(E, H, R))
    base = small_base(tmp_path, family, H)
    tensors = peft_tensors(format_name or "peft-fused", {"down": down})
    path = save(tmp_path / "in", tensors, peft_version=version,
                target_parameters=["mlp.experts.down_proj"])  # fmt: skip
    if not format_name:
        with pytest.raises(UsageError, match="ambiguous"):
            back(path, base_model=str(base))
        return
    raw = back(path, base_model=str(base))
    np.testing.assert_array_equal(delta(raw, 4, "down"), 3.0 * down[1] @ down[0])


@pytest.mark.parametrize("layout", ["peft-0.19.1", "peft-0.18", "each expert"])
def test_automodels_rank_of_experts(tmp_path, layout):
    """moe_rank_scaling: experts have r // top_k, and alpha over that; only its own file says so."""
    made, format_name = stacks(same=True), {"peft-0.19.1": "peft-fused"}.get(layout, layout)
    if layout == "each expert":
        tensors = {}
        for name, pair in made.items():
            for half, stack in zip("AB", pair, strict=True):
                tensors |= numbered(f"{name}_proj", half, stack)
    else:
        tensors = peft_tensors(format_name, {"gate_up": fused_pair(made), "down": made["down"]})
    path = save(tmp_path / "in", tensors, r=2 * R, lora_alpha=6,
                **({"target_parameters": None} if layout == "each expert" else {}))  # fmt: skip
    own = {"moe_rank_scaling": True, "dim": 2 * R} | (
        {"paramwrapper_layout": layout} if "peft" in layout else {}
    )
    (path / "automodel_peft_config.json").write_text(json.dumps(own))
    base = small_base(tmp_path)
    if layout != "each expert":
        with pytest.raises(ProblemsError) as error:
            back(path)
        assert "--base-model" in error.value.problems[0].next_step
    raw = back(path, base_model=str(base))
    for name, (a, b) in made.items():
        np.testing.assert_array_equal(delta(raw, 4, name), 6 / R * b @ a, err_msg=name)


@pytest.mark.parametrize("to", ["vllm", "raw", "sglang-3d", "kt-merged", "gguf", "peft-fused"])
def test_experts_of_several_ranks_and_scales(tmp_path, to):
    """By PEFT's patterns: padded and folded exactly, in float32 if that is asked for, or refused."""
    base = small_base(tmp_path)
    ranks, tensors, pairs = {"gate": R, "up": 2 * R, "down": R}, {}, {}
    for name, (wide, high) in SIZES.items():
        rank = ranks[name]
        pairs[name] = random(E, rank, wide), random(E, high, rank)
        for half, stack in zip("AB", pairs[name], strict=True):
            tensors |= numbered(f"{name}_proj", half, stack)
    for alpha, exact in ((12, True), (9, False)):
        path = save(tmp_path / f"in-{alpha}", tensors, target_parameters=None,
                    rank_pattern={"up_proj": 2 * R}, alpha_pattern={r"experts\.1\.down_proj": alpha},
                    base_model_name_or_path=str(base))  # fmt: skip
        scales = {"gate": [3.0] * E, "up": [1.5] * E, "down": [3.0, alpha / R, 3.0]}
        out = tmp_path / f"out-{alpha}"
        if not exact:
            with pytest.raises(ProblemsError) as error:
                convert_adapter(path, to=to, output_dir=out)
            (step,) = {p.next_step for p in error.value.problems if p.severity == "error"}
            assert "--dtype f32" in step
        convert_adapter(path, to=to, output_dir=out, **({} if exact else {"dtype": "f32"}))
        raw = out if to == "raw" else back(out, from_format=to)
        for name, (a, b) in pairs.items():
            expected = np.array(scales[name])[:, None, None] * (b @ a)
            found = delta(read_adapter(raw) if to == "raw" else raw, 4, name)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
