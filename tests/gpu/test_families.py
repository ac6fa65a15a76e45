"""Every family with its experts on the GPU: the CPU's float32 autograd's answers and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from familygradients import ON_GPU, check_family
from moefamilies import FAMILIES, KIMI, SEEING
from transformers import CONFIG_MAPPING


# torch's own thread for backward may start with a product, and says that it made a context first.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("executor", ON_GPU)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family(
    model_type: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if KIMI.get(model_type, model_type) not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    check_family(model_type, tmp_path, monkeypatch, executor, torch.device("cuda", 0))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("executor", ON_GPU)
@pytest.mark.parametrize("model_type", SEEING)
def test_family_with_images(
    model_type: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 0)
    check_family(model_type, tmp_path, monkeypatch, executor, gpu, images=True)
