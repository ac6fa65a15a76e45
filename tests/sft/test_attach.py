"""Which modules get LoRA, and what of it others read: PEFT itself, the engine's rules, a later run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from moefamilies import (
    FAMILIES,
    IDS,
    everything,
    made,
    parametrize_families,
    randomize,
    reference,
)
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from tinymoe import tiny_model
from transformers import AutoModelForCausalLM

from ktbridge.adapter import convert_adapter, read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.experts.load_model import load_mapped
from ktbridge.experts.lora import to_torch
from ktbridge.experts.lora_targets import (
    choose_modules,
    find_lora_targets,
    left_out_of_all,
    path_in_layer,
    peft_targets,
)
from ktbridge.experts.save_adapter import nonexpert_tensors
from ktbridge.model import family_of
from ktbridge.sft import expert_layers, model, save_raw_adapter, set_expert_lora, wrap_experts
from ktbridge.sft.config import TrainConfig, parse_config
from ktbridge.sft.model import attach_lora, attention_device, threads_beside_python

ENGINE = "sglang-kt==0.7.2"


def configured(base: Path, **settings: Any) -> TrainConfig:
    own = {"model_name_or_path": str(base), "dataset": "none", "output_dir": "none"}
    return parse_config({**own, "lora_rank": 4, "lora_alpha": 8, **settings})


def trained(base: Path, config: TrainConfig, model: Any = None) -> Any:
    """A model with LoRA that isn't zero."""
    tuned = attach_lora(model or load_mapped(base, torch.float32), config).eval()
    randomize(tuned, torch.Generator().manual_seed(5))
    return tuned


def going_on(base: Path, raw: Path, **settings: Any) -> Any:
    config = configured(base, adapter_name_or_path=str(raw), **settings)
    return attach_lora(load_mapped(base, torch.bfloat16), config)


def refusal(base: Path, raw: Path, **settings: Any) -> ProblemsError:
    with pytest.raises(ProblemsError) as refused:
        going_on(base, raw, **settings)
    return refused.value


def scales(model: Any) -> set[float]:
    """Of PEFT's half."""
    return {m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)}


def alarms(*paths: Path, **checks: Any) -> set[str]:
    found = validate_adapter(paths, **checks).problems
    return {problem.code for problem in found if problem.severity != "info"}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


@pytest.mark.quick("qwen3_moe|deepseek_v3")
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_5_moe"])
def test_what_is_saved_is_loaded_by_all(model_type, tmp_path):
    """LoRA on all that can have it: by a later run, and by PEFT alone."""
    base, raw = tmp_path / "base", tmp_path / "raw"
    reference(model_type, base)
    plain = load_mapped(base, torch.float32)
    model = trained(base, everything(plain, base, lora_dropout=0.1), plain)
    save_raw_adapter(model, raw, str(base))
    full = logits(model)
    set_expert_lora(model, False)
    rest = logits(model)
    with model.disable_adapter():
        assert (logits(model) - rest).abs().max() > 0.1

    # A later run has it all, and would save the same bytes.
    again = configured(base, lora_dropout=0.1, adapter_name_or_path=str(raw))
    later = attach_lora(load_mapped(base, torch.float32), again).eval()
    assert torch.equal(logits(later), full)
    settings = {(each.lora_rank, each.lora_dropout.p) for each in expert_layers(later).values()}
    assert settings == {(4, 0.1)}
    save_raw_adapter(later, tmp_path / "later", str(base))
    for file in raw.iterdir():
        if file.name != "kt_adapter_manifest.json":  # says when
            assert (tmp_path / "later" / file.name).read_bytes() == file.read_bytes()

    # As trl does for DPO: another adapter goes to the same modules, and away again.
    shapes = {name: value.shape for name, value in later.named_parameters()}
    before = {name for name, value in later.named_parameters() if value.requires_grad}
    later.add_adapter("ref", later.peft_config["default"])
    assert before == {name for name, value in later.named_parameters() if value.requires_grad}
    for name in [name for name in shapes if ".default." in name]:
        assert later.get_parameter(name.replace(".default.", ".ref.")).shape == shapes[name]
    later.delete_adapter("ref")
    assert torch.equal(logits(later), full)

    # PEFT by itself, on transformers' model: every tensor has its place, and the experts none.
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = nonexpert_tensors(PeftModel.from_pretrained(fresh, raw).eval())
    ours = nonexpert_tensors(model)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(to_torch(theirs[key]), to_torch(ours[key])) for key in ours)
    # The same on our experts, for rounding that is the same.
    loaded = PeftModel.from_pretrained(load_mapped(base, torch.float32), raw)
    wrap_experts(loaded, lora_rank=0)
    torch.testing.assert_close(logits(loaded), rest, atol=2e-3, rtol=0)


