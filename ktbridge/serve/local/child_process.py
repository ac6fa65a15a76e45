"""The embedded engine as a child process: it ends with the block, or with its parent."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from ktbridge.errors import KtbridgeError

ADAPTER = "adapter"
END_SECONDS = 10


@dataclass(frozen=True)
class Child:
    """A running engine: base URL, API key and listed model names."""

    url: str
    key: str
    models: list[str]
    process: subprocess.Popen[str]

    def check(self) -> None:
        """Raises KtbridgeError if it has ended."""
        try:
            code = self.process.wait(
                0.2
            )  # a connection breaks slightly before its process has exited
        except subprocess.TimeoutExpired:
            return
        raise KtbridgeError(f"the engine ended with code {code}.", "its output is above")


@contextmanager
def engine(model: str, adapter: str | None = None, threads: int | None = None) -> Iterator[Child]:
    """`ktbridge serve` on a free loopback port, once it is ready.

    ``adapter`` (any layout) is served as S:adapter. The child's output goes to our stderr. Raises
    KtbridgeError when it ends before it is ready.
    """
    key = secrets.token_hex(16)
    command = [sys.executable, "-c", "from ktbridge.cli import main; main()", "serve"]
    command += ["--base-model", model, "--port", "0", "--json"]
    command += ["--adapter", f"{ADAPTER}={adapter}"] if adapter is not None else []
    command += ["--threads", str(threads)] if threads is not None else []
    parent = os.getpid()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"KTBRIDGE_API_KEY": key},
        # Ctrl-C at the terminal is meant for the chat: it ends an answer, not the engine.
        start_new_session=True,
        preexec_fn=lambda: _end_with(parent),
    )
    try:
        assert process.stdout is not None
        ready = _first_document(process.stdout)
        if ready is None or "base_url" not in ready:  # empty, or an error document
            raise KtbridgeError(
                f"the engine ended with code {process.wait()} before it was ready.",
                "its output is above",
            )
        yield Child(ready["base_url"], key, list(ready["models"]), process)
    finally:
        process.terminate()
        try:
            # The second signal aborts answers, which nobody reads any more.
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_document(stream: IO[str]) -> dict | None:
    """The first JSON document of a stream, or None if it ends before."""
    text = ""
    for line in stream:
        text += line
        if line == "}\n":
            return json.loads(text)
    return None


def _end_with(parent: int) -> None:
    """In the child: request SIGTERM when the parent dies, for whatever reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGTERM)
