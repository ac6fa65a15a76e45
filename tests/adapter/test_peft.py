"""With the real PEFT: what it saves is accepted in every family, and what is made of it, PEFT loads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from moefamilies import FAMILIES, SIZES, made
from rawadapter import convert_to, expert_tensors
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ktbridge.adapter import convert_adapter, validate_adapter, write_raw_adapter
from ktbridge.model import FAMILIES as TABLE
from ktbridge.model import family_of, open_tensor_file, read_model_config

LATENT = {**FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
KIMI_VISION = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
}  # fmt: skip
OURS = {name for family in TABLE if family.modules_checked for name in family.model_types}
SETTINGS = {name: FAMILIES[name] for name in sorted(OURS & FAMILIES.keys() & {*CONFIG_MAPPING})}
SETTINGS["kimi_k25"] = {"text_config": {**SIZES, **LATENT}, "vision_config": KIMI_VISION}
# In these families PEFT 0.21 takes any gate_proj, up_proj and down_proj, those of dense and shared
# MLPs included, for the routed experts', and writes fused expert LoRA.
TAKEN_FOR_EXPERTS = {"qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe"}


def reachable(model_type: str, name: str) -> bool:
    is_mlp = name.endswith(("gate_proj", "up_proj", "down_proj"))
    return not (is_mlp and model_type in TAKEN_FOR_EXPERTS)


def text_linears(model: Any) -> list[str]:
    """Paths of the text model's linear modules within a layer ("self_attn.q_proj")."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = [re.search(r"(?<!vision_tower\.)layers\.\d+\.(.+)", name) for name in names]
    return sorted({match[1] for match in inside if match})


def tuned(
    model_type: str,
    root: Path,
    wanted: Callable[[str], bool] | None = None,
    weights: bool = False,
    **lora: Any,
) -> Any:
    """A tiny model with random LoRA on the modules that ``wanted`` takes, saved below ``root``."""
    torch.manual_seed(0)
    model = made(model_type, SETTINGS[model_type]).eval()
    model.save_pretrained(root / "base") if weights else model.config.save_pretrained(root / "base")
    model.name_or_path = str(root / "base")
    wanted = wanted or (lambda name: reachable(model_type, name))
    chosen = [name for name in text_linears(model) if wanted(name)]
    assert chosen
    settings = {"r": 4, "lora_alpha": 8, "target_modules": chosen, "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings | lora)).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(root / "adapter")
    return wrapped


def alarms(*paths: Path, **options: Any) -> set[str]:
    """Codes of errors and warnings."""
    problems = validate_adapter(paths, **options).problems
    return {problem.code for problem in problems if problem.severity != "info"}


def test_every_family_is_here():
    # The text half of Qwen3-VL alone has no model class; its wrapper is tested.
    assert (OURS & {*CONFIG_MAPPING}) - SETTINGS.keys() <= {"qwen3_vl_moe_text"}


@pytest.mark.quick("qwen3_moe|deepseek_v3|gpt_oss|qwen3_5_moe$|kimi")
@pytest.mark.parametrize("model_type", SETTINGS)
def test_no_false_alarm_on_what_peft_saves(tmp_path, model_type):
    """On every linear module of the text model: attention of either kind, shared and dense MLPs."""
    model = tuned(model_type, tmp_path)
    served = family_of(model_type).nonexpert_targets
    targets = model.peft_config["default"].target_modules
    beyond = [name for name in targets if served and name not in served]
    # Modules that the engine won't apply in this family are a true finding, and only that.
    expected = {"KTB608"} if beyond else set()
    assert alarms(tmp_path / "adapter", base_model=tmp_path / "base") == expected
    assert alarms(tmp_path / "adapter") == set()


@pytest.mark.quick("qwen3_moe|deepseek_v3|gpt_oss|qwen3_5_moe$")
@pytest.mark.parametrize("model_type", SETTINGS)
def test_no_finding_on_what_peft_saves_for_the_engine(tmp_path, model_type):
    """The modules that the engine applies, and with expert LoRA beside them, converted."""
    served = family_of(model_type).nonexpert_targets
    # Qwen3-Next's q_proj ends the engine at start-up (KTB903), and the others need it beside them (KTB209).
    ending = [f"self_attn.{part}_proj" for part in "qkv" if model_type == "qwen3_next"]

    def wanted(name):
        applied = not served or name in served
        return reachable(model_type, name) and name not in ending and applied

    model = tuned(model_type, tmp_path, wanted)
    base = tmp_path / "base"
    checks = {"base_model": base, "engine": None if model_type == "gpt_oss" else "sglang-kt==0.7.2"}
    assert alarms(tmp_path / "adapter", **checks) == set()
    sizes = read_model_config(base)
    saved = open_tensor_file(tmp_path / "adapter" / "adapter_model.safetensors")
    write_raw_adapter(
        tmp_path / "raw",
        expert=expert_tensors(
            sizes.moe_layers, experts=4, hidden=sizes.hidden_size, inter=sizes.intermediate_size
        ),
        nonexpert={name: saved.tensor(name) for name in saved.entries},
        config=model.peft_config["default"].to_dict(),
        base_model=str(base),
        rank=4,
        alpha=8.0,
    )
    outputs = convert_to(tmp_path / "raw")
    for paths in (
        (tmp_path / "raw",),
        *zip(outputs.values()),
        (tmp_path / "raw", *outputs.values()),
    ):
        assert alarms(*paths, base_model=base) == set()
    assert alarms(outputs["m"], **checks) == set()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("targets", "code", "says"),
    [
        (["o_proj", "lm_head"], "KTB213", "because lm_head was targeted"),
        ("all-linear", "KTB208", "in the peft-fused format"),
    ],
)
def test_targets_that_engines_do_not_serve_are_told_once(tmp_path, targets, code, says):
    model = tuned("deepseek_v3", tmp_path, weights=True, target_modules=targets)
    if targets == "all-linear" and not model.peft_config["default"].target_parameters:
        pytest.skip("this PEFT adapts the linear modules that were named")
    alarming = {code} if code == "KTB213" else set()
    assert alarms(tmp_path / "adapter", base_model=tmp_path / "base") == alarming
    problems = validate_adapter([tmp_path / "adapter"]).problems
    (told,) = [problem for problem in problems if says in problem.found]
    assert told.code == code


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}])
def test_peft_loads_the_nonexpert_directory_made_of_its_own_adapter(tmp_path, lora):
    model = tuned("qwen3_moe", tmp_path, weights=True, **lora)
    convert_adapter(tmp_path / "adapter", nonexpert_output_dir=tmp_path / "n")
    before, after = (
        open_tensor_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "n")
    )
    assert before.entries.keys() == after.entries.keys()
    assert all(before.tensor(name).data == after.tensor(name).data for name in before.entries)
    config = json.loads((tmp_path / "n" / "adapter_config.json").read_text())
    targets = model.peft_config["default"].target_modules
    assert config["target_modules"] == sorted({name.rpartition(".")[2] for name in targets})
    assert validate_adapter([tmp_path / "n"]).ok
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "n").eval()
    tokens = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
        with loaded.disable_adapter():
            assert (loaded(tokens).logits - model(tokens).logits).abs().max() > 0.01
