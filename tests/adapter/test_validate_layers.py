"""Missing layers: told where there are any, silent where the architecture or the user left them out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapterfaults import drop, edit
from rawadapter import nonexpert_tensors, write_config
from tensorfiles import write_tensor_file

from ktbridge.adapter import convert_adapter, validate_adapter

EIGHT = range(8)
QV = ("self_attn.q_proj", "self_attn.v_proj")
SHARED = ("mlp.gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
FULL = [layer for layer in range(12) if layer % 4 == 3]
LINEAR = [layer for layer in range(12) if layer % 4 != 3]


def adapter(
    path: Path, modules: dict[str, Iterable[int]], experts: Iterable[int] = (), **config: Any
) -> Path:
    """A serving directory with LoRA on ``modules`` (path within a layer -> layers) and one expert."""
    shapes = {"gate": (8, 16), "up": (8, 16), "down": (16, 8)}
    of_experts = {f"mlp.experts.0.{name}_proj": shape for name, shape in shapes.items()}
    table = nonexpert_tensors(experts, modules=of_experts, block="")
    tensors = [replace(t, name=t.name.removeprefix("base_model.model.")) for t in table.values()]
    for module, layers in modules.items():
        tensors += nonexpert_tensors(layers, modules={module: (16, 16)}, block="").values()
    path.mkdir()
    write_tensor_file(path / "adapter_model.safetensors", tensors, {"format": "pt"})
    leaves = {module.rpartition(".")[2] for module in (*modules, *(of_experts if experts else ()))}
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(leaves),
                "base_model_name_or_path": "models/base", **config}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def model(path: Path, layers: int = 8, **sizes: Any) -> Path:
    return write_config(
        path / "base", num_hidden_layers=layers, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, **sizes,
    )  # fmt: skip


def found(*dirs: Path, **kwargs: Any) -> set[str]:
    return {f"{p.code} {p.severity}" for p in validate_adapter(dirs, **kwargs).problems}


@pytest.mark.parametrize(
    ("missing", "where"),
    [
        ("layers.3.self_attn.", "layer 3"),
        ("layers.0.self_attn.", "layer 0"),
        ("layers.7.self_attn.", "layer 7"),
        ("layers.3.mlp.gate.", "layer 3"),
        ("layers.7.mlp.shared_expert.", "layer 7"),
        ("layers.3.mlp.experts.", "layer 3"),
        ("layers.0.mlp.", None),  # first layers may be dense
        ("layers.0.", None),
    ],
)
def test_one_hole_in_eight_layers(tmp_path, missing, where):
    modules: dict[str, Iterable[int]] = dict.fromkeys((*QV, *SHARED), EIGHT)
    whole = adapter(tmp_path / "m", modules, EIGHT)
    assert found(whole) == set()
    problems = validate_adapter([edit(whole, drop(missing))]).problems
    assert [(p.code, p.severity) for p in problems] == ([("KTB212", "warning")] if where else [])
    assert all(str(where) in p.where for p in problems)


def test_halves_of_a_pair_tell_of_each_other(tmp_path):
    expert = adapter(tmp_path / "e", {}, EIGHT)
    first = adapter(tmp_path / "n", dict.fromkeys(QV, range(1, 8)))
    assert found(expert) == found(first) == set()
    assert found(expert, first) == {"KTB212 warning"}


@pytest.mark.parametrize(
    ("modules", "experts"),
    [
        ({"self_attn.o_proj": FULL, "linear_attn.out_proj": LINEAR}, range(12)),
        ({"self_attn.o_proj": FULL, "self_attn.qkv_proj": LINEAR}, range(12)),
        ({"self_attn.o_proj": LINEAR}, ()),
        ({"linear_attn.out_proj": LINEAR[:6]}, range(8)),
        ({"linear_attn.out_proj": LINEAR[:6]}, ()),
        ({"self_attn.o_proj": range(1, 12, 2)}, range(12)),
        ({"self_attn.o_proj": range(12)}, range(1, 12, 2)),
        ({"self_attn.o_proj": range(12), "mlp.down_proj": [0, 1, 2]}, range(3, 12)),
        ({"self_attn.o_proj": [5]}, range(12)),
    ],
)
def test_architectures_that_leave_layers_out(tmp_path, modules, experts):
    assert found(adapter(tmp_path / "m", modules, experts)) == set()


def test_a_hole_in_a_hybrid_model(tmp_path):
    modules = {"self_attn.o_proj": FULL, "linear_attn.out_proj": LINEAR}
    path = adapter(tmp_path / "n", modules)
    assert found(path) == set()
    assert found(edit(path, drop("layers.5."))) == {"KTB212 warning"}


ONLY = [f"model.layers.{layer}.{module}" for layer in (0, 1, 2, 5) for module in QV]


@pytest.mark.parametrize(
    ("layers", "config", "told"),
    [
        ([0, 1, 2, 5], {"target_modules": ONLY}, False),
        ([0, 1, 2, 5], {"target_modules": [*ONLY, "model.layers.4.self_attn.q_proj"]}, True),
        ([0, 1, 2, 5], {"target_modules": r".*\.layers\.(0|1|2|5)\.self_attn\.(q|v)_proj"}, False),
        ([0, 1, 2, 5], {"target_modules": r".*\.self_attn\.(q|v)_proj"}, True),
        ([0, 1, 2, 5], {"target_modules": r"(.*)*\.self_attn\.(q|v)_proj"}, False),  # can't tell
        ([0, 1, 2, 5], {"target_modules": "all-linear"}, True),
        ([0, 1, 2, 5], {"layers_to_transform": [0, 1, 2, 5]}, False),
        ([1], {"layers_to_transform": [0, 1]}, True),
        ([1], {"layers_to_transform": 1}, False),
        ([0, 1, 2, 5], {"exclude_modules": ["lm_head"]}, True),
        ([0, 1, 2, 5], {"exclude_modules": r"model\.layers\.[3467]\..*"}, False),
    ],
)
def test_layers_that_the_configuration_chose(tmp_path, layers, config, told):
    base = model(tmp_path)
    path = adapter(tmp_path / "n", dict.fromkeys(QV, layers), **config)
    expected = {"KTB607 error"} if told else set()
    assert found(path, base_model=base) - {"KTB106 error", "KTB117 warning"} == expected


def test_a_source_tells_of_the_layers_that_its_output_may_lack(tmp_path):
    base = model(tmp_path)
    source = adapter(tmp_path / "n", dict.fromkeys(QV, (0, 1, 2, 5)), target_modules=ONLY)
    output = adapter(tmp_path / "o", dict.fromkeys(QV, (0, 1, 2, 5)))
    assert found(source, output, base_model=base) == set()
    assert found(source, edit(output, drop("layers.2.")), base_model=base) == {
        "KTB504 error", "KTB607 error"
    }  # fmt: skip


UNKNOWN: list[dict[str, Any]] = [
    {"model_type": "kimi_linear", "num_key_value_heads": 8, "head_dim": 7, "first_k_dense_replace": 4},
    {"model_type": "gemma4_text", "head_dim": 99, "layer_types": ["linear_attention"] * 8},
    {"model_type": "ernie4_5_moe", "moe_layer_start_index": 4, "moe_num_experts": 1,
     "num_experts": None, "num_local_experts": None, "n_routed_experts": None},
    {"model_type": "afmoe", "num_dense_layers": 4},
    {"model_type": "llama4_text", "interleave_moe_layer_step": 2, "num_experts": None},
    {"model_type": "longcat_flash", "num_hidden_layers": None, "num_layers": 8},
    {"model_type": "nemotron_h", "num_hidden_layers": None, "hybrid_override_pattern": "ME*ME*ME"},
    {"model_type": "nemotron_h", "num_hidden_layers": None, "layers_block_type": ["moe"] * 8},
]  # fmt: skip


@pytest.mark.parametrize("config", UNKNOWN, ids=lambda config: config["model_type"])
def test_only_sizes_are_checked_of_models_without_an_inventory(tmp_path, config):
    base = write_config(tmp_path / "base", **{"num_hidden_layers": 8, "num_experts": 1, **config})
    modules = dict.fromkeys(QV, (1, 3, 5, 7))
    path = adapter(tmp_path / "m", modules, (4, 5, 6, 7))
    assert found(path, base_model=base) == {"KTB602 info"}
    wider = write_config(tmp_path / "base", **{"num_hidden_layers": 7, **config, "hidden_size": 32})
    assert {"KTB605 error", "KTB602 info"} <= found(path, base_model=wider)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/hub/models--org--base/snapshots/0123abcd", False),
        ("/hub/models--org--base/snapshots/0123abcd/", False),
        ("/hub/models--org--other/snapshots/base", True),
    ],
)
def test_a_base_model_in_the_hubs_cache_is_known_by_its_name(tmp_path, name, told):
    base = model(tmp_path)
    path = adapter(tmp_path / "n", dict.fromkeys(QV, EIGHT), base_model_name_or_path=name)
    assert found(path, base_model=base) == ({"KTB601 warning"} if told else set())


@pytest.mark.parametrize("last", [1, 3, 5])
@pytest.mark.parametrize("split", [False, True])
def test_expert_lora_that_ends_before_other_lora(tmp_path, last, split):
    """Too many layers for a gap; of the merged directory as of the pair."""
    experts, modules = range(last + 1), dict.fromkeys(QV, EIGHT)
    if split:
        dirs = [adapter(tmp_path / "e", {}, experts), adapter(tmp_path / "n", modules)]
    else:
        dirs = [adapter(tmp_path / "m", modules, experts)]
    (problem,) = validate_adapter(dirs).problems
    assert (problem.code, problem.severity) == ("KTB122", "warning")
    assert f"layer {last + 1}" in problem.where
    assert f"ends at layer {last}" in problem.found
    base = write_config(tmp_path / "base", num_hidden_layers=8)
    codes = found(*dirs, base_model=base)
    assert "KTB603 error" in codes
    assert "KTB122 warning" not in codes


def test_experts_where_dense_layers_come_first_or_every_second_end_nowhere(tmp_path):
    modules = dict.fromkeys(QV, EIGHT)
    assert found(adapter(tmp_path / "first", modules, range(3, 8))) == set()
    assert found(adapter(tmp_path / "second", modules, range(0, 8, 2))) == set()
    assert found(adapter(tmp_path / "attention", modules)) == set()
    assert found(adapter(tmp_path / "experts", {}, range(4))) == set()
    chosen = {"layers_to_transform": list(EIGHT)}
    assert "KTB122 warning" not in found(adapter(tmp_path / "chosen", modules, range(4), **chosen))


def test_target_modules_that_miss_what_tensors_are_there_for(tmp_path):
    """Where the engine doesn't read the list, or a conversion comes first, it is a warning."""
    names = {"target_modules": ["gate_proj", "up_proj"]}
    (problem,) = validate_adapter([adapter(tmp_path / "e", {}, EIGHT, **names)]).problems
    assert (problem.code, problem.severity) == ("KTB121", "warning")
    assert "mlp.experts.0.down_proj" in problem.found
    assert found(adapter(tmp_path / "n", dict.fromkeys(QV, EIGHT), target_modules=["q_proj"])) == {
        "KTB118 error"
    }
    other = {"target_modules": ["w1", "w2", "w3"]}
    assert "KTB121 warning" not in found(adapter(tmp_path / "w", {}, EIGHT, **other))


