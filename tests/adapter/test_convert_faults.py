"""What a conversion leaves behind when it is killed, when the disk fills, and in which order it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter, write_raw_adapter
from ktbridge.errors import KtbridgeError, ProblemsError

Make = Callable[..., Path]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
COMMAND = [sys.executable, "-m", "ktbridge", "convert"]


def wide_experts(layers: int) -> dict[str, Tensor]:
    """25 MB a layer: enough for a kill or a full disk to find the conversion at work."""
    experts, rank, hidden, inter = 32, 4, 32768, 32
    block = (np.arange(experts * rank * hidden) % 1000 + 0x3C00).astype(np.uint16).tobytes()
    tensors = {}
    for layer in range(layers):
        for projection in ("gate", "up", "down"):
            wide, narrow = (inter, hidden) if projection == "down" else (hidden, inter)
            for half, shape in (("a", (experts, rank, wide)), ("b", (experts, narrow, rank))):
                name = f"layers.{layer}.experts.{projection}_lora_{half}"
                size = 2 * shape[0] * shape[1] * shape[2]
                tensors[name] = Tensor(name, "BF16", shape, block[:size])
    return tensors


@pytest.mark.slow
def test_sigkill_of_the_command_leaves_old_or_new(make_raw: Make, tmp_path: Path) -> None:
    """At many points: from the first trace on disk to well after the end."""
    raw, place = make_raw(expert=wide_experts(1)), tmp_path / "place"
    outputs = {"--expert-output-dir": place / "e", "--nonexpert-output-dir": place / "n"}
    options = [f"{name}={path}" for name, path in outputs.items()]
    convert_adapter(
        raw, expert_output_dir=place / "e", nonexpert_output_dir=place / "n", base_model="old"
    )
    argv = [*COMMAND, str(raw), *options, "--overwrite", "--base-model-name-or-path=new"]
    killed = interrupted = 0
    delays = [0.0, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08, 0.15]
    for delay in delays:
        before = set(os.listdir(place))
        process = subprocess.Popen(argv, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and set(os.listdir(place)) <= before:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        interrupted += len(os.listdir(place)) > 2
        for directory in outputs.values():
            report = validate_adapter([directory])
            assert report.problems == []  # the manifest's hashes included
            assert report.adapters[0]["base_model"] in ("old", "new")
    assert killed >= 3
    assert interrupted >= 1
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(place)) == ["e", "n"]  # leftovers are swept up
    report = validate_adapter([raw, *outputs.values()])
    assert {problem.code for problem in report.problems} <= {
        "KTB502",
        "KTB009",
        "KTB122",
    }  # the base's name, and experts in some layers


# Runs in a namespace of its own, where mounting a small disk needs no privilege.
FULL_DISK = """
import json, os, subprocess, sys
place, small, big, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
print("mounted", flush=True)
target = ["--merged-output-dir=" + place + "/m"]
steps = []
for source, overwrite in ((big, []), (small, []), (big, ["--overwrite"])):
    done = subprocess.run([*command, source, *target, *overwrite], capture_output=True, text=True)
    listed = {name: sorted(os.listdir(f"{place}/{name}")) for name in os.listdir(place)}
    steps.append([done.returncode, done.stderr, listed])
check = [*command[:-1], "validate", place + "/m", "--json"]
steps.append(json.loads(subprocess.run(check, capture_output=True, text=True).stdout)["ok"])
print(json.dumps(steps))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_new(make_raw: Make, tmp_path: Path) -> None:
    big, small = make_raw("big", expert=wide_experts(1)), make_raw("small")
    place = tmp_path / "place"
    place.mkdir()
    script = [sys.executable, "-c", FULL_DISK, str(place), str(small), str(big), *COMMAND]
    try:
        done = subprocess.run(
            ["unshare", "-rm", *script], env=ENVIRONMENT, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare command")
    if "mounted" not in done.stdout:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()[-200:]}")
    first, second, third, valid = json.loads(done.stdout.splitlines()[-1])
    assert (first[0], first[2]) == (1, {})
    assert "the disk is full" in first[1]
    assert "nothing was written" in first[1]
    files = ["adapter_config.json", "adapter_model.safetensors", "kt_adapter_manifest.json"]
    assert (second[0], second[2]) == (0, {"m": files})
    assert (third[0], third[2]) == (1, {"m": files})
    assert valid is True  # the small one, whole


# Python tells its audit hooks of every file opened, made or renamed.
AUDITED = """
import json, os, sys
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and args[2] & os.O_CREAT:
        seen.append(["write", os.fspath(args[0])])
    elif event == "os.rename":
        seen.append(["rename", os.fspath(args[0])])
sys.addaudithook(hook)
from ktbridge.adapter import convert_adapter
convert_adapter(sys.argv[1], expert_output_dir=sys.argv[2], nonexpert_output_dir=sys.argv[3])
print(json.dumps(seen))
"""