@pytest.mark.parametrize("model_type", parametrize_families())
def test_all_is_what_the_engine_applies(model_type):
    with torch.device("meta"):
        model = made(model_type, FAMILIES[model_type])
    found = find_lora_targets(model)
    every = {name for name, _ in model.named_modules() if ".layers." in name}
    assert {name for name in every if ".shared_expert" in name and name.endswith("_proj")} <= {*found.linears}
    chosen = {path_in_layer(name) for name in choose_modules(model, found, ("all",))}
    family = family_of(model_type)
    served = {*family.nonexpert_targets} if family else set()
    assert chosen == {
        path_in_layer(name) for name in found.linears if not served or path_in_layer(name) in served
    }
    linears = {path_in_layer(name) for name in found.linears}
    assert {*left_out_of_all(model, found)} == linears - chosen
    assert not chosen & {"lm_head", *map(path_in_layer, found.routers)}
    assert not any(".experts" in name or "visual" in name for name in chosen)


def test_names_mean_what_they_say():
    with torch.device("meta"):
        model = made("deepseek_v3", FAMILIES["deepseek_v3"])
    found = find_lora_targets(model)

    def chosen(*targets: str) -> set[str]:
        return {path_in_layer(name) for name in choose_modules(model, found, targets)}

    assert chosen("gate_proj") == {"mlp.gate_proj", "mlp.shared_experts.gate_proj"}
    assert chosen("mlp.gate_proj") == {"mlp.gate_proj"}
    assert chosen("gate") == {"mlp.gate"}
    assert chosen("all", "gate") == chosen("all") | {"mlp.gate"}
    with pytest.raises(UsageError) as refused:
        chosen("q_proj", "gates", "o_proj", "lm_head", "w1")  # this one has q_a_proj and q_b_proj
    assert "q_proj, gates, lm_head, w1" in str(refused.value)
    assert "kv_b_proj" in refused.value.next_step
    assert "the router is gate" in refused.value.next_step


