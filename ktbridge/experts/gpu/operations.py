"""Operations of a layer of experts on sorted rows: grouped products, and what is computed between them.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType

import torch
from torch.nn import functional

from ktbridge.experts.gpu.placement import PAD, pad_rank
from ktbridge.experts.lora import Mask
from ktbridge.experts.weights import SILU, Gating

_BYTES = 16  # grouped GEMM wants addresses and strides that are multiples of it
_WIDTH = _BYTES // 2  # in elements
IN_TORCH = hasattr(functional, "grouped_mm")
"""True where this torch has grouped GEMM."""


def by_row(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, bounds: Sequence[int] | None = None
) -> torch.Tensor:
    """[R, in] rows and [E, out, in] matrices -> [R, out]: row r times its expert's matrix, transposed.

    ``ends`` [E] int32 on the device delimit each expert's rows; rows behind the last are not filled.
    ``bounds`` are the same on the host, after a 0: without them a device that has no grouped GEMM is
    waited for.
    """
    if _grouped(rows, matrices):
        return functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    out = rows.new_empty(len(rows), matrices.shape[1])
    bounds = _bounds(ends) if bounds is None else bounds
    for matrix, (start, end) in zip(matrices, pairwise(bounds), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix.T, out=out[start:end])
    return out


def _bounds(ends: torch.Tensor) -> list[int]:
    return [0, *ends.tolist()]


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a CUDA ``device`` multiplies bfloat16 in tensor cores: sm80 and later do."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether grouped GEMM takes these operands."""
    if left.dtype != torch.bfloat16 or not IN_TORCH or not len(left):
        return False
    if left.device.type == "cuda" and not has_tensor_cores(left.device):
        return False
    if any(tensor.data_ptr() % _BYTES for tensor in (left, right)):
        return False
    return all(
        step % _WIDTH == 0
        for tensor in (left, right)
        for step in (*tensor.shape[1:], *(s for s in tensor.stride() if s != 1))
    )


