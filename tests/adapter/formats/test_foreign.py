"""Other tools' adapters, written here element by element: what is read, what is refused, and why."""

from __future__ import annotations

import json
import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from foreignadapter import INTER, PEFTS_OWN, E, H, R, back, delta, peft_tensors, random, save
from rawadapter import write_config, write_raw
from safetensors.numpy import load_file
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor, convert_adapter, open_adapter, read_adapter
from ktbridge.adapter.formats import FORMATS
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.install import install_hint


def two_parts():
    """A [E,r,in] and B [E,out,r] of PEFT's two parameters."""
    gate_up = random(E, R, H), random(E, 2 * INTER, R)
    return {"gate_up": gate_up, "down": (random(E, R, INTER), random(E, H, R))}


def test_the_writer_is_found_by_shapes_and_by_marks(tmp_path):
    parts = two_parts()
    expected = {name: 3.0 * b @ a for name, (a, b) in parts.items()}

    def holds(path: Path) -> None:
        raw = back(path)
        assert (raw.rank, raw.alpha) == (R, 6.0)
        gate_up = np.concatenate([delta(raw, 4, name) for name in ("gate", "up")], 1)
        np.testing.assert_array_equal(gate_up, expected["gate_up"])
        np.testing.assert_array_equal(delta(raw, 4, "down"), expected["down"])

    unsloth = {"auto_mapping": {"unsloth_fixed": True}}
    grouped, plain = ({"lora_B_layout": order} for order in ("grouped_by_expert", "rank_major"))
    found = {
        "peft-0.18": {"peft_version": "0.18.1"},
        "peft-fused": {},
        "unsloth-legacy": {**unsloth, **grouped},
    }
    for format_name, marks in found.items():
        holds(save(tmp_path / format_name, peft_tensors(format_name, parts), **marks))
    now = {"auto_mapping": {"unsloth_fixed": True, **plain}}
    holds(save(tmp_path / "newest", peft_tensors("peft-fused", parts), **now))
    unmarked = save(tmp_path / "unmarked", peft_tensors("unsloth-legacy", parts), **unsloth)
    with pytest.raises(UsageError, match="ambiguous") as error:
        convert_adapter(unmarked, to="raw", output_dir=tmp_path / "out")
    assert "--from unsloth-legacy" in error.value.next_step
    old, new = tmp_path / "peft-0.18", tmp_path / "peft-fused"
    for path, flag, right in ((old, "peft-fused", "peft-0.18"), (new, "peft-0.18", "peft-fused")):
        with pytest.raises(UsageError) as error:
            convert_adapter(path, to="raw", from_format=flag, output_dir=tmp_path / "out")
        assert error.value.next_step.startswith(f"pass --from {right}")
    assert not (tmp_path / "out").exists()


def test_an_alpha_that_is_given_goes_before_the_files(tmp_path):
    path = save(tmp_path / "in", peft_tensors("peft-fused", parts := two_parts()))
    raw = back(path, from_format="peft-fused", lora_alpha=12)
    b_a = parts["down"][1] @ parts["down"][0]
    np.testing.assert_allclose(delta(raw, 4, "down"), 6.0 * b_a, rtol=1e-6, atol=1e-6)


def test_square_and_lone_parameters_need_a_version_or_the_flag(tmp_path):
    down = (random(E, R, H), random(E, H, R))
    target = {"target_parameters": ["mlp.experts.down_proj"]}
    square = save(tmp_path / "square", peft_tensors("peft-0.18", {"down": down}), **target)
    with pytest.raises(UsageError, match="neither shapes nor peft_version"):
        convert_adapter(square, to="raw", output_dir=tmp_path / "out")
    raw = back(square, from_format="peft-0.18")
    np.testing.assert_array_equal(delta(raw, 4, "down"), 3.0 * down[1] @ down[0])
    # The base model's hidden size tells, where the matrices aren't square.
    lone = peft_tensors("peft-0.18", {"down": (random(E, R, INTER), random(E, H, R))})
    lone_path = save(tmp_path / "lone", lone, **target, **PEFTS_OWN)
    base = write_config(tmp_path / "base", hidden_size=H, num_experts=E)
    convert_adapter(lone_path, to="raw", output_dir=tmp_path / "told", base_model=str(base))
    assert read_adapter(tmp_path / "told").expert_modules() == ("down_proj",)


