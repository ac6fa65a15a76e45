"""What vLLM and SGLang do with a damaged adapter, and that validation for them never lets one through.

``does`` is what the engine makes of it: refuses it, drops (serves without a part, silently), ignores (as if
the damage weren't there, which is not what the adapter says), takes (serves other values), or honors (serves
what the adapter says). Only "refuses" can be heard; of SGLang it is "start", the server ends before it is
up, or "request", it ends at the first request for the adapter.
"""

from __future__ import annotations

import json

import pytest
from adapterfaults import (
    add,
    config,
    drop,
    edit_config,
    experts,
    fill,
    rename,
    swap_gate_and_up,
    tensors,
)
from loaders import EXPERTS, HIDDEN, RANK, Refusal, deltas_of, make_raw, outcome, same

from ktbridge.adapter import convert_adapter, validate_adapter

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
P = "base_model.model.model.layers."
OUT = "self_attn.o_proj"
pytestmark = pytest.mark.timeout(600)  # the first tests start the engines


def pair(module, rows, columns):
    halves = (("A", (RANK, columns)), ("B", (rows, RANK)))
    return tensors(*(add(f"{module}.lora_{half}.weight", shape) for half, shape in halves))


def untargeted(*names, add=()):
    """target_modules without some names, and with others."""

    def change(directory):
        targets = json.loads((directory / "adapter_config.json").read_text())["target_modules"]
        edit_config(directory, target_modules=[*({*targets} - {*names}), *add])

    return change


def both(*damages):
    def damage(directory):
        for one in damages:
            one(directory)

    return damage


def without(*names):
    """As an adapter that was never trained on these modules."""
    return both(tensors(*(drop(name) for name in names)), untargeted(*names))


