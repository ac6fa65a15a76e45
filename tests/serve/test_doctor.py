"""doctor: what it says of this machine, and of what was read of others."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ktbridge.experts.gpu.probe import MARK, GpuFacts
from ktbridge.machine import NumaNode, read_machine
from ktbridge.serve import doctor

SMI = "#!/bin/sh\necho '0, A GPU, 9.0, 81920'\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


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


def test_what_is_worth_doing_something_about_comes_with_what_to_do():
    nodes = (NumaNode(0, "0-3", 10**6, 4), NumaNode(9, "900-901", 1))
    here = replace(read_machine(), numa=nodes, memory=10**7, huge_pages=3 * 10**6)
    found = replace(here, transparent_huge_pages="madvise")
    assert "affinity allows no CPU of node 9" in doctor._numa(found).found
    assert "numactl --membind" in doctor._numa(found).remedy
    assert "numactl --interleave" in doctor._numa(replace(here, numa=(nodes[0],) * 2)).remedy
    assert "vm.nr_hugepages=0" in doctor._huge_pages(found).remedy
    never = replace(here, transparent_huge_pages="never")
    assert "transparent_hugepage/enabled" in doctor._huge_pages(never).remedy


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


def test_torch_alone_is_imported_and_what_it_dies_of_is_told(report, tmp_path):
    why = "libgone.so.12: cannot open shared object file"
    write(tmp_path, {"torch.py": f"raise ImportError({why!r})\n", "transformers.py": "1 / 0\n"})
    checks = report(code=1, PYTHONPATH=str(tmp_path))
    assert checks["GPU"]["state"] == "problem"
    assert checks["GPU"]["found"].endswith(f"with code 1: ImportError: {why}")
    assert checks["torch"]["state"] == checks["transformers"]["state"] == "ok"


def test_what_does_not_run_is_a_problem(report, tmp_path):
    """A package that is too old, an engine's interpreter, kernels that aren't there."""
    info = tmp_path / "openai-1.99.dist-info"
    write(info, {"METADATA": "Metadata-Version: 2.1\nName: openai\nVersion: 1.99\n"})
    python = str(tmp_path / "python")
    wrong = {"PYTHONPATH": str(tmp_path), "KTBRIDGE_ISA": "no-such-isa"}
    checks = report("--quick", "--engine-python", python, code=1, **wrong)
    assert "no-such-isa" in checks["kernels"]["found"]
    assert checks["openai"]["found"].startswith("1.99 is too old; ktbridge needs 3.0")
    assert checks["openai"]["remedy"] == "pip install 'openai>=3.0'"
    assert f"{python} does not run" in checks["sglang-kt"]["found"]
