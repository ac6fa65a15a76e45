"""The rows of what engines swallow, one broken adapter each: code, severity, place, next step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfaults import (
    Tensors,
    add,
    copies,
    drop,
    edit,
    edit_config,
    edit_manifest,
    fill,
    rename,
    swap_gate_and_up,
    widen,
)
from rawadapter import nonexpert_tensors

from ktbridge.adapter import Tensor, validate_adapter

Paths = dict[str, Path]
P = "base_model.model.model."
BASE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 3,
}
FUSED = {
    "experts.base_layer.lora_A": (12, 16),
    "experts.base_layer.lora_B": (16, 12),
    "experts.lora_A": (12, 8),
    "experts.lora_B": (16, 12),
}


@dataclass
class Row:
    """One way to be wrong: what is done to which directory, and everything the problem says."""

    name: str
    where: str  # directories to validate, of "raw e n m", then what else the place names
    damage: Callable[[Paths], object]
    code: str
    says: str  # in ``found``
    expected: str = ""
    step: str = ""
    severity: str = "error"
    place: str = ""
    base: dict[str, Any] | None = None
    also: Sequence[str] = ()  # other errors and warnings that the damage can't be without
    kwargs: dict[str, Any] = field(default_factory=dict)


def tensors(directory: str, *changes: Callable[[Tensors], None]) -> Callable[[Paths], object]:
    return lambda paths: [edit(paths[directory], change) for change in changes]


def config(directory: str, **changes: Any) -> Callable[[Paths], object]:
    return lambda paths: edit_config(paths[directory], **changes)


def manifest(directory: str, **changes: Any) -> Callable[[Paths], object]:
    return lambda paths: edit_manifest(paths[directory], **changes)


def nothing(paths: Paths) -> None:
    pass


def fused(swapped: bool) -> Callable[[Tensors], None]:
    def change(table: Tensors) -> None:
        drop("")(table)
        for name, (rows, columns) in FUSED.items():
            inner = "base_layer" in name
            if swapped:  # in and out change places
                gate_up = (12, 16) if name.endswith("A") else (16, 12)
                down = (12, 16) if name.endswith("A") else (8, 12)
                rows, columns = gate_up if inner else down
            add(f"{P}layers.0.mlp.{name}.weight", (rows, columns))(table)

    return change


def stacked(table: Tensors) -> None:
    drop("")(table)
    for name, shape in (("gate_proj.lora_A", (3, 4, 16)), ("gate_proj.lora_B", (3, 8, 4))):
        add(f"model.layers.0.mlp.experts.{name}.weight", shape)(table)


def pickled(paths: Paths) -> None:
    (paths["n"] / "adapter_model.safetensors").rename(paths["n"] / "adapter_model.bin")


def as_gguf(paths: Paths) -> None:
    shutil.rmtree(paths["n"])
    paths["n"].mkdir()
    (paths["n"] / "neko.gguf").write_bytes(b"GGUF")


def dated(paths: Paths) -> None:
    os.utime(paths["m"] / "adapter_model.safetensors", (0, 0))


def rename_module(paths: Paths) -> None:
    """Attention becomes a shared expert: q reads H and writes 24, which is made I."""
    edit(paths["n"], drop("k_proj"))
    edit(paths["n"], drop("v_proj"))
    edit(paths["n"], drop("o_proj"))
    edit(paths["n"], rename("self_attn.q_proj", "mlp.shared_experts.gate_proj"))
    edit_config(paths["n"], target_modules=["gate_proj"])


def full(paths: Paths) -> None:
    (paths["raw"] / "kt_full_experts-00001.safetensors").touch()


KT072, KT064 = {"engine": "sglang-kt==0.7.2"}, {"engine": "sglang-kt==0.6.4"}
OLD = {"engine": "sglang-kt==0.6.2"}
GLM = {"model_type": "glm4_moe", "n_shared_experts": 3}

ROWS = [
    # The table "what the loaders read, and swallow", expert loader then non-expert loader.
    Row("missing layer", "e", tensors("e", drop("layers.1.")), "KTB603", "lacks layers 1",
        "2 MoE layers", "belong together", base={}),
    Row("missing expert", "e", tensors("e", drop("layers.1.mlp.experts.1.")), "KTB203",
        "lacks 1 experts, first 1", "3 experts", "save the adapter again", place="layer 1"),
    Row("missing last expert", "e", tensors("e", drop("mlp.experts.2.")), "KTB604",
        "2 experts a layer", "3", "belong together", base={}),
    Row("missing projection", "e", tensors("e", drop("layers.0.mlp.experts.2.up_proj")), "KTB203",
        "up_proj.lora_A lacks", "3 experts", "save", place="layer 0"),
    Row("missing layer", "n", tensors("n", drop("layers.1.")), "KTB607",
        "has no LoRA in layers 1", "", "saved every layer", place="self_attn.k_proj", base={}),
    Row("missing module", "n", tensors("n", drop("layers.1.self_attn.o_proj")), "KTB212",
        "has no o_proj", "modules of other layers", "saved every layer", "warning", "layer 1"),
    Row("missing module", "n", tensors("n", drop("layers.1.self_attn.o_proj")), "KTB607",
        "has no LoRA in layers 1", "", "saved every layer", place="o_proj", base={},
        also=["KTB212"]),
    Row("missing layers in between", "e",
        tensors("e", *(copies("layers.1.", f"layers.{i}.") for i in (2, 4))), "KTB215",
        "nothing between layers 2 and 4", "regular", "--base-model", "info"),
    Row("A without B", "e", tensors("e", drop("up_proj.lora_B")), "KTB202",
        "has no up_lora_b", "gate_lora_a", "save", place="layer 0"),
    Row("A without B, one expert", "e", tensors("e", drop("1.mlp.experts.0.up_proj.lora_B")),
        "KTB203", "up_proj.lora_B lacks 1", "3 experts", "save", place="layer 1"),
    Row("B without A", "n", tensors("n", drop("layers.1.self_attn.o_proj.lora_A")), "KTB202",
        "has no counterpart", "lora_A and lora_B", "save", place="o_proj.lora_B"),
    Row("extra layer", "e", tensors("e", copies("layers.1.", "layers.2.")), "KTB603",
        "has layers 2, where the base has no experts", "2 MoE layers", "belong", base={}),
    Row("extra expert", "e", tensors("e", copies("experts.2.", "experts.3.")), "KTB604",
        "4 experts a layer", "3", "belong", also=["KTB407"], base={}),
    Row("extra layer", "n", tensors("n", copies("layers.1.", "layers.2.")), "KTB606",
        "is beyond the last layer", "2 layers", "belong", place="layers.2.", base={}),
    *(
        row
        for d in ("e", "n")
        for row in (
            Row("rsLoRA", d, config(d, use_rslora=True), "KTB107", "use_rslora is true",
                "use_rslora false", "ktbridge convert"),
            Row("wrong r", d, config(d, r=8), "KTB301", "another rank", "rank 8", "save"),
            Row("DoRA", d, config(d, use_dora=True), "KTB110", "use_dora", "", "merge"),
            Row("lora_bias", d, config(d, lora_bias=True), "KTB111", "lora_bias", "", "merge"),
            Row("modules_to_save", d, config(d, modules_to_save=["lm_head"]), "KTB112",
                "modules_to_save", "", "merge"),
            Row("fan_in_fan_out", d, config(d, fan_in_fan_out=True), "KTB113",
                "fan_in_fan_out", "", "merge"),
            Row("no lora_alpha", d, config(d, lora_alpha="absent"), "KTB103",
                "lora_alpha is None", "a positive number", "set lora_alpha"),
            Row("float32", d, tensors(d, widen("lora_A")), "KTB304", "is F32", "BF16",
                "bfloat16", "info"),
            Row("NaN", d, tensors(d, fill("layers.1", b"\xc0\xff")), "KTB401",
                "NaN or infinite", "", "checkpoint", place="layers.1"),
            Row("Inf", d, tensors(d, fill("q_proj.lora_A", b"\x80\x7f"),
                                  fill("2.up_proj.lora_A", b"\x80\xff")), "KTB401",
                "NaN or infinite", "", "checkpoint", place="lora_A"),
            Row("all-zero B", d, tensors(d, fill("lora_B", b"\x00")), "KTB402", "zero",
                "", "no longer zero"),
            Row("all-zero B with signs", d, tensors(d, fill("lora_B", b"\x00\x80")), "KTB402",
                "zero", "", "no longer zero"),
        )
    ),
    Row("alpha_pattern", "n", config("n", alpha_pattern={"q_proj": 1}), "KTB109",
        "alpha_pattern gives model.layers.0", "", "--nonexpert-output-dir D"),
    Row("rank_pattern", "n", config("n", rank_pattern={"q_proj": 1}), "KTB108", "rank 1",
        "r, 4", "--nonexpert-output-dir D", also=("KTB301",)),
    Row("DoRA tensors", "n", tensors("n", add(P + "layers.0.self_attn.q_proj.lora_magnitude_vector")),
        "KTB110", "DoRA magnitude", "", "merge", place="lora_magnitude_vector"),
    Row("bias tensors", "e", tensors("e", add("model.layers.0.mlp.experts.0.up_proj.lora_B.bias")),
        "KTB111", "LoRA bias", "", "merge", place="lora_B.bias"),
    Row("saved modules", "e", tensors("e", add("model.layers.0.mlp.gate.weight")), "KTB112",
        "is a whole weight", "", "merge", place="mlp.gate.weight"),
    # The paragraph "more that a validator must catch".
    Row("raw directory served", "raw", nothing, "KTB901", "raw training directory",
        "a serving directory", "--merged-output-dir", kwargs=KT072),
    Row("gate and up swapped", "raw e n", tensors("e", swap_gate_and_up), "KTB504",
        "gate and up are swapped", "gate as in", "convert the adapter again",
        place="layer 0 expert 0 gate_proj"),
    Row("another base model", "m", nothing, "KTB601", "names the base model 'models/base'",
        "another", "check", "warning", base={"_name": "another"}),
    Row("another base in the manifest", "m",
        manifest("m", base={"model_name_or_path": "models/other"}), "KTB119",
        "'models/other'", "'models/base'", "check which", "warning", "kt_adapter_manifest.json"),
    Row("full attention where it is linear", "n", nothing, "KTB610", "has LoRA in layers 0",
        "layers that have such a module", "belong", place="self_attn.k_proj",
        base={"model_type": "qwen3_5_moe", "full_attention_interval": 2}),
    Row("attention of another width", "n", nothing, "KTB605", "has shape [8, 4]", "out = 16",
        "belong", place="k_proj.lora_B",
        base={"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 8}),
    Row("language_model prefix", "e",
        tensors("e", rename("model.layers", "model.language_model.layers")), "KTB205",
             "has a prefix engines don't expect (36 tensors like it)", "model.layers",
             "ktbridge convert", "warning", "language_model"),
    Row("vision tower", "n", tensors("n", rename("model.layers.1.", "model.visual.layers.1.")),
        "KTB206", "vision or audio", "", "text model only", place="visual.layers.1"),
    Row("vision tower", "e", tensors("e", rename("model.layers.1.", "visual.model.layers.1.")),
        "KTB206", "vision or audio", "", "text model only", place="visual"),
    Row("MTP experts", "e", tensors("e", rename("model.layers.1", "mtp.layers.1")), "KTB207",
        "draft", "", "exclude the MTP", place="mtp."),
    Row("MTP layer by number", "e", nothing, "KTB207", "layers 1, which are for drafting",
        "1 MoE layers", "exclude the MTP",
        base={"num_hidden_layers": 1, "num_nextn_predict_layers": 1}),
    Row("MTP layer by number", "n", nothing, "KTB207", "drafts (MTP)", "1 layers",
        "exclude the MTP", place="layers.1.",
        base={"num_hidden_layers": 1, "num_nextn_predict_layers": 1}),
    Row("q without v", "n", tensors("n", drop("v_proj")), "KTB209", "without its partner",
        "q_proj and v_proj", "train both", "warning", "q_proj", also=["KTB117"]),
    Row("up without gate", "n",
        tensors("n", *(copies("self_attn.q_proj.", "mlp.up_proj."), drop("self_attn"))),
        "KTB210", "without gate_proj", "gate_proj and up_proj", "train both", "warning",
        "up_proj", also=["KTB117", "KTB118"]),
    Row("pickle", "n", pickled, "KTB004", "is a pickle", "", "safe_serialization",
        place="adapter_model.bin"),
    Row("PEFT's fused experts", "n", tensors("n", fused(False)), "KTB208",
        "in the peft-fused format", "", "--from peft-fused --to kt-merged", "info"),
    Row("PEFT's older fused experts", "n", tensors("n", fused(True)), "KTB018",
        "is ambiguous", "one format", "--from peft-0.18"),
    Row("PEFT's fused experts for an engine", "n", tensors("n", fused(False)), "KTB208",
        "in the peft-fused format", "sglang-kt 0.7.2", "--to kt-merged", kwargs=KT072),
    Row("PEFT's fused experts, told to be a raw adapter's", "n", tensors("n", fused(False)), "KTB208",
        "PEFT's fused layout (4 tensors", "one tensor an expert", "--to raw",
        place="mlp.experts.", also=["KTB117"], kwargs={"from_format": "raw"}),
    Row("SGLang's stacked experts", "n", tensors("n", stacked), "KTB216",
        "in the sglang-3d format", "", "nothing", "info"),
    Row("SGLang's stacked experts for an engine", "n", tensors("n", stacked), "KTB216",
        "in the sglang-3d format", "sglang-kt 0.7.2", "merge the adapter", also=["KTB203"], kwargs=KT072),
    Row("GGUF", "n", as_gguf, "KTB016", "not a GGUF file that can be read", "", "copy"),
    Row("LoRA experts", "e", tensors("e", add("model.layers.0.mlp.lora_experts.0.le_gate.weight")),
        "KTB211", "whole LoRA experts", "", "routed-expert LoRA", place="lora_experts"),
    Row("fully trained experts", "raw", full, "KTB006", "fully trained experts", "",
        "serve it as a checkpoint", place="kt_full_experts"),
    Row("a name with a colon", "m", config("m", base_model_name_or_path="base:v2"), "KTB906",
        "has a colon", "", "--served-model-name", "warning", "base:v2", kwargs=KT072),
    Row("a fixed time stamp", "m", dated, "KTB015", "dated 1980 or before", "its real time",
        "touch", "info", "adapter_model.safetensors"),
    Row("unknown weight format", "raw", manifest("raw", expert_weight_format="int3"), "KTB120",
        "'int3'", "bf16, int8", "KTransformers", "warning"),
    # One engine version's contract.
    Row("split pair for 0.7.2", "e n", nothing, "KTB901", "one half of a split pair",
        "what sglang-kt 0.7.2 serves", "RAW_DIR --merged-output-dir", kwargs=KT072),
    Row("split pair beside its source", "raw e n", nothing, "KTB901", "split pair",
        "0.7.2", "raw --merged-output-dir", place="/e", kwargs=KT072),
    Row("merged for 0.6.2", "m", nothing, "KTB901", "merged layout", "up to 0.6.2",
        "use sglang-kt 0.7.2", kwargs=OLD),
    Row("experts for 0.6.2", "e", nothing, "KTB901", "expert layout", "up to 0.6.2",
        "use sglang-kt 0.7.2", kwargs=OLD),
    Row("a version between", "m", nothing, "KTB902", "contract of 0.7.2", "0.6.3 to 0.7.0",
        "nothing to do", "info", "0.7.1", kwargs={"engine": "sglang-kt==0.7.1"}),
    Row("a newer version", "m", nothing, "KTB902", "contract of 0.7.2", "0.7.2",
        "nothing to do", "info", "1.0", kwargs={"engine": "sglang-kt==1.0"}),
    Row("attention of Qwen3.5 in 0.6.4", "n", nothing, "KTB903", "never applied",
        "", "0.7.2", place="self_attn", base={"model_type": "qwen3_5_moe"}, kwargs=KT064),
    Row("modules the engine doesn't apply", "n", rename_module, "KTB608",
        "not applied by SGLang-KT", "", "embedded engine", place="gate_proj", base=GLM,
        kwargs=KT072),
    Row("modules some engine doesn't apply", "n", rename_module, "KTB608",
        "not applied by SGLang-KT", "", "embedded engine", "warning", "gate_proj", base=GLM),
    Row("weights without a method", "raw e n", manifest("raw", expert_weight_format="fp8"),
             "KTB904", "trained upon fp8 weights", "bf16, int8", "newer version", "warning",
             kwargs=KT064),
    Row("rank of RAWINT4", "raw m", manifest("raw", expert_weight_format="rawint4"), "KTB905",
        "rank 4 upon rawint4", "rank 8", "train with that rank", kwargs=KT072),
    Row("no model of the engine's", "m", nothing, "KTB618", "isn't in the engine's registry", "0.7.2 serves",
        "embedded engine", base={"architectures": ["Qwen3MoeForSomethingElse"]}, kwargs=KT072),
    Row("experts that the engine doesn't read", "m", nothing, "KTB618", "as feed_forward.experts.E.w1",
        "0.7.2 serves", "embedded engine", kwargs=KT072,
        base={"model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"]}),
    Row("another activation", "m", nothing, "KTB907", "experts use gelu", "silu",
        "embedded engine", base={"hidden_act": "gelu"}, kwargs=KT072),
]  # fmt: skip


@pytest.fixture
def whole(converted):
    return converted()


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row.code} {row.where} {row.name}".replace(" ", "-") for row in ROWS]
)
def test_each_row_is_a_rule(whole, tmp_path, row):
    kwargs = dict(row.kwargs)
    if row.base is not None:
        settings = {**BASE, **row.base}
        model = tmp_path / str(settings.pop("_name", "base"))
        model.mkdir()
        (model / "config.json").write_text(json.dumps(settings))
        kwargs["base_model"] = model
    row.damage(whole)
    dirs = [whole[name] for name in row.where.split()]
    problems = validate_adapter(dirs, **kwargs).problems
    mine = [problem for problem in problems if problem.code == row.code]
    assert mine, [str(problem) for problem in problems]
    first = mine[0]
    assert first.severity == row.severity
    assert row.says in first.found
    assert row.expected in first.expected
    assert bool(row.expected) == bool(first.expected)
    assert row.step
    assert row.step in first.next_step
    assert row.place in first.where
    names = {str(path) for path in dirs} | set(filter(None, [row.place]))
    assert any(name in first.where for name in names) or row.base is not None
    others = {p.code for p in problems if p.code != row.code and p.severity != "info"}
    assert others == set(row.also)


def test_what_manifests_may_say_beside(whole):
    known = {"expert_quantization": {"group": 32}, "non_expert_cache": {}, "int8_experts": True}
    for stored in ("bf16", "int8", "fp8", "rawint4", "mxfp4"):
        edit_manifest(whole["raw"], expert_weight_format=stored, native_experts=False, **known)
        assert validate_adapter([whole["raw"]]).problems == []


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_value_is_looked_at(make_raw, dtype):
    """One NaN anywhere, the first and the last element included, in matrices larger than a read."""
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    one, nan = (0x3F80, 0x7FC0) if dtype == "BF16" else (1, np.nan)
    rng, size = np.random.default_rng(0), 700_000
    module = "base_model.model.model.layers.1.self_attn.v_proj"
    for spot in (None, 0, size * 4 - 1, *rng.integers(0, size * 4, 4)):
        table = nonexpert_tensors()
        for half, shape in (("A", (4, size)), ("B", (8, 4))):
            values = np.full(shape, one, kind)
            if half == "A" and spot is not None:
                values.ravel()[spot] = nan
            name = f"{module}.lora_{half}.weight"
            table[name] = Tensor(name, dtype, shape, values.tobytes())
        raw = make_raw("big", nonexpert=table, overwrite=True)
        found = [p.where for p in validate_adapter([raw]).problems if p.code == "KTB401"]
        assert bool(found) == (spot is not None)
        assert all(f"{module}.lora_A" in where for where in found)