def test_a_vision_tower_with_the_same_names_is_left_alone():
    vision = {
        "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    }  # fmt: skip
    text = {**FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
    with torch.device("meta"):
        model = made("kimi_k25", {"text_config": text, "vision_config": vision})
    found = find_lora_targets(model)
    beside = {name for name, _ in model.named_modules() if "vision" in name}
    assert any(".layers.0." in name for name in beside)
    assert not beside.intersection(found.modules)
    lora = LoraConfig(r=4, target_modules=[])
    targets = peft_targets(model, found.linears, found, lora)
    ends = {*targets["target_modules"]}
    assert not [name for name in beside if any(name.endswith(f".{end}") for end in ends)]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("attach")
    tiny_model().save_pretrained(root / "base")
    model = trained(root / "base", configured(root / "base", lora_target="q_proj,v_proj"))
    save_raw_adapter(model, root / "raw", str(root / "base"))
    return root


def test_everything_that_does_not_fit_is_told_at_once(adapter):
    other = {"lora_rank": 8, "lora_target": "q_proj,o_proj", "kt_config": {"kt_lora_alpha": 3}}
    refused = refusal(adapter / "base", adapter / "raw", **other)
    assert [problem.next_step for problem in refused.problems] == [
        "Set kt_lora_rank: 4.", "Set kt_lora_alpha: 8.", "Set lora_rank: 4.",
        *["Set lora_target: q_proj, v_proj, or all."] * 2,
    ]  # fmt: skip


def test_another_base_model_is_refused(adapter, tmp_path):
    other, two = tmp_path / "other", {"lora_target": "q_proj,v_proj"}
    tiny_model(rope_theta=5e5).save_pretrained(other)
    with pytest.raises(KtbridgeError, match=r"whose config\.json differs .* in rope_parameters"):
        going_on(other, adapter / "raw")
    # Its manifest tells what it was trained on, wherever that is: other values are another model.
    moved, raw = tmp_path / "moved", tmp_path / "trained"
    shutil.copytree(adapter / "base", moved)
    save_raw_adapter(trained(moved, configured(moved, **two)), raw, str(moved))
    moved.rename(tmp_path / "here")
    going_on(tmp_path / "here", raw)
    tiny_model(seed=1).save_pretrained(moved)
    assert {problem.code for problem in refusal(moved, raw).problems} == {"KTB612"}
    # The one that it was trained on isn't here: what fits by its shapes is taken, and said.
    model = trained(adapter / "base", configured(adapter / "base", **two))
    save_raw_adapter(model, tmp_path / "elsewhere", "/gone/model")
    with pytest.warns(UserWarning, match="from its shapes only"):
        going_on(other, tmp_path / "elsewhere")
    shutil.rmtree(other)
    tiny_model(num_key_value_heads=4, num_experts=4).save_pretrained(other)
    with pytest.warns(UserWarning, match="from its shapes only"):
        refused = refusal(other, tmp_path / "elsewhere")
    assert {problem.code for problem in refused.problems} == {"KTB604", "KTB605"}


def test_a_cpu_for_python_is_spared_where_any_part_is_elsewhere(monkeypatch):
    """As embeddings are on the CPU by some optimize rules, and attention isn't."""
    parts = torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2, device="meta")
    assert attention_device(torch.nn.Sequential(*parts)).type == "meta"
    assert attention_device(torch.nn.Sequential(parts[0])).type == "cpu"
    monkeypatch.delenv("KTBRIDGE_THREADS", raising=False)
    monkeypatch.setattr(model, "choose_threads", lambda: 8)
    devices = torch.device("cuda"), torch.device("cpu")
    assert [threads_beside_python(device) for device in devices] == [7, 0]


def test_what_is_no_start_is_refused(adapter, tmp_path):
    halves = {f"{half}_output_dir": tmp_path / half for half in ("expert", "nonexpert")}
    convert_adapter(adapter / "raw", **halves)
    shutil.copytree(adapter / "raw", tmp_path / "half")
    (tmp_path / "half" / "fused_expert_lora.safetensors").unlink()
    for name, words in (
        ("expert", "one half of a split pair"), ("nonexpert", "one half of a split pair"),
        ("nothing", "does not exist"), ("half", None),
    ):  # fmt: skip
        with pytest.raises(KtbridgeError, match=words):
            going_on(adapter / "base", tmp_path / name)


@pytest.mark.parametrize("to", ["kt-merged", "peft-fused", "sglang-3d", "vllm"])
def test_training_goes_on_from_any_format(adapter, tmp_path, to):
    base, raw = adapter / "base", adapter / "raw"
    convert_adapter(raw, to=to, output_dir=tmp_path / to, base_model=str(base))
    expected = dict(going_on(base, raw).named_parameters())
    for name, parameter in going_on(base, tmp_path / to).named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected


ROOT = float(numpy.float32(4 * 8**0.5))
"""alpha · √rank for alpha 4 and rank 8: no whole number, and none that a short text gives again."""


def test_rslora_is_saved_as_plain_lora_that_every_layout_takes(tmp_path):
    base, raw = tmp_path / "base", tmp_path / "raw"
    tiny_model().save_pretrained(base)
    ours = configured(base, lora_rank=8, lora_alpha=4, use_rslora=True, lora_target="q_proj,v_proj")
    model = trained(base, ours)
    save_raw_adapter(model, raw, str(base))
    # The scales are PEFT's own of rsLoRA, for both halves.
    alone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    (scale,) = scales(get_peft_model(alone, LoraConfig(**settings)))
    experts = {each.lora_alpha / each.lora_rank for each in expert_layers(model).values()}
    assert sorted(scales(model) | experts) == [pytest.approx(scale, rel=1e-7)]
    # What is written is plain, whole to the last bit, and every layout holds it.
    config = json.loads((raw / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"]) == (ROOT, False)
    assert read_adapter(raw).alpha == ROOT
    layouts = {layout: tmp_path / layout for layout in ("kt-merged", "peft-fused", "vllm", "gguf")}
    for layout, path in layouts.items():
        convert_adapter(raw, to=layout, output_dir=path, base_model=str(base))
    assert alarms(raw, layouts["kt-merged"], base_model=base, engine=ENGINE) == set()
    back = tmp_path / "back"
    convert_adapter(layouts["gguf"], to="raw", output_dir=back, base_model=str(base))
    assert read_adapter(back).alpha == ROOT  # which GGUF has as float32

    # Another run goes on from it by either name of the scale, and is told the right one.
    for named in ({"lora_alpha": 4, "use_rslora": True}, {"lora_alpha": ROOT}):
        later = configured(base, adapter_name_or_path=str(raw), **{"lora_rank": 8, **named})
        again = attach_lora(load_mapped(base, torch.float32), later)
        assert torch.equal(logits(again), logits(model))
    refused = refusal(base, raw, lora_rank=8, lora_alpha=4)
    assert {problem.next_step for problem in refused.problems} == {
        f"Set kt_lora_alpha: {ROOT!r}.", f"Set lora_alpha: {ROOT!r}.",
    }  # fmt: skip


def test_rslora_goes_on_as_it_was(adapter, tmp_path):
    base = adapter / "base"
    model = trained(base, configured(base, lora_target="q_proj,v_proj"))
    model.peft_config["default"].use_rslora = True
    save_raw_adapter(model, tmp_path / "raw", str(base))
    asked = {"use_rslora": True, "kt_config": {"kt_lora_alpha": 4}}
    for settings, alpha in (({}, 8), (asked, 16)):
        later = going_on(base, tmp_path / "raw", **settings)
        assert scales(later) == {4.0}  # 8 / sqrt(4)
        assert later.peft_config["default"].lora_alpha == alpha
