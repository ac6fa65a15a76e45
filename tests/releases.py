"""Other releases of tools, which `make test-peft` puts below build/peft, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RELEASES = TESTS.parent / "build/peft"


def run_with(
    code: str, *arguments: object, places: tuple[str, ...], cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with packages of ``places`` before the installed ones; skip where one isn't there."""
    paths = [RELEASES / place for place in places]
    for path in paths:
        if not path.is_dir():
            pytest.skip(f"{path} is not there: make test-peft")
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*paths, TESTS))),
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
        cwd=cwd,
        capture_output=True,
        text=True,
    )
