"""Checks of what this machine can do with ktbridge, with a remedy for each failed one."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import asdict, dataclass

from ktbridge.adapter.engines import ENGINE, REPLAY_HOLE, SERVER_HOLES, contract_for, install_engine
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.gpu.probe import GpuFacts
from ktbridge.files.sizes import size_text
from ktbridge.install import reinstall_hint, without_kernels
from ktbridge.machine import Machine, read_machine
from ktbridge.serve.doctor_packages import (
    ENGINE_STEP,
    Check,
    check_engine_packages,
    check_gpu,
    check_linear_attention,
    check_packages,
    try_gpus,
)
from ktbridge.serve.sglang.facts import DISTRIBUTION, KERNEL, read_installed


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    checks: tuple[Check, ...]
    gpus: tuple[GpuFacts, ...] = ()
    """Measurements of each GPU that torch sees."""

    @property
    def ok(self) -> bool:
        return all(check.state != "problem" for check in self.checks)

    def as_dict(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "machine": self.machine.as_dict(),
            "checks": [asdict(check) for check in self.checks],
            "gpus": [asdict(gpu) for gpu in self.gpus],
        }


def diagnose(engine_python: str | None = None, imports: bool = True) -> Diagnosis:
    """Run all checks once. Raises nothing: a failure is reported as a check.

    ``engine_python`` is the interpreter of SGLang-KT's environment, where that isn't this one.
    Without ``imports`` only package metadata is read, which is quick.
    """
    machine = read_machine()
    packages, imported = check_packages(imports)
    gpus, expert_checks = try_gpus(imported)
    checks = [
        Check("CPU", "ok", machine.cpu or "unknown"),
        _isa(machine),
        _kernels(machine),
        _cores(machine),
        _memory(machine),
        _numa(machine),
        _huge_pages(machine),
        check_gpu(imported),
        *expert_checks,
        *packages,
        *check_linear_attention(),
        *check_engine(machine, engine_python, imports),
    ]
    return Diagnosis(machine, tuple(checks), gpus)


def _isa(machine: Machine) -> Check:
    if not machine.isa:
        return Check("ISA", "missing", "no AVX2", "the scalar kernels run everywhere, slowly")
    return Check("ISA", "ok", " ".join(machine.isa))


def _kernels(machine: Machine) -> Check:
    """Our extension: the instruction sets (ISAs) this CPU can run, and the one that 'auto' selects."""
    try:
        kernels = importlib.import_module("ktbridge._kernels")
    except ModuleNotFoundError:
        lacking = without_kernels()
        return Check("kernels", "missing", lacking.sentence, lacking.next_step)
    except ImportError as error:
        found = f"ktbridge._kernels does not import: {error}"
        return Check("kernels", "problem", found, f"install ktbridge again: {reinstall_hint()}")
    available = ", ".join(kernels.isa_available())
    if "amx_bf16" in machine.isa and "amx" not in available:
        reason = kernels.why_no_tiles() or "the CPU that is seen here lacks some of it"
        found = f"the CPU has AMX, but it isn't used (only {available}): {reason}"
        step = "use Linux 5.16 or newer, and a container runtime that allows arch_prctl"
        return Check("kernels", "problem", found, step)
    # Here, because it needs what may not import.
    from ktbridge.kernel_choice import choose_isa

    try:
        return Check("kernels", "ok", f"{choose_isa()} (of {available})")
    except UsageError as error:
        found = f"KTBRIDGE_ISA={os.environ.get('KTBRIDGE_ISA')}: {error.sentence}"
        step = f"unset KTBRIDGE_ISA, or set it to one of {available}"
        return Check("kernels", "problem", found, step)


def _cores(machine: Machine) -> Check:
    text = f"{machine.physical_cores or '?'} physical, {machine.logical_cpus} logical"
    if machine.affinity < machine.logical_cpus:
        text += f"; affinity allows {machine.affinity}"
    step, quota = "", machine.cpu_quota
    if quota is not None:
        text += f"; cgroup allows {quota:g}"
        if quota < machine.affinity:
            threads = max(1, int(quota))
            step = f"run with --threads {threads}: more threads than the quota stall"
    return Check("cores", "ok", text, step)


def _memory(machine: Machine) -> Check:
    if machine.memory is None:
        return Check("RAM", "missing", "unknown", "/proc/meminfo cannot be read")
    text = f"{size_text(machine.memory)}"
    if machine.memory_available is not None:
        text += f", {size_text(machine.memory_available)} available"
    if machine.memory_limit is not None and machine.memory_limit < machine.memory:
        text += f"; cgroup allows {size_text(machine.memory_limit)}"
    return Check("RAM", "ok", text)


def _numa(machine: Machine) -> Check:
    if not machine.numa:
        return Check("NUMA", "ok", "one node (the kernel lists none)")
    nodes = [
        f"node {node.node}: CPUs {node.cpus or 'none'}"
        + (f", {size_text(node.memory)}" if node.memory is not None else "")
        for node in machine.numa
    ]
    text, step = "; ".join(nodes), ""
    idle = [str(node.node) for node in machine.numa if node.cpus and not node.usable]
    if idle:
        text += f"; affinity allows no CPU of node {', '.join(idle)}"
        step = "start without taskset, or with numactl --membind on the nodes whose CPUs are used"
    elif len(machine.numa) > 1:
        step = "pages stay where they are first touched; numactl --interleave=all spreads a model's"
    return Check("NUMA", "ok", text, step)


def _huge_pages(machine: Machine) -> Check:
    """Transparent huge pages: expert weights are read in long rows, so page walks cost."""
    setting, step = machine.transparent_huge_pages, ""
    text = f"transparent: {setting or 'unknown'}"
    if setting == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        step = f"echo madvise > {path} (as root) may help large models"
    if machine.huge_pages:
        text += f"; {size_text(machine.huge_pages)} set aside"
        if machine.memory and machine.huge_pages > machine.memory / 10 and setting != "never":
            step = "ktbridge uses none of those; sysctl vm.nr_hugepages=0 frees them"
    return Check("huge pages", "ok", text, step)


# Every sglang-kt has them. `ktbridge serve` warns of or refuses settings that expose them.
HOLES = (
    f"has {SERVER_HOLES} (its image generator and encoder servers unpickle "
    f"what reaches their sockets), {REPLAY_HOLE} (its replay script does so with dumps) and CVE-2026-7304 "
    "(custom logit processors run code that a request brings)"
)
STEP = "start none of those, as `ktbridge serve` does, and keep its ports off untrusted networks"


def check_engine(machine: Machine, python: str | None, imports: bool) -> list[Check]:
    """SGLang-KT's packages and the contract of its version."""
    try:
        installed = read_installed(python)
    except KtbridgeError as error:
        return [Check(DISTRIBUTION, "problem", error.sentence, error.next_step)]
    versions = {DISTRIBUTION: installed.engine, KERNEL: installed.kernel}
    checks = check_engine_packages(python or sys.executable, versions, imports)
    if installed.engine is None and installed.upstream is not None:
        message = f"sglang {installed.upstream} is installed, which is SGLang without KTransformers"
        checks[0] = Check(DISTRIBUTION, "missing", message, ENGINE_STEP)
    if installed.engine is None:
        return checks
    return [
        *checks,
        *_contract(machine, installed.engine, installed.kernel),
        Check("engine security", "ok", f"{installed.engine} {HOLES}", STEP),
    ]


def _contract(machine: Machine, version: str, kernel: str | None) -> list[Check]:
    """Return what the installed engine accepts, and whether its kernels and this CPU are compatible."""
    try:
        contract, known = contract_for(f"{ENGINE}=={version}")
    except KtbridgeError as error:
        return [Check("engine contract", "problem", error.sentence, error.next_step)]
    layouts = [
        name for name in ("split", "merged", "expert", "nonexpert") if getattr(contract, name)
    ]
    text = f"{contract.name}: adapters {', '.join(layouts)}; methods {', '.join(contract.methods)}"
    if not contract.expert:
        text = f"{contract.name}: no expert LoRA"
        return [Check("engine contract", "problem", text, install_engine())]
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
