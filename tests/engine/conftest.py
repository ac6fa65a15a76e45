"""Tests that launch the real SGLang-KT. They need a GPU, an AMX CPU and the engine; without, they skip.

KTBRIDGE_ENGINE_PYTHON names the interpreter of the engine's environment; without it, the engine must be
importable here (PYTHONPATH will do). KTBRIDGE_ENGINE_FLAGS adds engine flags, which a machine without
FlashAttention needs. `make test-gpu` runs these.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from tinymoe import tiny_model, tiny_tokenizer

from ktbridge.adapter import Tensor, write_raw_adapter
from ktbridge.machine import read_gpus
from ktbridge.serve.sglang.facts import Installed, read_installed

HIDDEN, INNER, EXPERTS, LAYERS, RANK = 256, 128, 8, 2, 8


@pytest.fixture(scope="session")
def engine() -> Installed:
    if not read_gpus():
        pytest.skip("no GPU")
    installed = read_installed(os.environ.get("KTBRIDGE_ENGINE_PYTHON"))
    if installed.engine is None:
        pytest.skip("no sglang-kt: name its interpreter as KTBRIDGE_ENGINE_PYTHON")
    return installed


@pytest.fixture(scope="session")
def flags() -> list[str]:
    return shlex.split(os.environ.get("KTBRIDGE_ENGINE_FLAGS", ""))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, with sizes that the AMX kernels take, and a router that is sure of itself."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    made = tiny_model(
        seed=0, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, head_dim=64,
        num_hidden_layers=LAYERS, initializer_range=0.05, tie_word_embeddings=False,
    )  # fmt: skip
    for layer in made.model.layers:
        layer.mlp.gate.weight.data *= 20  # or rounding alone would send tokens elsewhere
    made.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw adapter whose halves both move the logprobs by more than bfloat16 does."""
    rng = np.random.default_rng(1)

    def tensor(name: str, *shape: int) -> Tensor:
        values = rng.normal(0, 0.1, shape).astype(np.float32).view(np.uint32)
        return Tensor(name, "BF16", shape, (values >> 16).astype(np.uint16).tobytes())

    expert, rest = {}, {}
    heads = {"q_proj": (256, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN)}
    for layer in range(LAYERS):
        for name in ("gate", "up", "down"):
            wide, high = (INNER, HIDDEN) if name == "down" else (HIDDEN, INNER)
            for half, shape in (("a", (EXPERTS, RANK, wide)), ("b", (EXPERTS, high, RANK))):
                key = f"layers.{layer}.experts.{name}_lora_{half}"
                expert[key] = tensor(key, *shape)
        for name, (out, inner) in {**heads, "o_proj": (HIDDEN, 256)}.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for key, shape in (("A", (RANK, inner)), ("B", (out, RANK))):
                key = f"{path}.lora_{key}.weight"
                rest[key] = tensor(key, *shape)
    directory = tmp_path_factory.mktemp("adapters") / "raw"
    write_raw_adapter(
        directory,
        expert=expert,
        nonexpert=rest,
        config={"r": RANK, "lora_alpha": 16, "target_modules": sorted({*heads, "o_proj"}),
                "task_type": "CAUSAL_LM", "bias": "none", "use_rslora": False},
        base_model=str(model),
        rank=RANK,
        alpha=16,
    )  # fmt: skip
    return directory
