"""Linear layers for CPUs on which torch has no fast bfloat16 GEMM: weights packed once, in float16.

Without AVX-512 torch multiplies bfloat16 row by row, so that eight rows take as long as eight calls (seven
times one, measured), and a batch gains nothing outside the experts. FBGEMM's product of float32 rows with
float16 weights reads each weight once for up to six rows. Float16 has three more bits of mantissa than
bfloat16, so a weight from 2**-14 up to 65504 is the same number in both; smaller ones are off by 2**-25
at most. Sums are float32 in either, and the output is rounded to bfloat16 once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ktbridge.machine import read_machine

log = logging.getLogger(__name__)

SMALLEST = 1 << 16  # weights: below, converting the input costs what the product saves
LARGEST = 65504.0  # of float16
MOST_LOST = 2.0**-12  # of a matrix's norm; bfloat16's own rounding is 2**-9 of each weight
SHARE = 4  # packed copies take at most this fraction of free memory


def worth_packing() -> bool:
    """Whether this torch has no bfloat16 product of its own for this CPU, but has FBGEMM's."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_linears(model: nn.Module) -> int:
    """Give the bfloat16 linear layers of ``model`` a packed copy to compute with, in place; its bytes.

    For inference only. A layer keeps its weight, which a tied embedding may share. Nothing is packed
    where it doesn't fit into a quarter of the memory that is free.
    """
    if not worth_packing():
        return 0
    # A subclass, or a layer that was given its own forward, computes something else.
    found: list[Any] = [m for m in model.modules() if type(m) is nn.Linear]
    layers = [m for m in found if "forward" not in vars(m) and m.weight.dtype == torch.bfloat16]
    layers = [m for m in layers if m.weight.numel() >= SMALLEST and m.weight.device.type == "cpu"]
    size = sum(layer.weight.nbytes for layer in layers)
    free = read_machine().memory_available
    if free is not None and size > free // SHARE:
        log.warning(
            "linear layers are not packed for batches: %.1f GB more would not leave enough memory",
            size / 1e9,
        )
        return 0
    done = 0
    for layer in layers:
        if _exact_enough(layer.weight):
            layer.forward = _packed_forward(layer)
            done += layer.weight.nbytes
    return done


def _exact_enough(weight: torch.Tensor) -> bool:
    """Whether float16 holds ``weight`` [out, in]; rows at a time, so that copies stay small."""
    lost = whole = 0.0
    for rows in weight.detach().split(max(1, SMALLEST * 64 // weight.shape[1])):
        exact = rows.float()
        if not bool(exact.abs().max() <= LARGEST):  # NaN is none either
            return False
        lost += float((exact.half().float() - exact).square().sum())
        whole += float(exact.square().sum())
    return lost <= MOST_LOST**2 * whole


def _packed_forward(layer: nn.Linear) -> Callable[..., torch.Tensor]:
    bias = None if layer.bias is None else layer.bias.detach().float()
    weights = torch.ops.quantized.linear_prepack_fp16(layer.weight.detach().float(), bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], both bfloat16."""
        return multiply(hidden.float(), weights).to(hidden.dtype)

    return forward
