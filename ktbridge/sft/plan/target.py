"""The machine that a plan is for, this one or one that is described; and the pace of its disk."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import UsageError
from ktbridge.files.sizes import size_text
from ktbridge.machine import Described, Machine, read_gpus, read_machine
from ktbridge.sft.plan.memory import Setting, mapped_bytes
from ktbridge.sft.plan.parts import DiskReads, Part, total


@dataclass(frozen=True)
class Target:
    """Bytes of one GPU's memory (None: no GPU), of memory and of free disk (None: not known), cores, GPUs.

    ``text`` describes it; ``elsewhere``: it isn't the machine that the plan runs on.
    """

    gpu_memory: int | None
    memory: int | None
    disk: int | None
    cores: int
    gpus: int = 1
    text: str = ""
    elsewhere: bool = False
    capabilities: tuple[str, ...] = ()
    """Compute capability of each GPU ("8.6"), where they are this machine's."""


def this_machine(output_dir: Path, described: Described | None = None) -> Target:
    """Resources of this machine, or of the ``described`` one; torch is not imported.

    Cores and GPUs that aren't given are this machine's. The disk of another machine isn't known.
    """
    described = described or Described()
    here = read_machine()
    machine = described.machine(here)
    gpus, how = _gpus(described)
    return Target(
        gpu_memory=min(gpus) if gpus else None,
        memory=machine.usable_memory,
        disk=None if described.elsewhere else shutil.disk_usage(existing(output_dir)).free,
        cores=machine.usable_cores,
        gpus=max(1, len(gpus)),
        text=_text(described, machine, gpus, how),
        elsewhere=described.elsewhere,
        capabilities=tuple(gpu.capability for gpu in read_gpus())
        if gpus and described.gpu_memory is None
        else (),
    )


def existing(path: Path) -> Path:
    """``path`` or the nearest directory above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _gpus(described: Described) -> tuple[list[int], str]:
    """Memory of each GPU that the plan counts on, and whose they are."""
    if described.gpus == 0:
        return [], ""
    if described.gpus is None and described.gpu_memory is None:
        return _here(), " (this machine's)" if described.elsewhere else ""
    size = described.gpu_memory
    if size is None:
        sizes = _here()
        if not sizes:
            raise UsageError(
                "--gpus needs --gpu-memory: there is no GPU here whose memory could be taken.",
                "Give the memory of each, as --gpu-memory 24GB.",
            )
        size = min(sizes)
    return [size] * (described.gpus or len(_here()) or 1), ""


def _here() -> list[int]:
    """Memory of each GPU as the driver reports; empty without one, or with a torch that can't use it."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return []
    except importlib.metadata.PackageNotFoundError:
        pass
    return [gpu.memory for gpu in read_gpus()]


def _text(described: Described, machine: Machine, gpus: list[int], how: str) -> str:
    cores = machine.usable_cores
    has = [f"{cores} core{'s' * (cores > 1)}"]
    if described.elsewhere and described.cores is None:
        has[0] += " (this machine's)"
    if machine.usable_memory:
        has.append(f"{size_text(machine.usable_memory)} memory")
    else:
        has.append("memory not known (--memory)")
    if gpus:
        has.append(f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {size_text(min(gpus))}{how}")
    else:
        has.append("no GPU")
    return f"{'another' if described.elsewhere else 'this'} machine: {', '.join(has)}"


_MOST = 256_000_000  # bytes
_SECONDS = 2.0
_CHUNK = 16 << 20


def disk_reads(
    setting: Setting, parts: list[Part], memory: int | None, experts: Path | None, measure: bool
) -> DiskReads | None:
    """What each pass reads from disk on a machine of ``memory`` bytes; None where nothing, or not known.

    ``experts`` is the checkpoint that they are mapped from, None where it isn't here; ``measure`` reads some
    of it.
    """
    size = missed_bytes(setting, parts, memory)
    if not size:
        return None
    enough = total(parts, "RAM") + total(parts, "page cache")
    if experts is None:
        return DiskReads(size, None, "the weights aren't here", enough)
    if not measure:
        return DiskReads(size, None, "not measured", enough)
    shard = max(experts.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    try:
        return DiskReads(size, read_rate(shard), f"measured here on {shard.name}", enough)
    except OSError as error:
        why = f"{shard.name} can't be read past the page cache: {error}"
        return DiskReads(size, None, why, enough)


def missed_bytes(setting: Setting, parts: list[Part], memory: int | None) -> int:
    """The least bytes of experts that a pass reads from disk, if each of them has tokens.

    A pass goes through the experts once forward and once backward (a reference: forward once more), and each
    time what is in memory from the time before needn't be read, in the page cache or in the GPU's ring. 0
    where the process's own memory doesn't fit, and no pass is made.
    """
    own = total(parts, "RAM")
    if memory is None or own > memory:
        return 0
    missing = min(mapped_bytes(setting), own + total(parts, "page cache") - memory)
    if setting.placed is not None:
        missing -= setting.placed.slots * setting.placed.slot_bytes
    return max(0, missing) * (2 + setting.config.forwards_alone)


def read_rate(file: Path) -> float:
    """Bytes per second of reading up to 256 MB from the start of ``file``, for two seconds at most.

    Reads go past the page cache, which stays as it is. Raises OSError where the file system has no such
    reads, as tmpfs, or the file is empty.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, _CHUNK) as buffer:  # whole pages, as direct reads want
            read, began = 0, time.perf_counter()
            while read < _MOST and time.perf_counter() - began < _SECONDS:
                got = os.preadv(descriptor, [buffer], read)
                read += got
                if got < _CHUNK:
                    break
            seconds = time.perf_counter() - began
    finally:
        os.close(descriptor)
    if not read:
        raise OSError(f"{file} is empty")
    return read / seconds
