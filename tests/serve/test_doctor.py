"""doctor: what it reads on this machine, and on machines written down here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from ktbridge.experts.gpu.probe import MARK, GpuFacts
from ktbridge.machine import NumaNode, read_machine
from ktbridge.serve import doctor
from ktbridge.serve.doctor import _huge_pages, _numa

SMI = "#!/bin/sh\necho '0, A GPU, 9.0, 81920'\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Where psutil, too, reads another machine's files."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return tmp_path


def test_a_two_node_machine_in_a_container(elsewhere):
    cores = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{value}\n"
        for cpu in range(8)
        for name, value in (("core_id", cpu % 2), ("physical_package_id", cpu // 2 % 2))
    }
    nodes = {
        f"sys/devices/system/node/node{n}/{name}": text
        for n in range(2)
        for name, text in (
            ("cpulist", f"{4 * n}-{4 * n + 3}\n"),
            ("meminfo", f"Node {n} MemTotal:       1000 kB\nNode {n} MemFree:  10 kB\n"),
        )
    }
    machine = read_machine(
        write(
            elsewhere,
            cores
            | nodes
            | {
                "proc/cpuinfo": "processor : 0\nmodel name\t: A CPU @ 2 GHz\n"
                "flags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_tile amx_bf16 avx512bwx\n",
                "proc/meminfo": "MemTotal:  2000 kB\nMemFree:  900 kB\nMemAvailable:  1500 kB\n"
                "Buffers: 0 kB\nCached: 0 kB\nShmem: 0 kB\nActive: 0 kB\nInactive: 0 kB\n"
                "HugePages_Total:       3\nHugepagesize:       2048 kB\n",
                "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
                "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/outer/inner/memory.max": "1024000\n",
                "sys/fs/cgroup/outer/memory.max": "max\n",
            },
        )
    )
    assert machine.cpu == "A CPU @ 2 GHz"
    assert machine.isa == ("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    assert machine.cpu_quota == 1.5
    assert machine.usable_cpus <= 1.5
    assert (machine.memory, machine.memory_available) == (2_048_000, 1_536_000)
    assert machine.usable_memory == 1_024_000
    assert (machine.huge_pages, machine.transparent_huge_pages) == (3 * 2048 * 1024, "madvise")
    assert [(n.node, n.cpus, n.memory) for n in machine.numa] == [
        (0, "0-3", 1_024_000),
        (1, "4-7", 1_024_000),
    ]
    # What is worth doing something about comes with what to do.
    node = NumaNode(9, "900-901", 1)
    lost = replace(machine, numa=(*machine.numa, node), huge_pages=10**6)
    assert "numactl" in _numa(machine).remedy
    assert "affinity allows no CPU of node 9" in _numa(replace(lost, numa=(node,))).found
    assert "vm.nr_hugepages=0" in _huge_pages(lost).remedy
    never = replace(machine, transparent_huge_pages="never")
    assert "transparent_hugepage/enabled" in _huge_pages(never).remedy


def test_cgroup_version_1(tmp_path):
    machine = read_machine(
        write(
            tmp_path,
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert (machine.memory_limit, machine.cpu_quota) == (4096, 0.5)


def test_nothing_readable_is_unknown_not_zero(elsewhere):
    machine = read_machine(elsewhere)
    assert (machine.cpu, machine.memory, machine.memory_limit, machine.cpu_quota) == (None,) * 4
    assert (machine.isa, machine.numa) == ((), ())


@pytest.fixture
def report(run_cli):
    """report(*options, code=0, **environment): the checks of `ktbridge doctor --json` by topic."""

    def report(*options, code=0, **environment):
        done = run_cli("doctor", "--json", *options, **environment)
        assert done.returncode == code, done.stdout
        return {check["topic"]: check for check in json.loads(done.stdout)["checks"]}

    return report


def test_report(report, tmp_path):
    """An engine on the path is looked up in the table; what isn't as it should be has a remedy."""
    for name, version in (("sglang_kt", "0.6.4"), ("kt_kernel", "0.7.2")):
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(tmp_path, {f"{name}-{version}.dist-info/METADATA": metadata})
    write(tmp_path, {"nvidia-smi": SMI})
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    checks = report("--quick", PYTHONPATH=str(tmp_path), PATH=path)
    assert checks["kernels"]["state"] == checks["torch"]["state"] == "ok"
    assert "scalar" in checks["kernels"]["found"]
    assert checks["GPU"]["found"] == "A GPU 85.9 GB (nvidia-smi; torch was not asked)"
    assert "0.6.3 to 0.7.0.post3: adapters split" in checks["engine contract"]["found"]
    assert checks["engine contract"]["remedy"] == "pip install kt-kernel==0.6.4"
    assert "0.6.4 has CVE-2026-3059, CVE-2026-3060" in checks["engine security"]["found"]
    assert "off untrusted networks" in checks["engine security"]["remedy"]
    assert all(check["remedy"] for check in checks.values() if check["state"] != "ok")


