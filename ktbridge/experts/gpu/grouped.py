"""Products over sorted rows: each expert's rows with its own matrix.

torch's grouped GEMM where the device has it (sm80 and later, bfloat16, widths that are multiples of 8), else
one product per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

_BYTES = 16  # grouped GEMM wants addresses and strides that are multiples of it
_WIDTH = _BYTES // 2  # in elements
IN_TORCH = hasattr(functional, "grouped_mm")
"""Whether this torch has grouped GEMM."""


def by_row(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int]
) -> torch.Tensor:
    """[R, in] rows and [E, out, in] matrices -> [R, out]: row r times its expert's matrix, transposed.

    ``ends`` [E] int32 on the device and ``bounds`` (E + 1 numbers from 0) delimit each expert's rows.
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
        sums = functional.grouped_mm(left.T, right, offs=ends)
        if any(start == end for start, end in pairwise(bounds)):
            # Not every device's kernels write 0 there (pytorch issue 172439).
            without = ends.diff(prepend=ends.new_zeros(1)) == 0
            sums.masked_fill_(without[:, None, None], 0)
        return sums
    out = left.new_zeros(len(bounds) - 1, left.shape[1], right.shape[1])
    for sums, (start, end) in zip(out, pairwise(bounds), strict=True):
        if end > start:
            torch.mm(left[start:end].T, right[start:end], out=sums)
    return out


def has_cores(device: torch.device) -> bool:
    """Whether a CUDA ``device`` multiplies bfloat16 in tensor cores: sm80 and later do."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether grouped GEMM takes these operands."""
    if left.dtype != torch.bfloat16 or not IN_TORCH or not len(left):
        return False
    if left.device.type == "cuda" and not has_cores(left.device):
        return False
    if any(tensor.data_ptr() % _BYTES for tensor in (left, right)):
        return False
    return all(
        step % _WIDTH == 0
        for tensor in (left, right)
        for step in (*tensor.shape[1:], *(s for s in tensor.stride() if s != 1))
    )
