"""Hardware of this machine, by psutil and from /proc and /sys, and what its system can do.

Functions that read files take the root of their tree, so that tests can read other machines'.
A fact that cannot be read is None, never a guess.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path("/")
Number = TypeVar("Number", int, float)
# Instruction sets that select the kernel path, ours or an engine's.
ISA_FLAGS = "avx2 fma avx512f avx512bw avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8".split()


@dataclass(frozen=True)
class Cpu:
    """A CPU and its NUMA node as the kernel numbers them, and its physical core, which SMT siblings share."""

    id: int
    core: int
    node: int = 0


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node: its CPUs as the kernel lists them ("0-15") and its bytes.

    ``usable`` counts those CPUs that this process's affinity allows.
    """

    node: int
    cpus: str
    memory: int | None
    usable: int = 0


@dataclass(frozen=True)
class Machine:
    """CPU and memory. Sizes are bytes; ``usable_cpus`` may be fractional under a quota.

    ``huge_pages`` are bytes reserved for them; ``transparent_huge_pages`` is the kernel's setting.
    """

    cpu: str | None
    isa: tuple[str, ...]
    physical_cores: int | None
    logical_cpus: int
    affinity: int
    cpu_quota: float | None
    memory: int | None
    memory_available: int | None
    memory_limit: int | None
    numa: tuple[NumaNode, ...]
    huge_pages: int | None = None
    transparent_huge_pages: str | None = None

    @property
    def usable_cpus(self) -> float:
        """CPUs that this process can keep busy: its affinity, or less by cgroup quota."""
        return min(self.affinity, self.cpu_quota or self.affinity)

    @property
    def usable_cores(self) -> int:
        """Physical cores that this process can keep busy, at least one."""
        return max(1, int(min(self.usable_cpus, self.physical_cores or self.logical_cpus)))

    @property
    def usable_memory(self) -> int | None:
        """Bytes that this process may use: the cgroup's limit if below the RAM."""
        sizes = [size for size in (self.memory, self.memory_limit) if size is not None]
        return min(sizes) if sizes else None

    def as_dict(self) -> dict[str, Any]:
        derived = {"usable_cpus": self.usable_cpus, "usable_memory": self.usable_memory}
        return asdict(self) | derived


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in bytes, 0 where unknown; compute capability as NVIDIA writes it ("9.0"), or ""."""

    index: int
    name: str
    memory: int
    capability: str = ""


@dataclass(frozen=True)
class Described:
    """Another machine as a user describes it; None if not given. ``gpu_memory`` is bytes per GPU.

    Cores or memory make it another machine; GPUs alone mean other GPUs in this one.
    """

    cores: int | None = None
    memory: int | None = None
    gpus: int | None = None
    gpu_memory: int | None = None

    @property
    def given(self) -> bool:
        return self != Described()

    @property
    def elsewhere(self) -> bool:
        """Return whether it is another machine, to which this one's facts don't apply."""
        return self.cores is not None or self.memory is not None

    def machine(self, here: Machine) -> Machine:
        """Its known facts: ``here``, or a machine with these cores (default: ``here``'s) and memory."""
        if not self.elsewhere:
            return here
        cores = self.cores or here.usable_cores
        return Machine(None, (), cores, cores, cores, None, self.memory, None, None, ())


def own_cpus() -> frozenset[int]:
    """The CPUs that this process may run on; all that there are where the system has no affinity (macOS)."""
    # The process's own: the calling thread may be pinned by somebody.
    if affinity := getattr(os, "sched_getaffinity", None):
        return frozenset(affinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def libc_function(name: str) -> Callable[..., int] | None:
    """A function of the C library by its name; None where this system's has no such function.

    ``ctypes.get_errno()`` has its error.
    """
    if os.name != "posix":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    return found


def make_memory_file(name: str) -> int:
    """Return the descriptor of a file in memory, closed on exec. Raises OSError where the system has none.

    Not by ``os.memfd_create``, which some builds of Python lack on systems that have it.
    """
    create = libc_function("memfd_create")
    descriptor = create(name.encode(), 1) if create else -1  # 1: MFD_CLOEXEC
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "no memory file can be made")
    return descriptor


def release_memory() -> None:
    """Give freed memory back to the system, which glibc would keep."""
    if trim := libc_function("malloc_trim"):
        trim(0)


_PR_SET_PDEATHSIG = 1
# Loaded here: nothing may be loaded between fork and exec.
_PRCTL = libc_function("prctl")


def end_with_parent(parent: int) -> None:
    """Run in a child before exec: it gets SIGTERM when ``parent`` dies, for whatever reason."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGTERM)


def read_machine(root: Path = ROOT) -> Machine:
    """Read the facts, those of files below ``root`` (/proc, /sys)."""
    cpuinfo = _text(root / "proc/cpuinfo") or ""
    cores, memory, available = _cores_and_memory()
    return Machine(
        cpu=_match(r"^model name\s*:\s*(.+)$", cpuinfo),
        isa=_isa(cpuinfo),
        physical_cores=cores,
        logical_cpus=os.cpu_count() or 1,
        affinity=len(own_cpus()),
        cpu_quota=cpu_quota(root),
        memory=memory,
        memory_available=available,
        memory_limit=_granted(root, _limit),
        numa=_numa(root),
        huge_pages=_huge_pages(_text(root / "proc/meminfo") or ""),
        transparent_huge_pages=_match(
            r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
        ),
    )


def usable_cpus(root: Path = ROOT, affinity: Iterable[int] | None = None) -> tuple[Cpu, ...]:
    """The CPUs that this process may run on (or those of ``affinity``), by rising number.

    Where the machine doesn't say, each CPU is its own core, on node 0.
    """
    if affinity is None:
        affinity = own_cpus()
    node_of = {cpu: node.node for node in _numa(root) for cpu in _cpu_numbers(node.cpus)}
    cores: dict[object, int] = {}
    return tuple(
        Cpu(cpu, cores.setdefault(_core(root, f"cpu{cpu}") or cpu, len(cores)), node_of.get(cpu, 0))
        for cpu in sorted(affinity)
    )


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time that this process's cgroups grant, the smallest along the ancestors."""
    return _granted(root, _quota)


def place(cpus: Iterable[Cpu], threads: int) -> tuple[Cpu, ...]:
    """The CPUs of ``threads`` threads, thread by thread; fewer where there are fewer.

    A physical core each first, spread over the nodes in proportion to their cores; SMT siblings only once
    every core has a thread. Fewer threads get a prefix of what more threads get.
    """
    siblings: Counter[int] = Counter()
    queues: defaultdict[tuple[int, int], list[Cpu]] = defaultdict(list)
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        queues[siblings[cpu.core], cpu.node].append(cpu)
        siblings[cpu.core] += 1
    # Ordered by the share of its node that is taken with it, CPUs interleave in proportion.
    order = [
        (sibling, number / len(queue), node, cpu)
        for (sibling, node), queue in queues.items()
        for number, cpu in enumerate(queue, 1)
    ]
    return tuple(cpu for *_, cpu in sorted(order, key=lambda each: each[:3])[:threads])


def read_gpus() -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi lists; none without it. Doesn't initialize CUDA."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    columns = "index,name,compute_cap,memory.total"
    query = [tool, f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
        return tuple(Gpu(int(row[0]), row[1], int(float(row[-1]) * 2**20), row[-2]) for row in rows)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return ()


def _isa(cpuinfo: str) -> tuple[str, ...]:
    flags = set((_match(r"^flags\s*:\s*(.+)$", cpuinfo) or "").split())
    return tuple(flag for flag in ISA_FLAGS if flag in flags)


def _cores_and_memory() -> tuple[int | None, int | None, int | None]:
    """Physical cores, bytes of RAM, and those that are available."""
    import psutil  # not above: `--help` works where it can't be loaded

    cores = psutil.cpu_count(logical=False)
    try:
        found = psutil.virtual_memory()
    except (OSError, KeyError):
        return cores, None, None
    return cores, found.total, found.available


def _core(root: Path, name: str) -> tuple[int, ...] | None:
    """Tell the core of "cpu5" from others: ids repeat between packages, and between some's dies."""
    topology = root / "sys/devices/system/cpu" / name / "topology"
    package, core, die = (
        _text(topology / file) or "" for file in ("physical_package_id", "core_id", "die_id")
    )
    # Some virtual machines say -1.
    if not (package.isdigit() and core.isdigit()):
        return None
    return int(package), int(die) if die.isdigit() else 0, int(core)


def _granted(root: Path, read: Callable[[Path], Number | None]) -> Number | None:
    """The smallest that this process's cgroups grant, by ``read`` of each; None where none limits it."""
    return min(filter(None, map(read, _cgroups(root))), default=None)


def _cgroups(root: Path) -> list[Path]:
    """This process's cgroup directories, innermost first: any of them may set a limit.

    Version 2 has one tree; version 1 one per controller. In a container the tree is often mounted at
    its own root, so the root directories are read too.
    """
    mount = root / "sys/fs/cgroup"
    found = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has no controllers here; version 1's directories may be named after all of a group's.
        names = [*controllers.split(","), controllers] if controllers else ["", "unified"]
        for controller in names:
            inner = Path(path.lstrip("/"))
            found += [mount / controller / parent for parent in (inner, *inner.parents)]
    return list(dict.fromkeys([*found, mount]))


def _quota(group: Path) -> float | None:
    """CPUs that a cgroup allows: cpu.max (v2) or cpu.cfs_quota_us (v1)."""
    fields = (_text(group / "cpu.max") or "").split()
    if len(fields) != 2:
        fields = [_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if fields[0].isdigit() and fields[1].isdigit() and int(fields[1]) > 0:
        return int(fields[0]) / int(fields[1]) or None
    return None


def _limit(group: Path) -> int | None:
    """Bytes that a cgroup allows: memory.max (v2) or memory.limit_in_bytes (v1)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _text(group / name)
        # Version 1 represents "no limit" as a number near 2^63.
        if text is not None and text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _numa(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        memory = _kilobytes(_text(directory / "meminfo") or "", r"Node \d+ MemTotal")
        number = int(directory.name.removeprefix("node"))
        cpus = _text(directory / "cpulist") or ""
        usable = len(_cpu_numbers(cpus) & own_cpus())
        nodes.append(NumaNode(number, cpus, memory, usable))
    return tuple(sorted(nodes, key=lambda node: node.node))


def _cpu_numbers(text: str) -> set[int]:
    """The CPUs of a kernel list: {0, 1, 2, 8} for "0-2,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _huge_pages(meminfo: str) -> int | None:
    count = _match(r"^HugePages_Total:\s*(\d+)$", meminfo)
    size = _kilobytes(meminfo, "Hugepagesize")
    return None if count is None or size is None else int(count) * size


def _kilobytes(text: str, name: str) -> int | None:
    value = _match(rf"^{name}:\s*(\d+) kB$", text)
    return None if value is None else int(value) * 1024


def _match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
