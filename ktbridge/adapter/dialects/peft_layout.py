"""PEFT's flat matrices as stacks of experts, and gate_up as gate and up (see ``peft.py``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ktbridge.adapter.blocks import Block
from ktbridge.adapter.outputs import Piece, piece
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


def is_interleaved(base: ModelConfig | None, name: str | None) -> bool:
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


def arrangement(
    gate_up: dict[int, tuple[Block, Block]], interleaved: bool, hint: dict[str, Any]
) -> str:
    """ "block", "gate", "up" (only that one is adapted) or "shared"; reads every B once.

    ``hint`` is what our manifest recorded.
    """
    rank = next((a.shape[1] for a, _ in gate_up.values()), 0)
    fits = {"block": rank % 2 == 0, "gate": True, "up": True}
    for _, b in gate_up.values():
        bits = b.load() << 1  # sign bit removed, so that -0.0 is zero
        gate, up = (bits[:, pick] for pick in gate_up_rows(b.shape[1], interleaved))
        half = rank // 2
        fits["gate"] = fits["gate"] and not up.any()
        fits["up"] = fits["up"] and not gate.any()
        fits["block"] = fits["block"] and not gate[:, :, half:].any() and not up[:, :, :half].any()
        if not any(fits.values()):
            break
    recorded = hint.get("gate_up")
    if recorded == "shared" or fits.get(str(recorded)):
        return str(recorded)
    if all(fits.values()):  # all zeros: inconclusive
        return "shared"
    return next((name for name, fit in fits.items() if fit), "shared")


def half_of(a: Block, b: Block, name: str, block: bool, interleaved: bool) -> tuple[Block, Block]:
    """A and B of gate or up, of a pair that holds both."""
    count, rank, wide = a.shape
    size = b.shape[1] // 2
    pick = gate_up_rows(b.shape[1], interleaved)[0 if name == "gate" else 1]
    part = slice(None)
    if block:
        rank //= 2
        part = slice(0, rank) if name == "gate" else slice(rank, None)
    return (
        a.then((count, rank, wide), lambda bits: bits[:, part]),
        b.then((count, size, rank), lambda bits: bits[:, pick, part]),
    )


def padded(block: Block, axis: int, rank: int) -> Block:
    """A stack with zeros up to ``rank`` on one axis."""
    if block.shape[axis] == rank:
        return block
    missing = [(0, 0)] * 3
    missing[axis] = (0, rank - block.shape[axis])
    shape = (*block.shape[:axis], rank, *block.shape[axis + 1 :])
    return block.then(shape, lambda bits: np.pad(bits, missing))
