"""What vLLM's loader does with a damaged adapter, and that validation for vLLM never lets one through.

``does`` is what vLLM makes of it: refuses it, drops (serves without a part, silently), ignores (as if the
damage weren't there, which is not what the adapter says), takes (serves other values), or honors (serves
what the adapter says). Only "refuses" can be heard.
"""

from __future__ import annotations

import pytest
from adapterfaults import add, drop, fill, rename, swap_gate_and_up
from loaders import EXPERTS, HIDDEN, RANK, config, deltas_of, make_raw, outcome, same, tensors

from ktbridge.adapter import convert_adapter, validate_adapter

VERSION = "0.33.0"
P = "base_model.model.model.layers."
FURTHER = f"{P}0.mlp.experts.{EXPERTS}.up_proj.lora_A.weight"
OUT = "self_attn.o_proj"
pytestmark = pytest.mark.timeout(600)  # the first test starts vLLM


layer_7 = tensors(
    add(f"{P}7.{OUT}.lora_A.weight", (RANK, 64)), add(f"{P}7.{OUT}.lora_B.weight", (HIDDEN, RANK))
)
wrapped = tensors(rename("model.model.layers", "model.model.language_model.layers"))
HEAD = "base_model.model.lm_head.weight"
ROWS = [
    # what, damage, what vLLM does, what `ktbridge validate --engine vllm` calls it
    ("experts of a missing layer", tensors(drop("layers.1.mlp.experts")), "drops", "KTB603"),
    ("a missing expert", tensors(drop("layers.1.mlp.experts.1.")), "refuses", "KTB203"),
    ("a missing projection", tensors(drop("experts.1.up_proj")), "refuses", "KTB203"),
    ("no up_proj at all", tensors(drop("up_proj")), "refuses", "KTB203"),
    ("an expert's A without B", tensors(drop("experts.1.up_proj.lora_B")), "refuses", "KTB203"),
    ("A without B", tensors(drop(f"layers.1.{OUT}.lora_B")), "refuses", "KTB202"),
    ("an extra expert", tensors(add(FURTHER, (RANK, HIDDEN))), "refuses", "KTB604"),
    ("an extra layer", layer_7, "ignores", "KTB606"),
    ("a missing module", tensors(drop(f"layers.1.{OUT}")), "drops", "KTB607"),
    ("k without q and v", tensors(drop("q_proj"), drop("v_proj")), "honors", None),
    ("another prefix", wrapped, "drops", "KTB641"),
    ("a draft layer's", tensors(rename("model.layers.1", "mtp.layers.1")), "drops", "KTB207"),
    ("rsLoRA", config(use_rslora=True), "honors", None),
    ("alpha_pattern", config(alpha_pattern={"up_proj": 64}), "honors", None),
    ("rank_pattern", config(rank_pattern={"up_proj": 2}), "takes", "KTB108"),
    ("a smaller r", config(r=2), "takes", "KTB301"),
    ("no alpha", config(lora_alpha="absent"), "refuses", "KTB103"),
    ("DoRA", config(use_dora=True), "refuses", "KTB110"),
    ("lora_bias", config(lora_bias=True), "refuses", "KTB111"),
    ("a whole module", tensors(add(HEAD, (128, HIDDEN))), "refuses", "KTB112"),
    ("fan_in_fan_out", config(fan_in_fan_out=True), "ignores", "KTB113"),
    ("LoHa", config(peft_type="LOHA"), "ignores", "KTB101"),
    ("no target_modules", config(target_modules="absent"), "refuses", "KTB106"),
    ("a target left out", config(target_modules=["q_proj"]), "honors", None),
    ("NaN", tensors(fill("experts.0.up_proj.lora_B", b"\xff")), "takes", "KTB401"),
    ("all B zero", tensors(fill("lora_B", b"\x00")), "drops", "KTB402"),
    ("gate and up swapped", tensors(swap_gate_and_up), "takes", "KTB504"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "-"))
def test_damaged_directories(loaders, models, tmp_path, row) -> None:
    _, damage, does, code = row
    model = models("qwen3_moe")
    raw, directory = make_raw(tmp_path / "raw", "qwen3_moe", model), tmp_path / "vllm"
    convert_adapter(raw, to="vllm", output_dir=directory)
    damage(directory)
    found = outcome(loaders("vllm", VERSION).load(model, directory), deltas_of(raw))
    # Swapped gate and up have the same shapes: only the raw adapter beside tells.
    directories = [raw, directory] if code == "KTB504" else [directory]
    report = validate_adapter(directories, base_model=model, engine=f"vllm=={VERSION}")
    said = {finding.code for finding in report.problems if finding.severity == "error"}
    if does == "honors":
        assert found != "refuses"
        assert not said
    else:
        assert found == does
        assert code in said


def test_mixtrals_experts_below_another_block_are_dropped(loaders, models, tmp_path) -> None:
    """KT's merged layout has them below mlp, vLLM's model below block_sparse_moe."""
    model = models("mixtral")
    raw = make_raw(tmp_path / "raw", "mixtral", model)
    convert_adapter(raw, merged_output_dir=tmp_path / "merged")
    found = loaders("vllm", VERSION).load(model, tmp_path / "merged")
    assert outcome(found, deltas_of(raw)) == "drops"
    report = validate_adapter([tmp_path / "merged"], base_model=model, engine="vllm")
    assert "KTB641" in {finding.code for finding in report.problems}


@pytest.mark.parametrize(
    ("model_type", "code"), [("gpt_oss", "KTB640"), ("qwen3_vl_moe", "KTB640")]
)
def test_fused_families_refuse_separate_experts(
    loaders, models, tmp_path, model_type, code
) -> None:
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    assert outcome(loaders("vllm", VERSION).load(model, tmp_path / "vllm"), {}) == "refuses"
    report = validate_adapter([tmp_path / "vllm"], base_model=model, engine="vllm")
    assert code in {finding.code for finding in report.problems}


def test_a_rank_above_the_servers_is_refused(loaders, models, tmp_path) -> None:
    model = models("qwen3_moe")
    raw = make_raw(tmp_path / "raw", "qwen3_moe", model, rank=24, alpha=24.0)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    found = loaders("vllm", VERSION).load(model, tmp_path / "vllm", max_lora_rank=16)
    assert "greater than max_lora_rank" in str(found)
    same(loaders("vllm", VERSION).load(model, tmp_path / "vllm", max_lora_rank=32), deltas_of(raw))
    report = validate_adapter([tmp_path / "vllm"], base_model=model, engine="vllm")
    assert "--max-lora-rank 32" in report.problems[0].next_step
