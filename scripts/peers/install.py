"""kt-kernel in a virtual environment of its own, because it pins another torch than ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from peers import machine

VERSION = "0.7.2"
ROOT = Path(__file__).resolve().parents[2]
# What it imports, found by importing it; --no-deps because it asks for torch 2.9.1 and triton.
NEEDS = "gguf typer rich httpx pyyaml numpy safetensors packaging".split()


def why_not() -> str:
    """Why kt-kernel can't run its SFT layer on this CPU, in a sentence; "" when it can."""
    flags = machine.cpu_flags()
    if flags & {"amx_bf16", "avx512_bf16"}:
        return ""
    return (
        "kt-kernel is left out: its bf16 SFT layer needs AMX or AVX512-BF16, which this CPU lacks."
    )


def backend_note() -> str:
    """A sentence when this CPU makes kt-kernel take its second best path."""
    if "amx_bf16" in machine.cpu_flags():
        return ""
    return "This CPU has no AMX, so kt-kernel runs its AVX512-BF16 backend; don't quote it as AMX."


def kt_kernel_python(peer_dir: Path) -> str:
    """The interpreter of an environment with kt-kernel, made on the first call (some 1.2 GB).

    Raises ``subprocess.CalledProcessError`` when venv or pip fails; a half-made environment is made anew.
    """
    home = peer_dir / f"kt-kernel-{VERSION}-py{sys.version_info.major}{sys.version_info.minor}"
    python, complete = home / "bin" / "python", home / ".complete"
    if complete.exists():
        return str(python)
    if home.exists():
        shutil.rmtree(home)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = [] if shutil.which("nvidia-smi") else ["-c", str(ROOT / "constraints-cpu.txt")]
    subprocess.run([*pip, *constraints, "torch", *NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", f"kt-kernel=={VERSION}"], check=True)
    complete.touch()
    return str(python)
