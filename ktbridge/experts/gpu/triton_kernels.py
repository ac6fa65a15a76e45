"""``operations``' kernels in Triton: one launch each, memory read and written once.

Those of rows, of stored weights (``layout.dequantize``) and of routing, which is a stable counting sort in
three launches. Nothing is added atomically. ``triton_lora`` has those of LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ktbridge.experts.lora import Mask
from ktbridge.experts.weights import SILU, ExpertWeights, Gating


@triton.jit
def _gather(source, tokens, out, columns, out_step, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.load(tokens + row)
    value = tl.load(source + token * columns + at, mask=at < columns)
    tl.store(out + row * out_step + at, value, mask=at < columns)


def launch_gather(source: torch.Tensor, tokens: torch.Tensor, wide: int) -> torch.Tensor:
    source = source.contiguous()
    columns = source.shape[1]
    out = source.new_empty(len(tokens), columns + wide)
    if len(tokens):
        block = min(triton.next_power_of_2(columns), 2048)
        grid = (len(tokens), triton.cdiv(columns, block))
        _gather[grid](source, tokens, out, columns, columns + wide, block)
    return out


@triton.jit
def _add_bias(rows, bias, owners, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < columns
    place = rows + row * columns + at
    value = tl.load(place, mask=mask).to(tl.float32)
    value += tl.load(bias + tl.load(owners + row) * columns + at, mask=mask).to(tl.float32)
    tl.store(place, value.to(tl.bfloat16), mask=mask)


def launch_add_bias(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> None:
    """``rows`` and ``bias`` are contiguous."""
    columns = rows.shape[1]
    if len(rows):
        block = min(triton.next_power_of_2(columns), 2048)
        _add_bias[(len(rows), triton.cdiv(columns, block))](rows, bias, owners, columns, block)


@triton.jit
def _bias_products(  # type: ignore[no-untyped-def]
    rows, bias, owners, out, columns, row_step, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    own = bias + tl.load(owners + row) * columns
    total = 0.0
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        mask = at < columns
        value = tl.load(rows + row * row_step + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(value * tl.load(own + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + row, total)


def launch_bias_products(rows: torch.Tensor, bias: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    columns = bias.shape[1]
    out = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    if len(rows):
        block = min(triton.next_power_of_2(columns), 2048)
        _bias_products[(len(rows),)](rows, bias, owners, out, columns, rows.stride(0), block)
    return out


@triton.jit
def within(gate, up, limit, offset):  # type: ignore[no-untyped-def]
    """gate and up within their limits (None: SiLU), and up with its offset; a NaN stays one."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + offset
    return gate, up


@triton.jit
def _activation(  # type: ignore[no-untyped-def]
    gate_up, out, inner, out_step, limit, alpha, offset, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=mask).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=mask).to(tl.float32)
    gate, up = within(gate, up, limit, offset)
    value = gate * tl.sigmoid(gate if limit is None else alpha * gate) * up
    tl.store(out + row * out_step + at, value.to(tl.bfloat16), mask=mask)


def launch_activation(gate_up: torch.Tensor, inner: int, wide: int, gating: Gating = SILU) -> torch.Tensor:
    out = gate_up.new_empty(len(gate_up), inner + wide)
    if len(gate_up):
        block = min(triton.next_power_of_2(inner), 2048)
        _activation[(len(gate_up), triton.cdiv(inner, block))](
            gate_up, out, inner, inner + wide, *gating_numbers(gating), block
        )
    return out


def gating_numbers(gating: Gating) -> tuple[float | None, float, float]:
    return None if gating == SILU else gating.limit, gating.alpha, gating.offset


