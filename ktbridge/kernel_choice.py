"""The choice of kernels and of their CPUs: as an argument, the environment or the machine says."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ktbridge.errors import UsageError
from ktbridge.machine import Cpu, cpu_quota, own_cpus, place, read_machine, usable_cpus

if TYPE_CHECKING:
    from ktbridge import _kernels

MOST_THREADS = 4096
BF16_ISAS = frozenset({"avx512_bf16", "amx_bf16"})
"""Instruction sets, and our kernels by the same names, that multiply bfloat16 numbers."""


@functools.cache
def has_kernels() -> bool:
    """Return whether this installation has the C++ kernels; a pure one computes with numpy what it can."""
    return find_spec("ktbridge._kernels") is not None


def choose_isa(wish: str = "auto") -> str:
    """The name of the kernels for ``wish``: "auto" is KTBRIDGE_ISA if set, else the best this CPU can run.

    Raises ``UsageError`` where this CPU can't run them, or there are none of that name.
    """
    available = _runnable()
    name = (os.environ.get("KTBRIDGE_ISA") if wish == "auto" else None) or wish
    if name == "auto":
        return available[-1]
    if name in available:
        return name
    can = ", ".join(("auto", *available))
    raise UsageError(f"this CPU can't run {name!r} kernels; it can run: {can}.")


def has_bf16_instructions() -> bool:
    """Return whether the CPU has AVX512_BF16 or AMX, and KTBRIDGE_ISA doesn't name kernels without them."""
    named = os.environ.get("KTBRIDGE_ISA", "auto")
    return named in ("auto", *BF16_ISAS) and not BF16_ISAS.isdisjoint(read_machine().isa)


def choose_threads(wish: int = 0) -> int:
    """The number of kernel threads: ``wish``; for 0 KTBRIDGE_THREADS if set, else one a physical core.

    Not above the cgroup's quota then: threads beyond it would be stopped while all the others wait. Raises
    ``UsageError`` for what is no number of threads.
    """
    if not 0 <= wish <= MOST_THREADS:
        raise UsageError(f"threads must be 0 (automatic) or at most {MOST_THREADS}, not {wish}.")
    if wish:
        return wish
    if text := os.environ.get("KTBRIDGE_THREADS"):
        if not text.isdecimal() or not 1 <= int(text) <= MOST_THREADS:
            raise UsageError(f"KTBRIDGE_THREADS must be a number from 1 to {MOST_THREADS}, not {text!r}.")
        return int(text)
    cores = len({cpu.core for cpu in _own_cpus()})
    return max(1, int(min(cores, cpu_quota() or cores)))


def places(threads: int) -> tuple[_kernels.Place, ...]:
    """The places of ``threads`` threads, or one on each usable CPU if they are fewer.

    Threads that wait for each other's CPU would be slower than fewer threads.
    """
    from ktbridge import _kernels

    return tuple(_kernels.Place(cpu.id, cpu.node) for cpu in place(_own_cpus(), threads))


def _own_cpus() -> tuple[Cpu, ...]:
    return _read_cpus(own_cpus())


@functools.cache
def _runnable() -> tuple[str, ...]:
    """Once, for asking a virtual machine's CPU takes 150 microseconds."""
    from ktbridge import _kernels

    return tuple(_kernels.isa_available())


@functools.cache
def _read_cpus(affinity: frozenset[int]) -> tuple[Cpu, ...]:
    """By affinity, which may change; reading every CPU's files for every layer would take a while."""
    return usable_cpus(affinity=affinity)
