"""`ktbridge verify` against llama.cpp's two servers, as real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from proving.steps import serving
from realllama import Case

from ktbridge.errors import KtbridgeError
from ktbridge.verify.run import verify

SERVER = "KTBRIDGE_LLAMA_SERVER"
Start = Callable[..., list[str]]


def llama_cpp_python(python: str, model: Path, lora: Path | None, port: int) -> list[str]:
    command = [python, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", "tiny"]
    command += ["--port", str(port), "--n_ctx", "256", "--n_threads", "1", "--logits_all", "true"]
    return command + (["--lora_path", str(lora)] if lora else [])


def llama_server(_: str, model: Path, lora: Path | None, port: int) -> list[str]:
    binary = os.environ.get(SERVER)
    if not binary:
        pytest.skip(f"no llama-server: name one as {SERVER}")
    command = [binary, "-m", str(model), "--alias", "tiny", "--port", str(port), "-c", "256"]
    return [*command, "-t", "1", *(["--lora", str(lora)] if lora else [])]


def running(command: Start, python: str, of: Case, lora: Path | None) -> AbstractContextManager[str]:
    return serving(lambda port: command(python, of.model, lora, port), of.root / "server.log")


@pytest.mark.parametrize("command", [llama_cpp_python, llama_server])
def test_verify_tells_what_is_served(case, llama_python, warm, command):
    """Whole, one half and nothing; never exit code 0 unless sampled tokens were asked for."""
    of = case("qwen3_moe")
    form = "prompts as text" if command is llama_cpp_python else "prompts as ids"
    asked = ("--model", "tiny", "--adapter", str(of.raw()), "--base-model", str(of.base))
    with running(command, llama_python, of, of.converted()) as url:
        done = {
            way: warm.run(
                "-m",
                "ktbridge",
                "verify",
                "--server",
                url,
                *asked,
                "--json",
                "--logprobs-from",
                way,
            )
            for way in ("auto", "sampled")
        }
        with pytest.raises(KtbridgeError, match="echo: "):
            verify(url, "tiny", str(of.raw()), str(of.base), logprobs_from="echo")
    for way, code, severity in (("auto", 1, "error"), ("sampled", 0, "warning")):
        result = json.loads(done[way].stdout)
        assert (result["verdict"], result["ok"], done[way].returncode) == (
            "applied",
            code == 0,
            code,
        )
        assert result["logprobs_from"] == "sampled"
        assert form in result["asked"]
        (told,) = [item for item in result["problems"] if item["code"] == "KTV010"]
        assert told["severity"] == severity
        assert "tokens that the server chose" in result["reason"]
        # Prompts in letters that the tokenizer hasn't got: transformers and llama.cpp differ in what's left.
        left_out = [item["code"] for item in result["problems"] if item["code"] == "KTV011"]
        assert left_out == (["KTV011"] if command is llama_cpp_python else [])
    for lora, verdict in (("expert", "only experts"), (None, "not applied")):
        file = of.converted(lora, nonexpert=False) if lora else None
        with running(command, llama_python, of, file) as url:
            found = verify(url, "tiny", str(of.raw()), str(of.base), logprobs_from="sampled")
        assert (found.verdict, found.ok) == (verdict, False)
