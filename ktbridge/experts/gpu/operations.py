"""What a layer of experts is computed with on sorted rows: grouped products, and the operations between them.

Products are torch's grouped GEMM where the device has it (sm80 and later, bfloat16, widths that are multiples
of 8), else one product per expert. Gathering rows, the activation and summing a token's slots are one kernel
each on a CUDA device with Triton (``triton_kernels``); here they are the same in torch, in float32 with
results rounded once, and what the kernels are held against (columns that are left to fill are 0 here: torch's
products on an AMX CPU let NaNs behind a row's end through). Sums are over a token's slots in their order,
never by atomic adds: the same bits each time.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import torch
from torch.nn import functional

from ktbridge.experts.dropout import Mask
from ktbridge.experts.weights import SILU, Gating

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


def kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels for tensors that are where ``tensor`` is, or None."""
    return kernels_on(tensor.device)


def kernels_on(device: torch.device) -> ModuleType | None:
    """The Triton kernels for tensors on ``device``, or None."""
    if device.type != "cuda":
        return None
    found = tried(device)
    return None if isinstance(found, str) else found


@functools.cache
def tried(device: torch.device) -> ModuleType | str:
    """The Triton kernels, or why there are none on a CUDA ``device``: Triton wants a C compiler.

    Warns where it is there and doesn't work.
    """
    try:
        from ktbridge.experts.gpu import triton_kernels
    except ImportError as error:
        return str(error)
    try:
        source = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)
        triton_kernels.gather(source, torch.zeros(1, dtype=torch.int64, device=device), 0)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its compilers raise
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Triton doesn't work here, so experts are slower: {reason}", stacklevel=2)
        return reason
    return triton_kernels


def gather(source: torch.Tensor, tokens: torch.Tensor, wide: int) -> torch.Tensor:
    """``source`` [T, H] by row: [R, H + wide], whose last ``wide`` columns are not filled."""
    if fused := kernels(source):
        return fused.gather(source, tokens, wide)
    out = source.new_zeros(len(tokens), source.shape[1] + wide)
    out[:, : source.shape[1]] = source[tokens]
    return out


def add_bias(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> None:
    """Add to each row [R, n] the bias [E, n] of its expert, ``owners`` [R] int64, in place."""
    if fused := kernels(rows):
        fused.add_bias(rows, bias, owners)
        return
    rows.copy_(rows.float() + bias.float()[owners])


def bias_products(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """[R] float32: each row [R, n or more] times the bias [E, n] of its expert."""
    if fused := kernels(rows):
        return fused.bias_products(rows, bias, owners)
    return (rows[:, : bias.shape[1]].float() * bias.float()[owners]).sum(1)


def activation(gate_up: torch.Tensor, inner: int, wide: int, gating: Gating = SILU) -> torch.Tensor:
    """h of gate and up [R, 2I]: [R, I + wide], whose last ``wide`` columns are not filled."""
    if fused := kernels(gate_up):
        return fused.activation(gate_up, inner, wide, gating)
    out = gate_up.new_zeros(len(gate_up), inner + wide)
    gate, up = gate_up.float().split(inner, dim=1)
    out[:, :inner] = functional.silu(gate) * up if gating == SILU else gating(gate, up)
    return out


def activation_backward(
    gate_up: torch.Tensor,
    d_h: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor,
    inner: int,
    wide: int,
    gating: Gating = SILU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up [R, 2I + wide], the last columns not filled, and of the weights [R] float32.

    ``d_h`` [R, I] is the gradient of h [R, I or more] for a weight of 1, so the weights' gradient
    is <h, d_h>.
    """
    if fused := kernels(gate_up):
        return fused.activation_backward(gate_up, d_h, h, weights, inner, wide, gating)
    gate, up = gate_up.float().split(inner, dim=1)
    d = d_h.float()
    d_weights = (h[:, :inner].float() * d).sum(1)
    d = d * weights[:, None]
    free, free_up = gate <= gating.limit, up.abs() <= gating.limit
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit) + gating.offset
    sigmoid = (gating.alpha * gate).sigmoid()
    out = gate_up.new_zeros(len(gate_up), 2 * inner + wide)
    out[:, :inner] = d * up * sigmoid * (1 + gating.alpha * gate * (1 - sigmoid)) * free
    out[:, inner : 2 * inner] = d * gate * sigmoid * free_up
    return out, d_weights


def keep(source: torch.Tensor, tokens: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    """Rows [R, n] of ``source`` [T, n] with zeros where ``mask`` drops them; ``tokens`` None: as they are."""
    if fused := kernels(source):
        return fused.keep(source, tokens, mask)
    rows = source if tokens is None else source[tokens]
    return rows * mask.kept(source.shape[1])


def add_kept(total: torch.Tensor, parts: Sequence[torch.Tensor], masks: Sequence[Mask]) -> None:
    """Add each of ``parts`` [R, n], one or two, to ``total`` where its mask keeps it."""
    if fused := kernels(total):
        fused.add_kept(total, parts, masks)
        return
    whole = total.float()
    for part, mask in zip(parts, masks, strict=True):
        whole += part * mask.kept(total.shape[1])
    total.copy_(whole)


def combine(by_row: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Σ_k weights[t, k] · by_row[rows[t, k]] (weights None: 1): [T, H] in ``by_row``'s dtype."""
    if fused := kernels(by_row):
        return fused.combine(by_row, rows, weights)
    total = torch.zeros(len(rows), by_row.shape[1], device=by_row.device)
    for slot in range(rows.shape[1]):
        part = by_row[rows[:, slot]].float()
        total += part if weights is None else part * weights[:, slot, None]
    return total.to(by_row.dtype)
