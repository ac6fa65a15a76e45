"""What this machine can do with ktbridge, and a remedy for each thing that is missing."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.serve.doctor_packages import (
    ENGINE_PACKAGES,
    PACKAGES,
    Check,
    check_engine_packages,
    check_packages,
    version_of,
)
from ktbridge.serve.machine import Machine, read_machine

GIB = 2**30


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.state != "problem" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "machine": self.machine.as_dict(),
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose(engine_python: str | None = None, imports: bool = True) -> Diagnosis:
    """Look at everything once. Raises nothing: what fails is a check that says so.

    ``engine_python`` is the interpreter of SGLang-KT's environment, where that isn't this one.
    Without ``imports`` packages are looked up only, which is quick.
    """
    machine = read_machine()
    checks = [
        Check("CPU", "ok", machine.cpu or "unknown"),
        _isa(machine),
        _kernels(machine),
        _cores(machine),
        _memory(machine),
        _numa(machine),
        _huge_pages(machine),
        _gpu(),
        *check_packages(imports),
        *_engine(machine, engine_python, imports),
    ]
    return Diagnosis(machine, tuple(checks))


def _isa(machine: Machine) -> Check:
    if not machine.isa:
        return Check("ISA", "missing", "no AVX2", "the scalar kernels run everywhere, slowly")
    return Check("ISA", "ok", " ".join(machine.isa))


def _kernels(machine: Machine) -> Check:
    """Our extension: the paths this CPU can run, and the one that 'auto' takes."""
    try:
        kernels = importlib.import_module("ktbridge._kernels")
    except ImportError as error:
        return Check(
            "kernels",
            "problem",
            f"ktbridge._kernels does not import: {error}",
            "install ktbridge again: pip install --force-reinstall ktbridge",
        )
    available = ", ".join(kernels.isa_available())
    if "amx_bf16" in machine.isa and "amx" not in available:
        return Check(
            "kernels",
            "problem",
            f"the CPU has AMX, but the operating system doesn't let us use it (only {available})",
            "use Linux 5.16 or newer, and a container runtime that allows arch_prctl",
        )
    try:
        return Check("kernels", "ok", f"{kernels.isa_default()} (of {available})")
    except ValueError as error:
        forced = os.environ.get("KTBRIDGE_ISA")
        return Check(
            "kernels",
            "problem",
            f"KTBRIDGE_ISA={forced}: {error}",
            f"unset KTBRIDGE_ISA, or set it to one of {available}",
        )


def _cores(machine: Machine) -> Check:
    physical = machine.physical_cores
    text = f"{physical or '?'} physical, {machine.logical_cpus} logical"
    if machine.affinity < machine.logical_cpus:
        text += f"; affinity allows {machine.affinity}"
    if machine.cpu_quota is not None:
        text += f"; cgroup allows {machine.cpu_quota:g}"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.affinity:
        return Check(
            "cores",
            "ok",
            text,
            f"run with --threads {max(1, int(machine.cpu_quota))}: more threads than the quota stall",
        )
    return Check("cores", "ok", text)


def _memory(machine: Machine) -> Check:
    if machine.memory is None:
        return Check("RAM", "missing", "unknown", "/proc/meminfo cannot be read")
    text = f"{machine.memory / GIB:.1f} GiB"
    if machine.memory_available is not None:
        text += f", {machine.memory_available / GIB:.1f} GiB available"
    if machine.memory_limit is not None and machine.memory_limit < machine.memory:
        text += f"; cgroup allows {machine.memory_limit / GIB:.1f} GiB"
    return Check("RAM", "ok", text)


def _numa(machine: Machine) -> Check:
    if not machine.numa:
        return Check("NUMA", "ok", "one node (the kernel lists none)")
    nodes = [
        f"node {node.node}: CPUs {node.cpus or 'none'}"
        + (f", {node.memory / GIB:.1f} GiB" if node.memory is not None else "")
        for node in machine.numa
    ]
    return Check("NUMA", "ok", "; ".join(nodes))


def _huge_pages(machine: Machine) -> Check:
    """Transparent huge pages: expert weights are read in long rows, so page walks cost."""
    setting = machine.transparent_huge_pages
    text = f"transparent: {setting or 'unknown'}"
    if machine.huge_pages:
        text += f"; {machine.huge_pages / GIB:.1f} GiB set aside"
    if setting == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        return Check(
            "huge pages", "ok", text, f"echo madvise > {path} (as root) may help large models"
        )
    return Check("huge pages", "ok", text)


def _engine(machine: Machine, python: str | None, imports: bool) -> list[Check]:
    """SGLang-KT's packages and the contract of its version."""
    from ktbridge.serve.sglang.installed import DISTRIBUTION, KERNEL, read_installed

    try:
        installed = read_installed(python)
    except KtbridgeError as error:
        return [Check(DISTRIBUTION, "problem", str(error), error.next_step)]
    versions = {DISTRIBUTION: installed.engine, KERNEL: installed.kernel}
    checks = check_engine_packages(python or sys.executable, versions, imports)
    if installed.engine is None and installed.upstream is not None:
        said = f"sglang {installed.upstream} is installed, which is SGLang without KTransformers"
        checks[0] = Check(DISTRIBUTION, "missing", said, ENGINE_PACKAGES[DISTRIBUTION][2])
    if installed.engine is None:
        return checks
    return [*checks, *_contract(machine, installed.engine, installed.kernel)]