def triton_for(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels for tensors that are where ``tensor`` is, or None."""
    return triton_on(tensor.device)


def triton_on(device: torch.device) -> ModuleType | None:
    """The Triton kernels for tensors on ``device``, or None."""
    if device.type != "cuda":
        return None
    found = triton_or_reason(device)
    return None if isinstance(found, str) else found


@functools.cache
def triton_or_reason(device: torch.device) -> ModuleType | str:
    """The Triton kernels, or why there are none on a CUDA ``device``: Triton wants a C compiler.

    Warns where it is there and doesn't work.
    """
    try:
        from ktbridge.experts.gpu import triton_kernels
    except ImportError as error:
        return str(error)
    try:
        source = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)
        triton_kernels.launch_gather(source, torch.zeros(1, dtype=torch.int64, device=device), 0)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever its compilers raise
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"Triton doesn't work here, so experts are slower: {reason}", stacklevel=2)
        return reason
    return triton_kernels


def gather_rows(source: torch.Tensor, tokens: torch.Tensor, wide: int) -> torch.Tensor:
    """``source`` [T, H] by row: [R, H + wide], whose last ``wide`` columns are not filled."""
    if fused := triton_for(source):
        return fused.launch_gather(source, tokens, wide)
    out = source.new_zeros(len(tokens), source.shape[1] + wide)
    out[:, : source.shape[1]] = source[tokens]
    return out


def add_bias(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> None:
    """Add to each row [R, n] the bias [E, n] of its expert, ``owners`` [R] int64, in place."""
    if fused := triton_for(rows):
        fused.launch_add_bias(rows, bias, owners)
        return
    rows.copy_(rows.float() + bias.float()[owners])


def bias_products(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """[R] float32: each row [R, n or more] times the bias [E, n] of its expert."""
    if fused := triton_for(rows):
        return fused.launch_bias_products(rows, bias, owners)
    return (rows[:, : bias.shape[1]].float() * bias.float()[owners]).sum(1)


def activation(gate_up: torch.Tensor, inner: int, wide: int, gating: Gating = SILU) -> torch.Tensor:
    """h of gate and up [R, 2I]: [R, I + wide], whose last ``wide`` columns are not filled."""
    if fused := triton_for(gate_up):
        return fused.launch_activation(gate_up, inner, wide, gating)
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
    if fused := triton_for(gate_up):
        return fused.launch_activation_backward(gate_up, d_h, h, weights, inner, wide, gating)
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
    if fused := triton_for(source):
        return fused.launch_keep(source, tokens, mask)
    rows = source if tokens is None else source[tokens]
    return rows * mask.kept(source.shape[1])


def add_kept(total: torch.Tensor, parts: Sequence[torch.Tensor], masks: Sequence[Mask]) -> None:
    """Add each of ``parts`` [R, n], one or two, to ``total`` where its mask keeps it."""
    if fused := triton_for(total):
        fused.launch_add_kept(total, parts, masks)
        return
    whole = total.float()
    for part, mask in zip(parts, masks, strict=True):
        whole += part * mask.kept(total.shape[1])
    total.copy_(whole)


def combine(by_row: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Σ_k weights[t, k] · by_row[rows[t, k]] (weights None: 1): [T, H] in ``by_row``'s dtype."""
    if fused := triton_for(by_row):
        return fused.launch_combine(by_row, rows, weights)
    total = torch.zeros(len(rows), by_row.shape[1], device=by_row.device)
    for slot in range(rows.shape[1]):
        part = by_row[rows[:, slot]].float()
        total += part if weights is None else part * weights[:, slot, None]
    return total.to(by_row.dtype)


def rows_for(slots: int, experts: int) -> int:
    """Return the most rows that ``slots`` of ``experts`` need, each expert's padded to ``PAD``."""
    return (slots + (PAD - 1) * min(slots, experts)) // PAD * PAD


@dataclass(frozen=True)
class RoutedRows:
    """Slots sorted by expert, in a number of rows that doesn't depend on the router: ``rows_for``."""

    tokens: torch.Tensor
    """[R] int64: the token of each row; 0 for padding, and behind the last expert's rows."""
    slots: torch.Tensor
    """[R] int64: its place in the flat [T * K]; T * K for padding, and behind the last expert's rows."""
    rows: torch.Tensor
    """[T, K] int64: the row of each of a token's slots; 0 for an id that is no expert's."""
    ends: torch.Tensor
    """[E] int32: where each expert's rows end, in the order of computing."""
    outside: torch.Tensor
    """[1] int32: how many ids are no expert's."""


def route(ids: torch.Tensor, place: torch.Tensor | None, experts: int) -> RoutedRows:
    """The rows of ``ids`` [T, K], by slot within an expert; nothing waits for the device.

    ``place`` [E] int64 is each expert's place in the order of computing, None: its own number.
    """
    if triton_for(ids) is not None:
        from ktbridge.experts.gpu import triton_kernels

        rows = rows_for(ids.numel(), experts)
        return RoutedRows(*triton_kernels.launch_route(ids, place, experts, rows, PAD))
    slots = ids.numel()
    flat = ids.reshape(-1)
    inside = (flat >= 0) & (flat < experts)
    at = flat.long().clamp(0, experts - 1)
    at = torch.where(inside, at if place is None else place[at], experts)
    order = at.sort(stable=True).indices
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, at, torch.ones_like(at))
    padded_counts = (counts[:-1] + PAD - 1) // PAD * PAD
    ends = padded_counts.cumsum(0)
    starts = torch.cat((ends - padded_counts, ends.new_zeros(1)))
    before = counts.cumsum(0) - counts
    row = (starts - before)[at[order]] + torch.arange(slots, device=ids.device)
    by_row = torch.full((rows_for(slots, experts),), slots, device=ids.device)
    rows_of = torch.zeros(slots, dtype=torch.int64, device=ids.device)
    kept = inside[order]
    by_row[row[kept]] = order[kept]
    rows_of[order[kept]] = row[kept]
    tokens = torch.where(by_row < slots, by_row // max(ids.shape[1], 1), 0)
    return RoutedRows(tokens, by_row, rows_of.view(ids.shape), ends.int(), counts[-1:].int())


def gather_thin(
    source: torch.Tensor, tokens: torch.Tensor, below: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """``source`` [T, H] by row, and each row times its expert's ``below`` [E, R, H] behind: [R, H + R].

    ``below`` is any view, so ``right.transpose(1, 2)`` for d s B. Rows behind the last expert's are 0.
    """
    if fused := _lora_kernels(source):
        return fused.launch_gather_thin(source, tokens, below, ends)
    columns = source.shape[1]
    out = source.new_zeros(len(tokens), columns + below.shape[1])
    filled = int(ends[-1])
    out[:filled, :columns] = source[tokens[:filled]]
    _fill_thin(out, columns, below, ends)
    return out


def _fill_thin(out: torch.Tensor, columns: int, below: torch.Tensor, ends: torch.Tensor) -> None:
    """Put each row's thin product of its first ``columns`` into those behind them."""
    filled = int(ends[-1])
    out[:filled, columns:] = by_row(out[:filled, :columns], below, ends)


def activation_thin(
    gate_up: torch.Tensor, below: torch.Tensor, ends: torch.Tensor, gating: Gating = SILU
) -> torch.Tensor:
    """h of gate and up [R, 2I], and each row times its expert's ``below`` [E, Q, I] behind: [R, I + Q].

    Rows behind the last expert's are 0.
    """
    if fused := _lora_kernels(gate_up):
        return fused.launch_activation_thin(gate_up, below, ends, gating)
    inner, filled = gate_up.shape[1] // 2, int(ends[-1])
    out = gate_up.new_zeros(len(gate_up), inner + below.shape[1])
    out[:filled] = activation(gate_up[:filled], inner, below.shape[1], gating)
    _fill_thin(out, inner, below, ends)
    return out


@dataclass(frozen=True)
class RowWeights:
    """Weights of rows in their tokens' outputs, and the target of their gradients."""

    weights: torch.Tensor
    """[T * K] float32, contiguous."""
    slots: torch.Tensor
    """[R] int64: each row's place in it; T * K for padding, whose weight is 0."""
    gradients: torch.Tensor
    """[T * K] float32, contiguous: written at the slots of the rows."""

    def by_row(self) -> torch.Tensor:
        """[R] float32."""
        return torch.cat((self.weights, self.weights.new_zeros(1)))[self.slots]


def activation_backward_thin(
    gate_up: torch.Tensor,
    d_h: torch.Tensor,
    weighing: RowWeights,
    above: torch.Tensor,
    ends: torch.Tensor,
    below: torch.Tensor | None = None,
    more: torch.Tensor | None = None,
    gating: Gating = SILU,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of gate and up with each row's thin product behind: [R, 2I + P]; and h, where wanted.

    ``d_h`` [R, I] is the gradient of h for a weight of 1: <h, d_h>, and ``more`` [R] float32 (a bias's
    part), are the weights' gradients. ``above`` [E, P, 2I] is any view. With ``below`` [E, Q, I] the second
    result is ``activation_thin``'s. Rows behind the last expert's are 0.
    """
    if fused := _lora_kernels(gate_up):
        return fused.launch_activation_backward_thin(gate_up, d_h, weighing, above, ends, below, more, gating)
    inner, filled = gate_up.shape[1] // 2, int(ends[-1])
    h = activation(gate_up, inner, 0, gating)
    d, d_weights = activation_backward(
        gate_up[:filled], d_h[:filled], h[:filled], weighing.by_row()[:filled], inner, above.shape[1], gating
    )
    out = d.new_zeros(len(gate_up), d.shape[1])
    out[:filled] = d
    _fill_thin(out, 2 * inner, above, ends)
    if more is not None:
        d_weights = d_weights + more[:filled]
    slots = weighing.slots[:filled]
    real = slots < len(weighing.gradients)
    weighing.gradients[slots[real]] = d_weights[real]
    return out, None if below is None else activation_thin(gate_up, below, ends, gating)


def write_borders(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    lora: Mapping[str, torch.Tensor],
    rank: int,
    scale: float,
    order: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Fill the borders of a group's matrices (``layer_math``) with LoRA tensors [E, ...] by name.

    Those at the experts' places: the group's expert e is ``order[first + e]`` of them, or ``first + e``.
    A and B are rounded to bfloat16 before B is scaled, as the adapter is saved; absent ones are 0.
    """
    if fused := _lora_kernels(gate_up):
        fused.launch_write_borders(gate_up, down, lora, rank, scale, order, first)
        return
    half, count = pad_rank(rank), len(down)
    hidden, inner = gate_up.shape[2] - 2 * half, down.shape[2] - half
    some = slice(first, first + count)

    def put(target: torch.Tensor, name: str, scaled: bool) -> None:
        if name not in lora:
            target.zero_()
            return
        given = (lora[name][some] if order is None else lora[name][order[some]]).to(target.dtype)
        target.copy_(given * scale if scaled else given)

    for index, name in enumerate(("gate", "up")):
        first_column, row = index * half, index * inner
        thin = slice(first_column, first_column + rank)
        put(gate_up[:, 2 * inner :][:, thin, :hidden], f"{name}_lora_a", False)
        put(gate_up[:, row : row + inner, hidden:][:, :, thin], f"{name}_lora_b", True)
    put(down[:, hidden : hidden + rank, :inner], "down_lora_a", False)
    put(down[:, :hidden, inner : inner + rank], "down_lora_b", True)


@dataclass(frozen=True)
class LoraInputs:
    """Inputs of the LoRA's A matrices, bfloat16; with dropout each has its own."""

    gate: torch.Tensor
    """[R, H or more] by row, or [T, H] with ``tokens``."""
    up: torch.Tensor
    """The same tensor as ``gate``, but for dropout."""
    down: torch.Tensor
    """[R, I or more] by row."""
    tokens: torch.Tensor | None = None
    """[R] int64: where gate and up find each row; None: they are by row."""


@dataclass(frozen=True)
class GradientTargets:
    """Targets of a group's LoRA gradients."""

    tensors: Mapping[str, torch.Tensor]
    """By name, contiguous float32 [E, ...] of all the layer's experts; absent ones are not wanted."""
    rank: int
    scale: float
    """α / r."""
    add: bool
    """Add to what is there; else write, 0 for experts without rows."""
    order: torch.Tensor | None = None
    """The places of experts in the tensors, in the order of computing; None: their own order."""
    first: int = 0
    """The place in that order of the group's first expert."""


def lora_gradients(
    seen: LoraInputs,
    thin_x: torch.Tensor,
    h: torch.Tensor,
    d: torch.Tensor,
    d_gate_up: torch.Tensor,
    weighing: RowWeights,
    ends: torch.Tensor,
    into: GradientTargets,
) -> None:
    """The gradients of a group's LoRA, summed over each expert's rows in float32, in the rows' order.

    ``thin_x`` [R, 2Q] is z of x, ``h`` [R, I + Q] has its own behind it, as ``d`` [R, H + Q] and
    ``d_gate_up`` [R, 2I + 2Q] have their d s B.
    """
    if fused := _lora_kernels(d):
        fused.launch_lora_gradients(seen, thin_x, h, d, d_gate_up, weighing, ends, into)
        return
    half, rank = pad_rank(into.rank), into.rank
    hidden, inner = d.shape[1] - half, h.shape[1] - half
    column = weighing.by_row()[:, None]
    x, x_up = (
        (each if seen.tokens is None else each[seen.tokens])[:, :hidden] for each in (seen.gate, seen.up)
    )
    thin_d = (d[:, hidden:] * column).to(d.dtype)
    thin_h = (h[:, inner:] * column).to(h.dtype)
    pairs = {
        "down_lora_a": (thin_d, seen.down[:, :inner], 1.0),
        "down_lora_b": (d[:, :hidden], thin_h, into.scale),
    }
    for index, (name, had) in enumerate((("gate", x), ("up", x_up))):
        thin = slice(index * half, (index + 1) * half)
        pairs[f"{name}_lora_a"] = (d_gate_up[:, 2 * inner :][:, thin], had, 1.0)
        of_rows = d_gate_up[:, index * inner : (index + 1) * inner]
        pairs[f"{name}_lora_b"] = (of_rows, thin_x[:, thin], into.scale)
    some = slice(into.first, into.first + len(ends))
    places = range(some.start, some.stop) if into.order is None else into.order[some].tolist()
    bounds = _bounds(ends)
    for name, (left, right, scale) in pairs.items():
        if name not in into.tensors:
            continue
        width = (slice(rank), slice(None)) if name.endswith("_a") else (slice(None), slice(rank))
        for place, (start, end) in zip(places, pairwise(bounds), strict=True):
            found = (left[start:end].float().T @ right[start:end].float())[width] * scale
            target = into.tensors[name][place]
            target.copy_(target + found if into.add else found)


def _lora_kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The Triton kernels of LoRA for tensors that are where ``tensor`` is, or None."""
    if triton_for(tensor) is None:
        return None
    from ktbridge.experts.gpu import triton_lora

    return triton_lora