def test_the_manifest_is_written_last(make_raw: Make, tmp_path: Path) -> None:
    argv = [str(make_raw()), str(tmp_path / "e"), str(tmp_path / "n")]
    done = subprocess.run(
        [sys.executable, "-B", "-c", AUDITED, *argv],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    events: dict[str, list[Any]] = {"e": [], "n": []}
    for what, name in json.loads(done.stdout):
        path = Path(name)
        for target, rows in events.items():
            if f".{target}.partial-" in name:
                rows.append((what, path.name if what == "write" else "directory"))
    expected = [
        ("write", "adapter_model.safetensors"),
        ("write", "adapter_config.json"),
        ("write", "kt_adapter_manifest.json"),
        ("rename", "directory"),
    ]
    assert events == {"e": expected, "n": expected}


@pytest.mark.parametrize(
    "mark", ["fused_expert_lora.safetensors", "trainer_log.jsonl", "training_loss.png"]
)
@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
def test_a_training_output_gives_way_to_another_only(
    make_raw: Make, tmp_path: Path, mark: str, to: str
) -> None:
    source, victim = make_raw(), make_raw("victim", expert={})
    (victim / mark).write_bytes(b"days of training")
    before = {path.name: path.read_bytes() for path in victim.iterdir()}
    with pytest.raises(ProblemsError) as error:
        convert_adapter(source, to=to, output_dir=victim, overwrite=True)
    (said,) = [item.found for item in error.value.problems if item.code == "KTB701"]
    assert (mark in said, "training output" in said) == (True, True)
    assert {path.name: path.read_bytes() for path in victim.iterdir()} == before
    convert_adapter(source, to="raw", output_dir=victim, overwrite=True)
    assert make_raw("victim", overwrite=True) == victim  # and training itself may


@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
def test_a_file_among_the_parents(make_raw: Make, tmp_path: Path, to: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ProblemsError) as error:
        convert_adapter(make_raw(), to=to, output_dir=tmp_path / "file" / "m")
    (said,) = [item.found for item in error.value.problems if item.severity == "error"]
    assert said == f"lies inside {tmp_path / 'file'}, which is not a directory"


@pytest.mark.quick("in/.*(pipe|link)")
@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link"])
@pytest.mark.parametrize("name", ["in/adapter_model.safetensors", "in/a.gguf", "a.gguf"])
def test_what_is_no_regular_file_is_refused_at_once(
    make_raw: Make, tmp_path: Path, kind: str, name: str
) -> None:
    make_raw("in", expert={})
    (tmp_path / "in" / "adapter_model.safetensors").unlink()
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    given = path if name == "a.gguf" else path.parent
    command = [*COMMAND, str(given), "--to=raw", f"--output-dir={tmp_path}/o"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (done.returncode in (1, 2), "Traceback" in done.stderr) == (True, False)
    assert "next" in done.stderr
    assert not (tmp_path / "o").exists()


# Sends itself a signal at the first call of a function, and runs the command line.
STOPPED = """
import importlib, os, signal, sys
number, module, name, *argv = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)
place = importlib.import_module(module)
real = getattr(place, name)
def stopping(*args, **kwargs):
    setattr(place, name, real)
    os.kill(os.getpid(), int(number))
    return real(*args, **kwargs)
setattr(place, name, stopping)
from ktbridge.cli import main
main(args=argv, prog_name="ktbridge")
"""


@pytest.mark.quick("fsync-False-kt-merged-2|rmtree-True-vllm-15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to", ["kt-merged", "vllm"])
@pytest.mark.parametrize(("moment", "written"), [("os.fsync", False), ("shutil.rmtree", True)])
def test_an_interrupt_cleans_up_and_says_what_is_in_place(
    make_raw: Make, tmp_path: Path, number: int, to: str, moment: str, written: bool
) -> None:
    raw, place = make_raw(), tmp_path / "place"
    target = place / "m"
    if written:  # what is removed is the old directory, after the exchange
        convert_adapter(raw, to=to, output_dir=target, base_model="old")
    argv = ["convert", str(raw), f"--to={to}", f"--output-dir={target}", "--overwrite", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(int(number)), *moment.rsplit(".", 1), *argv],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    left = f"{target} is in place" if written else "nothing was written"
    assert (done.returncode, json.loads(done.stdout)["error"]) == (
        128 + number,
        f"interrupted: {left}",
    )
    assert done.stderr.startswith("error: interrupted")
    if written:
        assert os.listdir(place) == ["m"]
        assert (
            json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
            == "models/base"
        )
    else:
        assert not place.exists()


def test_a_file_that_is_a_link_to_nowhere_is_not_a_missing_half(
    make_raw: Make, tmp_path: Path
) -> None:
    raw = make_raw()
    (raw / "fused_expert_lora.safetensors").unlink()
    (raw / "fused_expert_lora.safetensors").symlink_to("gone")
    with pytest.raises(ProblemsError) as caught:
        convert_adapter(raw, merged_output_dir=tmp_path / "merged")
    assert [problem.code for problem in caught.value.problems] == ["KTB005"]
    assert caught.value.problems[0].found == "is a link to nowhere"
    assert not (tmp_path / "merged").exists()


def test_alpha_and_base_stand_in_for_a_missing_configuration(
    make_raw: Make, tmp_path: Path
) -> None:
    raw, bare = make_raw(), make_raw("bare")
    for name in ("adapter_config.json", "kt_adapter_manifest.json"):
        (bare / name).unlink()
    for source, out in ((raw, "a"), (bare, "b")):
        convert_adapter(
            source, merged_output_dir=tmp_path / out, base_model="org/base", lora_alpha=8.0
        )
    name = "adapter_model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    first, second = (
        json.loads((tmp_path / out / "adapter_config.json").read_text()) for out in "ab"
    )
    for key in ("r", "lora_alpha", "target_modules", "base_model_name_or_path"):
        assert first[key] == second[key]
    with pytest.raises(ProblemsError, match="can't be converted"):
        convert_adapter(bare, merged_output_dir=tmp_path / "c", base_model="org/base")


def test_a_tensor_with_bytes_of_another_length_is_not_written(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(KtbridgeError, match="5 bytes"):
        write_raw_adapter(
            tmp_path / "raw", expert={}, nonexpert={key: Tensor(key, "BF16", (1, 3), b"12345")},
            config={}, base_model="b", rank=1, alpha=1.0,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