def _contract(machine: Machine, version: str, kernel: str | None) -> list[Check]:
    """What the installed engine accepts, and whether its kernels and this CPU go with it."""
    from ktbridge.adapter.engines import ENGINE, contract_for

    try:
        contract, known = contract_for(f"{ENGINE}=={version}")
    except KtbridgeError as error:
        return [Check("engine contract", "problem", str(error), error.next_step)]
    layouts = [
        name for name in ("split", "merged", "expert", "nonexpert") if getattr(contract, name)
    ]
    text = f"{contract.name}: adapters {', '.join(layouts)}; methods {', '.join(contract.methods)}"
    if not contract.expert:
        text = f"{contract.name}: no expert LoRA"
        return [Check("engine contract", "problem", text, f"install {ENGINE} 0.6.3 or newer")]
    if not known:
        step = "compare with `ktbridge verify` before relying on it"
        return [Check("engine contract", "ok", f"{text} (not looked at)", step)]
    if kernel is not None and kernel != version:
        text += f"; kt-kernel is {kernel}"
        return [Check("engine contract", "ok", text, f"pip install kt-kernel=={version}")]
    if "amx_bf16" not in machine.isa:
        step = "its expert LoRA needs AMX; use a machine that has it, or --engine local"
        return [Check("engine contract", "missing", f"{text}; no AMX here", step)]
    return [Check("engine contract", "ok", text)]


def _gpu() -> Check:
    """GPUs as torch sees them; an import that fails says why."""
    from ktbridge.serve.sglang.resources import read_gpus

    if version_of("torch") is None:
        return Check("GPU", "missing", "torch is not installed", PACKAGES["torch"][2])
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            built = torch.version.cuda
            listed = ", ".join(gpu.name for gpu in read_gpus())
            if listed:
                why = "torch is a CPU build" if built is None else f"torch's CUDA {built} has none"
                step = "install a torch build for this driver's CUDA version, as pytorch.org says"
                return Check("GPU", "problem", f"nvidia-smi lists {listed}, but {why}", step)
            found = "torch is a CPU build" if built is None else f"none for torch's CUDA {built}"
            return Check(
                "GPU", "missing", found, "not needed by --engine local and by training on a CPU"
            )
        names = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            names.append(f"{properties.name} {properties.total_memory / GIB:.0f} GiB")
        return Check("GPU", "ok", "; ".join(names))
    except Exception as error:  # a broken torch fails in many ways; each is worth reading
        said = f"{type(error).__name__}: {error}"
        return Check("GPU", "problem", f"torch does not load: {said}", "reinstall torch")
