"""Every family with its experts on the GPU: the CPU's float32 autograd's answers and gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from familygradients import ON_GPU, check_family
from moefamilies import FAMILIES, KIMI, SEEING
from transformers import CONFIG_MAPPING

LINEAR = ("glm5_next", "kimi_linear", "qwen3_5", "qwen3_next")
"""Families with linear attention."""


# torch's own thread for backward may start with a product, and says that it made a context first.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("executor", ON_GPU)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family(model_type, executor, tmp_path, monkeypatch):
    if KIMI.get(model_type, model_type) not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    skip_beside_kernels(model_type)
    check_family(model_type, tmp_path, monkeypatch, executor, torch.device("cuda", 0))


def skip_beside_kernels(model_type: str) -> None:
    """Skip what flash-linear-attention computes where it is installed: the reference is on the CPU."""
    if model_type.startswith(LINEAR) and importlib.util.find_spec("fla"):
        pytest.skip("flash-linear-attention is installed, and takes no tensor on the CPU")


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("executor", ON_GPU)
@pytest.mark.parametrize("model_type", SEEING)
def test_family_with_images(model_type, executor, tmp_path, monkeypatch):
    skip_beside_kernels(model_type)
    gpu = torch.device("cuda", 0)
    check_family(model_type, tmp_path, monkeypatch, executor, gpu, images=True)
