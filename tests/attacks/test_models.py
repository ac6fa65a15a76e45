"""config.json of a base model that no class of transformers can be made of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3MoeConfig

from ktbridge.errors import KtbridgeError
from ktbridge.experts.load_model import make_skeleton
from ktbridge.model import read_model_config
from ktbridge.verify.run import fixed_prompts

SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 99,
}  # fmt: skip


def write(folder: Path, **changes: object) -> Path:
    config = Qwen3MoeConfig(**SIZES).to_dict() | changes
    kept = {key: value for key, value in config.items() if value != "missing"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": "missing", "num_attention_heads": 100},
        {"id2label": True},
        {"num_experts": "4"},
        {"rope_parameters": [[]]},
    ],
)
def test_no_model_can_be_made_of_it(tmp_path, changes):
    """All but the third were tracebacks of train, verify, chat and serve."""
    with pytest.raises(KtbridgeError):
        make_skeleton(write(tmp_path, **changes))


@pytest.mark.parametrize("size", ["missing", "many", -1, 2**60])
def test_verify_needs_a_vocabulary(tmp_path, size):
    config = read_model_config(write(tmp_path, vocab_size=size))
    with pytest.raises(KtbridgeError, match="vocab_size"):
        print(config.vocab_size)


class Tokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return 2


def test_verify_needs_ordinary_tokens():
    with pytest.raises(KtbridgeError, match="no ordinary token"):
        fixed_prompts(Tokenizer(all_special_ids=[0, 1]), 99)  # type: ignore[arg-type]