def test_gate_up_is_taken_apart_where_zeros_prove_it(tmp_path):
    a = random(E, 2 * R, H)
    b = random(E, 2 * INTER, 2 * R)
    b[:, :INTER, R:] = 0
    b[:, INTER:, :R] = -0.0
    down = (random(E, R, INTER), random(E, H, R))
    tensors = peft_tensors("peft-fused", {"gate_up": (a, b), "down": down})
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 2 * R},
                "alpha_pattern": {r".*\.gate_up_proj": 12}}  # fmt: skip
    raw = back(save(tmp_path / "in", tensors, **patterns), from_format="peft-fused")
    assert raw.rank == R
    np.testing.assert_array_equal(delta(raw, 4, "gate"), 3.0 * b[:, :INTER, :R] @ a[:, :R])
    np.testing.assert_array_equal(delta(raw, 4, "up"), 3.0 * b[:, INTER:, R:] @ a[:, R:])


def test_a_projection_of_zeros_is_left_out_and_said(tmp_path):
    b = random(E, 2 * INTER, R)
    b[:, :INTER] = 0
    tensors = peft_tensors("peft-fused", {"gate_up": (random(E, R, H), b)})
    path = save(tmp_path / "in", tensors, target_parameters=["mlp.experts.gate_up_proj"])
    report = convert_adapter(path, to="raw", from_format="peft-fused", output_dir=tmp_path / "raw")
    assert read_adapter(tmp_path / "raw").expert_modules() == ("up_proj",)
    assert any("gate_proj is all zero" in finding.found for finding in report.findings)


