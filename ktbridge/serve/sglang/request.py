"""A user's request for an SGLang-KT launch, before any check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ktbridge.machine import Described
from ktbridge.serve.request import ServeRequest

RequestedLayout = Literal["auto", "split", "merged"]


@dataclass(frozen=True)
class Request(ServeRequest):
    """One launch of SGLang-KT as the command line gives it.

    ``engine_version`` plans for a version that need not be installed; ``python`` is the interpreter
    whose environment holds the engine, None for ours. ``tp_size`` counts GPUs over all ``nodes``;
    ``dist_init_addr`` is HOST:PORT of the first node. ``flags`` are the engine's own, as they stood
    after ``--``. ``allowed`` are codes of problems that the user takes upon themselves: errors among
    them become warnings. ``described`` is another machine to plan for.
    """

    layout: RequestedLayout = "auto"
    engine_version: str | None = None
    python: str | None = None
    trust_remote_code: bool = False
    tp_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    replicas: int = 1
    flags: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()
    described: Described = field(default_factory=Described)

    @property
    def gpus_needed(self) -> int:
        """GPUs on one machine, over its replicas."""
        return max(1, self.tp_size // self.nodes) * self.replicas
