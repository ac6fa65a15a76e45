"""A good machine, and the facts of a launch of SGLang-KT on it, written down instead of collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktbridge.machine import Gpu, Machine, NumaNode
from ktbridge.model import read_model_config
from ktbridge.serve.sglang.facts import Installed, LaunchFacts, Weights

GIB = 2**30
AMX = Machine(
    cpu="A CPU", isa=("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    physical_cores=64, logical_cpus=128, affinity=128, cpu_quota=None,
    memory=512 * GIB, memory_available=500 * GIB, memory_limit=None,
    numa=(NumaNode(0, "0-31,64-95", 256 * GIB, 64), NumaNode(1, "32-63,96-127", 256 * GIB, 64)),
)  # fmt: skip
GPUS = tuple(Gpu(index, "A GPU", 80 * GIB, "9.0") for index in range(8))


def facts_for(model: Path, version: str = "0.7.2", /, **changes: Any) -> LaunchFacts:
    """Facts of a launch with ``model``, of which config.json alone is read, and sglang-kt ``version``."""
    written: dict[str, Any] = {
        "installed": Installed("python", version, version), "machine": AMX, "gpus": GPUS,
        "model": read_model_config(model), "model_path": model, "weights": Weights(GIB, GIB),
        "stored": "bf16", "sources": (), "source_problems": (), "port": 8000, "port_fault": None,
        "cache": Path("/cache"), "environment": {},
    }  # fmt: skip
    return LaunchFacts(**written | changes)