LAYER = "layers.1.mlp.experts"
GATE = pair(f"{P}0.mlp.gate", EXPERTS, HIDDEN)
STACKED = [
    # what, damage, what SGLang does, what `ktbridge validate --engine sglang` calls it
    ("experts of a missing layer", tensors(drop(LAYER)), "drops", "KTB603"),
    ("a layer without up_proj", tensors(drop(f"{LAYER}.up_proj")), "drops", "KTB203"),
    ("a layer without down_proj", tensors(drop(f"{LAYER}.down_proj")), "drops", "KTB203"),
    ("a layer without gate_proj", tensors(drop(f"{LAYER}.gate_proj")), "request", "KTB203"),
    ("no up_proj at all", without("up_proj"), "honors", None),
    ("no gate_proj at all", without("gate_proj"), "request", "KTB646"),
    ("no down_proj at all", without("down_proj"), "drops", "KTB645"),
    ("down_proj alone", without("gate_proj", "up_proj"), "drops", "KTB645"),
    ("a missing expert", tensors(experts(".experts.", EXPERTS - 1)), "drops", "KTB604"),
    ("a missing down_proj", tensors(experts(".down_proj.", EXPERTS - 1)), "drops", "KTB203"),
    ("an extra expert", tensors(experts(".experts.", EXPERTS + 1)), "request", "KTB604"),
    ("experts' A without B", tensors(drop(f"{LAYER}.up_proj.lora_B")), "drops", "KTB202"),
    ("A without B", tensors(drop(f"layers.1.{OUT}.lora_B")), "request", "KTB202"),
    ("B without A", tensors(drop(f"layers.1.{OUT}.lora_A")), "drops", "KTB202"),
    ("an extra layer", pair(f"{P}7.{OUT}", HIDDEN, 64), "start", "KTB606"),
    ("a missing module", tensors(drop(f"layers.1.{OUT}")), "drops", "KTB607"),
    ("q and v without k", without("k_proj"), "honors", None),
    ("k without q and v", without("q_proj", "v_proj"), "request", "KTB646"),
    ("q without v", without("v_proj"), "start", "KTB646"),
    ("a draft layer's", pair(f"base_model.model.mtp.layers.0.{OUT}", HIDDEN, 64), "takes", "KTB207"),
    ("a vision tower's", pair(f"base_model.model.visual.layers.0.{OUT}", HIDDEN, 64), "takes", "KTB206"),
    ("the router", both(GATE, untargeted(add=["gate"])), "start", "KTB644"),
    ("the router left out", GATE, "request", "KTB646"),
    ("a target left out", untargeted("o_proj"), "request", "KTB646"),
    ("down_proj left out", untargeted("down_proj"), "request", "KTB646"),
    ("a target of another model", untargeted(add=["kv_b_proj"]), "start", "KTB644"),
    ("all-linear", config(target_modules="all-linear"), "honors", None),
    ("a pattern as target", config(target_modules=".*_proj"), "start", "KTB106"),
    ("no target_modules", config(target_modules="absent"), "start", "KTB106"),
    ("rsLoRA", config(use_rslora=True), "ignores", "KTB107"),
    ("alpha_pattern", config(alpha_pattern={"up_proj": 64}), "ignores", "KTB109"),
    ("rank_pattern", config(rank_pattern={"up_proj": 2}), "ignores", "KTB108"),
    ("a smaller r", config(r=2), "request", "KTB301"),
    ("no r", config(r="absent"), "start", "KTB102"),
    ("no alpha", config(lora_alpha="absent"), "start", "KTB103"),
    ("DoRA", config(use_dora=True), "start", "KTB110"),
    ("lora_bias", config(lora_bias=True), "ignores", "KTB111"),
    ("a head", tensors(add("base_model.model.lm_head.weight", (128, HIDDEN))), "ignores", "KTB112"),
    ("a norm", tensors(add(f"{P}0.input_layernorm.weight", (HIDDEN,))), "request", "KTB112"),
    ("fan_in_fan_out", config(fan_in_fan_out=True), "ignores", "KTB113"),
    ("LoHa", config(peft_type="LOHA"), "start", "KTB101"),
    ("no peft_type", config(peft_type="absent"), "start", "KTB101"),
    ("NaN", tensors(fill("experts.up_proj.lora_B", b"\xff")), "takes", "KTB401"),
    ("all B zero", tensors(fill("lora_B", b"\x00")), "drops", "KTB402"),
    ("gate and up swapped", tensors(swap_gate_and_up), "takes", "KTB504"),
]  # fmt: skip
SINGLE = [
    ("a missing expert", tensors(drop(f"{LAYER}.1.")), "drops", "KTB203"),
    ("a missing projection", tensors(drop("experts.1.up_proj")), "drops", "KTB203"),
    ("a missing gate_proj", tensors(drop("experts.1.gate_proj")), "request", "KTB203"),
    ("an expert's A without B", tensors(drop("experts.1.up_proj.lora_B")), "drops", "KTB203"),
    ("no up_proj at all", without("up_proj"), "honors", None),
    ("an extra expert", pair(f"{P}0.mlp.experts.{EXPERTS}.down_proj", HIDDEN, 40), "request", "KTB604"),
    ("rsLoRA", config(use_rslora=True), "ignores", "KTB107"),
]  # fmt: skip
WRAPPED = tensors(rename("model.model.layers", "model.model.language_model.layers"))
FURTHER = tensors(add(f"{P}0.mlp.experts.{EXPERTS}.up_proj.lora_A.weight", (RANK, HIDDEN)))
HEAD = tensors(add("base_model.model.lm_head.weight", (128, HIDDEN)))
VLLM = [
    # what, damage, what vLLM does, what `ktbridge validate --engine vllm` calls it
    ("experts of a missing layer", tensors(drop("layers.1.mlp.experts")), "drops", "KTB603"),
    ("a missing expert", tensors(drop("layers.1.mlp.experts.1.")), "refuses", "KTB203"),
    ("a missing projection", tensors(drop("experts.1.up_proj")), "refuses", "KTB203"),
    ("no up_proj at all", tensors(drop("up_proj")), "refuses", "KTB203"),
    ("an expert's A without B", tensors(drop("experts.1.up_proj.lora_B")), "refuses", "KTB203"),
    ("A without B", tensors(drop(f"layers.1.{OUT}.lora_B")), "refuses", "KTB202"),
    ("an extra expert", FURTHER, "refuses", "KTB604"),
    ("an extra layer", pair(f"{P}7.{OUT}", HIDDEN, 64), "ignores", "KTB606"),
    ("a missing module", tensors(drop(f"layers.1.{OUT}")), "drops", "KTB607"),
    ("k without q and v", tensors(drop("q_proj"), drop("v_proj")), "honors", None),
    ("another prefix", WRAPPED, "drops", "KTB641"),
    ("a draft layer's", tensors(rename("model.layers.1", "mtp.layers.1")), "drops", "KTB207"),
    ("rsLoRA", config(use_rslora=True), "honors", None),
    ("alpha_pattern", config(alpha_pattern={"up_proj": 64}), "honors", None),
    ("rank_pattern", config(rank_pattern={"up_proj": 2}), "takes", "KTB108"),
    ("a smaller r", config(r=2), "takes", "KTB301"),
    ("no alpha", config(lora_alpha="absent"), "refuses", "KTB103"),
    ("DoRA", config(use_dora=True), "refuses", "KTB110"),
    ("lora_bias", config(lora_bias=True), "refuses", "KTB111"),
    ("a whole module", HEAD, "refuses", "KTB112"),
    ("fan_in_fan_out", config(fan_in_fan_out=True), "ignores", "KTB113"),
    ("LoHa", config(peft_type="LOHA"), "ignores", "KTB101"),
    ("no target_modules", config(target_modules="absent"), "refuses", "KTB106"),
    ("a target left out", config(target_modules=["q_proj"]), "honors", None),
    ("NaN", tensors(fill("experts.0.up_proj.lora_B", b"\xff")), "takes", "KTB401"),
    ("all B zero", tensors(fill("lora_B", b"\x00")), "drops", "KTB402"),
    ("gate and up swapped", tensors(swap_gate_and_up), "takes", "KTB504"),
]  # fmt: skip
CASES = [("sglang", "sglang-3d", row) for row in STACKED]
CASES += [("sglang", "vllm", row) for row in SINGLE]
CASES += [("vllm", "vllm", row) for row in VLLM]


