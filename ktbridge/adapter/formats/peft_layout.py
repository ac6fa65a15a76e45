"""PEFT's flat matrices as stacks of experts and back, gate_up as gate and up and back (see ``peft.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ktbridge.adapter.adapter import MODEL_FILE, Adapter, Part, Slot
from ktbridge.adapter.blocks import BITS, Block
from ktbridge.adapter.keys import PEFT_PREFIX
from ktbridge.adapter.lora_config import AS_PARAMETERS, build_config, pattern_fields
from ktbridge.adapter.numbers import whole
from ktbridge.adapter.outputs import Output, Piece, piece
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.model import ModelConfig

if TYPE_CHECKING:
    from ktbridge.adapter.blocks import Bits

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Pair(NamedTuple):
    """A and B of one parameter of one layer, as stored."""

    a: Part
    b: Part

    @property
    def columns(self) -> int:
        return self.a.entry.shape[1]

    @property
    def rows(self) -> int:
        return self.b.entry.shape[0]


def swapped(pairs: dict[str, Pair], hidden: int) -> bool | None:
    """Return whether in and out are swapped (PEFT 0.17/0.18); None if shapes are ambiguous.

    With both parameters, gate_up's input is down's output, and gate_up's output twice down's
    input. With one of them, the hidden size decides (0: unknown), unless its matrices are square.
    """
    gate_up, down = pairs.get(GATE_UP), pairs.get(DOWN)
    if gate_up and down:
        now = gate_up.columns == down.rows and gate_up.rows == 2 * down.columns
        old = gate_up.rows == down.columns and gate_up.columns == 2 * down.rows
        return old if now != old else None
    pair = gate_up or down
    if pair is None or pair.columns == pair.rows or hidden not in (pair.columns, pair.rows):
        return None
    inner = pair.columns if gate_up else pair.rows
    return inner != hidden


def unpack(a: Block, b: Block, count: int, rank: int, exchanged: bool, order: str) -> tuple[Block, Block]:
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
    flat_b = b.then((high, rank * count), lambda bits: bits.transpose(1, 2, 0).reshape(high, rank * count))
    return [piece(f"{stem}.lora_A.weight", flat_a), piece(f"{stem}.lora_B.weight", flat_b)]


def arrangement(gate_up: dict[int, tuple[Block, Block]], interleaved: bool, hint: dict[str, object]) -> str:
    """ "block", "gate", "up" (only that one is adapted) or "shared"; reads every B once.

    ``hint`` is what our manifest recorded.
    """
    fits = {"block": True, "gate": True, "up": True}
    for a, b in gate_up.values():
        bits = b.load() << 1  # sign bit removed, so that -0.0 is zero
        gate, up = (bits[:, pick] for pick in gate_up_rows(b.shape[1], interleaved))
        half, odd = divmod(a.shape[1], 2)
        fits["gate"] = fits["gate"] and not up.any()
        fits["up"] = fits["up"] and not gate.any()
        fits["block"] = fits["block"] and not (odd or gate[:, :, half:].any() or up[:, :, :half].any())
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


def write_peft(adapter: Adapter) -> tuple[list[Output], list[Problem]]:
    """The layout of PEFT >= 0.19, with rank_pattern and alpha_pattern where experts differ."""
    experts, nonexpert = adapter.blocks()
    dtypes = {block.dtype for block in experts.values()}
    if len(dtypes) > 1:
        found = f"its experts have the dtypes {', '.join(sorted(dtypes))}, a fused tensor has one"
        return [], [problem("KTB720", str(adapter.path), found, next_step="pass --dtype bf16")]
    if len(experts) != 2 * len(adapter.expert_layers()) * len(adapter.projections):
        found, step = "its layers have LoRA on different projections", "choose raw, vllm or sglang-3d"
        return [], [problem("KTB720", str(adapter.path), found, next_step=step)]
    interleaved = is_interleaved(adapter.base, adapter.base_model)
    gated = [name for name in adapter.projections if name != "down"]
    how = _choose(adapter, experts) if len(gated) == 2 else "".join(gated)
    rest = adapter.rest
    usual = (rest.rank, rest.plain_alpha) if nonexpert else (adapter.rank, adapter.alpha)
    block = adapter.experts_block()
    pieces: list[Piece] = []
    parameters: list[str] = []
    for layer in adapter.expert_layers():
        module = f"layers.{layer}.{block}.experts"
        stem = f"{PEFT_PREFIX}{adapter.module_prefix()}{module}"
        both = bool(how) and "down" in adapter.projections
        if how:
            a, b = _fused([experts[layer, n, half] for half in "AB" for n in gated], how, interleaved)
            parameters.append(f"{module}.{GATE_UP}")
            pieces += pack(f"{stem}.base_layer" if both else stem, a, b)
        if "down" in adapter.projections:
            parameters.append(f"{module}.{DOWN}")
            pieces += pack(stem, *(experts[layer, "down", half] for half in "AB"))
    own: dict[str, tuple[int, float]] = {}
    for parameter, names in ((GATE_UP, gated), (DOWN, ("down",))):
        if not {*names} & {*adapter.projections}:
            continue
        times = 2 if parameter == GATE_UP and how == "block" else 1
        # An explicit alpha stands for the common one.
        alphas = {
            layer: times * adapter.alpha * (adapter.own_of(layer, names[0])[0].scale / adapter.usual.scale)
            for layer in adapter.expert_layers()
        }
        if len(set(alphas.values())) == 1:
            own[f"experts.{parameter}"] = times * adapter.rank, next(iter(alphas.values()))
            continue
        for layer, alpha in alphas.items():
            name = f"layers.{layer}.{block}.experts.{parameter}"
            own[name] = times * adapter.rank, whole(alpha)
    for module, numbers in adapter.own.items():
        listed = module.rpartition(".")[2] in AS_PARAMETERS
        own[f"{module}.weight" if listed else module] = numbers.rank, numbers.plain_alpha
    config = build_config(adapter, *usual, {*adapter.nonexpert_modules()} - AS_PARAMETERS)
    config |= {"rank_pattern": {}, "alpha_pattern": {}, **pattern_fields(own, usual)}
    for key, part in sorted(adapter.nonexpert.items()):
        pieces.append(piece(key, part.block))
        if part.key.leaf in AS_PARAMETERS and part.key.half == "A":
            parameters.append(f"{part.key.module}.weight")
    # Every layer is listed: a layer without LoRA must not be wrapped.
    config["target_parameters"] = parameters
    if parameters:  # PEFT rejects dropout there; it only affects training
        config["lora_dropout"] = 0.0
    kept: dict[str, object] = {"gate_up": how} if how else {}
    return [Output("peft-fused", config, {MODEL_FILE: pieces}, adapter.rank, adapter.alpha, kept)], []


def _choose(adapter: Adapter, experts: Mapping[Slot, Block]) -> str:
    for layer in adapter.expert_layers():
        gate, up = (experts[layer, name, "A"] for name in ("gate", "up"))
        if gate.shape != up.shape or not np.array_equal(gate.load(), up.load()):
            return "block"
    return "shared"


def _fused(blocks: list[Block], how: str, interleaved: bool) -> tuple[Block, Block]:
    """A and B of gate_up, of the A and the B of gate, of up, or of both."""
    a, b = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    count, rank, wide = a[0].shape
    size = b[0].shape[1]
    total = rank * (2 if how == "block" else 1)
    rows = gate_up_rows(2 * size, interleaved)[how == "up" :]

    def make_a() -> Bits:
        return np.concatenate([x.load() for x in a], 1) if how == "block" else a[0].load()

    def make_b() -> Bits:
        bits = np.zeros((count, 2 * size, total), BITS[b[0].dtype])
        for number, (place, block) in enumerate(zip(rows, b, strict=False)):
            first = number * rank if how == "block" else 0
            bits[:, place, first : first + rank] = block.load()
        return bits

    return Block(a[0].dtype, (count, total, wide), make_a), Block(
        b[0].dtype, (count, 2 * size, total), make_b
    )
