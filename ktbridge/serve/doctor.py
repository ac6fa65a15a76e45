"""Checks of what this machine can do with ktbridge, with a remedy for each failed one.

Packages are looked up in pip's metadata and not imported. What metadata doesn't say, whether torch loads and
which GPUs it sees, is asked in a process of its own: it may crash, and takes GPU memory.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ktbridge.adapter.engines import ENGINE, REPLAY_HOLE, SERVER_HOLES, contract_for, install_engine
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.experts.gpu.probe import MARK, NO_KERNEL, ONE_BY_ONE, GpuFacts, loops_over_experts
from ktbridge.files.sizes import size_text
from ktbridge.install import (
    install_hint,
    linear_attention_gaps,
    reinstall_hint,
    release_of,
    version_of,
    without_kernels,
)
from ktbridge.machine import Machine, read_gpus, read_machine
from ktbridge.serve.sglang.facts import DISTRIBUTION, KERNEL, read_installed

State = Literal["ok", "missing", "problem"]


@dataclass(frozen=True)
class Check:
    """One line of the report. ``problem`` means broken; ``missing`` means not installed."""

    topic: str
    state: State
    found: str
    remedy: str = ""


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


def diagnose(engine_python: str | None = None, ask_torch: bool = True) -> Diagnosis:
    """Run all checks once. Raises nothing: a failure is reported as a check.

    ``engine_python`` is the interpreter of SGLang-KT's environment, where that isn't this one.
    Without ``ask_torch`` GPUs are those that nvidia-smi lists, which is quick.
    """
    machine = read_machine()
    gpus, gpu_checks = check_gpus(ask_torch)
    checks = [
        Check("CPU", "ok", machine.cpu or "unknown"),
        _isa(machine),
        _kernels(machine),
        _cores(machine),
        _memory(machine),
        _numa(machine),
        _huge_pages(machine),
        *gpu_checks,
        *check_packages(),
        *check_linear_attention(),
        *check_sglang_install(machine, engine_python),
    ]
    return Diagnosis(machine, tuple(checks), gpus)


# --- the machine -------------------------------------------------------------------------------


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


# --- packages ----------------------------------------------------------------------------------

PACKAGES = {
    "torch": ("train, serve and verify", "serve"),
    "transformers": ("train, serve and verify", "serve"),
    "accelerate": ("train and serve --engine local", "serve"),
    "peft": ("train and serve", "serve"),
    "trl": ("train", "train"),
    "datasets": ("train", "train"),
    "starlette": ("serve --engine local", "serve"),
    "uvicorn": ("serve --engine local", "serve"),
    "openai": ("demo", "demo"),
}
"""What doesn't work without a distribution, and our extra that installs it. Its module has the same name."""


def check_packages() -> list[Check]:
    """Look up the packages of this environment: installed, and recent enough."""
    least = _least_versions()
    checks = []
    for name, (purpose, extra) in PACKAGES.items():
        version = version_of(name)
        if version is None:
            checks.append(_missing(name, purpose, install_hint(extra)))
        elif name in least and release_of(version) < release_of(least[name]):
            found = f"{version} is too old; ktbridge needs {least[name]} to {purpose}"
            checks.append(Check(name, "problem", found, f"pip install '{name}>={least[name]}'"))
        else:
            checks.append(Check(name, "ok", version))
    return checks


def _missing(name: str, purpose: str, remedy: str) -> Check:
    return Check(name, "missing", f"not installed; needed for {purpose}", remedy)


def _least_versions() -> dict[str, str]:
    """The minimum version of each package in our own metadata."""
    try:
        wanted = importlib.metadata.requires("ktbridge") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    # Metadata puts bounds in an order of its own: "openai<4,>=2.0; extra == 'eval'".
    found = (re.match(r"([\w.-]+)[^;]*?>=\s*([\w.]+)", line) for line in wanted)
    return {match[1]: match[2] for match in found if match}


def check_linear_attention() -> list[Check]:
    """Return how models with linear attention would be computed here; each gap is a check."""
    gaps = linear_attention_gaps([gpu.capability for gpu in read_gpus()], errors={})
    topic = "linear attention"
    if not gaps:
        return [Check(topic, "ok", "flash-linear-attention is installed")]
    models = "(Qwen3-Next, Qwen3.5, Kimi Linear)"
    return [
        Check(topic, "problem" if gap.wrong else "missing", f"{gap.found} {models}", gap.remedy)
        for gap in gaps
    ]


# --- GPUs --------------------------------------------------------------------------------------

NOT_NEEDED = "not needed by --engine local and by training on a CPU"
_PROBE = [sys.executable, "-m", "ktbridge.experts.gpu.probe"]
_PROBE_SECONDS = 300


def check_gpus(ask_torch: bool) -> tuple[tuple[GpuFacts, ...], list[Check]]:
    """Return facts of each GPU that torch sees, and the checks of GPUs.

    Without ``ask_torch`` there are no facts, and nvidia-smi's list is checked.
    """
    if version_of("torch") is None:
        return (), [Check("GPU", "missing", "torch is not installed", install_hint("serve"))]
    listed = _named([(gpu.name, gpu.memory) for gpu in read_gpus()])
    if not ask_torch and listed:
        return (), [Check("GPU", "ok", f"{listed} (nvidia-smi; torch was not asked)")]
    if not ask_torch:
        return (), [Check("GPU", "missing", "nvidia-smi lists none", NOT_NEEDED)]
    answers, failure = _run_probe()
    if not answers:
        step = "reinstall torch, or the driver"
        return (), [Check("GPU", "problem", f"torch does not load: {failure}", step)]
    cuda, facts = answers[0]["cuda"], tuple(GpuFacts(**answer) for answer in answers[1:])
    checks = [_what_torch_sees(cuda, facts, listed)]
    checks += [expert_check(gpu, _memlock()) for gpu in facts]
    if failure:
        found, step = f"trying the GPUs: {failure}", f"{' '.join(_PROBE)} shows its output"
        checks.append(Check("experts on GPUs", "problem", found, step))
    return facts, checks