@pytest.mark.parametrize(
    "chosen",
    [
        {"layers_to_transform": [2, 3]},
        {"target_modules": [f"model.layers.{layer}.{path}" for layer in (2, 3)
                            for path in (*QV, *(f"mlp.experts.0.{n}_proj" for n in ("gate", "up", "down")))]},
    ],
    ids=["layers_to_transform", "full paths"],
)  # fmt: skip
def test_layers_left_out_on_purpose(tmp_path, chosen):
    """Only KT's engine needs every layer; without an engine that is a warning."""
    base = model(tmp_path, 4, num_experts=1)
    path = adapter(tmp_path / "a", dict.fromkeys(QV, (2, 3)), (2, 3), **chosen)

    def said(engine):
        problems = validate_adapter([path], base_model=base, engine=engine).problems
        kinds = ("KTB603", "KTB607", "KTB117", "KTB118")
        return {p.code: p.severity for p in problems if p.code in kinds}

    assert said("vllm") == said("sglang") == {}
    assert said(None) == {"KTB603": "warning"}
    assert said("sglang-kt==0.7.2") == {"KTB603": "error"}


@pytest.mark.parametrize("targets", ["paths", r".*\.layers\.[23]\..*_proj"])
def test_a_conversion_keeps_what_targets_by_layer_chose(tmp_path, targets):
    modules = (*QV, *(f"mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")))
    paths = [f"model.layers.{layer}.{module}" for layer in (2, 3) for module in modules]
    chosen = paths if targets == "paths" else targets
    path = adapter(tmp_path / "a", dict.fromkeys(QV, (2, 3)), (2, 3), target_modules=chosen)
    convert_adapter(path, to="vllm", output_dir=tmp_path / "v", base_model="some/base")
    kept = json.loads((tmp_path / "v" / "adapter_config.json").read_text())
    assert kept["layers_to_transform"] == [2, 3]


def test_a_conversion_keeps_layers_whose_experts_alone_were_left_out(tmp_path):
    chosen = r".*self_attn\.[qv]_proj|.*\.layers\.[23]\.mlp\.experts\..*_proj"
    path = adapter(tmp_path / "a", dict.fromkeys(QV, EIGHT), (2, 3), target_modules=chosen)
    convert_adapter(path, to="vllm", output_dir=tmp_path / "v", base_model="some/base")
    kept = json.loads((tmp_path / "v" / "adapter_config.json").read_text())
    assert kept["exclude_modules"] == r".*\.layers\.(0|1|4|5|6|7)\.mlp\.experts\..*"
    base = write_config(tmp_path / "base", num_hidden_layers=8)
    problems = validate_adapter([tmp_path / "v"], base_model=base, engine="vllm").problems
    assert "KTB603" not in {one.code for one in problems}
