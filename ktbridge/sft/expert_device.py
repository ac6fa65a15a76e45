"""Where a run's routed experts are computed, and how many tokens go through the model at once.

``kt_experts: auto`` takes what is predicted to be fastest within the GPU-memory budget, from times measured
on the run's own weights; other values are done or refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ktbridge.errors import Problem, UsageError
from ktbridge.experts.gpu.measure import time_layer
from ktbridge.experts.gpu.place import Placed, give_to_gpu, sizes_of, take_back
from ktbridge.experts.gpu.share import Share, Sizes, cpu_seconds, gpu_seconds
from ktbridge.experts.inject import expert_layers
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.machine import read_machine
from ktbridge.sft import distributed
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.devices import choose
from ktbridge.sft.plan.memory import CUDA_CONTEXT, Setting
from ktbridge.sft.plan.modes import (
    OF_ALL,
    ON_GPU,
    Room,
    cpu_tokens,
    obstacle,
    refuse_on_gpu,
    room,
    share_for,
)
from ktbridge.units import size_text


@dataclass(frozen=True)
class ExpertDevice:
    """What was chosen; as a context, its threads and registered pages are let go of at the end."""

    mode: str
    """cpu, stream or resident."""
    tokens: int | None
    """Tokens of a pass that there is room for; None where that isn't known."""
    why: str = ""
    """The choice and its reason, for the user; "" where there was none to make."""
    placed: Placed | None = None

    @property
    def note(self) -> Problem | None:
        return Problem("KTC024", "info", "kt_experts", self.why) if self.why else None

    def __enter__(self) -> ExpertDevice:
        return self

    def __exit__(self, *_: object) -> None:
        if self.placed is not None:
            self.placed.copier.close()


def check_expert_device(config: TrainConfig) -> None:
    """Raise ``UsageError`` where ``kt_experts`` asks for a GPU that can't be had; needs no weights."""
    refuse_on_gpu(config, _obstacle(config, choose(config)))


def place_experts(setting: Setting, model: Any) -> ExpertDevice:
    """Give the experts of a wrapped, loaded model to the CPU kernels or to the GPU; before the optimizer.

    ``setting`` is the run as the plan knows it, with the lengths of its rows; ``check_expert_device`` had
    nothing against it. All ranks call it, and decide the same: by the smallest GPU memory of theirs, and by
    rank 0's times. ``distributed.prepare`` comes afterwards. Raises ``UsageError`` where what ``kt_experts``
    asks for doesn't fit.
    """
    config = setting.config
    device, wanted = choose(config), config.kt_config.kt_experts
    if distributed.agree(bool(_obstacle(config, device))):
        return ExpertDevice("cpu", None)
    top_k = setting.shape.config.experts_per_token
    sizes = sizes_of(model, top_k)
    space = _space(setting, device)
    # The least that a rank has: then all of them share alike, masters on the same side.
    space = replace(space, free=-distributed.agree(-space.free))
    ranks = distributed.world().size

    def on_cpu(why: str) -> ExpertDevice:
        # Rank 0's kernels keep what the passes of all ranks need for backward.
        memory = read_machine().usable_memory
        tokens = cpu_tokens(setting, space, memory and memory // ranks)
        return ExpertDevice("cpu", tokens, f"experts on the CPU{why}; {tokens:,} tokens a pass")

    try:
        share = share_for(setting, wanted, space, sizes)
    except UsageError as error:
        if wanted in ON_GPU:
            raise
        return on_cpu(f", for the GPU's memory is too small: {error.sentence}")
    placed = give_to_gpu(model, device, share)
    if wanted in ON_GPU:
        return ExpertDevice(wanted, share.tokens, _describe(share, sizes, placed, ""), placed)
    there = here = 0.0
    if distributed.is_main():  # alone, with the CPU that would be its own
        layer = next(iter(expert_layers(model).values()))
        assert isinstance(layer, MoELoRAExperts)
        times = time_layer(layer, placed.experts, top_k, share.tokens)
        there, here = gpu_seconds(times, share, sizes), ranks * cpu_seconds(times, sizes)
    there, here = distributed.from_main(there), distributed.from_main(here)
    if here < there:
        take_back(model, placed)
        return on_cpu(f": {here:.2f} s a pass predicted, {there:.2f} s on the GPU")
    mode = "resident" if len(share.resident) == sizes.layers else "stream"
    more = f"; {there:.2f} s a pass predicted, {here:.2f} s on the CPU"
    return ExpertDevice(mode, share.tokens, _describe(share, sizes, placed, more), placed)


def _obstacle(config: TrainConfig, device: torch.device) -> str:
    """Why the GPU can't compute the experts of this run, to follow "kt_experts: stream"; "" if it can."""
    if closed := obstacle(config, device.type == "cuda"):
        return closed
    if torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"needs bfloat16 tensor cores (sm80 or later; this GPU is sm{major}{minor})"
    return ""


def _space(setting: Setting, device: torch.device) -> Room:
    """GPU memory for experts and activations; a budget is held from here on."""
    free, whole = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    budget = setting.config.kt_config.kt_gpu_memory
    limit = round(OF_ALL * (free + held))
    if budget is not None:
        limit = min(budget - CUDA_CONTEXT, free + held)
        torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, limit / whole)), device)
    return room(setting, limit, torch.cuda.memory_allocated(device))


def _describe(share: Share, sizes: Sizes, placed: Placed, more: str) -> str:
    """What was chosen, in a line."""
    kept = len(share.resident)
    if kept == sizes.layers:
        what = f"experts resident on the GPU, all {kept} layers"
    else:
        what = f"experts streamed to the GPU, {sizes.layers - kept} layers {placed.how}"
        if kept:
            what += f", {kept} layers resident"
    masters = "the GPU" if share.masters else "the host"
    return (
        f"{what}; {size_text(share.gpu_bytes(sizes))} of GPU memory, LoRA masters on {masters}, "
        f"{share.tokens:,} tokens a pass{more}"
    )
