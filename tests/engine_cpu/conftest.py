"""Engines to ask, a model and adapters of it, and plans on a machine that could serve them.

KTBRIDGE_ENGINE_PYTHON names an interpreter that has SGLang-KT (`make test-engine` makes one); without it
these tests skip. Versions before the one that is installed there are the published wheels' own files, put
before it on the path: what the loaders need of other packages is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launchfacts import facts_for
from rawadapter import write_config, write_raw
from realengine import (
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    MERGED,
    MODULES,
    RANK,
    SPLIT,
    Engine,
    Pairs,
    trained,
)

from ktbridge.adapter import read_adapter
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import convert, read_sources
from ktbridge.serve.sglang.facts import read_installed
from ktbridge.serve.sglang.launch import Launch
from ktbridge.serve.sglang.preflight import plan_launch

PYTHON = "KTBRIDGE_ENGINE_PYTHON"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """engines(version): started once, as importing the engine takes half a minute."""
    started: dict[str, Engine] = {}
    broken: dict[str, str] = {}

    def start(version: str) -> Engine:
        python = os.environ.get(PYTHON)
        if not python:
            pytest.skip(f"no engine: `make test-engine` makes one, or name its Python as {PYTHON}")
        if version in broken:
            pytest.fail(broken[version])
        if version not in started:
            broken[version] = "its process did not start, see the first test that failed"
            root = tmp_path_factory.mktemp(f"engine-{version}")
            started[version] = Engine(python, version, root)
            del broken[version]
        return started[version]

    yield start
    for engine in started.values():
        engine.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("models") / "tiny",
        architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=LAYERS, hidden_size=HIDDEN,
        moe_intermediate_size=INNER, intermediate_size=56, num_experts=EXPERTS, head_dim=16,
        vocab_size=128, max_position_embeddings=256, torch_dtype="bfloat16",
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def make_raw(model: Path) -> Callable[..., Path]:
    """make_raw(directory, version, **write_raw's options): all experts and all that the version serves."""

    def make(directory: Path, version: str, **kind: Any) -> Path:
        modules = dict(MODULES)
        if version == SPLIT:
            del modules["mlp.gate"]  # a Qwen3-MoE router's LoRA ends that version at start-up
        return write_raw(
            directory, layers=tuple(range(LAYERS)), experts=EXPERTS, rank=RANK, hidden=HIDDEN, inter=INNER,
            modules=modules, block="", base_model=str(model), seed=3, **kind,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def raws(make_raw: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One raw adapter a version."""
    root = tmp_path_factory.mktemp("adapters")
    return {version: make_raw(root / version, version) for version in (SPLIT, MERGED)}


@pytest.fixture
def make_plan(model: Path, tmp_path: Path) -> Callable[..., Launch]:
    """make_plan(version, **request): the plan on a good machine, its conversions made."""

    def make(version: str, python: str = "python", **fields: Any) -> Launch:
        request = SglangRequest(model=str(model), **fields)
        sources, problems = read_sources(request)
        facts = facts_for(
            model,
            installed=replace(read_installed(), python=python, engine=version, kernel=version),
            sources=sources,
            source_problems=tuple(problems),
            cache=tmp_path / "cache",
        )
        made = plan_launch(request, facts)
        for step in made.conversions:
            convert(step)
        return made

    return make


@pytest.fixture(scope="session")
def as_trained(raws: dict[str, Path]) -> dict[str, Pairs]:
    return {version: trained(read_adapter(raw)) for version, raw in raws.items()}
