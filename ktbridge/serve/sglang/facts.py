"""Everything a plan depends on, looked up once: engine, machine, GPUs, model, adapters, port."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktbridge.errors import Problem
from ktbridge.model import ModelConfig, open_checkpoint, read_model_config, resolve_model
from ktbridge.model.jsonfile import read_json_file
from ktbridge.serve.machine import Machine, read_machine
from ktbridge.serve.sglang.cache import KERNEL_CACHE, cache_root
from ktbridge.serve.sglang.installed import Installed, read_installed
from ktbridge.serve.sglang.request import Request
from ktbridge.serve.sglang.resources import Gpu, Weights, read_gpus, stored_format, weigh
from ktbridge.serve.sglang.sources import Source, read_sources

LOGGING = "SGLANG_LOGGING_CONFIG_PATH"


@dataclass(frozen=True)
class Facts:
    """What was found. ``port`` is the request's, or a free one where that was 0.

    ``port_fault`` says why it can't be had. ``stored`` is the format of the checkpoint's experts,
    None where config.json doesn't say. ``environment`` are variables that the engine would inherit
    and that matter here.
    """

    installed: Installed
    machine: Machine
    gpus: tuple[Gpu, ...]
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


def gather(request: Request) -> Facts:
    """Look everything up. Raises KtbridgeError for a model or an interpreter that can't be read."""
    model_path = Path(resolve_model(request.model)).absolute()
    sources, problems = read_sources(request)
    port, fault = check_port(request.host, request.port)
    return Facts(
        installed=read_installed(request.python),
        machine=read_machine(),
        gpus=read_gpus(),
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
            name: os.environ[name] for name in (LOGGING, KERNEL_CACHE) if name in os.environ
        },
    )


def check_port(host: str, port: int) -> tuple[int, str]:
    """The port (a free one for 0), and why it can't be had, "" when it can."""
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
