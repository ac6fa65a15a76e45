"""Assume what a placement is chosen by, where no GPU can be timed: the paces of docs/gpu-experts.md.

They order placements as they do on a fast server GPU. No pace is promised from them.
"""

from __future__ import annotations

from ktbridge.experts.gpu.placement import (
    MICRO_BATCH_SECONDS,
    STEP_SECONDS,
    Costs,
    Line,
)
from ktbridge.sft.plan.memory import Setting, nonexpert_lora_elements

ASSUMED = (
    "the placement is chosen by assumed costs (H100 or H200, 55 GB/s from host memory), for no GPU was timed "
    "here; train measures its own and may choose another, and the pace has no tokens/s of the GPU"
)
_LINK = 55e9  # bytes a second
_PRODUCTS = 400e12  # FLOP/s of grouped products with what surrounds them
_READ = 2e12  # bytes a second of the GPU's own memory
_UNPACK = 1e-12  # seconds for a byte of bfloat16 matrices
_LAUNCH = (0.0010, 0.0020)  # seconds of the host, a layer's experts forward and backward
_GROUP = 0.0014
_OUTSIDE = (0.0020, 0.0040)  # the same, a layer outside its experts
_UPDATE = (2e-11, 2e-10)  # seconds for a LoRA weight, on the GPU and on the host
_CPU = 5e11  # FLOP/s of the kernels


def assumed_costs(setting: Setting) -> Costs:
    """Costs of the run's shape, the CPU's left out: how it compares with a GPU can't be assumed."""
    shape, sizes, alone = setting.shape, setting.expert_sizes, setting.config.forwards_alone
    runs = 1 if setting.config.disable_gradient_checkpointing else 2
    product = 2 * sizes.hidden * sizes.inner / _PRODUCTS
    read = sizes.matrices(sizes.experts) / _READ
    linears = sum(out * inputs for each in shape.layers for out, inputs in each.linears.values())
    linears += round(setting.lengths.mean) * sizes.hidden * len(shape.layers)
    one = (
        2 * 2 * (linears + nonexpert_lora_elements(setting)) / _PRODUCTS
    )  # as much again for the rest
    head = 2 * 2 * (3 + alone) * shape.vocabulary * sizes.hidden / _PRODUCTS
    layers = len(shape.layers)
    return Costs(
        link=_LINK,
        experts=(Line(read, 3 * product), Line(2 * read, 5 * product)),
        again=Line(read / 2, 2 * product),
        unpack=_UNPACK,
        launch=_LAUNCH,
        launch_group=_GROUP,
        outside=(Line(0.0, one), Line(0.0, runs * one)),
        launch_outside=(layers * _OUTSIDE[0], layers * _OUTSIDE[1]),
        loss=Line(0.0, head),
        update=_UPDATE,
        add=_UPDATE[1],
        others=STEP_SECONDS,
        micro_batch=MICRO_BATCH_SECONDS,
        forwards=1 + alone,
    )


def assumed_cpu(setting: Setting) -> Line:
    """Seconds of one layer's experts on the CPU by tokens: all weights are read, forward and backward."""
    sizes = setting.expert_sizes
    products = 16 * sizes.top_k * sizes.hidden * sizes.inner
    return Line(2 * sizes.stored / 1e11, products / _CPU)
