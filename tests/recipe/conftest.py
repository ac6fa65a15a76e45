"""A tiny base whose answers end, and a warm Python, for runs of commands."""

from __future__ import annotations

import sys

import pytest
import warm as warm_python
from tinyserver import save_model

ENDS = 4.5
"""The logit of the token that ends an answer: one in some ten tokens, where a random model never ends."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random model whose answers end."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)
    model, tokenizer = (kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    letters = tokenizer("<|im_start|>assistant\nthe quick brown fox and 0123456789", return_tensors="pt")
    with torch.no_grad():
        usual = model.model(**letters).last_hidden_state[0, 4:].mean(0)
        model.lm_head.weight[tokenizer.eos_token_id] = ENDS * usual / usual.norm() ** 2
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def python(warm):
    """What starts an interpreter that has imported everything."""
    assert warm.run("-c", "pass").returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm_python.ADDRESS, warm.address)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("KTBRIDGE_API_KEY", raising=False)
        yield [sys.executable, str(warm_python.HERE)]
