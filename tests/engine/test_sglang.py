"""The real engine: launched by `ktbridge serve`, proven by `ktbridge verify`, ended without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ktbridge.adapter.engines import contract_for
from ktbridge.serve.sglang.facts import Installed

KEY = "a-secret_4711"
CLI = [sys.executable, "-m", "ktbridge"]


@pytest.mark.timeout(900)
def test_launch_verify_and_end(
    engine: Installed, flags: list[str], model: Path, adapter: Path, tmp_path: Path
) -> None:
    contract, _ = contract_for(f"sglang-kt=={engine.engine}")
    environment = {**os.environ, "KTBRIDGE_API_KEY": KEY, "XDG_CACHE_HOME": str(tmp_path)}
    log = tmp_path / "engine.log"
    words = ["serve", "--engine", "sglang", "--engine-python", engine.python]
    words += ["--json", "--port", "0"]
    words += ["--model", str(model), "--adapter", f"neko={adapter}", "--served-model-name", "tiny"]
    words += ["--log", str(log), "--timeout", "600", "--", *flags]
    with subprocess.Popen([*CLI, *words], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.endswith("\n}\n"):
                line = server.stdout.readline()
                assert line, f"ended before it was ready: {text}\n{log.read_text()[-4000:]}"
                text += line
            ready = json.loads(text)
            assert ready["layout"] == ("split" if contract.split else "merged")
            words = ["verify", "--base-url", ready["base_url"], "--model", "tiny:neko", "--json"]
            words += ["--adapter", str(adapter), "--base-model", str(model)]
            if "tiny" in ready["models"]:
                words += ["--expert-model", "tiny"]
            proof = subprocess.run(
                [*CLI, *words], capture_output=True, text=True, env=environment, timeout=300
            )
            print(proof.stdout, proof.stderr)
            assert proof.returncode == 0
            assert {half["verdict"] for half in json.loads(proof.stdout)["halves"]} == {"applied"}
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)
    with socket.create_server(("127.0.0.1", ready["port"])):
        pass
    assert log.read_text().count("Loaded KT expert LoRA for layer") == 2
    assert KEY not in log.read_text() + text
    assert "sglang::" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
