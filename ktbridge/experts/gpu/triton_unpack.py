"""``unpack.fill`` in Triton: stored matrices to bfloat16 ones in one kernel, memory read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktbridge.experts.weights import ExpertWeights

_KINDS = {"bf16": 0, "fp8": 1, "int8": 2, "int4": 3}


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
        else:
            word = tl.load(from_row + column // 8, mask=mask, other=0)
            plain = ((word >> (column % 8 * 4)) & 15).to(tl.float32) - 8.0
        at = tl.load(scale_places + expert) + row // row_group * scale_row + column // column_group
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        value = (plain * scale).to(tl.bfloat16)
    tl.store(out + expert * out_step + row * out_row + column, value, mask=mask)


def fill(
    weights: ExpertWeights, stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> None:
    each = torch.arange(len(out), device=out.device)
    given = stored if scales is None else scales
    rows = stored.stride(1), given.stride(1)
    fill_at(weights, stored, given, each * stored.stride(0), each * given.stride(0), rows, out)


def fill_at(
    weights: ExpertWeights,
    stored: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
    scale_places: torch.Tensor,
    row_steps: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """``fill`` of ``out`` [n, rows, columns] from anywhere in ``stored`` and ``scales``, in one kernel.

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
