"""Facts that a plan depends on, collected once: engine, machine, GPUs, model, adapters, port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.adapter.opening import cache_root
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.files.sizes import size_text
from ktbridge.machine import Described, Gpu, Machine, read_gpus, read_machine
from ktbridge.model import Checkpoint, ModelConfig, open_checkpoint, read_model_config, resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.request import SglangRequest
from ktbridge.serve.sglang.adapters import AdapterSource, read_sources
from ktbridge.server_api.hosts import bind

LOGGING = "SGLANG_LOGGING_CONFIG_PATH"

ENGINE_CACHE = "SGLANG_KT_LORA_CACHE_DIR"
KERNEL_CACHE = "TVM_FFI_CACHE_DIR"

DISTRIBUTION, KERNEL, UPSTREAM = "sglang-kt", "kt-kernel", "sglang"
PARSER_FILE = "sglang/srt/server_args.py"

# Run by the engine's interpreter, in our working directory and environment: it sees what the engine
# will see. Metadata only, so it takes milliseconds where importing the engine takes half a minute.
_ASK = f"""
import importlib.metadata as metadata, json
found = {{}}
for name in ({DISTRIBUTION!r}, {KERNEL!r}, {UPSTREAM!r}):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
for name in ({DISTRIBUTION!r}, {UPSTREAM!r}):
    if name in found:
        found["parser"] = str(metadata.distribution(name).locate_file({PARSER_FILE!r}))
        break
print(json.dumps(found))
"""

_ARGUMENT = re.compile(r"add_argument\(\s*((?:(?:\"[^\"]*\"|'[^']*')\s*,\s*)+)")
_FLAG = re.compile(r"[\"'](--[A-Za-z0-9][\w-]*)[\"']")


@dataclass(frozen=True)
class Installed:
    """Packages that are installed for ``python``. ``parser`` are the flags its argument parser knows.

    Versions are None where a distribution is missing; ``upstream`` is SGLang without KTransformers,
    which has none of the flags. ``parser`` is None where its text can't be found.
    """

    python: str
    engine: str | None
    kernel: str | None
    upstream: str | None = None
    parser: frozenset[str] | None = None


def read_installed(python: str | None = None) -> Installed:
    """Ask ``python`` (None: the interpreter that runs us) what is installed.

    Raises KtbridgeError when there is no such interpreter or it doesn't run.
    """
    interpreter = python or sys.executable
    step = "name the interpreter of the engine's environment with --engine-python"
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise KtbridgeError(f"{interpreter} does not run: {error}", step) from error
    if found is None:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise KtbridgeError(f"{interpreter} does not run: {last_line}", step)
    return Installed(
        python=interpreter,
        engine=found.get(DISTRIBUTION),
        kernel=found.get(KERNEL),
        upstream=found.get(UPSTREAM),
        parser=_read_parser(found.get("parser")),
    )


def parser_flags(text: str) -> frozenset[str]:
    """Every ``--flag`` that the ``add_argument`` calls of a parser's source text define."""
    return frozenset(flag for names in _ARGUMENT.findall(text) for flag in _FLAG.findall(names + " "))


def _read_parser(path: str | None) -> frozenset[str] | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return parser_flags(text) or None


@dataclass(frozen=True)
class Weights:
    """Sizes from a checkpoint's headers: bytes of routed experts, bytes of everything else.

    ``head``: an output head is among the latter.
    """

    experts: int
    rest: int
    head: bool = True


def weigh(checkpoint: Checkpoint) -> Weights:
    """Sum up the headers. Routed experts are what lies below an ``experts`` module."""
    experts = rest = 0
    for name in checkpoint:
        size = checkpoint.entry(name).nbytes
        if ".experts." in name:
            experts += size
        else:
            rest += size
    return Weights(experts, rest, any(name.endswith("lm_head.weight") for name in checkpoint))


