"""Convert between PEFT's flat matrices and stacks of experts (see ``peft.py``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ktbridge.adapter.blocks import Block, Piece, piece
from ktbridge.errors import KtbridgeError
from ktbridge.model import ModelConfig

if TYPE_CHECKING:
    from ktbridge.adapter.blocks import Bits

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def unpack(
    a: Block, b: Block, count: int, rank: int, exchanged: bool, order: str
) -> tuple[Block, Block]:
    """The flat matrices of one parameter as stacks A [E,R,in] and B [E,out,R]."""

    def rows(bits: Bits) -> Bits:
        split: Bits = bits.reshape(count, rank, -1)
        return split

    def columns(bits: Bits) -> Bits:  # [x, R*E] -> [E,x,R]
        split: Bits
        if order == "e*R+k":
            split = bits.reshape(-1, count, rank).transpose(1, 0, 2)
        else:
            split = bits.reshape(-1, rank, count).transpose(2, 0, 1)
        return split

    wide, high = a.shape[1], b.shape[0]
    if not exchanged:
        return a.then((count, rank, wide), rows), b.then((count, high, rank), columns)
    return (
        b.then((count, rank, high), lambda bits: columns(bits).transpose(0, 2, 1)),
        a.then((count, wide, rank), lambda bits: rows(bits).transpose(0, 2, 1)),
    )


def takes_turns(base: ModelConfig | None, name: str | None) -> bool:
    """True if gate and up rows are interleaved (gpt-oss); otherwise all gate rows come first."""
    if base is None and re.search(r"gpt.?oss", name or "", re.IGNORECASE):
        raise KtbridgeError(
            f"{name} looks like gpt-oss, whose gate and up rows may take turns",
            "pass --base-model with a directory that has its config.json",
        )
    family = base.family if base else None
    return family is not None and family.storage == "fused-interleaved"


def gate_up_rows(size: int, interleaved: bool) -> tuple[slice, slice]:
    """Positions of gate and up in ``size`` = 2I rows."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, size // 2), slice(size // 2, None)


def pack(stem: str, a: Block, b: Block) -> list[Piece]:
    """Stacks A [E,R,in], B [E,out,R] as PEFT's flat matrices A [E*R,in], B [out,R*E]."""
    count, rank, wide = a.shape
    high = b.shape[1]
    flat_a = a.then((count * rank, wide), lambda bits: bits.reshape(count * rank, wide))
    flat_b = b.then(
        (high, rank * count), lambda bits: bits.transpose(1, 2, 0).reshape(high, rank * count)
    )
    return [piece(f"{stem}.lora_A.weight", flat_a), piece(f"{stem}.lora_B.weight", flat_b)]
