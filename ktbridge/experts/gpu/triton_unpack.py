"""``unpack.fill`` in Triton: stored matrices to bfloat16 ones in one kernel, memory read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ktbridge.experts.weights import ExpertWeights

_KINDS = {"bf16": 0, "fp8": 1, "int8": 2, "int4": 3}


@triton.jit
def _fill(  # type: ignore[no-untyped-def]
    stored, scales, out, rows, columns, stored_step, stored_row, scale_step, scale_row, out_step, out_row,
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
    from_row = stored + expert * stored_step + row * stored_row
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
        at = expert * scale_step + row // row_group * scale_row + column // column_group
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        value = (plain * scale).to(tl.bfloat16)
    tl.store(out + expert * out_step + row * out_row + column, value, mask=mask)


def fill(
    weights: ExpertWeights, stored: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor
) -> None:
    count, rows, columns = out.shape
    kind = _KINDS[weights.storage]
    if weights.storage == "fp8":
        stored = stored.view(torch.uint8)
    given = stored if scales is None else scales
    wide = min(triton.next_power_of_2(columns), 512)
    tall = max(1, 4096 // wide)
    programs = count * triton.cdiv(rows, tall) * triton.cdiv(columns, wide)
    if programs:
        _fill[(programs,)](
            stored, given, out, rows, columns, stored.stride(0), stored.stride(1), given.stride(0),
            given.stride(1), out.stride(0), out.stride(1), kind, weights.row_group, weights.column_group,
            tall, wide,
        )  # fmt: skip
