"""Several replicas on one machine, and the router in front of them. Pure.

Each replica has its own GPUs, NUMA nodes and port; ``sglang-router`` distributes requests by
the prefixes they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktbridge.serve.sglang.facts import Facts
from ktbridge.serve.sglang.request import Request
from ktbridge.serve.sglang.resources import Threads

GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Launch:
    """One engine process: its command line, the variables set on top of ours, its port."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    port: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "argv": list(self.argv),
            "environment": dict(self.environment),
            "port": self.port,
        }


def replicate(
    launch: Launch, request: Request, facts: Facts, threads: Threads
) -> tuple[Launch, ...]:
    """One launch per replica: replica i listens on the port after the router's, i further on."""
    if request.replicas <= 1:
        return (launch,)
    nodes = [node.node for node in facts.machine.numa if node.usable] or [0]
    launches = []
    for replica in range(request.replicas):
        port = launch.port + 1 + replica
        first = replica * request.tp_size
        devices = ",".join(str(first + index) for index in range(request.tp_size))
        argv = _set(launch.argv, "--port", str(port))
        argv = _set(argv, "--host", "127.0.0.1")
        if len(nodes) > 1:
            start = replica * threads.pools
            own = [str(nodes[(start + index) % len(nodes)]) for index in range(threads.pools)]
            argv = _set(argv, "--kt-numa-nodes", *own)
        launches.append(Launch(argv, {**launch.environment, GPUS: devices}, port))
    return tuple(launches)


def router_argv(python: str, request: Request, facts: Facts) -> tuple[str, ...]:
    """The router's command line; empty for one replica."""
    if request.replicas <= 1:
        return ()
    ports = range(facts.port + 1, facts.port + 1 + request.replicas)
    return (
        python,
        "-m",
        "sglang_router.launch_router",
        "--worker-urls",
        *(f"http://127.0.0.1:{port}" for port in ports),
        "--policy",
        "cache_aware",
        "--host",
        request.host,
        "--port",
        str(facts.port),
    )


def _set(argv: tuple[str, ...], flag: str, *values: str) -> tuple[str, ...]:
    """``argv`` with ``flag`` set to these values (replaced or added)."""
    if flag not in argv:
        return (*argv, flag, *values)
    start = argv.index(flag)
    end = start + 1
    while end < len(argv) and not argv[end].startswith("--"):
        end += 1
    return (*argv[: start + 1], *values, *argv[end:])
