"""Choose where a run's routed experts are computed, and the number of tokens per pass.

``kt_experts: auto`` takes what is predicted to be fastest within the GPU-memory budget, from times measured
on the run's own weights; other values are obeyed or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.experts.gpu.choose import Room
from ktbridge.experts.gpu.measure import time_layer
from ktbridge.experts.gpu.operations import has_cores
from ktbridge.experts.gpu.place import Placed, give_to_gpu, sizes_of
from ktbridge.experts.gpu.share import (
    LayerTimes,
    Share,
    Sizes,
    cpu_seconds,
    gpu_seconds,
)
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.experts.wrapped_layers import expert_layers
from ktbridge.machine import read_machine
from ktbridge.sft import distributed
from ktbridge.sft.arguments import choose
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.memory import CUDA_CONTEXT, Setting
from ktbridge.sft.plan.modes import (
    OF_ALL,
    ON_GPU,
    cpu_tokens,
    obstacle,
    refuse_on_gpu,
    room,
    share_for,
)
from ktbridge.units import size_text


@dataclass(frozen=True)
class ExpertDevice:
    """What was chosen; as a context, its threads and registered pages are released at the end."""

    mode: str
    """cpu, stream or resident."""
    tokens: int | None
    """Tokens of a pass that there is room for; None where that isn't known."""
    why: str = ""
    """The choice and its reason, for the user; "" where there was none to make."""
    placed: Placed | None = None

    @property
    def note(self) -> Problem | None:
        return problem("KTC024", "kt_experts", self.why, next_step="") if self.why else None

    def __enter__(self) -> ExpertDevice:
        return self

    def __exit__(self, *_: object) -> None:
        if self.placed is not None:
            self.placed.copier.close()


def check_expert_device(config: TrainConfig) -> None:
    """Raise ``UsageError`` if ``kt_experts`` requests an unavailable GPU; needs no weights."""
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

    shares, why = _shares(setting, wanted, space, sizes)
    if not shares:
        return on_cpu(f", for the GPU's memory is too small: {why}")
    times = _timed(model, shares, device, top_k, wanted == "auto")
    mode, more = wanted, ""
    if wanted == "auto":
        seconds = _seconds(shares, times, sizes)
        mode = min(seconds, key=lambda each: seconds[each])
        if mode == "cpu":
            here = seconds.pop("cpu")
            return on_cpu(
                f": {here:.2f} s a pass predicted, {min(seconds.values()):.2f} s on the GPU"
            )
        others = ", ".join(f"{each} {took:.2f}" for each, took in seconds.items() if each != mode)
        more = f"; {seconds[mode]:.2f} s a pass predicted for the experts ({others})"
    return _given(model, mode, shares[mode], more, device=device, sizes=sizes)


def _timed(
    model: Any, shares: Mapping[str, Share], device: torch.device, top_k: int, auto: bool
) -> LayerTimes | None:
    """A layer's times, where they decide something: rank 0's, for ``auto``."""
    if not (auto and distributed.is_main()):
        return None
    layer = next(iter(expert_layers(model).values()))
    assert isinstance(layer, MoELoRAExperts)
    smallest = min(shares.values(), key=lambda share: share.slots * share.slot_bytes)
    return time_layer(
        layer,
        device,
        smallest.slot_bytes,
        top_k,
        max(share.tokens for share in shares.values()),
        slots=max(1, smallest.slots),
        cpu=auto,
    )


def _given(
    model: Any,
    mode: str,
    share: Share,
    more: str,
    *,
    device: torch.device,
    sizes: Sizes,
) -> ExpertDevice:
    """The experts given to ``device``; ``more``: the reason for it, in words."""
    placed = give_to_gpu(model, device, share)
    if len(share.resident) == sizes.layers:
        mode = "resident"
    return ExpertDevice(mode, share.tokens, _describe(share, sizes, placed, more), placed)


def _seconds(
    shares: Mapping[str, Share], times: LayerTimes | None, sizes: Sizes
) -> dict[str, float]:
    """Seconds of a pass's experts by mode, "cpu" too, as rank 0 has timed them."""
    found = dict.fromkeys((*shares, "cpu"), 0.0)
    if times is not None:
        for mode, share in shares.items():
            found[mode] = gpu_seconds(times, share, sizes)
        # Alone, with the CPU that would be rank 0's for the rows of all.
        found["cpu"] = distributed.world().size * cpu_seconds(times, sizes)
    return {mode: distributed.from_main(each) for mode, each in found.items()}


def _shares(
    setting: Setting, wanted: str, space: Room, sizes: Sizes
) -> tuple[dict[str, Share], str]:
    """The possible modes, and why there are none; raises ``UsageError`` for a requested mode that isn't."""
    if wanted in ON_GPU:
        return {wanted: share_for(setting, wanted, space, sizes)}, ""
    try:
        return {"stream": share_for(setting, "stream", space, sizes)}, ""
    except UsageError as error:
        return {}, error.sentence


def _obstacle(config: TrainConfig, device: torch.device) -> str:
    """Why the GPU can't compute the experts of this run, to follow "kt_experts: stream"; "" if it can."""
    if closed := obstacle(config, device.type == "cuda"):
        return closed
    if not has_cores(device):
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
    """The choice as one line of text."""
    kept = len(share.resident)
    if kept == sizes.layers:
        what = f"experts resident on the GPU, all {kept} layers"
    else:
        what = f"experts streamed to the GPU, {sizes.layers - kept} layers {placed.how}"
        if kept:
            what += f", {kept} layers resident"
    masters = f"LoRA masters on {'the GPU' if share.masters else 'the host'}"
    return (
        f"{what}; {size_text(share.gpu_bytes(sizes))} of GPU memory, "
        f"{masters if sizes.rank else 'no LoRA'}, {share.tokens:,} tokens a pass{more}"
    )
