"""Small adapters with random bfloat16 values, made without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rawadapter import ATTENTION, random_bits

from ktbridge.adapter import Tensor, convert_adapter, write_raw_adapter

HIDDEN, INTER = 16, 8


def expert_tensors(
    layers: tuple[int, ...] = (0, 1), experts: int = 3, rank: int = 4, seed: int = 0
) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        for projection in ("gate", "up", "down"):
            wide, narrow = (INTER, HIDDEN) if projection == "down" else (HIDDEN, INTER)
            for half, shape in (("a", (experts, rank, wide)), ("b", (experts, narrow, rank))):
                name = f"layers.{layer}.experts.{projection}_lora_{half}"
                tensors[name] = Tensor(name, "BF16", shape, random_bits(rng, shape))
    return tensors


def nonexpert_tensors(
    layers: tuple[int, ...] = (0, 1), rank: int = 4, prefix: str = "model.", seed: int = 1
) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        for module, (rows, columns) in ATTENTION.items():
            for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                path = f"{prefix}layers.{layer}.self_attn.{module}"
                name = f"base_model.model.{path}.lora_{half}.weight"
                tensors[name] = Tensor(name, "BF16", shape, random_bits(rng, shape))
    return tensors


@pytest.fixture
def make_raw(tmp_path: Path) -> Callable[..., Path]:
    """``make_raw(name, ...)`` writes a raw adapter and returns its directory."""

    def make(
        name: str = "raw",
        *,
        expert: dict[str, Tensor] | None = None,
        nonexpert: dict[str, Tensor] | None = None,
        rank: int = 4,
        alpha: float = 8.0,
        overwrite: bool = False,
        **config: Any,
    ) -> Path:
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 8,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(ATTENTION),
        }
        write_raw_adapter(
            tmp_path / name,
            expert=expert_tensors(rank=rank) if expert is None else expert,
            nonexpert=nonexpert_tensors(rank=rank) if nonexpert is None else nonexpert,
            config={**settings, **config},
            base_model="models/base",
            rank=rank,
            alpha=alpha,
            overwrite=overwrite,
        )
        return tmp_path / name

    return make


@pytest.fixture
def converted(make_raw: Callable[..., Path]) -> Callable[..., dict[str, Path]]:
    """``converted(...)`` makes raw, as ``make_raw(...)``, and e, n and m of it."""

    def make(**options: Any) -> dict[str, Path]:
        raw = make_raw(**options)
        paths = {name: raw.parent / name for name in "enm"}
        convert_adapter(
            raw,
            expert_output_dir=paths["e"],
            nonexpert_output_dir=paths["n"],
            merged_output_dir=paths["m"],
        )
        return {"raw": raw, **paths}

    return make


@pytest.fixture
def experts() -> Callable[..., dict[str, Tensor]]:
    return expert_tensors


@pytest.fixture
def nonexperts() -> Callable[..., dict[str, Tensor]]:
    return nonexpert_tensors
