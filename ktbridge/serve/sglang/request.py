"""A user's request for an SGLang-KT launch, before any check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ktbridge.machine import Described

LayoutWish = Literal["auto", "split", "merged"]


@dataclass(frozen=True)
class Request:
    """One launch as the command line gives it.

    ``adapters``, ``nonexpert_adapters`` and ``merged_adapters`` map an adapter's name to its
    directory: of any layout, non-expert, merged. ``engine_version`` plans for a version that need
    not be installed; ``python`` is the interpreter whose environment holds the engine, None for
    ours. ``tp_size`` counts GPUs over all ``nodes``; ``dist_init_addr`` is HOST:PORT of the first
    node. ``flags`` are the engine's own, as they stood after ``--``. ``allowed`` are codes of
    problems that the user takes upon themselves: errors among them become warnings, as does with
    ``allow_other_base`` that the adapter was trained on another base model. ``described`` is another
    machine to plan for.
    """

    model: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    expert_adapter: str | None = None
    nonexpert_adapters: Mapping[str, str] = field(default_factory=dict)
    merged_adapters: Mapping[str, str] = field(default_factory=dict)
    layout: LayoutWish = "auto"
    engine_version: str | None = None
    python: str | None = None
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    threads: int | None = None
    trust_remote_code: bool = False
    tp_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    replicas: int = 1
    flags: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()
    allow_other_base: bool = False
    described: Described = field(default_factory=Described)

    @property
    def gpus_needed(self) -> int:
        """GPUs on one machine, over its replicas."""
        return max(1, self.tp_size // self.nodes) * self.replicas