@pytest.mark.parametrize(
    ("engine", "to", "row"),
    CASES,
    ids=lambda value: value[0].replace(" ", "-") if isinstance(value, tuple) else value,
)
def test_damaged_directories(loaders, models, tmp_path, engine, to, row):
    _, damage, does, code = row
    model = models("qwen3_moe")
    raw, directory = tmp_path / "raw", tmp_path / "served"
    make_raw(raw, "qwen3_moe", model, without=["mlp.gate"] if engine == "sglang" else [])
    convert_adapter(raw, to=to, output_dir=directory)
    damage(directory)
    found = loaders(engine, VERSIONS[engine]).load(model, directory)
    became = outcome(found, deltas_of(raw))
    if isinstance(found, Refusal) and engine == "sglang":
        became = "request" if found.stage == "request" else "start"
    # Swapped gate and up have the same shapes: only the raw adapter beside tells.
    directories = [raw, directory] if code == "KTB504" else [directory]
    known = f"{engine}=={VERSIONS[engine]}"
    report = validate_adapter(directories, base_model=model, engine=known)
    said = {finding.code for finding in report.problems if finding.severity == "error"}
    if does == "honors":
        assert became not in ("start", "request", "refuses")
        assert not said
    else:
        assert became == does
        assert code in said


def test_mixtrals_experts_below_another_block_are_dropped(loaders, models, tmp_path):
    """KT's merged layout has them below mlp, vLLM's model below block_sparse_moe."""
    model = models("mixtral")
    raw = make_raw(tmp_path / "raw", "mixtral", model)
    convert_adapter(raw, merged_output_dir=tmp_path / "merged")
    found = loaders("vllm", VERSIONS["vllm"]).load(model, tmp_path / "merged")
    assert outcome(found, deltas_of(raw)) == "drops"
    report = validate_adapter([tmp_path / "merged"], base_model=model, engine="vllm")
    assert "KTB641" in {finding.code for finding in report.problems}


@pytest.mark.parametrize(("model_type", "code"), [("gpt_oss", "KTB640"), ("qwen3_vl_moe", "KTB640")])
def test_fused_families_refuse_separate_experts(loaders, models, tmp_path, model_type, code):
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    assert outcome(loaders("vllm", VERSIONS["vllm"]).load(model, tmp_path / "vllm"), {}) == "refuses"
    report = validate_adapter([tmp_path / "vllm"], base_model=model, engine="vllm")
    assert code in {finding.code for finding in report.problems}


def test_a_rank_above_the_servers_is_refused(loaders, models, tmp_path):
    model = models("qwen3_moe")
    raw = make_raw(tmp_path / "raw", "qwen3_moe", model, rank=24, alpha=24.0)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    found = loaders("vllm", VERSIONS["vllm"]).load(model, tmp_path / "vllm", max_lora_rank=16)
    assert "greater than max_lora_rank" in str(found)
    same(
        loaders("vllm", VERSIONS["vllm"]).load(model, tmp_path / "vllm", max_lora_rank=32),
        deltas_of(raw),
    )
    report = validate_adapter([tmp_path / "vllm"], base_model=model, engine="vllm")
    assert "--max-lora-rank 32" in report.problems[0].next_step
