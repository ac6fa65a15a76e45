"""Checks of the packages and GPUs that ktbridge works with: installed, recent enough, and seen to work.

Each package is imported in a subprocess, and GPUs are tried in another: a broken one may crash the process,
and importing an engine allocates GPU memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from ktbridge.adapter.engines import install_engine
from ktbridge.experts.gpu.probe import MARK, NO_KERNEL, ONE_BY_ONE, GpuFacts, loops
from ktbridge.files.sizes import size_text
from ktbridge.install import install_hint, linear_attention_gaps, release_of, version_of
from ktbridge.machine import read_gpus

State = Literal["ok", "missing", "problem"]
IMPORT_SECONDS = 300

# distribution -> module, what doesn't work without it, and the extra of ours that installs it
PACKAGES = {
    "torch": ("torch", "train, serve and verify", "serve"),
    "transformers": ("transformers", "train, serve and verify", "serve"),
    "accelerate": ("accelerate", "train and serve --engine local", "serve"),
    "peft": ("peft", "train and serve", "serve"),
    "trl": ("trl", "train", "train"),
    "datasets": ("datasets", "train", "train"),
    "fastapi": ("fastapi", "serve --engine local", "serve"),
    "uvicorn": ("uvicorn", "serve --engine local", "serve"),
    "openai": ("openai", "eval, verify and chat", "eval"),
}
ENGINE_PACKAGES = {"sglang-kt": "sglang", "kt-kernel": "kt_kernel"}
ENGINE_STEP = (
    f"{install_engine()}, on a GPU machine in an environment of its own, and name its interpreter with "
    "--engine-python"
)

_IMPORT = """
import importlib, json, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
        failure = None
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    print("\\nktbridge:" + json.dumps([module, failure]), flush=True)
torch = sys.modules.get("torch")
if torch is not None and "torch" in sys.argv:
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        each = [torch.cuda.get_device_properties(i) for i in range(count)]
        report = {"cuda": torch.version.cuda, "gpus": [[gpu.name, gpu.total_memory] for gpu in each]}
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    print("\\nktbridge:" + json.dumps(report), flush=True)
"""


@dataclass(frozen=True)
class Check:
    """One line of the report. ``problem`` means broken; ``missing`` means not installed."""

    topic: str
    state: State
    found: str
    remedy: str = ""


class CudaReport(TypedDict, total=False):
    """What torch reports: its version of CUDA and each GPU's name and bytes, or an error alone."""

    cuda: str | None
    gpus: list[tuple[str, int]]
    error: str


@dataclass
class Imports:
    """Results of the imports. ``errors``: module -> error; modules that import are left out.

    ``cuda`` is there if torch was imported.
    """

    errors: dict[str, str] = field(default_factory=dict)
    cuda: CudaReport | None = None


def try_imports(python: str, modules: Iterable[str]) -> Imports:
    """Import each of ``modules`` in ``python``.

    A module that ends the process is reported, and so are those that were therefore not tried.
    """
    left = list(modules)
    found = Imports()
    errors = found.errors
    if not left:
        return found
    try:
        done = subprocess.run(
            [python, "-c", _IMPORT, *left],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
            check=False,
        )
        output, end = done.stdout, f"the import ended Python with code {done.returncode}"
        end += "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        end = f"the import took more than {IMPORT_SECONDS} seconds"
    except OSError as error:
        return Imports(dict.fromkeys(left, f"{python} does not run: {error}"))
    for line in output.splitlines():
        if not line.startswith("ktbridge:"):
            continue  # what a package prints when it is imported
        report = json.loads(line.removeprefix("ktbridge:"))
        if isinstance(report, dict):
            found.cuda = CudaReport(**report)
        else:
            module, failure = report
            left.remove(module)
            if failure is not None:
                errors[module] = failure
    for i, module in enumerate(left):
        errors[module] = end if i == 0 else f"not tried: {left[0]} ended the process"
    return found


def check_packages(imports: bool = True) -> tuple[list[Check], Imports]:
    """The packages of this environment; each is imported unless ``imports`` is False."""
    versions = {name: version_of(name) for name in PACKAGES}
    there = [PACKAGES[name][0] for name, version in versions.items() if version is not None]
    found = try_imports(sys.executable, there if imports else ())
    least = _least_versions()
    checks = [
        _check(name, version, module, found.errors, purpose, install_hint(extra), least.get(name))
        for (name, version), (module, purpose, extra) in zip(
            versions.items(), PACKAGES.values(), strict=True
        )
    ]
    return checks, found


def check_engine_packages(
    python: str, versions: dict[str, str | None], imports: bool = True
) -> list[Check]:
    """The engine's packages, in its interpreter ``python``. ``versions``: distribution -> version or None."""
    there = [ENGINE_PACKAGES[name] for name, version in versions.items() if version is not None]
    errors = try_imports(python, there if imports else ()).errors
    return [
        _check(name, version, ENGINE_PACKAGES[name], errors, "serve --engine sglang", ENGINE_STEP)
        for name, version in versions.items()
    ]


