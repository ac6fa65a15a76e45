"""The wheels of sglang-kt as they were published: fetched with pip where that is asked for, and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def wheel_path(version: str) -> Path:
    """The wheel of one version; skips the test, with the reason, where it can't be had.

    They are large (6 to 100 MB), so they are only fetched where KTBRIDGE_ENGINE_WHEELS is 1 (`make
    test-engine`); once there, they are always found.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = home / "ktbridge" / "wheels"
    name = f"sglang_kt-{version}-*.whl"
    if not list(directory.glob(name)):
        if os.environ.get("KTBRIDGE_ENGINE_WHEELS", "") in ("", "0"):
            pytest.skip("the engine's wheel isn't here; `make test-engine` fetches it")
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        done = subprocess.run(
            [*fetch, "--dest", str(directory), f"sglang-kt=={version}"],
            capture_output=True,
            text=True,
            timeout=280,
        )
        if done.returncode:
            pytest.skip(f"pip can't fetch it: {done.stderr.strip().splitlines()[-1]}")
    return next(directory.glob(name))
