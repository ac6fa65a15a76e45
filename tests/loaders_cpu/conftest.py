"""Engines' own loaders, started once, and base models of which only config.json is there."""

from __future__ import annotations

import os

import pytest
from loaders import EXPERTS, FAMILIES, HIDDEN, INNER, LAYERS, PYTHON, Loader
from rawadapter import write_config


@pytest.fixture(scope="session")
def loaders(tmp_path_factory):
    """loaders(package, version): started once, as importing an engine takes half a minute."""
    started: dict[tuple[str, str], Loader] = {}

    def start(package, version):
        if not os.environ.get(PYTHON):
            pytest.skip(f"no loaders: `make test-loaders` makes them, or name a Python as {PYTHON}")
        if (package, version) not in started:
            root = tmp_path_factory.mktemp(f"{package}-{version}")
            started[package, version] = Loader(package, version, root)
        return started[package, version]

    yield start
    for loader in started.values():
        loader.end()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(name of a row of FAMILIES): a base model of which only config.json is there."""
    root = tmp_path_factory.mktemp("models")

    def make(name):
        architecture, changes, _, _ = FAMILIES[name]
        model_type = name.partition("/")[0]
        sizes = {
            "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER,
            "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_experts_per_tok": 2, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
            "n_routed_experts": EXPERTS, "head_dim": 16, "vocab_size": 128,
            "max_position_embeddings": 256, "dtype": "bfloat16", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True, "eos_token_id": 1, "pad_token_id": 0,
        }  # fmt: skip
        sizes |= changes
        if "vision_config" in sizes:  # a wrapper around the text model
            vision = sizes.pop("vision_config")
            sizes = {
                "text_config": {**sizes, "model_type": f"{model_type}_text"},
                "vision_config": vision,
            }
        return write_config(root / name.replace("/", "-"), model_type, architectures=[architecture], **sizes)

    return make
