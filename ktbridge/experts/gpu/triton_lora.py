"""``operations``' thin products, borders and LoRA gradients in Triton, for bfloat16 rows.

Tiles are fixed, so that bits depend on neither how many rows there are nor where a group begins. Nothing is
added atomically. A window of rows may have several experts: it takes them one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ktbridge.experts.gpu.placement import pad_rank
from ktbridge.experts.gpu.triton_kernels import gating_numbers, within
from ktbridge.experts.weights import SILU, Gating

if TYPE_CHECKING:
    from ktbridge.experts.gpu.operations import GradientTargets, LoraInputs, RowWeights

_WINDOW = 32  # rows that a program of the thin products has
_ROWS = 64  # that LoRA gradients take at a time
_COLUMNS = 128  # of a program of LoRA gradients
_BINS = 256  # ends of experts that a program looks at, or more: so parts of any size share what was compiled


@triton.jit
def _owner(ends, row, experts, bins: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the expert that has ``row``; ``experts`` behind the last's rows."""
    each = tl.arange(0, bins)
    last = tl.load(ends + each, mask=each < experts, other=2147483647)
    return tl.sum((last <= row).to(tl.int32), 0)


@triton.jit
def _thin_part(  # type: ignore[no-untyped-def]
    matrix, at, border, lead, columns, wide, turned: tl.constexpr
):
    """[columns, R] of an expert's matrix [R, columns]; ``turned`` where R lies next to each other."""
    if turned:
        place = matrix + at.to(tl.int64)[:, None] * lead + border[None, :]
    else:
        place = matrix + border.to(tl.int64)[None, :] * lead + at[:, None]
    return tl.load(place, mask=(at < columns)[:, None] & (border < wide)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "experts"])