def stored_format(config: Mapping[str, object]) -> str | None:
    """Storage format of the experts by config.json: bf16, fp8, rawint4, mxfp4; None if unclear."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        text = config.get("text_config")
        quantization = text.get("quantization_config") if isinstance(text, dict) else None
    if not isinstance(quantization, dict):
        return "bf16"
    method = str(quantization.get("quant_method", "")).lower()
    if method == "fp8" and quantization.get("weight_block_size"):
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method == "compressed-tensors" and quantization.get("format") == "pack-quantized":
        return "rawint4"
    return None


@dataclass(frozen=True)
class LaunchFacts:
    """The facts. ``port`` is the request's, or a free one where that was 0.

    ``port_fault`` is the reason why it is unavailable. ``stored`` is the format of the checkpoint's experts,
    None if config.json doesn't specify it. ``environment`` are variables that the engine would inherit
    and that matter here. ``machine`` and ``gpus`` are another machine's where one was ``described``;
    ``gpus`` is None if unknown.
    """

    installed: Installed
    machine: Machine
    gpus: tuple[Gpu, ...] | None
    model: ModelConfig
    model_path: Path
    weights: Weights
    stored: str | None
    sources: tuple[AdapterSource, ...]
    source_problems: tuple[Problem, ...]
    port: int
    port_fault: KtbridgeError | None
    cache: Path
    environment: Mapping[str, str]
    described: Described = field(default_factory=Described)


def gather(request: SglangRequest) -> LaunchFacts:
    """Collect all facts. Raises KtbridgeError for a model or an interpreter that can't be read."""
    model_path = Path(resolve_model(request.model)).absolute()
    sources, problems = read_sources(request)
    port, fault = check_port(request.host, request.port)
    elsewhere = request.described.elsewhere
    if elsewhere:  # its interpreter, its port and its environment can't be looked at
        version = read_installed().engine
        installed, fault = Installed(request.python or "python3", version, version), None
    else:
        installed = read_installed(request.python)
    return LaunchFacts(
        installed=installed,
        machine=request.described.machine(read_machine()),
        gpus=_gpus(request),
        model=read_model_config(model_path),
        model_path=model_path,
        weights=weigh(open_checkpoint(model_path)),
        stored=stored_format(read_json_file(model_path / "config.json")),
        sources=sources,
        source_problems=tuple(problems),
        port=port,
        port_fault=fault,
        cache=cache_root(),
        environment={
            name: os.environ[name] for name in (LOGGING, KERNEL_CACHE) if name in os.environ and not elsewhere
        },
        described=request.described,
    )


def _gpus(request: SglangRequest) -> tuple[Gpu, ...] | None:
    """This machine's, or those that were described; as many as are needed where no number is given."""
    described = request.described
    if described.gpus is None and described.gpu_memory is None:
        return None if described.elsewhere else read_gpus()
    count = request.tp_size if described.gpus is None else described.gpus
    return tuple(Gpu(index, "GPU", described.gpu_memory or 0) for index in range(count))


def machine_text(facts: LaunchFacts) -> str:
    """Return which machine a plan is for, and what is assumed of a machine other than this one."""
    machine, described = facts.machine, facts.described
    has = [f"{machine.usable_cores} cores"]
    if described.elsewhere and described.cores is None:
        has[0] += " (this machine's: --cores was not given)"
    memory = machine.usable_memory
    has.append(f"{size_text(memory)} memory" if memory else "memory not known")
    if facts.gpus is None:
        has.append("GPUs not known (--gpus, --gpu-memory)")
    elif not facts.gpus:
        has.append("no GPU")
    else:
        size = min(gpu.memory for gpu in facts.gpus)
        each = f" of {size_text(size)}" if size else ""
        has.append(f"{len(facts.gpus)} GPU{'s' * (len(facts.gpus) > 1)}{each}")
    if not described.elsewhere:
        others = "" if described.given else "; --cores, --memory, --gpus and --gpu-memory plan for another"
        return f"planned for this machine: {', '.join(has)}{others}"
    return (
        f"planned for another machine: {', '.join(has)}; taken for granted there: a CPU with AMX, one memory "
        "node (two: -- --kt-threadpool-count 2), the engine's packages, a free port"
    )


def check_port(host: str, port: int) -> tuple[int, KtbridgeError | None]:
    """The port (a free one for 0), and why it is unavailable (None if it is available)."""
    try:
        with bind(host, port) as listener:
            return listener.getsockname()[1], None
    except KtbridgeError as error:
        return port, error