def _check(
    name: str,
    version: str | None,
    module: str,
    errors: dict[str, str],
    purpose: str,
    remedy: str,
    least: str | None = None,
) -> Check:
    if version is None:
        return Check(name, "missing", f"not installed; needed for {purpose}", remedy)
    if module in errors:
        message = f"{version} does not import: {errors[module]}"
        return Check(name, "problem", message, f"pip install --force-reinstall {name}=={version}")
    if least is not None and release_of(version) < release_of(least):
        return Check(
            name,
            "problem",
            f"{version} is too old; ktbridge needs {least} to {purpose}",
            f"pip install '{name}>={least}'",
        )
    return Check(name, "ok", version)


def _least_versions() -> dict[str, str]:
    """The minimum version of each package in our own metadata."""
    try:
        wanted = importlib.metadata.requires("ktbridge") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    # Metadata puts bounds in an order of its own: "openai<4,>=2.0; extra == 'eval'".
    found = (re.match(r"([\w.-]+)[^;]*?>=\s*([\w.]+)", line) for line in wanted)
    return {match[1]: match[2] for match in found if match}


NOT_NEEDED = "not needed by --engine local and by training on a CPU"
_SECONDS = 120
_PROBE = [sys.executable, "-m", "ktbridge.experts.gpu.probe"]


def check_gpu(imported: Imports) -> Check:
    """``imported``: results of the import checks; torch isn't imported in this process."""
    listed = [(gpu.name, gpu.memory) for gpu in read_gpus()]
    if version_of("torch") is None:
        return Check("GPU", "missing", "torch is not installed", install_hint("serve"))
    if "torch" in imported.errors:
        message = f"torch does not load: {imported.errors['torch']}"
        return Check("GPU", "problem", message, "reinstall torch")
    if imported.cuda is None:  # --quick, or a later package ended the process
        if not listed:
            return Check("GPU", "missing", "nvidia-smi lists none", NOT_NEEDED)
        return Check("GPU", "ok", f"{_named(listed)} (nvidia-smi; torch was not asked)")
    if "error" in imported.cuda:
        message = f"torch can't read its GPUs: {imported.cuda['error']}"
        return Check("GPU", "problem", message, "reinstall torch, or the driver")
    built, seen = imported.cuda["cuda"], imported.cuda["gpus"]
    if seen:
        return Check("GPU", "ok", _named(seen))
    if listed:
        why = "torch is a CPU build" if built is None else f"torch's CUDA {built} has none"
        step = "install a torch build for this driver's CUDA version: pytorch.org lists them"
        return Check("GPU", "problem", f"nvidia-smi lists {_named(listed)}, but {why}", step)
    found = "torch is a CPU build" if built is None else f"none for torch's CUDA {built}"
    return Check("GPU", "missing", found, NOT_NEEDED)


def check_linear_attention() -> list[Check]:
    """Return how models with linear attention would be computed here; each gap is a check."""
    gaps = linear_attention_gaps([gpu.capability for gpu in read_gpus()])
    topic = "linear attention"
    if not gaps:
        return [Check(topic, "ok", "flash-linear-attention and causal-conv1d are installed")]
    models = "(Qwen3-Next, Qwen3.5, Kimi Linear)"
    return [
        Check(topic, "problem" if gap.wrong else "missing", f"{gap.found} {models}", gap.remedy)
        for gap in gaps
    ]


def _named(gpus: list[tuple[str, int]]) -> str:
    return "; ".join(f"{name} {size_text(memory)}" for name, memory in gpus)


def try_gpus(imported: Imports) -> tuple[tuple[GpuFacts, ...], list[Check]]:
    """Facts of each GPU that torch sees, measured in a subprocess, and the checks based on them.

    Empty if ``imported`` shows that torch sees no GPU or wasn't imported.
    """
    if imported.cuda is None or not imported.cuda.get("gpus"):
        return (), []
    try:
        done = subprocess.run(
            _PROBE, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return (), [_failed(f"took more than {_SECONDS} seconds")]
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    facts = tuple(GpuFacts(**json.loads(line.removeprefix(MARK))) for line in lines)
    import resource  # POSIX

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if limit == resource.RLIM_INFINITY else limit
    checks = [expert_check(gpu, memlock) for gpu in facts]
    if done.returncode:
        reason = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        checks.append(_failed(f"ended with code {done.returncode}{reason}"))
    return facts, checks


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
    if gpu.grouped_gemm and (gpu.one_by_one or loops(gpu.capability)):
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


def _unlock(memlock: int | None) -> str:
    if memlock is None:
        return "locked memory has no limit here: it is the driver, or the container's runtime, that refuses"
    return (
        "let processes lock memory: `ulimit -l unlimited`, for a container `--ulimit memlock=-1` (the limit "
        f"is {size_text(memlock)})"
    )


def _failed(how: str) -> Check:
    step = f"{' '.join(_PROBE)} shows its output"
    return Check("experts on GPUs", "problem", f"trying the GPUs {how}", step)
