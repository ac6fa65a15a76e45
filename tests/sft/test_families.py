"""Every family on our kernels and the GPU's executor, from its own mapped checkpoint: right gradients."""

import pytest
from familygradients import EXECUTORS, check_family
from moefamilies import SEEING, parametrize_families


@pytest.mark.parametrize(("model_type", "executor"), parametrize_families(*EXECUTORS))
def test_family(model_type, executor, tmp_path, monkeypatch):
    """With LoRA on all that can have it: every answer and gradient is transformers' and PEFT's rule's."""
    check_family(model_type, tmp_path, monkeypatch, executor)


@pytest.mark.parametrize(
    ("model_type", "executor"),
    [
        (SEEING[0], EXECUTORS[0]),
        pytest.param(SEEING[1], EXECUTORS[0], marks=pytest.mark.slow),
        pytest.param(SEEING[1], EXECUTORS[1], marks=pytest.mark.slow),
        pytest.param(SEEING[2], EXECUTORS[0], marks=pytest.mark.slow),
    ],
)
def test_family_with_images(model_type, executor, tmp_path, monkeypatch):
    """The same with the vision tower in front, and an image in each row."""
    check_family(model_type, tmp_path, monkeypatch, executor, images=True)