def test_gpt_oss_rows_take_turns(tmp_path):
    base = write_config(tmp_path / "base", "gpt_oss", hidden_size=H, num_local_experts=E,
                        intermediate_size=INTER)  # fmt: skip
    parts = two_parts()
    a, b = parts["gate_up"]
    path = save(tmp_path / "in", peft_tensors("peft-fused", parts))
    raw = back(path, from_format="peft-fused", base_model=str(base))
    np.testing.assert_array_equal(delta(raw, 4, "gate"), 3.0 * b[:, 0::2] @ a)
    np.testing.assert_array_equal(delta(raw, 4, "up"), 3.0 * b[:, 1::2] @ a)
    convert_adapter(raw.path, to="peft-fused", output_dir=tmp_path / "again")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("in", "again"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_gpt_oss_without_its_config_is_not_guessed(tmp_path):
    parts = two_parts()
    path = save(tmp_path / "in", peft_tensors("peft-fused", parts),
                base_model_name_or_path="openai/gpt-oss-20b")  # fmt: skip
    with pytest.raises(KtbridgeError, match="take turns"):
        convert_adapter(path, to="raw", from_format="peft-fused", output_dir=tmp_path / "out")


@pytest.mark.parametrize("form", ["fused", "stacked"])
@pytest.mark.parametrize(
    ("other", "code"), [("mtp", "KTB207"), ("visual", "KTB206"), ("talker.model", "KTB206")]
)
def test_experts_of_another_part_are_not_taken_for_the_text_models(tmp_path, form, other, code):
    """Their layers have the same numbers."""
    if form == "fused":
        tensors = peft_tensors("peft-fused", two_parts())
    else:
        stem = "base_model.model.model.layers.4.mlp.experts.down_proj.lora_"
        tensors = {f"{stem}A.weight": random(E, R, INTER), f"{stem}B.weight": random(E, H, R)}
    prefix = "base_model.model.model."
    assert all(name.startswith(prefix) for name in tensors)
    more = {f"base_model.model.{other}.{name.removeprefix(prefix)}": each for name, each in tensors.items()}
    path = save(tmp_path / "in", {**tensors, **more})
    with pytest.raises(ProblemsError) as error:
        convert_adapter(path, to="raw", output_dir=tmp_path / "out")
    assert code in {item.code for item in error.value.problems}
    assert not (tmp_path / "out").exists()


def test_rslora_of_other_tools_reaches_the_experts(tmp_path):
    parts = two_parts()
    path = save(tmp_path / "in", peft_tensors("peft-fused", parts), use_rslora=True)
    raw = back(path, from_format="peft-fused")
    assert raw.alpha / raw.rank == pytest.approx(6 / math.sqrt(R), rel=1e-15)


@pytest.mark.parametrize(
    ("to", "options", "says"),
    [
        ("sglang-3d", {"other_alpha": 5.0}, "can't hold both without rounding"),
        ("gguf", {"other_alpha": 5.0}, "can't hold both without rounding"),
        ("vllm", {"rslora": True, "rank": 2}, "can't hold both without rounding"),
        ("gguf", {"modules": {"in_proj_qkv": (4, 16)}, "block": "linear_attn"}, "rearranges"),
        ("gguf", {"modules": {"odd_proj": (4, 16)}}, "has no name in llama.cpp's qwen35moe"),
        ("gguf", {"base_model": "org/elsewhere"}, "without the base model's config.json"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, to, options, says):
    base = write_config(tmp_path / "base", "qwen3_5_moe_text")
    raw = write_raw(tmp_path / "raw", **{"base_model": str(base), **options})
    with pytest.raises(ProblemsError) as error:
        convert_adapter(raw, to=to, output_dir=tmp_path / "out")
    errors = [item for item in error.value.problems if item.severity == "error"]
    assert any(says in item.found for item in errors)
    assert all(item.next_step for item in errors)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "extra", "code"),
    [
        ({"use_dora": True}, {}, "KTB110"),
        ({}, {"base_model.model.model.norm.weight": random(4)}, "KTB201"),
        ({"modules_to_save": ["lm_head"]}, {}, "KTB112"),
        ({"alpha_pattern": {"down_proj": 99}}, {}, "KTB109"),
        ({"rank_pattern": {"(.*)*x": 4}}, {}, "not plain"),
        ({"r": 5}, {}, "KTB301"),
        ({}, {"base_model.model.model.layers.4.self_attn.q_proj.lora_A.weight": random(R, H)}, "KTB202"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(tmp_path, config, extra, code):
    parts = two_parts()
    path = save(tmp_path / "in", {**peft_tensors("peft-fused", parts), **extra}, **config)
    with pytest.raises(KtbridgeError, match=code):
        convert_adapter(path, to="raw", from_format="peft-fused", output_dir=tmp_path / "out")


def test_a_failure_halfway_leaves_nothing(tmp_path):
    # The ratio of scales is a power of two, which the smallest numbers still can't take.
    raw = write_raw(tmp_path / "raw", other_alpha=1.0, projections=("gate",))
    file = read_adapter(raw).files[1]
    entry = file.entries["base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"]
    with open(file.path, "r+b") as handle:
        handle.seek(entry.start)
        handle.write(b"\x01\x00")
    with pytest.raises(KtbridgeError, match="without rounding"):
        convert_adapter(raw, to="vllm", output_dir=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_every_format_says_what_loads_it_and_what_is_exact():
    assert len({format_name.name for format_name in FORMATS}) == len(FORMATS) == 12
    assert all(format_name.loaded_by and format_name.exact for format_name in FORMATS)


def test_gguf_says_what_to_install(tmp_path, monkeypatch):
    raw = write_raw(tmp_path / "raw", base_model=str(write_config(tmp_path / "base")))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(KtbridgeError, match="not installed") as error:
        convert_adapter(raw, to="gguf", output_dir=tmp_path / "out")
    assert error.value.next_step == install_hint("gguf")


def test_layers_with_lora_on_different_projections_keep_it_or_are_refused(tmp_path):
    """PEFT's per-expert form may have it so; the fused form has one arrangement for all layers."""
    tensors = {}
    for layer, names in enumerate((("gate", "up", "down"), ("gate", "up"))):
        for name, e in product(names, range(E)):
            rank, (wide, high) = 2 * R if name == "gate" else R, (INTER, H) if name == "down" else (H, INTER)
            stem = f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}_proj"
            tensors[f"{stem}.lora_A.weight"] = random(rank, wide)
            tensors[f"{stem}.lora_B.weight"] = random(high, rank)
    given = save(
        tmp_path / "given", tensors, target_parameters=None, rank_pattern={"gate_proj": 2 * R},
        peft_version="0.20.0",
    )  # fmt: skip
    for to in ("raw", "vllm"):
        convert_adapter(given, to=to, output_dir=tmp_path / to)
        for layer, name in ((0, "gate"), (0, "down"), (1, "gate"), (1, "up")):
            stem = f"base_model.model.model.layers.{layer}.mlp.experts.1.{name}_proj.lora_"
            product_of = tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
            scale = 6 / R / (2 if name == "gate" else 1)
            made = delta(open_adapter(tmp_path / to, as_raw=True), layer, name)[1]
            np.testing.assert_allclose(made, scale * product_of, rtol=1e-5, atol=1e-5)
    with pytest.raises(ProblemsError, match="on different projections"):
        convert_adapter(given, to="peft-fused", output_dir=tmp_path / "peft")


def test_gate_and_up_are_told_apart_by_each_layers_own_rank(tmp_path):
    """A of its own for gate and for up in one layer, and in another of half the rank LoRA on gate alone."""
    a, b = random(E, 2 * R, H), random(E, 2 * INTER, 2 * R)
    b[:, :INTER, R:] = b[:, INTER:, :R] = 0
    less, alone = random(E, R, H), random(E, 2 * INTER, R)
    alone[:, INTER:] = 0
    tensors = {}
    for layer, gate_up in enumerate(((a, b), (less, alone))):
        down = random(E, R, INTER), random(E, H, R)
        tensors |= peft_tensors("peft-fused", {"gate_up": gate_up, "down": down}, layer)
    numbers = {"layers.0.mlp.experts.gate_up_proj": 2 * R}
    given = save(tmp_path / "given", tensors, rank_pattern=numbers, alpha_pattern=dict.fromkeys(numbers, 12))
    made = back(given, from_format="peft-fused")
    for layer, (down, up) in enumerate(((a, b), (less, alone))):
        for name, rows in (("gate", slice(0, INTER)), ("up", slice(INTER, None))):
            np.testing.assert_allclose(delta(made, layer, name), 6 / R * up[:, rows] @ down, atol=1e-5)


@pytest.mark.parametrize("flat", [False, True], ids=["stacked", "flat"])
def test_mlx_adapters_mean_the_same(tmp_path, flat):
    """mlx-lm's x @ lora_a @ lora_b * scale, and lora_b[e] @ lora_a[e] of experts."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((16, 4)), rng.standard_normal((4, 24))
    up = rng.standard_normal((3, 4, 16)), rng.standard_normal((3, 8, 4))
    named = {
        "model.layers.1.self_attn.q_proj": query,
        "model.layers.1.mlp.switch_mlp.up_proj": (up[0].reshape(12, 16) if flat else up[0], up[1]),
    }
    tensors = [
        Tensor(f"{module}.lora_{half}", "F32", data.shape, data.astype(np.float32).tobytes())
        for module, pair in named.items()
        for half, data in zip("ab", pair, strict=True)
    ]
    given = tmp_path / "adapters"
    given.mkdir()
    write_tensor_file(given / "adapters.safetensors", tensors)
    settings = {"model": "some/base", "fine_tune_type": "lora",
                "lora_parameters": {"rank": 4, "scale": 2.5}}  # fmt: skip
    (given / "adapter_config.json").write_text(json.dumps(settings))
    convert_adapter(given, to="raw", output_dir=tmp_path / "raw")
    made = read_adapter(tmp_path / "raw")
    assert made.alpha / made.rank == made.nonexpert_scale == 2.5

    def values(tensor):
        return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)

    a, b = (values(made.expert_tensor(1, f"up_lora_{half}")) for half in "ab")
    assert np.array_equal(a, up[0].astype(np.float32))
    assert np.array_equal(b, up[1].astype(np.float32))
    stem = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    for half, data in zip("AB", query, strict=True):
        found = values(made.nonexpert_tensor(f"{stem}{half}.weight"))
        assert np.array_equal(found, data.T.astype(np.float32))
    settings["fine_tune_type"] = "dora"
    (given / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ProblemsError, match="dora"):
        convert_adapter(given, to="raw", output_dir=tmp_path / "other")
