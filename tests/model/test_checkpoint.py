"""config.json of each family, lazy checkpoints, and what a user hears when a model isn't there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ktbridge.errors import KtbridgeError
from ktbridge.model import FAMILIES, open_checkpoint, read_model_config, resolve_model
from ktbridge.model.locate import expert_home, module_weights

QWEN3 = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [2],
}


def model_dir(path: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def sharded(path: Path, weight_map: dict[str, str]) -> Path:
    model_dir(path, QWEN3)
    save_file({"a": np.zeros(2, np.float32)}, path / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    ("config", "family", "prefix", "moe_layers", "sizes"),
    [
        (QWEN3, "Qwen3-MoE", "model.", (0, 1, 3), (16, 8, 6)),
        ({**QWEN3, "decoder_sparse_step": 2}, "Qwen3-MoE", "model.", (1, 3), (16, 8, 6)),
        (
            {"model_type": "qwen3_5_moe", "text_config": {**QWEN3, "mlp_only_layers": None}},
            "Qwen3.5-MoE", "model.language_model.", (0, 1, 2, 3), (16, 8, 6),
        ),
        ({**QWEN3, "model_type": "qwen3_5_moe_text"}, "Qwen3.5-MoE", "model.", (0, 1, 3), (16, 8, 6)),
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 5, "hidden_size": 8,
             "intermediate_size": 99, "moe_intermediate_size": 4, "n_routed_experts": 7,
             "first_k_dense_replace": 2},
            "DeepSeek", "model.", (2, 3, 4), (8, 4, 7),
        ),
        (
            {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 8,
             "intermediate_size": 4, "num_local_experts": 3},
            "Mixtral", "model.", (0, 1), (8, 4, 3),
        ),
        (
            {"model_type": "newcomer", "num_hidden_layers": 2, "hidden_size": 8, "num_experts": 3,
             "moe_intermediate_size": 4, "mlp_layer_types": ["dense", "sparse"]},
            None, "model.", (1,), (8, 4, 3),
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
             "intermediate_size": 4},
            None, "model.", (), (8, 4, 0),
        ),
    ],
)  # fmt: skip
def test_config_of_each_family(tmp_path, config, family, prefix, moe_layers, sizes):
    read = read_model_config(model_dir(tmp_path / "m", config))
    assert (read.family.name if read.family else None) == family
    assert read.prefix == prefix
    assert read.moe_layers == moe_layers
    assert (read.hidden_size, read.intermediate_size, read.num_experts) == sizes


def test_hybrid_layer_types_from_the_interval(tmp_path):
    text = {**QWEN3, "full_attention_interval": 2}
    read = read_model_config(model_dir(tmp_path / "m", text))
    assert read.layer_types == ("linear_attention", "full_attention") * 2


def test_no_model_type_is_in_two_rows():
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": "qwen3_moe"}', "no num_hidden_layers"),
        ('{"model_type": "qwen3_moe", "num_hidden_layers": "4"}', "not a size"),
    ],
)
def test_broken_config_is_one_sentence(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(KtbridgeError, match=says) as caught:
        read_model_config(tmp_path)
    assert caught.value.next_step


def test_checkpoint_reads_single_and_sharded(tmp_path):
    array = np.arange(4, dtype=np.float32)
    single = open_checkpoint(model_dir(tmp_path / "one", QWEN3, {"a": array}))
    assert list(single) == ["a"]
    assert bytes(single.tensor("a").data) == array.tobytes()
    many = open_checkpoint(sharded(tmp_path / "many", {"a": "model-1.safetensors"}))
    assert many.shards == ("model-1.safetensors",)
    assert many.entry("a").shape == (2,)
    with pytest.raises(KtbridgeError, match="no tensor 'b'"):
        many.tensor("b")


@pytest.mark.parametrize(
    "shard",
    ["../m.safetensors", "/m.safetensors", "a/m.safetensors", "a\x00.safetensors", ".safetensors",
     "\x1b[2J.safetensors", "é\n.safetensors", ".hidden.safetensors", "m.bin", "m.safetensors/",
     "x" * 300 + ".safetensors", "", None, 3, ["m.safetensors"], {}],
)  # fmt: skip
def test_an_index_may_name_plain_files_beside_it_only(tmp_path, shard):
    path = sharded(tmp_path / "m", {"a": shard})
    with pytest.raises(KtbridgeError, match="not a shard beside it") as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.sentence


def test_a_pipe_is_not_opened(tmp_path):
    """Without a writer it would hold a reader for ever."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(KtbridgeError, match="not a regular file"):
        read_model_config(tmp_path)
    path = sharded(tmp_path / "m", {"a": "model-1.safetensors"})
    (path / "model-1.safetensors").unlink()
    os.mkfifo(path / "model-1.safetensors")
    with pytest.raises(KtbridgeError, match="not a regular file"):
        open_checkpoint(path).check()


