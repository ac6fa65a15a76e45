"""Models of the Hub: what is downloaded, resumed after a kill, and told in a sentence; a Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hubserver import running_hub
from rawadapter import write_base, write_config, write_raw
from tensorfiles import write_tensor_file

from ktbridge.adapter import Tensor
from ktbridge.cli import main
from ktbridge.model import resolve_model
from ktbridge.model.hub import Repository, name_of, repository

NAME = "org/tiny"


@pytest.fixture
def hub():
    with running_hub() as made:
        yield made


@pytest.fixture
def base(hub, tmp_path):
    """A model on the Hub, with what must not come beside what must."""
    directory = write_base(tmp_path / "base")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    files |= {
        "pytorch_model.bin": b"pickle" * 999,
        "modeling_tiny.py": b"evil()",
        "README.md": b"#",
    }
    files |= {"consolidated.safetensors": bytes(2000), "onnx/config.json": b"{}"}
    hub.model(NAME, files)
    return files


@pytest.fixture
def command(hub, tmp_path):
    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "ktbridge", *map(str, arguments)],
            env={**os.environ, **hub.environment(tmp_path / "home"), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def call(hub, tmp_path, monkeypatch):
    """The same in this process, ten times as fast."""
    hub.use(monkeypatch, tmp_path / "home")

    def run(*arguments, **environment):
        if offline := environment.get("HF_HUB_OFFLINE"):
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", bool(offline))
        if endpoint := environment.get("HF_ENDPOINT"):
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_TOKEN", environment.get("HF_TOKEN", ""))
        done = CliRunner().invoke(main, [*map(str, arguments)])
        return subprocess.CompletedProcess([*arguments], done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def raw(tmp_path):
    return write_raw(tmp_path / "raw", layers=(0, 1))


def snapshot(home: Path, name: str = NAME) -> dict[str, bytes]:
    folder = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots"
    return {
        str(path.relative_to(next(folder.iterdir()))): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """An error and a next step, and nothing like a traceback."""
    assert done.returncode in (1, 2), done.stdout
    lines = done.stderr.strip().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "next"], done.stderr
    for word in words:
        assert word in done.stderr


def test_what_a_name_means(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert repository("org/name@v1.0") == Repository("org/name", "v1.0")
    assert repository("org/name@refs/pr/1") == Repository("org/name", "refs/pr/1")
    for path in ("name", "a/b/c", "/org/name", "./org/name", "~/name", "org/", "../x"):
        assert repository(path) is None
    (tmp_path / "org/name").mkdir(parents=True)
    assert repository("org/name") is None
    cached = tmp_path / "hub/models--my-org--a--b/snapshots/0123"
    assert name_of(cached) == ("my-org/a--b", "0123")
    assert name_of("/models/x") == ("/models/x", None)


def test_a_model_is_downloaded_once_without_pickles_and_code(hub, base, call, raw, tmp_path):
    done = call("merge", raw, "--base-model", NAME, "--output", "merged", "--dry-run")
    one_sentence(done, "the weights of org/tiny are not all in the Hub cache")
    assert not hub.downloads(".safetensors")
    done = call("merge", raw, "--base-model", NAME, "--output", "merged")
    assert done.returncode == 0, done.stderr
    wanted = ("config.json", "tokenizer.json", "model.safetensors.index.json", "model-")
    found = snapshot(tmp_path / "home")
    assert found == {name: data for name, data in base.items() if name.startswith(wanted)}
    assert resolve_model(tmp_path / "merged")
    # From here on no network is needed, also where it is forbidden or gone.
    hub.asked.clear()
    for name, value in (("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")):
        done = call("merge", raw, "--base-model", NAME, "--output", f"to{name}", **{name: value})
        assert done.returncode == 0, done.stderr
    assert not hub.asked


@pytest.mark.slow
def test_a_killed_download_goes_on_from_its_last_byte(hub, base, command, raw, tmp_path):
    files = {name: base[name] for name in ("config.json", "tokenizer.json")}
    tensors = [
        Tensor(name, shard.dtype, shard.shape, shard.data)
        for name, shard in _tensors(tmp_path / "base").items()
    ]
    noise = np.random.default_rng(0).bytes(26 << 20)
    tensors.append(Tensor("noise", "U8", (len(noise),), noise))
    write_tensor_file(tmp_path / "one.safetensors", tensors)
    files["model.safetensors"] = (tmp_path / "one.safetensors").read_bytes()
    hub.model(NAME, files)
    hub.hold["model.safetensors"] = 24 << 20
    arguments = ["merge", str(raw), "--base-model", NAME, "--output", str(tmp_path / "merged")]
    killed = subprocess.Popen(
        [sys.executable, "-m", "ktbridge", *arguments],
        env={**os.environ, **hub.environment(tmp_path / "home")},
    )
    try:
        assert hub.held.wait(60)
        (partial,) = _when(lambda: [p for p in _partials(tmp_path) if p.stat().st_size >= 20 << 20])
    finally:
        killed.kill()
        killed.wait()
    assert "model.safetensors" not in snapshot(tmp_path / "home")
    came = partial.stat().st_size
    hub.go.set()
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert hub.downloads("model.safetensors") == ["", f"bytes={came}-"]
    assert snapshot(tmp_path / "home") == files
    assert not _partials(tmp_path)


@pytest.mark.slow
def test_a_second_process_waits_for_the_first(hub, base, command, raw, tmp_path):
    shard = next(name for name in base if name.startswith("model-"))
    hub.hold[shard] = 0
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(command, "merge", raw, "--base-model", NAME, "--output", f"merged{number}")
            for number in range(2)
        ]
        assert hub.held.wait(60)
        hub.go.set()
        assert [job.result().returncode for job in jobs] == [0, 0]
    assert hub.downloads(shard) == [""]


@pytest.mark.slow
def test_other_ranks_wait_for_the_first(hub, base, command, raw, tmp_path):
    waits = f"from ktbridge.cli._hub import wait_for_model; wait_for_model({NAME!r})"
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    with subprocess.Popen([sys.executable, "-c", waits], env=environment) as rank:
        command("validate", raw, "--base-model", NAME)
        assert rank.poll() is None  # the small files don't suffice
        command("merge", raw, "--base-model", NAME, "--output", "merged")
        assert rank.wait(60) == 0
    assert {len(hub.downloads(name)) for name in base if name.startswith("model-")} == {1}


def _tensors(directory: Path) -> dict[str, Tensor]:
    from ktbridge.model import open_checkpoint

    checkpoint = open_checkpoint(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint}


def _partials(tmp_path: Path) -> list[Path]:
    return [*(tmp_path / "home").rglob("*.incomplete")]


def _when(found: Callable[[], list[Path]]) -> list[Path]:
    """What is found, once it is."""
    import time

    while not (value := found()):
        time.sleep(0.05)
    return value


def test_a_broken_connection_and_damage_on_the_way(hub, base, call, raw, tmp_path):
    shard = next(name for name in base if name.startswith("model-"))
    hub.damaged.add(shard)
    arguments = ["merge", raw, "--base-model", NAME, "--output", "merged"]
    one_sentence(call(*arguments), f"{shard} of org/tiny came damaged")
    hub.damaged.clear()
    hub.cut[shard] = [100]
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "home")[shard] == base[shard]


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        (
            "org/none",
            {},
            ("no model 'org/none'", "no directory", "org/none, and no such repository"),
        ),
        (f"{NAME}@v9", {}, ("no branch, tag or commit 'v9'",)),
        ("org/gated", {}, ("org/gated is gated", "HF_TOKEN")),
        ("org/big", {}, ("free, and org/big needs", "HF_HOME")),
        ("org/pickled", {}, ("no model.safetensors; it has pytorch_model.bin", "never downloaded")),
        ("org/other", {}, ("org/other on the Hub has no config.json",)),
        (NAME, {"HF_HUB_OFFLINE": "1"}, ("HF_HUB_OFFLINE forbids", "no directory")),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, ("127.0.0.1:9 can't be reached",)),
        ("models/a/b", {}, ("no directory",)),
        ("./org/tiny", {}, ("no directory",)),
    ],
)
def test_what_cant_be_had_is_one_sentence(name, environment, words, hub, base, call, raw, tmp_path):
    pickled = {name: base[name] for name in ("config.json", "pytorch_model.bin")}
    shard = next(name for name in base if name.startswith("model-"))
    hub.model("org/gated", base, gated=True)
    hub.model("org/big", base, sizes={shard: 10**17})  # more than any disk has
    hub.model("org/pickled", pickled)
    hub.model("org/other", {"README.md": b"# other"})
    done = call("merge", raw, "--base-model", name, "--output", "merged", **environment)
    one_sentence(done, *words)
    assert not [p for p in (tmp_path / "home").rglob("*") if p.suffix in (".bin", ".safetensors")]


def test_a_token_opens_what_is_private(hub, base, call, raw):
    hub.model("org/mine", base, private=True)
    hub.tokens.add("hf_secret")
    arguments = ["validate", raw, "--base-model", "org/mine"]
    one_sentence(call(*arguments), "may be read with no token")
    one_sentence(call(*arguments, HF_TOKEN="hf_wrong"), "may be read with HF_TOKEN")
    done = call(*arguments, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert not hub.downloads(".safetensors")


def test_another_shape_is_seen_by_config_json_alone(hub, call, raw, tmp_path):
    other = write_config(tmp_path / "other", num_hidden_layers=2, hidden_size=32)
    hub.model("org/other", {"config.json": (other / "config.json").read_bytes()})
    done = call("validate", raw, "--base-model", "org/other", "--json")
    assert done.returncode == 1
    assert "KTB605" in {problem["code"] for problem in json.loads(done.stdout)["problems"]}


def test_without_huggingface_hub_names_are_a_sentence_and_paths_work(call, raw, tmp_path, monkeypatch):
    base = write_base(tmp_path / "base")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = call("merge", raw, "--base-model", NAME, "--output", "merged")
    one_sentence(done, "need the package huggingface_hub", "[hub]")
    assert call("merge", raw, "--base-model", base, "--output", "merged").returncode == 0
