"""With the real PEFT: what it writes is accepted, what we write it loads, to the same logits."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter, write_raw_adapter
from ktbridge.model import FAMILIES as TABLE
from ktbridge.model import family_of, open_tensor_file, read_model_config

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 24, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LATENT = {
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 12,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_shared_experts": 2,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
KIMI_VISION = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
}  # fmt: skip


def with_vision(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": {**SIZES, **text}, "vision_config": vision}


# Every model type of ktbridge.model.families with an inventory that transformers makes models of.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**SIZES, "decoder_sparse_step": 2},
    "qwen3_moe": {**SIZES, "mlp_only_layers": [0]},
    "qwen3_next": {**SIZES, **HYBRID},
    "qwen3_5_moe": with_vision(HYBRID, VISION),
    "qwen3_5_moe_text": {**SIZES, **HYBRID},
    "qwen3_vl_moe": with_vision({}, VISION),
    "mixtral": SIZES,
    "deepseek_v2": {**SIZES, **LATENT},
    "deepseek_v3": {**SIZES, **LATENT},
    "kimi_k25": with_vision({**LATENT, "model_type": "deepseek_v3"}, KIMI_VISION),
    "glm4_moe": {**SIZES, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "minimax_m2": SIZES,
    "gpt_oss": SIZES,
}


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
    base: Path,
    targets: Callable[[str], bool] | None = None,
    weights: bool = False,
    **lora: Any,
) -> tuple[Any, list[str]]:
    """A tiny model of a family with random, nonzero LoRA on the modules that ``targets`` takes."""
    settings = dict(FAMILIES[model_type])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    multimodal = "text_config" in settings
    auto = (
        transformers.AutoModelForImageTextToText
        if multimodal
        else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config).eval()
    model.save_pretrained(base) if weights else config.save_pretrained(base)
    model.name_or_path = str(base)
    wanted = targets or (lambda name: reachable(model_type, name))
    chosen = [name for name in text_linears(model) if wanted(name)]
    assert chosen
    adapter = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": chosen, "task_type": "CAUSAL_LM", **lora}
    )
    wrapped = peft.get_peft_model(model, adapter).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped, chosen


def alarms(paths: list[Path], **kwargs: Any) -> dict[str, set[str]]:
    """Codes of errors and warnings, each with the modules it names."""
    found: dict[str, set[str]] = {}
    for problem in validate_adapter(paths, **kwargs).problems:
        if problem.severity != "info":
            found.setdefault(problem.code, set()).add(problem.where)
    return found


def test_every_family_is_here() -> None:
    listed = {name for family in TABLE if family.modules_checked for name in family.model_types}
    made = {name for name in listed if name in transformers.CONFIG_MAPPING}
    # The text half of Qwen3-VL alone has no model class; its wrapper is tested.
    assert made - set(FAMILIES) == {"qwen3_vl_moe_text"}


@pytest.mark.quick("qwen3_moe|deepseek_v3|gpt_oss|qwen3_5_moe$|kimi")
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_false_alarm_on_what_peft_saves(tmp_path: Path, model_type: str) -> None:
    """On every linear module of the text model: attention of either kind, shared and dense MLPs."""
    model, targets = tuned(model_type, tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    family = family_of(model_type)
    assert family is not None
    served = family.nonexpert_targets
    beyond = [name for name in targets if served and name not in served]
    # Modules that the engine won't apply in this family are a true finding, and only that.
    expected = {"KTB608"} if beyond else set()
    found = alarms([tmp_path / "adapter"], base_model=tmp_path / "base")
    assert set(found) == expected, found
    assert alarms([tmp_path / "adapter"]) == {}


@pytest.mark.quick("qwen3_moe|deepseek_v3|gpt_oss|qwen3_5_moe$")
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_finding_on_what_peft_saves_for_the_engine(
    tmp_path: Path, model_type: str, experts: Callable[..., dict[str, Tensor]]
) -> None:
    """The modules that the engine applies, and with expert LoRA beside them, converted."""
    family = family_of(model_type)
    assert family is not None
    served = family.nonexpert_targets
    # Qwen3-Next's q_proj ends the engine at start-up (KTB903), and the others need it beside them (KTB209).
    ending = [f"self_attn.{part}_proj" for part in "qkv" if model_type == "qwen3_next"]
    model, _ = tuned(
        model_type,
        tmp_path / "base",
        lambda name: (
            reachable(model_type, name) and name not in ending and (not served or name in served)
        ),
    )
    model.save_pretrained(tmp_path / "adapter")
    engine = None if model_type == "gpt_oss" else "sglang-kt==0.7.2"
    checks: dict[str, Any] = {"base_model": tmp_path / "base", "engine": engine}
    assert alarms([tmp_path / "adapter"], **checks) == {}

    base = read_model_config(tmp_path / "base")
    saved = open_tensor_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rng = np.random.default_rng(0)
    fused = {}
    for layer in base.moe_layers:
        for projection in ("gate", "up", "down"):
            sizes = (base.hidden_size, base.intermediate_size)
            wide, narrow = sizes[::-1] if projection == "down" else sizes
            for half, shape in (("a", (4, 4, wide)), ("b", (4, narrow, 4))):
                name = f"layers.{layer}.experts.{projection}_lora_{half}"
                data = rng.normal(size=shape).astype(np.float32).view(np.uint32) >> 16
                fused[name] = Tensor(name, "BF16", shape, data.astype(np.uint16).tobytes())
    write_raw_adapter(
        tmp_path / "raw",
        expert=fused,
        nonexpert={name: saved.tensor(name) for name in saved.entries},
        config=model.peft_config["default"].to_dict(),
        base_model=str(tmp_path / "base"),
        rank=4,
        alpha=8.0,
    )
    outputs = {name: tmp_path / name for name in ("expert", "nonexpert", "merged")}
    convert_adapter(
        tmp_path / "raw",
        expert_output_dir=outputs["expert"],
        nonexpert_output_dir=outputs["nonexpert"],
        merged_output_dir=outputs["merged"],
    )
    for path in (tmp_path / "raw", *outputs.values()):
        assert alarms([path], base_model=tmp_path / "base") == {}
    assert alarms([tmp_path / "raw", *outputs.values()], base_model=tmp_path / "base") == {}
    assert alarms([outputs["merged"]], **checks) == {}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_what_peft_makes_of_mlp_targets_is_told_for_what_it_is(tmp_path: Path) -> None:
    model, _ = tuned("deepseek_v3", tmp_path / "base", lambda name: True)
    if not model.peft_config["default"].target_parameters:
        pytest.skip("this PEFT adapts the linear modules that were named")
    model.save_pretrained(tmp_path / "adapter")
    problems = validate_adapter([tmp_path / "adapter"], base_model=tmp_path / "base").problems
    assert not [problem for problem in problems if problem.severity != "info"]
    (told,) = [problem for problem in problems if problem.code == "KTB208"]
    assert "--from peft-fused" in told.next_step


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("targets", "code", "says"),
    [
        (["o_proj", "lm_head"], "KTB213", "because lm_head was targeted"),
        ("all-linear", "", "in the peft-fused format"),
    ],
)
def test_targets_that_engines_do_not_serve_are_told_once(
    tmp_path: Path, targets: Any, code: str, says: str
) -> None:
    model, _ = tuned("deepseek_v3", tmp_path / "base", weights=True, target_modules=targets)
    model.save_pretrained(tmp_path / "adapter")
    found = alarms([tmp_path / "adapter"], base_model=tmp_path / "base")
    if targets == "all-linear" and not model.peft_config["default"].target_parameters:
        pytest.skip("this PEFT adapts the linear modules that were named")
    assert set(found) == {code} - {""}
    problems = validate_adapter([tmp_path / "adapter"]).problems
    assert any(says in problem.found for problem in problems)


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}])
def test_peft_loads_the_nonexpert_directory(
    tmp_path: Path, lora: dict[str, Any], experts: Callable[..., dict[str, Tensor]]
) -> None:
    model, targets = tuned("qwen3_moe", tmp_path / "base", weights=True, **lora)
    model.save_pretrained(tmp_path / "peft")
    saved = open_tensor_file(tmp_path / "peft" / "adapter_model.safetensors")
    write_raw_adapter(
        tmp_path / "raw",
        expert=experts(layers=(1, 2, 3), experts=4),
        nonexpert={name: saved.tensor(name) for name in saved.entries},
        config=model.peft_config["default"].to_dict(),
        base_model=str(tmp_path / "base"),
        rank=4,
        alpha=8.0,
    )
    convert_adapter(
        tmp_path / "raw",
        nonexpert_output_dir=tmp_path / "n",
        merged_output_dir=tmp_path / "m",
    )
    config = json.loads((tmp_path / "n" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted({name.rpartition(".")[2] for name in targets})
    assert validate_adapter([tmp_path / name for name in ("raw", "n", "m")]).ok
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "n").eval()
    tokens = torch.arange(12).reshape(1, -1)
    with torch.no_grad():
        expected, got = model(tokens).logits, loaded(tokens).logits
        with loaded.disable_adapter():
            plain = loaded(tokens).logits
    torch.testing.assert_close(got, expected)
    assert (plain - expected).abs().max() > 0.01


def test_peft_output_without_a_manifest_converts(tmp_path: Path) -> None:
    model, _ = tuned("qwen3_moe", tmp_path / "base")
    model.save_pretrained(tmp_path / "peft")
    convert_adapter(tmp_path / "peft", nonexpert_output_dir=tmp_path / "n")
    before = open_tensor_file(tmp_path / "peft" / "adapter_model.safetensors")
    after = open_tensor_file(tmp_path / "n" / "adapter_model.safetensors")
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        assert before.tensor(name).data == after.tensor(name).data
    shutil.rmtree(tmp_path / "peft")
    assert validate_adapter([tmp_path / "n"]).ok