def _run_probe() -> tuple[list[dict[str, Any]], str]:
    """Return the probe's answers, torch's CUDA and each GPU's facts, and how it ended if that was badly."""
    try:
        done = subprocess.run(
            _PROBE, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS, check=False
        )
        output, failure = done.stdout, ""
        if done.returncode:
            last_line = done.stderr.strip().splitlines()[-1:]
            failure = ": ".join([f"Python ended with code {done.returncode}", *last_line])
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        failure = f"it took more than {_PROBE_SECONDS} seconds"
    marked = [line for line in output.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in marked], failure


def _what_torch_sees(cuda: str | None, gpus: tuple[GpuFacts, ...], listed: str) -> Check:
    """Compare torch's GPUs with those that nvidia-smi has ``listed``. ``cuda``: None in a CPU build."""
    if gpus:
        return Check("GPU", "ok", _named([(gpu.name, gpu.memory) for gpu in gpus]))
    if listed:
        why = "torch is a CPU build" if cuda is None else f"torch's CUDA {cuda} has none"
        step = "install a torch build for this driver's CUDA version: pytorch.org lists them"
        return Check("GPU", "problem", f"nvidia-smi lists {listed}, but {why}", step)
    found = "torch is a CPU build" if cuda is None else f"none for torch's CUDA {cuda}"
    return Check("GPU", "missing", found, NOT_NEEDED)


def _named(gpus: list[tuple[str, int]]) -> str:
    return "; ".join(f"{name} {size_text(memory)}" for name, memory in gpus)


def expert_check(gpu: GpuFacts, memlock: int | None) -> Check:
    """Return which kt_experts modes a GPU supports. ``memlock``: limit of locked bytes, None if unlimited."""
    topic = f"experts on GPU {gpu.index}"
    if gpu.error:
        step = "run it again while nothing else uses that GPU"
        return Check(topic, "missing", f"{gpu.name} could not be tried: {gpu.error}", step)
    model = f"sm{gpu.capability.replace('.', '')}"
    link = f"{gpu.link / 1e9:.1f} GB/s from pinned memory"
    if not gpu.tensor_cores:
        message = f"only kt_experts: cpu: {model} has no bfloat16 tensor cores; {link}"
        return Check(topic, "missing", message, "stream and resident want sm80 or later")
    found = [f"kt_experts: stream and resident work: {model}, bfloat16 tensor cores"]
    steps: list[str] = []
    if gpu.grouped_gemm and (gpu.one_by_one or loops_over_experts(gpu.capability)):
        found.append(ONE_BY_ONE)
        steps.append(NO_KERNEL)
    elif gpu.grouped_gemm:
        found.append("grouped GEMM")
    else:
        found.append("no grouped GEMM in this torch, so products are made one by one, slower")
        steps.append("install a newer torch")
    if gpu.no_triton:
        found.append(f"Triton doesn't work, so what is between products is slower: {gpu.no_triton}")
        steps.append("Triton wants its package (pip install triton) and a C compiler (gcc)")
    else:
        found.append("Triton works")
    found.append(link)
    if gpu.not_in_place:
        found.append(
            f"a mapped file can't be read in place ({gpu.not_in_place}), so weights are copied through "
            "pinned memory by threads, slower"
        )
        steps.append(_unlock(memlock))
    else:
        found.append("mapped files are read in place")
    return Check(topic, "missing" if steps else "ok", "; ".join(found), "; ".join(steps))


def _memlock() -> int | None:
    """Return how many bytes a process may lock; None if there is no limit."""
    import resource  # POSIX

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _unlock(memlock: int | None) -> str:
    if memlock is None:
        return "locked memory has no limit here: it is the driver, or the container's runtime, that refuses"
    return (
        "let processes lock memory: `ulimit -l unlimited`, for a container `--ulimit memlock=-1` (the limit "
        f"is {size_text(memlock)})"
    )


# --- the engine --------------------------------------------------------------------------------

ENGINE_STEP = (
    f"{install_engine()}, on a GPU machine in an environment of its own, and name its interpreter with "
    "--engine-python"
)
# Every sglang-kt has them. `ktbridge serve` warns of or refuses settings that expose them.
HOLES = (
    f"has {SERVER_HOLES} (its image generator and encoder servers unpickle "
    f"what reaches their sockets), {REPLAY_HOLE} (its replay script does so with dumps) and CVE-2026-7304 "
    "(custom logit processors run code that a request brings)"
)
STEP = "start none of those, as `ktbridge serve` does, and keep its ports off untrusted networks"


def check_sglang_install(machine: Machine, python: str | None) -> list[Check]:
    """Look up SGLang-KT's packages in its interpreter ``python``, and the contract of its version."""
    try:
        installed = read_installed(python)
    except KtbridgeError as error:
        return [Check(DISTRIBUTION, "problem", error.sentence, error.next_step)]
    checks = [
        Check(name, "ok", version)
        if version is not None
        else _missing(name, "serve --engine sglang", ENGINE_STEP)
        for name, version in ((DISTRIBUTION, installed.engine), (KERNEL, installed.kernel))
    ]
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
    layouts = [name for name in ("split", "merged", "expert", "nonexpert") if getattr(contract, name)]
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
