"""Which device each part of a model is meant for; what happens there is tested in tests/gpu."""

import torch
from tinymoe import tiny_config
from transformers import Qwen3MoeForCausalLM

from ktbridge.experts.loading import CPU, device_map, on_cpu

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def split(name: str) -> torch.device:
    if "embed_tokens" in name:
        return CPU
    return FIRST if name.startswith("model.layers.0.") else SECOND


def test_each_decoder_layer_is_one_part() -> None:
    config = tiny_config(tie_word_embeddings=False)
    assert device_map(Qwen3MoeForCausalLM, config, split) == {
        "model.embed_tokens": CPU,
        "model.layers.0": FIRST,
        "model.layers.1": SECOND,
        "model.norm": SECOND,
        "model.rotary_emb": SECOND,
        "lm_head": SECOND,
    }


def test_tied_embeddings_share_a_place() -> None:
    found = device_map(Qwen3MoeForCausalLM, tiny_config(), split)
    assert found["model.embed_tokens"] == found["lm_head"] == SECOND


def test_one_place_needs_no_map_of_parts() -> None:
    assert device_map(Qwen3MoeForCausalLM, tiny_config(), lambda name: FIRST) == {"": FIRST}
    assert device_map(Qwen3MoeForCausalLM, tiny_config(), on_cpu) == {}
