"""Modes of computing the experts: GPU memory of each and, if times were measured, its pace.

The same functions decide in ``ktbridge train`` (``ktbridge.sft.expert_device``), from the run's own weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ktbridge.errors import UsageError
from ktbridge.experts.gpu.choose import Room, choose_share
from ktbridge.experts.gpu.share import Share, Sizes
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.layer_bytes import host_bytes, saved_bytes
from ktbridge.sft.plan.memory import (
    CUDA_CONTEXT,
    GPU_SEGMENTS_SLACK,
    Setting,
    activation_bytes,
    kept_token_bytes,
    nonexpert_lora_elements,
)

ON_GPU = ("stream", "resident")
"""Values of kt_experts that ask for the GPU."""
_LARGE = 8192  # tokens
OF_ALL = 0.94
"""The part of a GPU's memory that is counted on where no budget is given."""


def room(setting: Setting, limit: int, taken: int | None = None) -> Room:
    """Of ``limit`` bytes for tensors; ``taken`` of them hold the model already, or as much as it will."""
    sides = setting.sides
    longest = setting.lengths.longest * sides
    # From large passes: in small ones a tile of the loss decides, which is no larger for more tokens.
    rows = max(1, _LARGE // longest)
    small, few, many = (
        [
            round((1 + GPU_SEGMENTS_SLACK) * each)
            for each in activation_bytes(replace(setting, rows=n))
        ]
        for n in (1, rows, 2 * rows)
    )
    token, passing = (
        max(1, math.ceil((b - a) / (rows * longest))) for a, b in zip(few, many, strict=True)
    )
    width = 2 if setting.config.pure_bf16 else 4
    lora = nonexpert_lora_elements(setting)
    if taken is None:
        taken = setting.shape.nonexpert_elements * setting.batch.width + width * lora
    constant = max(0, sum(small) - (token + passing) * longest)
    step = setting.step_rows * sides * setting.lengths.mean
    free = limit - taken - 3 * width * lora - constant
    return Room(free, token, passing, longest, math.ceil(step), kept_token_bytes(setting))


def share_for(setting: Setting, mode: str, space: Room, sizes: Sizes | None = None) -> Share:
    """What of the experts is where for ``mode``. Raises ``UsageError`` where it doesn't fit."""
    config = setting.config
    return choose_share(
        sizes or setting.expert_sizes,
        space,
        mode=mode,
        gpu_experts=config.kt_config.kt_num_gpu_experts,
        tokens=None if config.tokens_per_pass == "auto" else int(config.tokens_per_pass),
    )


def limit_of(setting: Setting, memory: int) -> int:
    """Bytes for tensors on a GPU of ``memory`` bytes, by the run's budget."""
    budget = setting.config.kt_config.kt_gpu_memory
    return min(budget or round(OF_ALL * memory), memory) - CUDA_CONTEXT


def everything_fits(share: Share, sizes: Sizes) -> bool:
    """Whether no weights are transferred any more: every layer is resident, or the ring holds all groups."""
    streamed = sizes.layers - len(share.resident)
    return share.slots >= streamed * share.groups


def cpu_tokens(setting: Setting, space: Room, memory: int | None) -> int:
    """Tokens of a pass whose experts the CPU computes: what those keep may take a third of ``memory``."""
    layers, tokens = setting.shape.sparse_layers, space.most
    while memory and tokens > space.longest:
        one = setting.expert_pass(tokens)
        kept = layers * (saved_bytes(one, setting.retain) + 8 * tokens * one.hidden)
        if kept + host_bytes(one, setting.retain, setting.threads) <= memory / 3:
            break
        tokens = max(space.longest, tokens // 2)
    return tokens


def obstacle(config: TrainConfig, cuda: bool) -> str:
    """Why a configuration keeps experts off the GPU, to follow "kt_experts: stream"; "" if nothing does.

    ``cuda``: whether there is a GPU to use.
    """
    if not cuda:
        return "needs a GPU, and there is none to use"
    if config.device_rules:
        return "doesn't go with kt_optimize_rule's devices"
    if config.kt_config.kt_backend == "kt-kernel":
        return "doesn't go with kt_backend: kt-kernel"
    return ""


def refuse_on_gpu(config: TrainConfig, why: str) -> None:
    """Raise ``UsageError`` if ``kt_experts`` requests the GPU, which is unavailable because of ``why``."""
    wanted = config.kt_config.kt_experts
    if why and wanted in ON_GPU:
        raise UsageError(f"kt_experts: {wanted} {why}.", "Set kt_experts: cpu, or auto.")


def with_tokens(setting: Setting, tokens: int) -> Setting:
    """The same run in passes of as many rows as ``tokens`` take, one at least."""
    return replace(setting, rows=max(1, tokens // (setting.lengths.longest * setting.sides)))


def possible(
    setting: Setting, memory: int, host: int | None
) -> Iterator[tuple[str, Setting | str]]:
    """cpu, stream and resident, each as its setting, or why it is unavailable.

    ``memory`` are the bytes of the GPU, ``host`` those of RAM.
    """
    space = room(setting, limit_of(setting, memory))
    wanted = setting.config.tokens_per_pass
    tokens = cpu_tokens(setting, space, host) if wanted == "auto" else int(wanted)
    yield "cpu", with_tokens(setting, tokens)
    for mode in ON_GPU:
        try:
            share = share_for(setting, mode, space)
        except UsageError as error:
            yield mode, error.sentence
            continue
        if mode != "resident" and everything_fits(share, setting.expert_sizes):
            yield mode, "everything fits: resident is faster"
            continue
        yield mode, replace(with_tokens(setting, share.tokens), share=share)
