"""The server as a process: refusals before loading, dry runs, fingerprints, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from click.testing import CliRunner, Result

from ktbridge.adapter import convert_adapter
from ktbridge.cli import main
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.install import install_hint
from ktbridge.serve.local import plan as local_plan
from ktbridge.serve.local.launch import _Server
from ktbridge.serve.local.plan import fingerprints, plan_local
from ktbridge.serve.request import ServeRequest


def serve(*args: object, **environment: str) -> Result:
    return CliRunner().invoke(main, ["serve", *map(str, args)], env=environment)


def refused(code: int, words: str, *args: object) -> str:
    """One sentence and a next step on stderr, nothing on stdout, no traceback."""
    result = serve(*args)
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert words in result.stderr
    assert "  next: " in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("code", "words", "args"),
    [
        (1, "nowhere", ("--model", "{nowhere}")),
        (1, "model.safetensors", ("--model", "{truncated}")),
        (1, "nowhere", ("--model", "{base}", "--adapter", "a={nowhere}")),
        (1, "narrow", ("--model", "{base}", "--adapter", "a={narrow}", "--port", "0")),
        (2, "'a:b'", ("--model", "{base}", "--served-model-name", "a:b")),
        (2, "no API key", ("--model", "{base}", "--host", "0.0.0.0")),
        (2, "no API key", ("--model", "{base}", "--host", "::")),
    ],
)  # fmt: skip
def test_refusals(base, adapter, make_adapter, tmp_path, code, words, args):
    paths = {"base": base, "adapter": adapter, "nowhere": tmp_path / "nowhere"}
    paths["narrow"] = make_adapter("narrow", hidden=32)  # of another base
    paths["truncated"] = Path(shutil.copytree(base, tmp_path / "truncated"))
    os.truncate(paths["truncated"] / "model.safetensors", 1000)
    refused(code, words, *(word.format(**paths) for word in args))


def test_each_of_several_adapters_has_its_own_experts(base, adapter, make_adapter, tmp_path):
    """Each name has its own; beside an expert LoRA that is for every name there can be none."""
    adapters = {"a": str(adapter), "b": str(make_adapter("second", seed=8))}
    plan = plan_local(ServeRequest(model=str(base), adapters=adapters, served_name="tiny"))
    assert plan.models == {
        "tiny:a": "base + expert LoRA a + non-expert LoRA a",
        "tiny:b": "base + expert LoRA b + non-expert LoRA b",
        "tiny:base": "base",
    }
    assert len(set(fingerprints(plan).values())) == 3
    convert_adapter(adapter, expert_output_dir=tmp_path / "half", nonexpert_output_dir=tmp_path / "rest")
    half = str(tmp_path / "half")
    request = ServeRequest(model=str(base), adapters=adapters, expert_adapter=half)
    with pytest.raises(UsageError, match="--expert-adapter and a and b both bring an expert LoRA"):
        plan_local(request)


def test_port_in_use_is_said_before_loading(server, base):
    said = refused(1, "already in use", "--model", str(base), "--port", str(server.port))
    assert "loading" not in said


def test_model_without_a_weight(base, tmp_path):
    """transformers would make the missing one up."""
    import torch
    from safetensors.torch import load_file, save_file

    from ktbridge.experts.load_model import load_model

    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(KtbridgeError, match=r"lacks model\.norm\.weight"):
        load_model(tmp_path, torch.bfloat16)


@pytest.mark.parametrize("key", [" hush", "hush\n", "  ", "hush\nhush"])
def test_a_key_that_no_client_could_send(base, key):
    with pytest.raises(UsageError, match="API key") as caught:
        plan_local(ServeRequest(str(base), api_key=key))
    assert "hush" not in str(caught.value)


def test_fingerprint_sees_every_small_file(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    (tmp_path / "a directory").mkdir()
    seen = {fingerprints(plan_local(ServeRequest(str(tmp_path), served_name="s")))["s"]}
    for name in ("tokenizer.model", "merges.txt", "vocab.txt"):
        (tmp_path / name).write_text(name)
        seen.add(fingerprints(plan_local(ServeRequest(str(tmp_path), served_name="s")))["s"])
    assert len(seen) == 4


def test_the_first_signal_drains_and_the_second_aborts():
    """By the event loop, and whoever called the server gets neither."""
    done = []
    worker = SimpleNamespace(drain=lambda: done.append("drain"), close=lambda: done.append("close"))

    async def scenario() -> None:
        server = _Server(uvicorn.Config(app=lambda: None), worker, 60, lambda: None)
        with server.capture_signals():
            for count in (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
                while len(done) < count:
                    await asyncio.sleep(0.01)
                assert server.should_exit

    asyncio.run(scenario())
    assert done == ["drain", "close"]


def test_a_dry_run_promises_what_could_be_served(base, adapter, monkeypatch, server):
    """The model's own context, names that warn of half an adapter, no key; no promise that can't be kept."""
    words = ("--engine", "local", "--base-model", base, "--adapter", f"neko={adapter}", "--dry-run")
    named = (*words, "--port", "0", "--served-model-name", "tiny")
    told = serve(*named, "--json", KTBRIDGE_API_KEY="hush-hush")
    plan = json.loads(told.stdout)
    assert (list(plan["models"]), plan["api_key"]) == (["tiny", "tiny:neko", "tiny:base"], True)
    assert "hush-hush" not in told.stdout + told.stderr
    fine = serve(*named)
    assert fine.exit_code == 0, fine.output
    assert "512 tokens of context" in fine.stdout  # max_position_embeddings, not our own limit
    assert (
        'WARNING: the name "tiny" is not the base model: it is base + expert LoRA, half of the adapter. '
        "Base model: tiny:base. Whole adapter: tiny:neko." in fine.stdout
    )
    taken = serve(*words, "--port", str(server.port))
    assert (taken.exit_code, taken.stdout) == (1, "")
    assert "already in use" in taken.stderr
    there = local_plan.find_spec
    monkeypatch.setattr(local_plan, "find_spec", lambda n: None if n == "uvicorn" else there(n))
    lacking = serve(*words, "--port", "0")
    assert (lacking.exit_code, lacking.stdout) == (1, "")
    assert "needs uvicorn" in lacking.stderr
    assert install_hint("serve") in lacking.stderr
