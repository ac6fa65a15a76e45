"""Engines' own servers as processes, from their start until they list their models."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ktbridge.errors import KtbridgeError
from ktbridge.openai_client import OpenAIClient


@contextmanager
def serving(
    command: Callable[[int], Sequence[str]], log: Path, seconds: float = 180, **environment: str
) -> Iterator[str]:
    """The URL of a server that ``command(port)`` starts; it fails with the end of its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as out:
        process = subprocess.Popen(
            command(port), stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    try:
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                OpenAIClient(url, timeout=5).models()
                break
            except KtbridgeError:
                assert time.monotonic() < ends, log.read_text()[-2000:]
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)
