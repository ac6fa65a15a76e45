"""GPUs as torch or nvidia-smi lists them, and, tried in a subprocess, what routed experts need of them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

from ktbridge.experts.gpu.probe import MARK, GpuFacts
from ktbridge.install import install_hint
from ktbridge.machine import read_gpus
from ktbridge.serve.doctor_packages import Check, Imports, version_of
from ktbridge.units import size_text

NOT_NEEDED = "not needed by --engine local and by training on a CPU"
_SECONDS = 120
_PROBE = [sys.executable, "-m", "ktbridge.experts.gpu.probe"]


def check_gpu(imported: Imports) -> Check:
    """``imported``: results of the import checks; torch isn't imported in this process."""
    listed = [(gpu.name, gpu.memory) for gpu in read_gpus()]
    if version_of("torch") is None:
        return Check("GPU", "missing", "torch is not installed", install_hint("all"))
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


def _named(gpus: list[tuple[str, int]]) -> str:
    return "; ".join(f"{name} {size_text(memory)}" for name, memory in gpus)


def try_gpus(imported: Imports) -> tuple[tuple[GpuFacts, ...], list[Check]]:
    """Facts of each GPU that torch sees, measured in a subprocess, and the checks based on them.

    Empty if ``imported`` shows that torch sees no GPU or wasn't imported.
    """
    if not (imported.cuda or {}).get("gpus"):
        return (), []
    try:
        done = subprocess.run(
            _PROBE, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return (), [_failed(f"took more than {_SECONDS} seconds")]
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    facts = tuple(GpuFacts(**json.loads(line.removeprefix(MARK))) for line in lines)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = None if limit == resource.RLIM_INFINITY else limit
    checks = [expert_check(gpu, memlock) for gpu in facts]
    if done.returncode:
        reason = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        checks.append(_failed(f"ended with code {done.returncode}{reason}"))
    return facts, checks


def expert_check(gpu: GpuFacts, memlock: int | None) -> Check:
    """Which kt_experts modes a GPU supports. ``memlock``: limit of locked bytes, None if unlimited."""
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
    if gpu.grouped_gemm:
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
