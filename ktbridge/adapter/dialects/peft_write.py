"""Writing PEFT's ``target_parameters`` layout, as PEFT >= 0.19 loads it (see ``peft.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ktbridge.adapter.adapter import MODEL_FILE
from ktbridge.adapter.blocks import BITS, Block
from ktbridge.adapter.dialects.peft_layout import DOWN, GATE_UP, gate_up_rows, is_interleaved, pack
from ktbridge.adapter.dialects.source import Source, refusal
from ktbridge.adapter.keys import PEFT_PREFIX, parse_key
from ktbridge.adapter.lora_config import AS_PARAMETERS, build_config
from ktbridge.adapter.outputs import Output, Piece, piece
from ktbridge.errors import Problem

if TYPE_CHECKING:
    from ktbridge.adapter.blocks import Bits


def write_peft(source: Source) -> tuple[list[Output], list[Problem]]:
    """The layout of PEFT >= 0.19, with rank_pattern and alpha_pattern where experts differ."""
    dtypes = {block.dtype for block in source.experts.values()}
    if len(dtypes) > 1:
        found = f"its experts have the dtypes {', '.join(sorted(dtypes))}, a fused tensor has one"
        return [], [refusal(str(source.path), found, "pass --dtype bf16")]
    interleaved = is_interleaved(source.base, source.base_model)
    how = "" if set(source.projections) <= {"down"} else _choose(source)
    rank = source.nonexpert_rank if source.nonexpert else source.rank
    alpha = source.plain_alpha if source.nonexpert else source.alpha
    prefix = source.module_prefix()
    pieces: list[Piece] = []
    parameters: list[str] = []
    for layer in source.layers:
        module = f"layers.{layer}.mlp.experts"
        stem = f"{PEFT_PREFIX}{prefix}{module}"
        both = bool(how) and "down" in source.projections
        if how:
            a, b = _fused(source, layer, how, interleaved)
            parameters.append(f"{module}.{GATE_UP}")
            pieces += pack(f"{stem}.base_layer" if both else stem, a, b)
        if "down" in source.projections:
            parameters.append(f"{module}.{DOWN}")
            pieces += pack(stem, *(source.experts[layer, "down", half] for half in "AB"))
    factor = 2 if how == "block" else 1
    wanted = {GATE_UP: factor} if how else {}
    wanted |= {DOWN: 1} if "down" in source.projections else {}
    ranks = {f"experts.{name}": times * source.rank for name, times in wanted.items()}
    alphas = {f"experts.{name}": times * source.alpha for name, times in wanted.items()}
    leaves = {parse_key(key).leaf for key in source.nonexpert} - AS_PARAMETERS
    config = build_config(source.kept, source.base_model, rank, alpha, leaves)
    config["rank_pattern"] = {name: value for name, value in ranks.items() if value != rank}
    config["alpha_pattern"] = {name: value for name, value in alphas.items() if value != alpha}
    for key, block in sorted(source.nonexpert.items()):
        pieces.append(piece(key, block))
        parsed = parse_key(key)
        if parsed.leaf in AS_PARAMETERS and parsed.half == "A":
            parameters.append(f"{parsed.module}.weight")
    # Every layer is listed: a layer without LoRA must not be wrapped.
    config["target_parameters"] = parameters
    if parameters:  # PEFT rejects dropout there; it only affects training
        config["lora_dropout"] = 0.0
    output = Output("peft-fused", config, {MODEL_FILE: pieces}, source.rank, source.alpha)
    output.experts = {"gate_up": how} if how else {}
    return [output], []


def _choose(source: Source) -> str:
    present = [name for name in ("gate", "up") if name in source.projections]
    if len(present) == 1:
        return present[0]
    for layer in source.layers:
        gate, up = (source.experts[layer, name, "A"] for name in ("gate", "up"))
        if gate.shape != up.shape or not np.array_equal(gate.load(), up.load()):
            return "block"
    return "shared"


def _fused(source: Source, layer: int, how: str, interleaved: bool) -> tuple[Block, Block]:
    names = [name for name in ("gate", "up") if name in source.projections]
    a = [source.experts[layer, name, "A"] for name in names]
    b = [source.experts[layer, name, "B"] for name in names]
    count, rank, wide = a[0].shape
    size = b[0].shape[1]
    total = rank * (2 if how == "block" else 1)
    picks = dict(zip(("gate", "up"), gate_up_rows(2 * size, interleaved), strict=True))

    def make_a() -> Bits:
        return np.concatenate([x.load() for x in a], 1) if how == "block" else a[0].load()

    def make_b() -> Bits:
        bits = np.zeros((count, 2 * size, total), BITS[b[0].dtype])
        for number, (name, block) in enumerate(zip(names, b, strict=True)):
            first = number * rank if how == "block" else 0
            bits[:, picks[name], first : first + rank] = block.load()
        return bits

    return Block(a[0].dtype, (count, total, wide), make_a), Block(
        b[0].dtype, (count, 2 * size, total), make_b
    )