GOOD = GpuFacts(0, "A GPU", "9.0", True, True, 55.2e9, memory=85 * 10**9)


@pytest.mark.parametrize(
    ("lacking", "memlock", "said", "remedy"),
    [
        ({}, 65536, "work: sm90, bfloat16 tensor cores; grouped GEMM; Triton works; 55.2 GB/s", ""),
        ({}, None, "mapped files are read in place", ""),
        ({"not_in_place": "not permitted"}, 65536, "in place (not permitted)", "memlock=-1` (the"),
        ({"not_in_place": "not supported"}, None, "through pinned memory", "has no limit here"),
        ({"no_triton": "no compiler"}, None, "Triton doesn't work", "(gcc)"),
        ({"grouped_gemm": False}, None, "one by one, slower", "newer torch"),
        (
            {"capability": "8.6"},
            None,
            "sm86, bfloat16 tensor cores; torch's grouped GEMM is a loop",
            "cpu",
        ),
        (
            {"one_by_one": True, "capability": "12.0"},
            None,
            "waits for the GPU in each call",
            "no kernel",
        ),
        ({"tensor_cores": False, "capability": "7.5"}, None, "only kt_experts: cpu: sm75", "sm80"),
        ({"error": "CUDA out of memory"}, None, "tried: CUDA out of memory", "nothing else uses"),
    ],
)
def test_what_a_gpu_can_do_for_experts(lacking, memlock, said, remedy):
    check = doctor.expert_check(replace(GOOD, **lacking), memlock)
    assert said in check.found
    assert remedy in check.remedy
    assert (check.state, bool(check.remedy)) == (("missing", True) if remedy else ("ok", False))


CUDA_13 = {"cuda": "13.0"}


@pytest.mark.parametrize(
    ("answers", "ending", "listed", "said"),
    [
        ([CUDA_13, asdict(GOOD)], "", SMI, ["ok A GPU 85.0 GB", "ok kt_experts: stream"]),
        ([CUDA_13, asdict(GOOD)], "driver gone", SMI,
         ["ok A GPU", "ok kt_experts", "problem trying the GPUs: Python ended with code 1: driver gone"]),
        ([CUDA_13], "", SMI, ["problem nvidia-smi lists A GPU 85.9 GB, but torch's CUDA 13.0 has none"]),
        ([{"cuda": None}], "", SMI, ["problem nvidia-smi lists A GPU 85.9 GB, but torch is a CPU build"]),
        ([CUDA_13], "", "", ["missing none for torch's CUDA 13.0"]),
        ([], "ImportError: libgone.so.12", "",
         ["problem torch does not load: Python ended with code 1: ImportError: libgone.so.12"]),
    ],
)  # fmt: skip
def test_torch_is_asked_for_gpus_in_a_process_of_its_own(
    answers, ending, listed, said, tmp_path, monkeypatch
):
    """What it answered counts even if it ends badly, and is held against nvidia-smi's list."""
    write(tmp_path, {"nvidia-smi": listed or "#!/bin/sh\n"})
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines = "".join(f"\n{MARK}{json.dumps(answer)}" for answer in answers)
    program = f"import sys; print({lines!r}); sys.exit({ending!r} or 0)"
    monkeypatch.setattr(doctor, "_PROBE", [sys.executable, "-c", program])
    gpus, checks = doctor.check_gpus(ask_torch=True)
    assert gpus == (GOOD,) * (len(answers) - 1)
    assert len(checks) == len(said)
    for check, words in zip(checks, said, strict=True):
        assert f"{check.state} {check.found}".startswith(words)
        assert check.remedy or check.state == "ok"


def test_a_forced_path_that_does_not_exist_is_a_problem(run_cli):
    done = run_cli("doctor", "--quick", KTBRIDGE_ISA="no-such-isa")
    assert done.returncode == 1
    assert "no-such-isa" in done.stdout


def test_torch_alone_is_imported_and_what_it_dies_of_is_told(report, tmp_path):
    why = "libgone.so.12: cannot open shared object file"
    write(tmp_path, {"torch.py": f"raise ImportError({why!r})\n", "transformers.py": "1 / 0\n"})
    checks = report(code=1, PYTHONPATH=str(tmp_path))
    assert checks["GPU"]["state"] == "problem"
    assert checks["GPU"]["found"].endswith(f"with code 1: ImportError: {why}")
    assert checks["torch"]["state"] == checks["transformers"]["state"] == "ok"


def test_a_package_that_is_too_old_and_an_engine_that_does_not_run(report, tmp_path):
    info = tmp_path / "openai-1.99.dist-info"
    write(info, {"METADATA": "Metadata-Version: 2.1\nName: openai\nVersion: 1.99\n"})
    python = str(tmp_path / "python")
    checks = report("--quick", "--engine-python", python, code=1, PYTHONPATH=str(tmp_path))
    assert checks["openai"]["found"].startswith("1.99 is too old; ktbridge needs 3.0")
    assert checks["openai"]["remedy"] == "pip install 'openai>=3.0'"
    assert f"{python} does not run" in checks["sglang-kt"]["found"]
