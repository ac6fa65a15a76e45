"""Where a run's routed experts are computed, and how many tokens go through the model at once.

``kt_experts: auto`` takes what is predicted to be fastest within the GPU-memory budget, from times measured
on the run's own weights; other values are done or refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.measure import LayerTimes, time_layer
from ktbridge.experts.gpu.place import Placed, give_to_gpu, sizes_of, take_back
from ktbridge.experts.gpu.share import Share, Sizes, choose_share
from ktbridge.experts.inject import expert_layers
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.sft import distributed
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.devices import choose
from ktbridge.sft.plan.memory import (
    CUDA_CONTEXT,
    Setting,
    activation_bytes,
    nonexpert_lora_elements,
)
from ktbridge.units import size_text

_SLACK = 1.1  # what the allocator holds beyond what is asked for
_OF_ALL = 0.94  # of the GPU's memory, where no budget is given
_ON_GPU = ("stream", "resident")


@dataclass(frozen=True)
class ExpertDevice:
    """What was chosen. ``mode``: cpu, stream or resident."""

    mode: str
    tokens: int | None
    """Tokens a pass; None: rows as the configuration spells them."""
    why: str
    """The choice and its reason, for the user."""
    placed: Placed | None = None


def place_experts(setting: Setting, model: Any) -> ExpertDevice:
    """Give the experts of a wrapped, loaded model to the CPU kernels or to the GPU; before the optimizer.

    ``setting`` is the run as the plan knows it, with the lengths of its rows. Raises ``UsageError`` where ``kt_experts`` asks for what can't be had here.
    """
    config = setting.config
    device, wanted = choose(config), config.kt_config.kt_experts
    if obstacle := _obstacle(config, device):
        if wanted in _ON_GPU:
            raise UsageError(f"kt_experts: {wanted} {obstacle}.", "Set kt_experts: cpu, or auto.")
        return ExpertDevice("cpu", None, "")
    top_k = setting.shape.config.experts_per_token
    sizes = sizes_of(model, top_k)
    free, token_bytes = _room(setting, device)
    longest = setting.batch.tokens // setting.batch.rows * setting.sides
    step = _step_tokens(setting)

    def on_cpu(why: str) -> ExpertDevice:
        return ExpertDevice("cpu", min(step, max(longest, free // token_bytes)), why)

    if wanted == "cpu":
        return on_cpu("experts on the CPU, as configured")
    try:
        share = choose_share(
            sizes,
            free,
            token_bytes,
            longest,
            step,
            mode=wanted,
            gpu_experts=config.kt_config.kt_num_gpu_experts,
            tokens=None if config.tokens_per_pass == "auto" else int(config.tokens_per_pass),
        )
    except UsageError as error:
        if wanted in _ON_GPU:
            raise
        return on_cpu(f"experts on the CPU: {error.sentence}")
    placed = give_to_gpu(model, device, share)
    if wanted in _ON_GPU:
        return ExpertDevice(wanted, share.tokens, _describe(share, sizes, placed, ""), placed)
    layer = next(iter(expert_layers(model).values()))
    assert isinstance(layer, MoELoRAExperts)
    there, here = _predict(time_layer(layer, placed.experts, top_k, share.tokens), share, sizes)
    if here < there:
        take_back(model, placed)
        return on_cpu(
            f"experts on the CPU: {here:.2f} s a pass predicted, {there:.2f} s on the GPU"
        )
    mode = "resident" if len(share.resident) == sizes.layers else "stream"
    more = f"; {there:.2f} s a pass predicted, {here:.2f} s on the CPU"
    return ExpertDevice(mode, share.tokens, _describe(share, sizes, placed, more), placed)


def _obstacle(config: TrainConfig, device: torch.device) -> str:
    """Why the GPU can't compute the experts of this run, to follow "kt_experts: stream"; "" if it can."""
    if device.type != "cuda":
        return "needs a GPU, and there is none to use"
    if distributed.world().size > 1:
        return "is for one process so far"
    if config.device_rules:
        return "doesn't go with kt_optimize_rule's devices"
    if config.kt_config.kt_backend == "kt-kernel":
        return "doesn't go with kt_backend: kt-kernel"
    if torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"needs bfloat16 tensor cores (sm80 or later; this GPU is sm{major}{minor})"
    return ""


def _step_tokens(setting: Setting) -> int:
    config = setting.config
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    rows = min(rows, setting.lengths.sequences)
    return math.ceil(rows * setting.sides * setting.lengths.mean)


def _room(setting: Setting, device: torch.device) -> tuple[int, int]:
    """GPU memory for experts and activations, and what a token of a pass takes of it outside the experts."""
    config = setting.config
    free, whole = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    budget = config.kt_config.kt_gpu_memory
    if budget is None:
        limit = round(_OF_ALL * (free + held))
    else:
        limit = min(budget - CUDA_CONTEXT, free + held)
        torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, limit / whole)), device)
    one = activation_bytes(setting)
    two = activation_bytes(replace(setting, rows=2 * setting.batch.rows // setting.sides))
    token = math.ceil(_SLACK * (two - one) / setting.batch.tokens)
    constant = max(0, one - token * setting.batch.tokens)
    width = 2 if config.pure_bf16 else 4
    states = 3 * width * nonexpert_lora_elements(setting)
    return limit - torch.cuda.memory_allocated(device) - states - constant, max(1, token)


def _predict(times: LayerTimes, share: Share, sizes: Sizes) -> tuple[float, float]:
    """Seconds of a pass over all layers' experts: on the GPU, and on the CPU."""
    streamed = (sizes.layers - len(share.resident)) * sizes.groups
    crossing = 0.0
    if streamed:
        crossing = 2 * max(0, streamed - share.slots) * share.slot_bytes / times.link
    return max(crossing, sizes.layers * times.gpu), sizes.layers * times.cpu


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
