"""`ktbridge convert --to sglang-3d` and `--to vllm`, through upstream SGLang's loader, pool and layers."""

from __future__ import annotations

import re

import pytest
from loaders import deltas_of, make_raw, same

from ktbridge.adapter import convert_adapter

VERSION = "0.5.23"
pytestmark = pytest.mark.timeout(600)  # the first test starts SGLang


@pytest.mark.parametrize(
    ("model_type", "to"),
    [
        *((name, to) for name in ("qwen3_moe", "olmoe") for to in ("sglang-3d", "vllm")),
        ("gpt_oss", "sglang-3d"),
    ],
)
def test_every_tensor_arrives(loaders, models, tmp_path, model_type, to) -> None:
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model, without=["mlp.gate"])
    convert_adapter(raw, to=to, output_dir=tmp_path / to)
    found = loaders("sglang", VERSION).load(model, tmp_path / to)
    same(found, deltas_of(raw))


@pytest.mark.parametrize(
    ("model_type", "to", "module"),
    [
        ("qwen3_moe", "sglang-3d", "gate"),
        ("mixtral", "vllm", "w[123]"),
        ("gpt_oss", "vllm", "w[123]"),
    ],
)
def test_modules_without_a_size_end_the_start(
    loaders, models, tmp_path, model_type, to, module
) -> None:
    """LoRA on the router, and w1, w2 or w3 among the target modules."""
    model = models(model_type)
    raw = make_raw(tmp_path / "raw", model_type, model)
    convert_adapter(raw, to=to, output_dir=tmp_path / to)
    found = loaders("sglang", VERSION).load(model, tmp_path / to)
    assert re.search(f"get_hidden_dim not implemented for {module}$", str(found)), found