@triton.jit
def _activation_backward(  # type: ignore[no-untyped-def]
    gate_up, d_h, h, weights, out, d_weights, inner, h_step, out_step, limit, alpha, offset,
    block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = 0.0
    for start in range(0, inner, block):
        at = start + tl.arange(0, block)
        mask = at < inner
        gate = tl.load(gate_up + row * 2 * inner + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * inner + inner + at, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_h + row * inner + at, mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(h + row * h_step + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(kept * d)
        d = d * weight
        g, u = within(gate, up, limit, offset)
        steep = g if limit is None else alpha * g
        sigmoid = tl.sigmoid(steep)
        d_gate = d * u * sigmoid * (1 + steep * (1 - sigmoid))
        d_up = d * g * sigmoid
        if limit is not None:
            d_gate = tl.where(gate <= limit, d_gate, 0.0)
            d_up = tl.where(tl.abs(up) <= limit, d_up, 0.0)
        tl.store(out + row * out_step + at, d_gate.to(tl.bfloat16), mask=mask)
        tl.store(out + row * out_step + inner + at, d_up.to(tl.bfloat16), mask=mask)
    tl.store(d_weights + row, total)


def launch_activation_backward(
    gate_up: torch.Tensor,
    d_h: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor,
    inner: int,
    wide: int,
    gating: Gating = SILU,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = gate_up.new_empty(len(gate_up), 2 * inner + wide)
    d_weights = torch.empty(len(gate_up), dtype=torch.float32, device=gate_up.device)
    if len(gate_up):
        block = min(triton.next_power_of_2(inner), 2048)
        _activation_backward[(len(gate_up),)](
            gate_up, d_h, h, weights, out, d_weights, inner, h.stride(0), 2 * inner + wide,
            *gating_numbers(gating), block,
        )  # fmt: skip
    return out, d_weights


@triton.jit
def _kept(key, number, projection, pairs, threshold):  # type: ignore[no-untyped-def]
    """Tell whether a mask keeps each column of ``pairs`` of a row: ``Mask.kept``."""
    z = (3 * number + projection + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    v = pairs.to(tl.uint32) * 0x9E3779B9 + z.to(tl.uint32)
    v = ((v ^ (v >> 16)) * 0x7FEB352D) ^ (z >> 32).to(tl.uint32)
    v = (v ^ (v >> 15)) * 0x846CA68B
    v = v ^ (v >> 16)
    bits = tl.interleave((v & 0xFFFF).to(tl.int32), (v >> 16).to(tl.int32))
    return bits >= threshold


@triton.jit(do_not_specialize=["key", "projection", "threshold"])
def _keep(  # type: ignore[no-untyped-def]
    source, tokens, out, columns, source_step, numbers, key, projection, threshold,
    gathered: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    pairs = tl.program_id(1) * (block // 2) + tl.arange(0, block // 2)
    token = row
    if gathered:
        token = tl.load(tokens + row)
    kept = _kept(key, tl.load(numbers + row), projection, pairs, threshold)
    value = tl.load(source + token * source_step + at, mask=(at < columns) & kept, other=0.0)
    tl.store(out + row * columns + at, value, mask=at < columns)


def launch_keep(source: torch.Tensor, tokens: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    columns = source.shape[1]
    count = len(source) if tokens is None else len(tokens)
    out = source.new_empty(count, columns)
    if count:
        block = _block_of_pairs(columns)
        drop = mask.dropout
        _keep[(count, triton.cdiv(columns, block))](
            source, mask.numbers if tokens is None else tokens, out, columns, source.stride(0),
            mask.numbers, drop.key, mask.projection, drop.threshold, tokens is not None, block,
        )  # fmt: skip
    return out


def _block_of_pairs(columns: int) -> int:
    return max(2, min(triton.next_power_of_2(columns), 2048))


@triton.jit(do_not_specialize=["key", "projection", "threshold"])
def _add_kept(  # type: ignore[no-untyped-def]
    total, part, other, columns, numbers, key, projection, threshold,
    both: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    pairs = tl.program_id(1) * (block // 2) + tl.arange(0, block // 2)
    number, mask, place = tl.load(numbers + row), at < columns, row * columns + at
    kept = _kept(key, number, projection, pairs, threshold) & mask
    value = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(part + place, mask=kept, other=0.0).to(tl.float32)
    if both:
        kept = _kept(key, number, projection + 1, pairs, threshold) & mask
        value += tl.load(other + place, mask=kept, other=0.0).to(tl.float32)
    tl.store(total + place, value.to(tl.bfloat16), mask=mask)


def launch_add_kept(total: torch.Tensor, parts: Sequence[torch.Tensor], masks: Sequence[Mask]) -> None:
    """All tensors are contiguous; a second mask is of the next projection."""
    columns, mask = total.shape[1], masks[0]
    if len(total):
        block = _block_of_pairs(columns)
        drop = mask.dropout
        _add_kept[(len(total), triton.cdiv(columns, block))](
            total, parts[0], parts[-1], columns, mask.numbers, drop.key, mask.projection,
            drop.threshold, len(parts) > 1, block,
        )  # fmt: skip


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    by_row, rows, weights, out, columns, slots: tl.constexpr, weighted: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < columns
    total = tl.zeros((block,), dtype=tl.float32)
    for slot in tl.static_range(slots):
        row = tl.load(rows + token * slots + slot)
        value = tl.load(by_row + row * columns + at, mask=mask, other=0.0).to(tl.float32)
        if weighted:
            value = value * tl.load(weights + token * slots + slot)
        total += value
    tl.store(out + token * columns + at, total.to(tl.bfloat16), mask=mask)


def launch_combine(by_row: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    columns = by_row.shape[1]
    out = by_row.new_empty(len(rows), columns)
    if len(rows):
        block = min(triton.next_power_of_2(columns), 2048)
        given = by_row if weights is None else weights.contiguous()
        grid = (len(rows), triton.cdiv(columns, block))
        _combine[grid](by_row, rows, given, out, columns, rows.shape[1], weights is not None, block)
    return out


_KINDS = {"bf16": 0, "fp8": 1, "int8": 2, "int4": 3, "mxfp4": 4}


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    stored, scales, places, scale_places, out, rows, columns, stored_row, scale_row, out_step, out_row,
    kind: tl.constexpr, row_group: tl.constexpr, column_group: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(columns, wide)
    bands = tl.cdiv(rows, tall)
    program = tl.program_id(0)
    expert = (program // (tiles * bands)).to(tl.int64)
    row = (program // tiles % bands * tall + tl.arange(0, tall))[:, None].to(tl.int64)
    column = (program % tiles * wide + tl.arange(0, wide))[None, :]
    mask = (row < rows) & (column < columns)
    from_row = stored + tl.load(places + expert) + row * stored_row
    if kind == 0:
        value = tl.load(from_row + column, mask=mask)
    else:
        if kind == 1:
            # By bits, as float16 of a 256th, which holds it exactly: not all GPUs convert e4m3.
            bits = tl.load(from_row + column, mask=mask, other=0).to(tl.int16)
            half = ((bits & 128) << 8) | ((bits & 127) << 7)
            plain = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        elif kind == 2:
            plain = tl.load(from_row + column, mask=mask, other=0).to(tl.float32)
        elif kind == 3:
            word = tl.load(from_row + column // 8, mask=mask, other=0)
            plain = ((word >> (column % 8 * 4)) & 15).to(tl.float32) - 8.0
        else:
            byte = tl.load(from_row + column // 2, mask=mask, other=0).to(tl.int32)
            code = (byte >> (column % 2 * 4)) & 15
            size = code & 7  # e2m1's exponent and mantissa, put in the place of float32's
            normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
            plain = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
            plain = tl.where(code > 7, -plain, plain)
        at = tl.load(scale_places + expert) + row // row_group * scale_row + column // column_group
        if kind == 4:
            exponent = tl.load(scales + at, mask=mask, other=0).to(tl.int32)
            bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
            scale = bits.to(tl.float32, bitcast=True)
        else:
            scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        value = (plain * scale).to(tl.bfloat16)
    tl.store(out + expert * out_step + row * out_row + column, value, mask=mask)


def fill_at(
    weights: ExpertWeights,
    stored: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
    scale_places: torch.Tensor,
    row_steps: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Dequantize ``out`` [n, rows, columns], as ``layout`` does, from anywhere in ``stored``, ``scales``.

    ``places`` and ``scale_places`` [n] int64 on the device are where each expert's begin, ``row_steps`` how
    far apart their rows are, all in elements. For bfloat16 ``scales`` is not read.
    """
    count, rows, columns = out.shape
    kind = _KINDS[weights.storage]
    if stored.dtype == torch.float8_e4m3fn:
        stored = stored.view(torch.uint8)
    wide = min(triton.next_power_of_2(columns), 512)
    tall = max(1, 4096 // wide)
    programs = count * triton.cdiv(rows, tall) * triton.cdiv(columns, wide)
    if programs:
        _fill[(programs,)](
            stored, scales, places, scale_places, out, rows, columns, *row_steps, out.stride(0),
            out.stride(1), kind, weights.row_group, weights.column_group, tall, wide,
        )  # fmt: skip


_SLOTS = 256  # that a program has


@triton.jit
def _places(ids, place, at, count, experts):  # type: ignore[no-untyped-def]
    """The place of each slot's expert; ``experts`` for ids outside, more behind the last slot."""
    number = tl.load(ids + at, mask=at < count, other=0).to(tl.int64)
    inside = (number >= 0) & (number < experts) & (at < count)
    key = number
    if place is not None:
        key = tl.load(place + number, mask=inside, other=0).to(tl.int64)
    key = tl.where(inside, key, experts)
    return tl.where(at < count, key, experts + 1).to(tl.int32)


@triton.jit(do_not_specialize=["count", "blocks", "rows", "share"])
def _count(  # type: ignore[no-untyped-def]
    ids, place, counts, tokens, slots, count, experts, blocks, rows, share,
    bins: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Slots of each place in a block of slots, counts [E + 1, blocks]; all rows become padding."""
    program = tl.program_id(0).to(tl.int64)
    at = program * block + tl.arange(0, block)
    found = tl.histogram(_places(ids, place, at, count, experts), bins)
    each = tl.arange(0, bins)
    tl.store(counts + each.to(tl.int64) * blocks + program, found, mask=each <= experts)
    for start in range(0, share, block):
        offset = start + tl.arange(0, block)
        row = program * share + offset
        mask = (offset < share) & (row < rows)
        tl.store(tokens + row, tl.zeros((block,), tl.int64), mask=mask)
        tl.store(slots + row, tl.zeros((block,), tl.int64) + count, mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _scan(counts, totals, blocks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Replace each block's slots of a place by those of the blocks before; sum up those of all blocks."""
    own = counts + tl.program_id(0).to(tl.int64) * blocks
    total = tl.zeros((), tl.int32)
    for start in range(0, blocks, block):
        at = start + tl.arange(0, block)
        here = tl.load(own + at, mask=at < blocks, other=0)
        tl.store(own + at, total + tl.cumsum(here, 0) - here, mask=at < blocks)
        total += tl.sum(here, 0)
    tl.store(totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count", "blocks"])
def _place(  # type: ignore[no-untyped-def]
    ids, place, counts, totals, tokens, slots, rows_of, ends, count, experts, blocks, top_k,
    pad: tl.constexpr, bins: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * block + tl.arange(0, block)
    key = _places(ids, place, at, count, experts)
    row = tl.zeros((block,), tl.int32)
    for start in range(0, bins, step):  # the rows of the experts before
        each = start + tl.arange(0, step)
        total = tl.load(totals + each, mask=each < experts, other=0)
        total = (total + pad - 1) // pad * pad
        row += tl.sum(tl.where(each[None, :] < key[:, None], total[None, :], 0), 1)
    for start in range(0, block, step):  # the slots of the expert before, in this block
        each = program * block + start + tl.arange(0, step)
        other = _places(ids, place, each, count, experts)
        before = (other[None, :] == key[:, None]) & (each[None, :] < at[:, None])
        row += tl.sum(before.to(tl.int32), 1)
    valid = key < experts
    row += tl.load(counts + key.to(tl.int64) * blocks + program, mask=valid, other=0)
    row = tl.where(valid, row, 0).to(tl.int64)
    tl.store(rows_of + at, row, mask=at < count)
    tl.store(slots + row, at, mask=valid)
    tl.store(tokens + row, at // top_k, mask=valid)
    if program == 0:
        each = tl.arange(0, bins)
        total = tl.load(totals + each, mask=each < experts, other=0)
        total = tl.cumsum((total + pad - 1) // pad * pad, 0)
        tl.store(ends + each, total, mask=each < experts)


def launch_route(
    ids: torch.Tensor, place: torch.Tensor | None, experts: int, rows: int, pad: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``operations.RoutedRows`` has, in three launches."""
    ids, device, count = ids.contiguous(), ids.device, ids.numel()
    blocks = max(1, triton.cdiv(count, _SLOTS))
    bins = triton.next_power_of_2(experts + 2)
    long = torch.empty(2 * rows + count, dtype=torch.int64, device=device)
    tokens, slots, rows_of = long.split((rows, rows, count))
    # Ends first: kernels are compiled anew for an address that isn't a multiple of 16.
    short = torch.empty((experts + 1) * (blocks + 1) + experts, dtype=torch.int32, device=device)
    ends, totals, counts = short.split((experts, experts + 1, (experts + 1) * blocks))
    _count[(blocks,)](
        ids, place, counts, tokens, slots, count, experts, blocks, rows, triton.cdiv(rows, blocks),
        bins, _SLOTS,
    )  # fmt: skip
    _scan[(experts + 1,)](counts, totals, blocks, 1024)
    _place[(blocks,)](
        ids, place, counts, totals, tokens, slots, rows_of, ends, count, experts, blocks,
        max(ids.shape[1], 1), pad, bins, _SLOTS, 16, num_warps=8,
    )  # fmt: skip
    return tokens, slots, rows_of.view(ids.shape), ends, totals[experts:]