def test_resolve_model_says_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def refused(model, says, step=""):
        with pytest.raises(KtbridgeError, match=says) as caught:
            resolve_model(model)
        assert step in caught.value.next_step

    refused("someone/something", "no model at", "hf download someone/something")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"no config\.json")
    bare = model_dir(tmp_path / "bare", QWEN3)
    refused(bare, "neither")
    (bare / "pytorch_model.bin").touch()
    refused(bare, "pickled")
    gone = sharded(tmp_path / "gone", {"a": "model-2.safetensors"})
    refused(gone, "lacks 1 of the 1 weight files", "download the rest, or copy them there")
    refused(sharded(tmp_path / "lack", {"b": "model-1.safetensors"}), "lacks 'b'")
    good = model_dir(tmp_path / "good", QWEN3, {"a": np.zeros(64, np.float32)})
    assert resolve_model(good) == good
    weights = good / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    refused(good, "truncated")


def test_resolve_model_finds_the_hub_cache(tmp_path, monkeypatch):
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    model_dir(repository / "snapshots" / "abc", QWEN3, {"a": np.zeros(2, np.float32)})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve_model("org/name") == repository / "snapshots" / "abc"


@pytest.mark.parametrize(
    ("stored", "module", "found"),
    [
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate", True),
        ("model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("language_model.lm_head", "lm_head", True),
        ("model.layers.0.self_attn.q_proj", "model.visual.layers.0.self_attn.q_proj", False),
        ("mtp.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", False),
        ("model.layers.1.mlp.gate", "model.layers.0.mlp.gate", False),
    ],
)
def test_a_module_in_memory_finds_its_weight_on_disk(tmp_path, stored, module, found):
    path = model_dir(tmp_path / "m", QWEN3, {f"{stored}.weight": np.zeros(2, np.float32)})
    expected = (f"{stored}.weight",) if found else ()
    assert module_weights(open_checkpoint(path), module) == expected


@pytest.mark.parametrize(
    ("stored", "base", "names"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.mlp.experts", "gate_proj"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight",
         "model.layers.0.block_sparse_moe.experts", "w1"),
        ("model.language_model.layers.0.mlp.experts.gate_up_proj",
         "model.language_model.layers.0.mlp.experts", None),
        ("model.layers.0.mlp.experts.0.gate_proj.weight_packed", "model.layers.0.mlp.experts",
         "gate_proj"),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts", None),
        ("mtp.layers.0.mlp.experts.gate_up_proj", None, None),
    ],
)  # fmt: skip
def test_experts_are_where_the_checkpoint_has_them(tmp_path, stored, base, names):
    path = model_dir(tmp_path / "m", QWEN3, {stored: np.zeros(2, np.float32)})
    home = expert_home(open_checkpoint(path), read_model_config(path), 0)
    assert (home.base if home else None) == base
    if home:
        assert home.names[:1] == ((names,) if names else ())
