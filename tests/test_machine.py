"""CPUs, quotas and the places of threads, on machines written down here and on the one the test runs on."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ktbridge import kernel_choice
from ktbridge.errors import UsageError
from ktbridge.kernel_choice import choose_threads, places
from ktbridge.machine import Cpu, cpu_quota, place, read_machine, usable_cpus


@pytest.fixture
def machine(tmp_path: Path):
    """Writes files below a root, whose path it returns."""

    def write(files: dict[str, object]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    return write


def core(cpu: int, package: int, number: int, die: int | None = None) -> dict[str, object]:
    topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
    files: dict[str, object] = {
        f"{topology}/physical_package_id": package,
        f"{topology}/core_id": number,
    }
    return files if die is None else {**files, f"{topology}/die_id": die}


def two_nodes(cores: int) -> dict[str, object]:
    """2 nodes x ``cores`` x 2 siblings as Linux numbers them: first siblings first.

    Core ids repeat in each package and have gaps.
    """
    files: dict[str, object] = {}
    for cpu in range(4 * cores):
        files |= core(cpu, cpu // cores % 2, 3 * (cpu % cores))
    for node in range(2):
        first, second = node * cores, (node + 2) * cores
        ranges = f"{first}-{first + cores - 1},{second}-{second + cores - 1}"
        files[f"sys/devices/system/node/node{node}/cpulist"] = ranges
    files["sys/devices/system/node/node2/cpulist"] = ""  # memory only
    files["sys/devices/system/node/possible"] = "0-2"
    return files


def ids(cpus: tuple[Cpu, ...]) -> list[int]:
    return [cpu.id for cpu in cpus]


def cores_of(cpus: tuple[Cpu, ...]) -> int:
    return len({cpu.core for cpu in cpus})


def test_cores_and_nodes(machine) -> None:
    cpus = usable_cpus(machine(two_nodes(4)), range(16))
    assert [cpu.id for cpu in cpus] == list(range(16))
    assert [cpu.node for cpu in cpus] == [cpu // 4 % 2 for cpu in range(16)]
    assert cores_of(cpus) == 8
    assert all(cpus[n].core == cpus[n + 8].core for n in range(8))


def test_dies_of_a_package_may_repeat_core_ids(machine) -> None:
    root = machine(core(0, 0, 0, 0) | core(1, 0, 0, 1))
    assert cores_of(usable_cpus(root, [0, 1])) == 2


def test_cores_come_before_siblings_and_nodes_take_turns(machine) -> None:
    cpus = usable_cpus(machine(two_nodes(8)), range(32))
    for threads in range(1, 33):
        found = place(cpus, threads)
        assert len(found) == threads
        assert cores_of(found) == min(threads, 16)
        counts = Counter(cpu.node for cpu in found)
        assert abs(counts[0] - counts[1]) <= 1
        assert place(cpus, 32)[:threads] == found
    assert ids(place(cpus, 18)) == [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 16, 24]
    assert len(place(cpus, 1000)) == 32
    assert place(cpus, 0) == ()


def test_nodes_take_threads_in_proportion_to_their_cores(machine) -> None:
    cpus = usable_cpus(machine(two_nodes(4)), [0, 1, 2, 3, 6])  # four of node 0, one of node 1
    assert {cpu.node for cpu in place(cpus, 4)} == {0}
    assert Counter(cpu.node for cpu in place(cpus, 5)) == {0: 4, 1: 1}


def test_second_siblings_alone_are_cores(machine) -> None:
    cpus = usable_cpus(machine(two_nodes(4)), [8, 9, 10, 11, 1, 5])
    assert ids(cpus) == [1, 5, 8, 9, 10, 11]
    assert cores_of(cpus) == 5
    assert ids(place(cpus, 6)) == [1, 8, 10, 11, 5, 9]  # 5: node 1's only core, used up with it


def test_a_machine_that_says_little(machine) -> None:
    assert cpu_quota(machine({})) is None
    cpus = usable_cpus(machine({}), [0, 1, 2, 7])
    assert (ids(cpus), cores_of(cpus), {cpu.node for cpu in cpus}) == ([0, 1, 2, 7], 4, {0})
    # Its packages but not its cores: some virtual ones say -1.
    assert cores_of(usable_cpus(machine(core(0, 0, -1) | core(1, 0, -1)), [0, 1, 2, 7])) == 4


V1 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n2:cpuset:/\n1:name=systemd:/x"


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "250000 100000"}, 2.5),
        (
            "0::/pod/box",
            {"pod/box/cpu.max": "250000 100000", "pod/cpu.max": "150000 100000"},
            1.5,
        ),
        (
            "0::/pod/box",
            {"pod/box/cpu.max": "max 100000", "podium/cpu.max": "10000 100000"},
            None,
        ),
        # A container sees the host's path in /proc, and only its own cgroup mounted.
        ("0::/docker/0123", {"cpu.max": "300000 100000"}, 3),
        ("0::/box", {"unified/box/cpu.max": "50000 100000"}, 0.5),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": -1}, None),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": 350000}, 3.5),
        (
            V1,
            {
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": 350000,
                "cpu/a/cpu.cfs_quota_us": 200000,
                "cpu/a/cpu.cfs_period_us": 100000,
            },
            2,
        ),
    ],
)
def test_quotas_of_cgroups(machine, groups, files, quota) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    period = "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us"
    assert cpu_quota(machine({"proc/self/cgroup": groups, period: 100000, **files})) == quota


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.5, 2), (0.3, 1), (8, 8), (100, 8)])
def test_threads_are_cores_and_not_above_the_quota(monkeypatch, quota, threads) -> None:
    monkeypatch.delenv("KTBRIDGE_THREADS", raising=False)
    monkeypatch.setattr(kernel_choice, "_own_cpus", lambda: [Cpu(n, n % 8) for n in range(16)])
    monkeypatch.setattr(kernel_choice, "cpu_quota", lambda: quota)
    assert choose_threads() == threads


def test_wishes_for_threads(monkeypatch) -> None:
    monkeypatch.setenv("KTBRIDGE_THREADS", "3")
    assert [choose_threads(wish) for wish in (0, 5, 4096)] == [3, 5, 4096]
    for wish in (-1, 4097):
        with pytest.raises(UsageError, match=rf"0 \(automatic\) or at most 4096, not {wish}"):
            choose_threads(wish)
    for nonsense in ("0", "-2", "4097", "two", "2x", " "):
        monkeypatch.setenv("KTBRIDGE_THREADS", nonsense)
        with pytest.raises(UsageError, match="KTBRIDGE_THREADS must be a number from 1 to 4096"):
            choose_threads()
    monkeypatch.setenv("KTBRIDGE_THREADS", "")
    assert choose_threads() >= 1


def test_places_are_cpus_of_this_process() -> None:
    assert len(places(4096)) == len(os.sched_getaffinity(0))
    assert len(places(1)) == 1


def test_a_machine_in_a_container(machine, monkeypatch) -> None:
    """Everything that is read of one, by psutil too; what can't be read is unknown, not zero."""
    meminfo = "MemTotal:  2000 kB\nMemFree:  900 kB\nMemAvailable:  1500 kB\nBuffers: 0 kB\nCached: 0 kB\n"
    meminfo += "Shmem: 0 kB\nActive: 0 kB\nInactive: 0 kB\nHugePages_Total: 3\nHugepagesize: 2048 kB"
    flags = "fpu avx2 fma avx512f avx512_bf16 amx_tile amx_bf16 avx512bwx"
    root = machine({})
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
    found = read_machine(root)
    assert (found.cpu, found.memory, found.memory_limit, found.cpu_quota) == (None,) * 4
    assert (found.isa, found.numa) == ((), ())
    files = {
        "proc/cpuinfo": f"processor : 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: {flags}",
        "proc/meminfo": meminfo,
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/inner/memory.max": 1024000,
        "sys/fs/cgroup/outer/memory.max": "max",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1000 kB\nNode 0 MemFree: 10 kB",
    }
    found = read_machine(machine(two_nodes(2) | files))
    assert (found.cpu, found.isa) == ("A CPU @ 2 GHz", tuple(flags.split()[1:-1]))
    assert (found.memory, found.memory_available) == (2_048_000, 1_536_000)
    assert found.usable_memory == found.memory_limit == 1_024_000
    assert (found.huge_pages, found.transparent_huge_pages) == (3 * 2048 * 1024, "madvise")
    nodes = [(node.node, node.cpus, node.memory) for node in found.numa]
    assert nodes[:2] == [(0, "0-1,4-5", 1_024_000), (1, "2-3,6-7", None)]
    old = {
        "proc/self/cgroup": "4:memory:/job",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 4096,
    }
    old["sys/fs/cgroup/memory/memory.limit_in_bytes"] = 9223372036854771712
    assert read_machine(machine(old)).memory_limit == 4096
