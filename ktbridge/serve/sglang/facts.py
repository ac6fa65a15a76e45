"""Facts that a plan depends on, collected once: engine, machine, GPUs, model, adapters, port."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.errors import Problem
from ktbridge.machine import Described, Gpu, Machine, read_gpus, read_machine
from ktbridge.model import ModelConfig, open_checkpoint, read_model_config, resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.sglang.cache import KERNEL_CACHE, cache_root
from ktbridge.serve.sglang.installed import Installed, read_installed
from ktbridge.serve.sglang.request import Request
from ktbridge.serve.sglang.resources import Weights, stored_format, weigh
from ktbridge.serve.sglang.sources import Source, read_sources
from ktbridge.units import size_text

LOGGING = "SGLANG_LOGGING_CONFIG_PATH"


@dataclass(frozen=True)
class Facts:
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
    sources: tuple[Source, ...]
    source_problems: tuple[Problem, ...]
    port: int
    port_fault: str
    cache: Path
    environment: Mapping[str, str]
    described: Described = field(default_factory=Described)


def gather(request: Request) -> Facts:
    """Collect all facts. Raises KtbridgeError for a model or an interpreter that can't be read."""
    model_path = Path(resolve_model(request.model)).absolute()
    sources, problems = read_sources(request)
    port, fault = check_port(request.host, request.port)
    elsewhere = request.described.elsewhere
    if elsewhere:  # its interpreter, its port and its environment can't be looked at
        version = read_installed().engine
        installed, fault = Installed(request.python or "python3", version, version), ""
    else:
        installed = read_installed(request.python)
    return Facts(
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
            name: os.environ[name]
            for name in (LOGGING, KERNEL_CACHE)
            if name in os.environ and not elsewhere
        },
        described=request.described,
    )


def _gpus(request: Request) -> tuple[Gpu, ...] | None:
    """This machine's, or those that were described; as many as are needed where no number is given."""
    described = request.described
    if described.gpus is None and described.gpu_memory is None:
        return None if described.elsewhere else read_gpus()
    count = request.gpus_needed if described.gpus is None else described.gpus
    return tuple(Gpu(index, "GPU", described.gpu_memory or 0) for index in range(count))


def machine_text(facts: Facts) -> str:
    """Which machine a plan is for, and what is assumed of a machine other than this one."""
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
        others = (
            ""
            if described.given
            else "; --cores, --memory, --gpus and --gpu-memory plan for another"
        )
        return f"planned for this machine: {', '.join(has)}{others}"
    return (
        f"planned for another machine: {', '.join(has)}; taken for granted there: a CPU with AMX, one memory "
        "node (two: -- --kt-threadpool-count 2), the engine's packages, a free port"
    )


def check_port(host: str, port: int) -> tuple[int, str]:
    """The port (a free one for 0), and why it is unavailable ("" if it is available)."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        return port, f"the host {host!r} has no address here"
    with socket.socket(family, kind, proto) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return port, "is in use"
            return port, f"can't be listened on: {error.strerror or error}"
        return listener.getsockname()[1], ""
