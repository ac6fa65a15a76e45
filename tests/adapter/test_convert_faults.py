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

from ktbridge.adapter import Tensor, convert_adapter, validate_adapter

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
    assert {problem.code for problem in report.problems} <= {"KTB502", "KTB009"}  # the base's name


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
