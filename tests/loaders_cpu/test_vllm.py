"""`ktbridge convert --to vllm` and `--to peft-fused`, through vLLM's own loader, packing and layers."""

from __future__ import annotations

import pytest
from loaders import FAMILIES, deltas_of, make_raw, same

from ktbridge.adapter import convert_adapter

VERSION = "0.33.0"
# vLLM takes these models' experts as PEFT's fused ones, unless it is started with the flag.
FUSED = ("qwen3_5_moe", "qwen3_5_moe/full", "qwen3_vl_moe", "gpt_oss")
pytestmark = pytest.mark.timeout(600)  # the first test starts vLLM


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    "kind",
    [{}, {"other_alpha": 16.0}, {"rslora": True, "other_alpha": 4.0}],
    ids=["plain", "two-alphas", "rslora"],
)
def test_every_tensor_arrives(loaders, models, tmp_path, model_type, kind):
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model, **kind)
    convert_adapter(raw, to="vllm", output_dir=tmp_path / "vllm")
    flags = {"enable_mixed_moe_lora_format": True} if model_type in FUSED else {}
    found = loaders("vllm", VERSION).load(model, tmp_path / "vllm", **flags)
    same(found, deltas_of(raw))


# The flag makes vLLM take every family's experts one by one, and split fused adapters into them.
@pytest.mark.parametrize(
    ("model_type", "flag"),
    [*((name, flag) for name in FUSED for flag in (False, True)), ("qwen3_moe", True)],
)
def test_every_fused_tensor_arrives(loaders, models, tmp_path, model_type, flag):
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model, other_alpha=16.0)
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    loader = loaders("vllm", VERSION)
    found = loader.load(model, tmp_path / "peft", fused=flag, enable_mixed_moe_lora_format=flag)
    same(found, deltas_of(raw))


def test_fused_experts_of_another_family_are_refused_without_the_flag(loaders, models, tmp_path):
    model = models("qwen3_moe")
    raw = make_raw(tmp_path / "raw", "qwen3_moe", model)
    convert_adapter(raw, to="peft-fused", output_dir=tmp_path / "peft")
    found = loaders("vllm", VERSION).load(model, tmp_path / "peft")
    assert "enable_mixed_moe_lora_format" in str(found)
