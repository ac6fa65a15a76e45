"""What this machine is: CPU, cores, memory. Reads /proc and /sys; raises nothing when they are thin."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_model() -> str:
    return _cpuinfo("model name") or "unknown CPU"


def cpu_flags() -> frozenset[str]:
    return frozenset(_cpuinfo("flags").split())


def cores() -> list[int]:
    """CPUs this process may use, one of each physical core first, their hyper-threads after them."""
    first, rest, seen = [], [], set()
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(
            cpu
        )
        (rest if siblings in seen else first).append(cpu)
        seen.add(siblings)
    return first + rest


def physical_cores() -> int:
    """How many of ``cores()`` are physical."""
    siblings = {
        _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in os.sched_getaffinity(0)
    }
    return len(siblings)


def memory_available() -> int:
    """Bytes that can be taken without swapping; 0 when /proc does not say."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def threads_outside(pid: int, cpus: list[int]) -> list[str]:
    """Names of the threads of ``pid`` that may run on other CPUs than ``cpus``."""
    outside = []
    for task in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in _read(task).splitlines() if ":\t" in line)
        if not _cpu_list(fields.get("Cpus_allowed_list", "")) <= set(cpus):
            outside.append(fields.get("Name", "?"))
    return sorted(outside)


def _cpu_list(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def _cpuinfo(field: str) -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
