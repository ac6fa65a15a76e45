"""Experts that the page cache can't hold: what a pass reads of them from disk, and how fast this disk is."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from ktbridge.sft.plan.memory import Setting, mapped_bytes
from ktbridge.sft.plan.parts import DiskReads, Part, total

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
    if experts is None:
        return DiskReads(size, None, "the weights aren't here")
    if not measure:
        return DiskReads(size, None, "not measured")
    shard = max(experts.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    try:
        return DiskReads(size, read_rate(shard), f"measured here on {shard.name}")
    except OSError as error:
        return DiskReads(size, None, f"{shard.name} can't be read past the page cache: {error}")


def missed_bytes(setting: Setting, parts: list[Part], memory: int | None) -> int:
    """The least bytes of experts that a pass reads from disk, if each of them has tokens.

    A pass goes through the experts once forward and once backward (dpo's reference: once more), and each time
    what is in memory from the time before needn't be read, in the page cache or in the GPU's ring. 0 where
    the process's own memory doesn't fit, and no pass is made.
    """
    own = total(parts, "RAM")
    if memory is None or own > memory:
        return 0
    missing = min(mapped_bytes(setting), own + total(parts, "page cache") - memory)
    if setting.share is not None:
        missing -= setting.share.slots * setting.share.slot_bytes
    return max(0, missing) * (3 if setting.config.stage == "dpo" else 2)


def read_rate(file: Path) -> float:
    """Bytes per second of reading up to 256 MB from the start of ``file``, for two seconds at most.

    Reads go past the page cache, which stays as it is. Raises OSError where the file system has no such
    reads, as tmpfs, or the file is empty.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
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
