"""Programs of other people against a real server: `make test-clients`.

They live in an environment of their own, which KTBRIDGE_CLIENTS names; without it these tests skip. The
server runs in ours.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tinyserver import adapter, base, launch, make_adapter, server  # noqa: F401

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_client() -> Run:
    """Run a program of the clients' environment, by name; offline but for our server."""
    where = os.environ.get("KTBRIDGE_CLIENTS")
    if not where:
        pytest.skip("KTBRIDGE_CLIENTS names no environment with lm_eval")

    def run(program: str, *args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "hf")}
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [str(Path(where).resolve() / "bin" / program), *args],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=280,
            env=environment | offline | {"TOKENIZERS_PARALLELISM": "false"} | more,
        )

    return run
