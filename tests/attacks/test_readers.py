"""Adapters that attack their reader: refused soon, in little memory, and no terminal obeys them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tinyserver import ENVIRONMENT

MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NASTY = "\x1b[31m\x9b\u202e"
RUN = """
import atexit, sys
def peak():
    status = open("/proc/self/status").read()
    print("PEAK", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
atexit.register(peak)
from ktbridge.cli import main
main()
"""


def set_config(adapter: Path, **changes: object) -> None:
    path = adapter / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_header(adapter: Path, header: dict[str, object], size: int) -> None:
    """A file with this header and ``size`` bytes behind it, of which none is written."""
    text = json.dumps(header).encode()
    (adapter / MODEL).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(adapter / MODEL, 8 + len(text) + size)


def entry(*shape: int, dtype: str = "F32", size: int = 4) -> dict[str, object]:
    for side in shape:
        size *= side
    return {"dtype": dtype, "shape": shape, "data_offsets": (0, size)}


def linked(adapter: Path, device: str) -> None:
    (adapter / MODEL).unlink()
    (adapter / MODEL).symlink_to(device)


def piped(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)


def set_manifest(adapter: Path, **changes: object) -> None:
    path = adapter / "kt_adapter_manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_layers(adapter: Path, number: int) -> None:
    """Layer 1's LoRA of attention under another number."""
    data = (adapter / MODEL).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(b"layers.1.", f"layers.{number}.".encode())
    (adapter / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


PLACE = "base_model.model.model.layers.0.self_attn."
ATTACKS = {
    "a device": lambda at: linked(at, "/dev/zero"),
    "a pipe": lambda at: piped(at, MODEL),
    "a pipe for a config": lambda at: piped(at, CONFIG),
    "a sparse giant": lambda at: set_header(
        at, {f"{PLACE}q_proj.lora_A.weight": entry(8, 2**34)}, 2**39
    ),
    "a config of 20 MB": lambda at: set_config(at, junk="x" * 20_000_000),
    "two million targets": lambda at: set_config(
        at, target_modules=[f"m{i}" for i in range(2**21)]
    ),
    "half a million tensors": lambda at: set_header(
        at, {f"{PLACE}q{i}.lora_A.weight": entry(0) for i in range(500_000)}, 0
    ),
    "a name of a megabyte": lambda at: set_header(at, {NASTY + "n" * 2**20: entry(1)}, 4),
    "a name that terminals obey": lambda at: set_header(
        at, {f"{PLACE}{NASTY}.lora_A": entry(1)}, 4
    ),
    "alpha of 1e299": lambda at: set_config(at, lora_alpha=1e299),
    "alpha of 1e30 in the manifest": lambda at: set_manifest(at, lora={"rank": 4, "alpha": 1e30}),
    "a manifest of many files": lambda at: set_manifest(
        at, artifacts={f"f{i}": {"size": 1} for i in range(150_000)}
    ),
    "layer 999999": lambda at: rename_layers(at, 999_999),
    "patterns": lambda at: set_config(
        at, alpha_pattern={"(.*)*" * 6 + str(i): 1 for i in range(1000)}
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_soon_and_shortly(adapter: Path, tmp_path: Path, attack: str) -> None:
    """Each took over 25 s, up to 3 GB, or megabytes of messages."""
    attacker = tmp_path / "attacker"
    shutil.copytree(adapter, attacker)
    ATTACKS[attack](attacker)
    out = tmp_path / "out"
    for command in (
        ("validate", attacker, "--json"),
        ("convert", attacker, "--merged-output-dir", out),
    ):
        start = time.monotonic()
        found = subprocess.run(
            [sys.executable, "-c", RUN, *map(str, command)],
            capture_output=True,
            timeout=60,
            env=ENVIRONMENT,
        )
        assert found.returncode == 1
        assert time.monotonic() - start < 20  # on a machine with other things to do
        told, _, peak = found.stderr.decode().partition("PEAK")
        assert int(peak) < 300_000  # KB
        shown = found.stdout.decode() + told
        assert "Traceback" not in shown
        assert len(shown) < 10_000
        assert not set(NASTY) - set("[31m") & set(shown)
        assert not out.exists()


def test_nasty_names_that_pass_are_escaped_in_json(adapter: Path, tmp_path: Path) -> None:
    nasty = tmp_path / "nasty"
    shutil.copytree(adapter, nasty)
    set_config(nasty, base_model_name_or_path=f"{NASTY}evil")
    found = subprocess.run(
        [sys.executable, "-c", RUN, "validate", str(nasty), "--json"],
        capture_output=True,
        env=ENVIRONMENT,
    )
    assert NASTY in json.dumps(json.loads(found.stdout), ensure_ascii=False).replace(
        "\\u001b", "\x1b"
    )
    assert not set("\x1b\x9b\u202e") & set(found.stdout.decode())
