"""Checks of the packages that ktbridge works with: installed, recent enough, importable.

Each package is imported in a subprocess: a broken one may crash the process, and importing an engine
allocates GPU memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ktbridge.adapter.engines import install_engine
from ktbridge.install import install_hint

State = Literal["ok", "missing", "problem"]
IMPORT_SECONDS = 300

# distribution -> module, what doesn't work without it, and the extra of ours that installs it
PACKAGES = {
    "torch": ("torch", "train, serve and verify", "all"),
    "transformers": ("transformers", "train, serve and verify", "all"),
    "accelerate": ("accelerate", "train and serve --engine local", "all"),
    "peft": ("peft", "train and serve", "all"),
    "trl": ("trl", "train", "train"),
    "datasets": ("datasets", "train", "train"),
    "fastapi": ("fastapi", "serve --engine local", "serve"),
    "uvicorn": ("uvicorn", "serve --engine local", "serve"),
    "prometheus-client": ("prometheus_client", "serve --engine local", "serve"),
    "openai": ("openai", "eval", "eval"),
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


@dataclass
class Imports:
    """Results of the imports. ``errors``: module -> error; modules that import are left out.

    ``cuda`` is what torch, if imported, reports of CUDA: {"cuda": version or None, "gpus": [[name,
    bytes]]}, or {"error": message}.
    """

    errors: dict[str, str] = field(default_factory=dict)
    cuda: dict[str, Any] | None = None


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
            found.cuda = report
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


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    if least is not None and _numbers(version) < _numbers(least):
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
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*>=\s*([\w.]+)", line) for line in wanted)
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version as numbers: (2, 13, 0) for 2.13.0+cpu."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
