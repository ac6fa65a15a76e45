"""Resources of a launch: threads, NUMA nodes and weights. Pure, from facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktbridge.machine import Machine
from ktbridge.model import Checkpoint, ModelConfig

GIB = 2**30

# --kt-method by the format the checkpoint stores its experts in.
METHOD_OF = {"bf16": "BF16", "fp8": "FP8", "rawint4": "RAWINT4", "mxfp4": "MXFP4"}
# Bytes in RAM for each byte of bfloat16 experts; the native formats keep the checkpoint's bytes.
_PACKED = {"AMXINT8": 0.53, "AMXINT4": 0.28}
# Rows of the intermediate size that one thread pool's share must be a multiple of (kt-kernel 0.7.2).
_SHARE = {"AMXFP8": 128, "FP8": 128, "RAWINT4": 32, "MXFP4": 32}
_AT_MOST_TWO = ("RAWINT4", "MXFP4")


@dataclass(frozen=True)
class Weights:
    """Sizes from a checkpoint's headers: bytes of routed experts, bytes of everything else."""

    experts: int
    rest: int


@dataclass(frozen=True)
class Threads:
    """``cpuinfer`` threads over ``pools`` pools; ``nodes`` are named where they aren't 0 to pools-1."""

    cpuinfer: int
    pools: int
    nodes: tuple[int, ...]
    reason: str


def weigh(checkpoint: Checkpoint) -> Weights:
    """Sum up the headers. Routed experts are what lies below an ``experts`` module."""
    experts = rest = 0
    for name in checkpoint:
        size = checkpoint.entry(name).nbytes
        if ".experts." in name:
            experts += size
        else:
            rest += size
    return Weights(experts, rest)


def stored_format(config: Mapping[str, Any]) -> str | None:
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


def plan_threads(
    machine: Machine, method: str, model: ModelConfig, wanted: int | None, share: int = 1
) -> Threads:
    """Threads for the CPU experts: physical cores that this process may use, less one for the engine.

    One pool per NUMA node, if the method can split the intermediate size into so many parts.
    ``share``: replicas on this machine, each of which gets an equal part. ``wanted`` overrides the
    number of threads.
    """
    cores = machine.usable_cores
    each = max(1, cores // share)
    count = wanted if wanted is not None else max(1, each - 1)
    nodes = [node.node for node in machine.numa if node.usable] or [0]
    pools = min(len(nodes), count)
    if share > 1:
        pools = max(1, pools // share)
    unit = _SHARE.get(method, 1)
    while pools > 1 and (
        model.intermediate_size % (pools * unit) or (method in _AT_MOST_TWO and pools > 2)
    ):
        pools -= 1
    if wanted is None:
        count = max(pools, count - count % pools)
    chosen = tuple(nodes[:pools])
    reason = f"{count} thread{'s' * (count > 1)} in {pools} pool{'s' * (pools > 1)}: "
    reason += f"{cores} usable physical core{'s' * (cores > 1)}"
    reason += f" for {share} replicas" if share > 1 else ""
    if wanted is None and count < each:
        reason += ", one left to the engine's own threads"
    reason += f", {len(nodes)} memory node{'s' * (len(nodes) > 1)}"
    if pools < len(nodes) // share:
        reason += f" (an intermediate size of {model.intermediate_size} can't be cut further)"
    return Threads(count, pools, () if chosen == tuple(range(pools)) else chosen, reason)


def memory_needed(weights: Weights, method: str, stored: str | None) -> int:
    """Bytes of RAM for the CPU experts and the engine's processes. A lower estimate."""
    factor = _PACKED.get(method, 1.0) if stored == "bf16" else 1.0
    return int(weights.experts * factor) + 6 * GIB
