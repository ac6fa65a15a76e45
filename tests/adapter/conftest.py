"""Small adapters with random bfloat16 values, made without torch."""

from __future__ import annotations

import pytest
from rawadapter import convert_to, expert_tensors, nonexpert_tensors, write_raw


@pytest.fixture
def make_raw(tmp_path):
    """``make_raw(name, ...)`` writes a raw adapter of two layers; LoRA beside experts has alpha 8."""

    def make(name="raw", *, rank=4, **options):
        tensors = {
            "expert": expert_tensors(rank=rank),
            "nonexpert": nonexpert_tensors(rank=rank),
            "other_alpha": 8,
        }
        return write_raw(tmp_path / name, rank=rank, **{**tensors, **options})

    return make


@pytest.fixture
def converted(make_raw):
    """``converted(...)`` makes raw, as ``make_raw(...)``, and e, n and m of it."""

    def make(**options):
        raw = make_raw(**options)
        return {"raw": raw, **convert_to(raw)}

    return make