def _gather_thin(  # type: ignore[no-untyped-def]
    source, tokens, below, ends, out, rows, experts, columns, wide, source_step, out_step,
    expert_step, lead, turned: tl.constexpr, unit: tl.constexpr,
    bins: tl.constexpr, thin: tl.constexpr, tall: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    columns, source_step, out_step = columns * unit, source_step * unit, out_step * unit
    expert_step, lead = expert_step * unit, lead * unit
    first = tl.program_id(0) * tall
    row = first + tl.arange(0, tall)
    border = tl.arange(0, thin)
    to = out + row.to(tl.int64)[:, None] * out_step
    start, stop = first, tl.minimum(first + tall, rows)
    expert = _owner(ends, first, experts, bins)
    while start < stop:
        end = stop
        if expert < experts:
            end = tl.minimum(tl.load(ends + expert), stop)
        here = (row >= start) & (row < end)
        token = tl.load(tokens + row, mask=here, other=0).to(tl.int64)
        filled = tl.where(expert < experts, columns, 0)
        matrix = below + expert.to(tl.int64) * expert_step
        total = tl.zeros((tall, thin), tl.float32)
        for begin in range(0, columns, block):
            at = begin + tl.arange(0, block)
            inside = here[:, None] & (at < columns)[None, :]
            read = here[:, None] & (at < filled)[None, :]
            x = tl.load(source + token[:, None] * source_step + at[None, :], mask=read, other=0.0)
            tl.store(to + at[None, :], x, mask=inside)
            a = _thin_part(matrix, at, border, lead, filled, wide, turned)
            total = tl.dot(x, a, total)
        mask = here[:, None] & (border < wide)[None, :]
        tl.store(to + columns + border[None, :], total.to(out.dtype.element_ty), mask=mask)
        start = end
        if expert < experts:  # the next that has rows
            expert = _owner(ends, start, experts, bins)


def _laid_out(matrices: torch.Tensor, *numbers: int) -> tuple[torch.Tensor, bool, int, tuple[int, ...]]:
    """Matrices [E, R, n] with one step of 1, whether R has it, and what divides the numbers and steps.

    Then the numbers, the step between experts and the other step in units of that: compilers learn from
    the unit that rows are aligned.
    """
    if 1 not in matrices.stride()[1:]:
        matrices = matrices.contiguous()
    expert_step, thin_step, column_step = matrices.stride()
    turned = column_step != 1
    unit, steps = _in_units(*numbers, expert_step, column_step if turned else thin_step)
    return matrices, turned, unit, steps


def _in_units(*numbers: int) -> tuple[int, tuple[int, ...]]:
    """8 if it divides all the numbers, else 1; and the numbers divided by it."""
    unit = 8 if all(number % 8 == 0 for number in numbers) else 1
    return unit, tuple(number // unit for number in numbers)


def _thin(wide: int) -> int:
    return max(16, triton.next_power_of_2(wide))


def _bins(experts: int) -> int:
    return max(_BINS, triton.next_power_of_2(experts))


def launch_gather_thin(
    source: torch.Tensor, tokens: torch.Tensor, below: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    experts, wide, columns = below.shape
    out = source.new_empty(len(tokens), columns + wide)
    if len(tokens):
        below, turned, unit, (columns, *steps) = _laid_out(below, columns, source.stride(0), columns + wide)
        _gather_thin[(triton.cdiv(len(tokens), _WINDOW),)](
            source, tokens, below, ends, out, len(tokens), experts, columns, wide, *steps, turned,
            unit, _bins(experts), _thin(wide), _WINDOW,
            128 if wide <= 64 else 64, num_warps=4 if wide <= 64 else 8, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "experts"])
def _activation_thin(  # type: ignore[no-untyped-def]
    gate_up, below, ends, out, rows, experts, inner, wide, row_step, out_step, expert_step,
    lead, limit, alpha, offset, turned: tl.constexpr, unit: tl.constexpr,
    bins: tl.constexpr, thin: tl.constexpr, tall: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    inner, row_step, out_step = inner * unit, row_step * unit, out_step * unit
    expert_step, lead = expert_step * unit, lead * unit
    first = tl.program_id(0) * tall
    row = first + tl.arange(0, tall)
    border = tl.arange(0, thin)
    source = gate_up + row.to(tl.int64)[:, None] * row_step
    to = out + row.to(tl.int64)[:, None] * out_step
    start, stop = first, tl.minimum(first + tall, rows)
    expert = _owner(ends, first, experts, bins)
    while start < stop:
        end = stop
        if expert < experts:
            end = tl.minimum(tl.load(ends + expert), stop)
        here = (row >= start) & (row < end)
        filled = tl.where(expert < experts, inner, 0)
        matrix = below + expert.to(tl.int64) * expert_step
        total = tl.zeros((tall, thin), tl.float32)
        for begin in range(0, inner, block):
            at = begin + tl.arange(0, block)
            inside = here[:, None] & (at < inner)[None, :]
            read = here[:, None] & (at < filled)[None, :]
            gate = tl.load(source + at[None, :], mask=read, other=0.0).to(tl.float32)
            up = tl.load(source + inner + at[None, :], mask=read, other=0.0).to(tl.float32)
            gate, up = within(gate, up, limit, offset)
            h = gate * tl.sigmoid(gate if limit is None else alpha * gate) * up
            h = h.to(out.dtype.element_ty)
            tl.store(to + at[None, :], h, mask=inside)
            a = _thin_part(matrix, at, border, lead, filled, wide, turned)
            total = tl.dot(h, a, total)
        mask = here[:, None] & (border < wide)[None, :]
        tl.store(to + inner + border[None, :], total.to(out.dtype.element_ty), mask=mask)
        start = end
        if expert < experts:
            expert = _owner(ends, start, experts, bins)


def launch_activation_thin(
    gate_up: torch.Tensor, below: torch.Tensor, ends: torch.Tensor, gating: Gating = SILU
) -> torch.Tensor:
    experts, wide, inner = below.shape
    out = gate_up.new_empty(len(gate_up), inner + wide)
    if len(gate_up):
        below, turned, unit, (inner, *steps) = _laid_out(below, inner, gate_up.stride(0), inner + wide)
        _activation_thin[(triton.cdiv(len(gate_up), _WINDOW),)](
            gate_up, below, ends, out, len(gate_up), experts, inner, wide, *steps,
            *gating_numbers(gating), turned, unit, _bins(experts), _thin(wide), _WINDOW,
            64, num_warps=4 if wide <= 64 else 8, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows", "count", "experts"])
def _activation_backward_thin(  # type: ignore[no-untyped-def]
    gate_up, d_h, weights, slots, more, above, below, ends, out, h_out, d_weights,
    rows, count, experts, wide, h_wide, inner, row_step, d_step, out_step, h_step,
    expert_step, lead, h_expert_step, h_lead, limit, alpha, offset,
    turned: tl.constexpr, unit: tl.constexpr, h_turned: tl.constexpr, h_unit: tl.constexpr,
    bins: tl.constexpr, thin: tl.constexpr, h_thin: tl.constexpr,
    tall: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    inner, row_step, d_step, out_step = (inner * unit, row_step * unit, d_step * unit, out_step * unit)
    h_step, expert_step, lead = h_step * unit, expert_step * unit, lead * unit
    h_expert_step, h_lead = h_expert_step * h_unit, h_lead * h_unit
    first = tl.program_id(0) * tall
    row = first + tl.arange(0, tall)
    border, h_border = tl.arange(0, thin), tl.arange(0, h_thin)
    far = row.to(tl.int64)[:, None]
    start, stop = first, tl.minimum(first + tall, rows)
    expert = _owner(ends, first, experts, bins)
    while start < stop:
        end = stop
        if expert < experts:
            end = tl.minimum(tl.load(ends + expert), stop)
        here = (row >= start) & (row < end)
        filled = tl.where(expert < experts, inner, 0)
        slot = tl.load(slots + row, mask=here, other=count).to(tl.int64)
        real = here & (slot < count)
        weight = tl.load(weights + slot, mask=real, other=0.0)
        matrix = above + expert.to(tl.int64) * expert_step
        total = tl.zeros((tall, thin), tl.float32)
        h_total = tl.zeros((tall, h_thin), tl.float32)
        products = tl.zeros((tall,), tl.float32)
        for begin in range(0, inner, block):
            at = begin + tl.arange(0, block)
            inside = here[:, None] & (at < inner)[None, :]
            read = here[:, None] & (at < filled)[None, :]
            source = gate_up + far * row_step + at[None, :]
            gate = tl.load(source, mask=read, other=0.0).to(tl.float32)
            up = tl.load(source + inner, mask=read, other=0.0).to(tl.float32)
            d = tl.load(d_h + far * d_step + at[None, :], mask=read, other=0.0).to(tl.float32)
            g, u = within(gate, up, limit, offset)
            steep = g if limit is None else alpha * g
            sigmoid = tl.sigmoid(steep)
            h = tl.where(read, g * sigmoid * u, 0.0).to(out.dtype.element_ty)
            products += tl.sum(h.to(tl.float32) * d, 1)
            d = d * weight[:, None]
            d_gate = d * u * sigmoid * (1 + steep * (1 - sigmoid))
            d_up = d * g * sigmoid
            if limit is not None:
                d_gate = tl.where(gate <= limit, d_gate, 0.0)
                d_up = tl.where(tl.abs(up) <= limit, d_up, 0.0)
            # Padding has a weight of 0, but may have no number.
            d_gate = tl.where(real[:, None], d_gate, 0.0).to(out.dtype.element_ty)
            d_up = tl.where(real[:, None], d_up, 0.0).to(out.dtype.element_ty)
            to = out + far * out_step + at[None, :]
            tl.store(to, d_gate, mask=inside)
            tl.store(to + inner, d_up, mask=inside)
            b = _thin_part(matrix, at, border, lead, filled, wide, turned)
            total = tl.dot(d_gate, b, total)
            right = matrix + inner
            if turned:
                right = matrix + inner.to(tl.int64) * lead
            b = _thin_part(right, at, border, lead, filled, wide, turned)
            total = tl.dot(d_up, b, total)
            if below is not None:
                tl.store(h_out + far * h_step + at[None, :], h, mask=inside)
                own = below + expert.to(tl.int64) * h_expert_step
                a = _thin_part(own, at, h_border, h_lead, filled, h_wide, h_turned)
                h_total = tl.dot(h, a, h_total)
        if more is not None:
            products += tl.load(more + row, mask=real, other=0.0)
        tl.store(d_weights + slot, products, mask=real)
        mask = here[:, None] & (border < wide)[None, :]
        to = out + far * out_step + 2 * inner + border[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mask)
        if below is not None:
            mask = here[:, None] & (h_border < h_wide)[None, :]
            to = h_out + far * h_step + inner + h_border[None, :]
            tl.store(to, h_total.to(out.dtype.element_ty), mask=mask)
        start = end
        if expert < experts:
            expert = _owner(ends, start, experts, bins)


def launch_activation_backward_thin(
    gate_up: torch.Tensor,
    d_h: torch.Tensor,
    weighing: RowWeights,
    above: torch.Tensor,
    ends: torch.Tensor,
    below: torch.Tensor | None = None,
    more: torch.Tensor | None = None,
    gating: Gating = SILU,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    experts, wide, twice = above.shape
    inner, rows = twice // 2, len(gate_up)
    h_wide = 0 if below is None else below.shape[1]
    out = gate_up.new_empty(rows, twice + wide)
    h = None if below is None else gate_up.new_empty(rows, inner + h_wide)
    if rows:
        above, turned, unit, steps = _laid_out(
            above, inner, gate_up.stride(0), d_h.stride(0), twice + wide, inner + h_wide
        )
        h_turned, h_unit = False, 1
        h_steps: tuple[int, ...] = (0, 0)
        if below is not None:
            below, h_turned, h_unit, h_steps = _laid_out(below)
        _activation_backward_thin[(triton.cdiv(rows, _WINDOW),)](
            gate_up, d_h, weighing.weights, weighing.slots, more, above, below, ends, out, h,
            weighing.gradients, rows, len(weighing.weights), experts, wide, h_wide, *steps, *h_steps,
            *gating_numbers(gating), turned, unit, h_turned, h_unit, _bins(experts),
            _thin(wide), _thin(h_wide), _WINDOW, 64, num_warps=4 if wide <= 64 else 8, num_stages=2,
        )  # fmt: skip
    return out, h


@triton.jit
def _border(  # type: ignore[no-untyped-def]
    target, given, place, at, rank, columns, row_step, scale, right: tl.constexpr
):
    """Elements ``at`` of an expert's A [rank, columns] or B [columns, rank] (``right``), 0 for none."""
    inside = at < rank * columns
    width = columns
    if right:
        width = rank
    value = tl.zeros(at.shape, target.dtype.element_ty)
    if given is not None:
        value = tl.load(given + place * rank * columns + at, mask=inside, other=0.0)
        value = value.to(target.dtype.element_ty)
        if right:
            value = (value.to(tl.float32) * scale).to(target.dtype.element_ty)
    tl.store(target + (at // width).to(tl.int64) * row_step + at % width, value, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _write_borders(  # type: ignore[no-untyped-def]
    gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, order, first, scale,
    hidden, inner, rank, half, expert_step, row_step, down_expert_step, down_row_step,
    block: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    which = tl.program_id(2)
    place = first + expert
    if order is not None:
        place = tl.load(order + place).to(tl.int64)
    above = gate_up + expert * expert_step + hidden
    below = gate_up + expert * expert_step + 2 * inner * row_step
    lower = down + expert * down_expert_step + hidden * down_row_step
    if which == 0:
        _border(below, gate_a, place, at, rank, hidden, row_step, scale, False)
    elif which == 1:
        _border(below + half * row_step, up_a, place, at, rank, hidden, row_step, scale, False)
    elif which == 2:
        _border(above, gate_b, place, at, rank, inner, row_step, scale, True)
    elif which == 3:
        to = above + inner * row_step + half
        _border(to, up_b, place, at, rank, inner, row_step, scale, True)
    elif which == 4:
        _border(lower, down_a, place, at, rank, inner, down_row_step, scale, False)
    else:
        to = down + expert * down_expert_step + inner
        _border(to, down_b, place, at, rank, hidden, down_row_step, scale, True)


_NAMES = tuple(f"{name}_lora_{side}" for name in ("gate", "up", "down") for side in "ab")


def launch_write_borders(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    lora: Mapping[str, torch.Tensor],
    rank: int,
    scale: float,
    order: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    half = pad_rank(rank)
    hidden, inner = gate_up.shape[2] - 2 * half, down.shape[2] - half
    given = [lora[name].contiguous() if name in lora else None for name in _NAMES]
    if len(down) and rank:
        _write_borders[(len(down), triton.cdiv(rank * max(hidden, inner), 1024), 6)](
            gate_up, down, *given, order, first, scale, hidden, inner, rank, half,
            gate_up.stride(0), gate_up.stride(1), down.stride(0), down.stride(1), 1024,
        )  # fmt: skip


@triton.jit
def _put(  # type: ignore[no-untyped-def]
    out, place, border, at, total, rank, columns, rank_step, column_step, add: tl.constexpr
):
    to = out + place * rank * columns + border.to(tl.int64)[:, None] * rank_step
    to += at.to(tl.int64)[None, :] * column_step
    mask = ((border >= 0) & (border < rank))[:, None] & (at < columns)[None, :]
    if add:
        total += tl.load(to, mask=mask, other=0.0)
    tl.store(to, total, mask=mask)


@triton.jit(do_not_specialize=["first", "count"])
def _gradient(  # type: ignore[no-untyped-def]
    thin, wide, tokens, weights, slots, ends, order, out, other, first, count, scale,
    rank, half, width, columns, thin_step, wide_step, rank_step, column_step, unit: tl.constexpr,
    side_by_side: tl.constexpr, add: tl.constexpr, borders: tl.constexpr, tall: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Sum over an expert's rows of thin [R, width] and wide [R, columns], for ``block`` columns.

    ``out`` has the first ``rank`` of the sums; ``other`` those from ``half`` on, or, ``side_by_side``, those
    of the thin from ``half`` on with the wide behind ``columns``.
    """
    half, columns, thin_step, wide_step = (half * 8, columns * unit, thin_step * unit, wide_step * unit)
    expert = tl.program_id(0)
    blocks = tl.cdiv(columns, block)
    part = tl.program_id(1) // blocks
    at = tl.program_id(1) % blocks * block + tl.arange(0, block)
    border = tl.arange(0, borders)
    place = (first + expert).to(tl.int64)
    if order is not None:
        place = tl.load(order + place).to(tl.int64)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    thin += part * half
    wide += part * columns
    total = tl.zeros((borders, block), tl.float32)
    for start in range(begin, end, tall):
        row = start + tl.arange(0, tall)
        inside = row < end
        far = row.to(tl.int64)
        left = tl.load(
            thin + far[:, None] * thin_step + border[None, :],
            mask=inside[:, None] & (border < width)[None, :],
            other=0.0,
        )
        if slots is not None:
            slot = tl.load(slots + row, mask=inside, other=count).to(tl.int64)
            weight = tl.load(weights + slot, mask=slot < count, other=0.0)
            left = (left.to(tl.float32) * weight[:, None]).to(thin.dtype.element_ty)
        if tokens is not None:
            far = tl.load(tokens + row, mask=inside, other=0).to(tl.int64)
        right = tl.load(
            wide + far[:, None] * wide_step + at[None, :],
            mask=inside[:, None] & (at < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total)
    total *= scale
    if side_by_side:
        if part == 0:
            if out is not None:
                _put(out, place, border, at, total, rank, columns, rank_step, column_step, add)
        elif other is not None:
            _put(other, place, border, at, total, rank, columns, rank_step, column_step, add)
    else:
        if out is not None:
            _put(out, place, border, at, total, rank, columns, rank_step, column_step, add)
        if other is not None:
            _put(other, place, border - half, at, total, rank, columns, rank_step, column_step, add)


def launch_lora_gradients(
    seen: LoraInputs,
    thin_x: torch.Tensor,
    h: torch.Tensor,
    d: torch.Tensor,
    d_gate_up: torch.Tensor,
    weighing: RowWeights,
    ends: torch.Tensor,
    into: GradientTargets,
) -> None:
    half = pad_rank(into.rank)
    hidden, inner = d.shape[1] - half, h.shape[1] - half
    weighed = weighing.weights, weighing.slots
    plain = None, None

    def launch(
        names: tuple[str | None, str | None],
        thin: torch.Tensor,
        wide: torch.Tensor,
        columns: int,
        weights: tuple[torch.Tensor | None, torch.Tensor | None],
        tokens: torch.Tensor | None = None,
    ) -> None:
        out, other = (None if name is None else into.tensors.get(name) for name in names)
        if (out is None and other is None) or not len(ends):
            return
        of_b = (names[0] or names[1] or "").endswith("_b")
        aside = of_b and names[1] is not None  # gate's and up's rows are columns here
        width = half if of_b or names[1] is None else 2 * half
        unit, steps = _in_units(columns, thin.stride(0), wide.stride(0))
        block = _COLUMNS if width <= 64 else _COLUMNS // 2
        _gradient[(len(ends), triton.cdiv(columns, block) * (2 if aside else 1))](
            thin, wide, tokens, *weights, ends, into.order, out, other, into.first,
            len(weighing.weights), into.scale if of_b else 1.0, into.rank, half // 8, width, *steps,
            *((1, into.rank) if of_b else (columns, 1)), unit, aside, into.add, _thin(width),
            _ROWS if width <= 64 else _ROWS // 2, block, num_warps=4 if width <= 64 else 8, num_stages=3,
        )  # fmt: skip

    launch(("down_lora_b", None), h[:, inner:], d, hidden, weighed)
    launch(("down_lora_a", None), d[:, hidden:], seen.down, inner, weighed)
    launch(("gate_lora_b", "up_lora_b"), thin_x, d_gate_up, inner, plain)
    thin = d_gate_up[:, 2 * inner :]
    if seen.gate is seen.up:
        launch(("gate_lora_a", "up_lora_a"), thin, seen.gate, hidden, plain, seen.tokens)
    else:
        launch(("gate_lora_a", None), thin, seen.gate, hidden, plain, seen.tokens)
        launch(("up_lora_a", None), thin[:, half:], seen.up, hidden, plain, seen.tokens)
