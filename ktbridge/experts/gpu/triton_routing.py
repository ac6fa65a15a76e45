"""``operations.route`` in Triton: a stable counting sort in three launches, nothing added atomically."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
    """How many slots of a place the blocks before each have, in place of its own; and of all blocks."""
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


def route(
    ids: torch.Tensor, place: torch.Tensor | None, experts: int, rows: int, pad: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what ``operations.Routed`` has, in three launches."""
    ids, device, count = ids.contiguous(), ids.device, ids.numel()
    blocks = max(1, triton.cdiv(count, _SLOTS))
    bins = triton.next_power_of_2(experts + 2)
    long = torch.empty(2 * rows + count, dtype=torch.int64, device=device)
    tokens, slots, rows_of = long.split((rows, rows, count))
    short = torch.empty((experts + 1) * (blocks + 1) + experts, dtype=torch.int32, device=device)
    counts, totals, ends = short.split(((experts + 1) * blocks, experts + 1, experts))
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
