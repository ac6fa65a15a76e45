"""Every family on our kernels and the GPU's executor, from its own mapped checkpoint: right gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from familygradients import EXECUTORS, check_family
from moefamilies import FAMILIES


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family(
    model_type: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LoRA on all that can have it: every answer and gradient is transformers' and PEFT's rule's."""
    check_family(model_type, tmp_path, monkeypatch, executor)
