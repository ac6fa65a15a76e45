"""The machine that a plan is for: this one, or one that is described."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Target:
    """Bytes of one GPU's memory (None: no GPU), of memory and of free disk (None: not known), cores, GPUs."""

    gpu_memory: int | None
    memory: int | None
    disk: int | None
    cores: int
    gpus: int = 1


def parse_size(text: str) -> int:
    """Bytes of "24GB", "64 GiB" or "512M". Raises UsageError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"{text!r} is not a size.", "Write it as 24GB or 64GiB.")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])


def this_machine(
    output_dir: Path,
    *,
    gpu_memory: int | None = None,
    memory: int | None = None,
    cores: int | None = None,
) -> Target:
    """What this machine has, each fact replaced by the one given. torch is not imported."""
    from ktbridge.machine import read_machine

    machine = read_machine()
    found = _gpu_memory() if gpu_memory is None else [gpu_memory]
    parent = next(path for path in output_dir.absolute().parents if path.exists())
    return Target(
        gpu_memory=found[0] if found else None,
        memory=memory if memory is not None else machine.usable_memory,
        disk=shutil.disk_usage(parent).free,
        cores=cores or max(1, int(min(machine.usable_cpus, machine.physical_cores or 1 << 20))),
        gpus=max(1, len(found)),
    )


def _gpu_memory() -> list[int]:
    """Memory of each GPU as the driver tells; empty without one, or with a torch that can't use it."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return []
    except importlib.metadata.PackageNotFoundError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(size) * 2**20 for size in told if size.isdigit()]
