"""GPUs as torch sees them, or as nvidia-smi lists them if torch isn't imported."""

from __future__ import annotations

from ktbridge.install import install_hint
from ktbridge.machine import read_gpus
from ktbridge.serve.doctor_packages import Check, Imports, version_of
from ktbridge.units import size_text

NOT_NEEDED = "not needed by --engine local and by training on a CPU"


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
