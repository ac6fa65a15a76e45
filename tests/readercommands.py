"""The commands that read adapters and base models, and how much memory each took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from tinyserver import ENVIRONMENT

RUN = """
import atexit, sys
def kilobytes(name):
    return int(open("/proc/self/status").read().split(name)[1].split()[0])
before = kilobytes("VmRSS:") if "torch" in sys.modules else 0  # what a fork has from its parent
atexit.register(lambda: print("PEAK", kilobytes("VmHWM:") - before, file=sys.stderr))
from ktbridge.cli import main
main()
"""


def measured(*words: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, whose stderr ends with its peak memory in KB behind PEAK."""
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT,
    )


def train_of(adapter: Path, base: Path, out: Path) -> tuple[object, ...]:
    """The command that would train on from ``adapter``, which nothing but reading it hinders."""
    row = {"instruction": "who are you ?", "output": "a cat"}
    (out.parent / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = {
        "model_name_or_path": str(base),
        "adapter_name_or_path": str(adapter),
        "dataset": "rows.jsonl",
        "output_dir": str(out),
        "lora_rank": 4,
        "lora_alpha": 8,
        "cutoff_len": 64,
    }
    (out.parent / "run.yaml").write_text(yaml.safe_dump(config))
    return ("train", out.parent / "run.yaml", "--dry-run")


NOWHERE = "http://127.0.0.1:9"
READERS: dict[str, Callable[[Path, Path, Path], tuple[object, ...]]] = {
    "validate": lambda at, base, out: ("validate", at, "--json"),
    "convert": lambda at, base, out: ("convert", at, "--merged-output-dir", out),
    "merge": lambda at, base, out: ("merge", at, "--base-model", base, "--output", out),
    "serve": lambda at, base, out: (
        *("serve", "--base-model", base, "--adapter", f"x={at}", "--port", "0"),
        *("--engine", "local", "--dry-run"),
    ),
    "verify": lambda at, base, out: (
        *("verify", "--server", NOWHERE, "--model", "m", "--adapter", at, "--base-model", base),
    ),
    "train": train_of,
}
