"""What a server says with `--json` when it is ready."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from typing import Any


def read_document(process: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
    """The JSON document on ``process``'s stdout; ``timeout`` is in seconds, for each line.

    The rest of stdout is read as well, so that the server never waits for a reader.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    text = ""
    while not text.endswith("\n}\n"):
        line = lines.get(timeout=timeout)
        assert line, f"the server ended before it was ready: {text}"
        text += line
    document: dict[str, Any] = json.loads(text)
    return document
