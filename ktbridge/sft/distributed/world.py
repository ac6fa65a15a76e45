"""Rank and world size of this process, as set by the launcher; without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """``rank`` of ``size`` processes; ``local_rank`` counts those of this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world() -> World:
    """This process among those that `accelerate launch` or torchrun started; alone without them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(os.environ.get(name, "").isdigit() for name in names):
        return World()
    return World(*(int(os.environ[name]) for name in names))


def is_main() -> bool:
    """Whether this process owns what the CPU kernels compute, logs, shows progress and writes."""
    return world().rank == 0
