"""Products over sorted rows: each expert's rows with its own matrix.

torch's grouped GEMM where the device has it (sm80 and later, bfloat16, widths that are multiples of 8), else
one product per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

_WIDTH = 8  # elements: grouped GEMM wants strides of whole 16 bytes


def by_row(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """[R, in] rows and [E, out, in] matrices -> [R, out]: row r times its expert's matrix, transposed.

    ``ends`` [E] int32 on the device and ``bounds`` (E + 1 numbers from 0) say where each expert's rows are.
    """
    if _grouped(rows, matrices):
        return functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    out = rows.new_empty(len(rows), matrices.shape[1])
    for matrix, (start, end) in zip(matrices, pairwise(bounds), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix.T, out=out[start:end])
    return out


def over_rows(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """[R, m] and [R, n] -> [E, m, n]: the sum over each expert's rows of left ⊗ right; 0 for no rows.

    The number of rows of each expert is a multiple of 16.
    """
    if _grouped(left, right):
        return functional.grouped_mm(left.T, right, offs=ends)
    out = left.new_zeros(len(bounds) - 1, left.shape[1], right.shape[1])
    for sums, (start, end) in zip(out, pairwise(bounds), strict=True):
        if end > start:
            torch.mm(left[start:end].T, right[start:end], out=sums)
    return out


def _grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether grouped GEMM takes these operands."""
    if left.dtype != torch.bfloat16 or not hasattr(functional, "grouped_mm") or not len(left):
        return False
    if left.device.type == "cuda" and torch.cuda.get_device_capability(left.device) < (8, 0):
        return False
    return all(
        step % _WIDTH == 0
        for tensor in (left, right)
        for step in (*tensor.shape[1:], *(s for s in tensor.stride() if s != 1))
    )
