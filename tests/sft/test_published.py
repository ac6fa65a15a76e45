"""Published configurations: sizes through the plan, and two layers of each in its own names and storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expertmoe import quantize, stored_as
from moefamilies import mxfp4_tensors
from published import MODELS, cut
from safetensors.torch import load_file, save_file
from trainrun import run_command, write_run

from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import load_mapped, model_class, model_config
from ktbridge.model.families import FAMILIES, UNSERVED
from ktbridge.sft import expert_layers, wrap_experts
from ktbridge.sft.plan.shape import read_shape, stub_from_config

QUANTIZED = ("fp8", "int8", "int4")
"""Storages of experts that lie one by one."""
IDS = torch.arange(3, 43).reshape(2, 20)


def written(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_finds_as_many_weights_as_the_model_is_said_to_have(name, tmp_path):
    model, base = MODELS[name], written(tmp_path / "base", MODELS[name].config)
    shape = read_shape(base, stub=stub_from_config(base))
    weights = shape.nonexpert_elements + shape.sparse_layers * shape.expert_elements
    assert weights / 1e9 == pytest.approx(model.billions, rel=0.01)
    assert (shape.expert_storage, shape.mappable) == (model.storage, True)


@pytest.mark.quick("Mixtral|30B|Next|V3$|Thinking|oss-20b|GLM-4.5$")
@pytest.mark.parametrize("name", MODELS)
def test_two_layers_in_published_names_and_storage(name, tmp_path):
    """The names are those stated for the weight index; the kernels read the experts where they are."""
    model, base = MODELS[name], written(tmp_path / "base", cut(MODELS[name]))
    cls, config = model_class(model_config(base))
    config.quantization_config = None
    torch.manual_seed(0)
    whole = cls(config).eval().to(torch.bfloat16)
    whole.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    if model.storage == "mxfp4":
        tensors = mxfp4_tensors(whole)
    assert {f"{model.prefix}layers.1.{stem}" for stem in model.names} <= tensors.keys()
    for key in [key for key in tensors if ".experts." in key and model.storage in QUANTIZED]:
        kind = {"int4": "int4-32"}.get(model.storage, model.storage)
        (stored, scale), _ = quantize(kind, tensors.pop(key).float()[None])
        tensors |= stored_as(kind, key, stored[0], scale[0])
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    written(base, cut(model))  # not as transformers saves it
    mapped = load_mapped(base, torch.bfloat16)
    wrap_experts(mapped, lora_rank=0)
    assert len(expert_layers(mapped)) == read_shape(base).sparse_layers
    with torch.no_grad():
        expected, found = whole(IDS).logits.float(), mapped(IDS).logits.float()
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("field", ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_renamed_field_is_no_default(field, tmp_path):
    """transformers would take DeepSeek-V3's own sizes for Kimi-K2's, and nobody would see it."""
    config = dict(MODELS["Kimi-K2-Instruct"].config)
    config[f"{field}_new"] = config.pop(field)
    base = written(tmp_path / "base", config)
    run = write_run(tmp_path, base, [{"messages": []}])
    done = run_command("plan", "--no-measure", run / "run.yaml", code=1)
    assert field in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("model_type", sorted(UNSERVED))
def test_what_is_not_served_is_refused_by_name(model_type, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_local_experts": 16}
    base = written(tmp_path / "base", {"model_type": model_type, **sizes})
    run = write_run(tmp_path, base, [{"messages": []}])
    done = run_command("plan", "--no-measure", run / "run.yaml", code=1)
    assert UNSERVED[model_type] in " ".join(done.stderr.split())


def test_a_renamed_tensor_is_named(tmp_path):
    base = written(tmp_path / "base", cut(MODELS["dots.llm1"]))
    cls, config = model_class(model_config(base))
    cls(config).to(torch.bfloat16).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    tensors = {key.replace("shared_experts", "shared_mlp"): value for key, value in tensors.items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(KtbridgeError, match=r"lacks model\.layers\.1\.mlp\.shared_experts"):
        load_mapped(base, torch.bfloat16)


def test_the_page_of_models_has_every_row():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    trained, refused = page.split("## Refused")
    for family in FAMILIES:
        assert all(f"`{model_type}`" in trained for model_type in family.model_types), family.name
    assert all(f"| `{model_type}` | {why} |" in refused for model_type, why in UNSERVED.items())
    assert all(name in trained for name in MODELS)
