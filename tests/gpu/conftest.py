"""Tests that need a CUDA GPU; without one they skip. `make test-gpu` runs these alone."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
