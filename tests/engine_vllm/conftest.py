"""A vLLM server on a CPU: what its tests share."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
from proving.steps import serving

PYTHON = "KTBRIDGE_VLLM_PYTHON"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm():
    """Context manager: the URL of a server of ``model``, named tiny, with options of its own."""
    if not os.environ.get(PYTHON):
        pytest.skip(f"no vLLM: `make test-vllm` makes one, or name its Python as {PYTHON}")

    @contextmanager
    def serve(model, *options):
        line = [os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server"]
        line += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
        line += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
        line += ["--enforce-eager", *options]
        log = model.parent / "log"
        with serving(lambda port: [*line, "--port", str(port)], log, 800, **ENVIRONMENT) as url:
            yield url

    return serve
