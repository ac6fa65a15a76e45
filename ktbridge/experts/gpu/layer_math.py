"""What one group of experts computes on sorted rows, forward and backward, with its LoRA.

``W x + s B A x`` costs one grouped product more than ``W x``, and a thin one: the matrices lie in memory
with a border, s B to their right and A below them,

    gate and up  [E, 2I + R, H + R]      down  [E, H + Q, I + Q]
        [ W   sB ]                           [ W   sB ]
        [ A   0  ]                           [ A   0  ]

so z = A x is the product with the rows below, and W x + s B z the product of (x, z) with those above.
Backward, (d, d s B) times the left columns is d W + d s B A. R is twice the rank and Q the rank, each rounded
up to 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.operations import by_row, over_rows
from ktbridge.experts.gpu.routing import Rows
from ktbridge.experts.gpu.share import borders, padded


@dataclass(frozen=True)
class Bordered:
    """A group's matrices with their borders, bfloat16."""

    gate_up: torch.Tensor
    """[E, 2I + R, H + R]"""
    down: torch.Tensor
    """[E, H + Q, I + Q]"""
    hidden: int
    inner: int
    rank: int
    """Of the LoRA, 0 for none: R and Q are what it takes rounded up."""
    scale: float
    """α / r."""

    @staticmethod
    def empty(experts: int, hidden: int, inner: int, rank: int, device: torch.device) -> Bordered:
        """Room for the matrices of so many experts, with their borders 0."""
        more, less = borders(rank)
        shapes = (experts, 2 * inner + more, hidden + more), (experts, hidden + less, inner + less)
        gate_up, down = (torch.empty(each, dtype=torch.bfloat16, device=device) for each in shapes)
        gate_up[:, 2 * inner :].zero_()
        gate_up[:, :, hidden:].zero_()
        down[:, hidden:].zero_()
        down[:, :, inner:].zero_()
        return Bordered(gate_up, down, hidden, inner, rank, 0.0)

    def set_borders(self, given: Borders, first: int) -> None:
        """Fill the borders with those of ``given`` from the expert at place ``first`` on."""
        hidden, inner, twice = self.hidden, self.inner, 2 * self.inner
        some = slice(first, first + len(self.down))
        self.gate_up[:, twice:, :hidden].copy_(given.gate_up_below[some])
        self.gate_up[:, :twice, hidden:].copy_(given.gate_up_right[some])
        self.down[:, hidden:, :inner].copy_(given.down_below[some])
        self.down[:, :hidden, inner:].copy_(given.down_right[some])


@dataclass(frozen=True)
class Borders:
    """A layer's LoRA as the borders of its matrices, bfloat16, for all experts in the order of computing."""

    gate_up_below: torch.Tensor
    """[E, R, H]"""
    gate_up_right: torch.Tensor
    """[E, 2I, R]"""
    down_below: torch.Tensor
    """[E, Q, I]"""
    down_right: torch.Tensor
    """[E, H, Q]"""


def make_borders(
    lora: Mapping[str, torch.Tensor],
    scale: float,
    order: torch.Tensor | None,
    experts: int,
    like: Bordered,
) -> Borders:
    """The borders of LoRA tensors [E, ...] by name; absent ones are 0. ``order`` [E]: None as they are.

    A and B are rounded to bfloat16 before B is scaled, as the adapter is saved. ``like`` has the sizes.
    """
    hidden, inner, rank, half = like.hidden, like.inner, like.rank, padded(like.rank)
    more, less = borders(rank)
    made = Borders(
        *(
            like.down.new_zeros(experts, *shape)
            for shape in ((more, hidden), (2 * inner, more), (less, inner), (hidden, less))
        )
    )

    def given(name: str, scale: float | None = None) -> torch.Tensor:
        tensor = lora[name] if order is None else lora[name][order]
        return tensor if scale is None else tensor.bfloat16() * scale

    for index, name in enumerate(("gate", "up")):
        if f"{name}_lora_a" in lora:
            first, row = index * half, index * inner
            made.gate_up_below[:, first : first + rank].copy_(given(f"{name}_lora_a"))
            right = made.gate_up_right[:, row : row + inner, first : first + rank]
            right.copy_(given(f"{name}_lora_b", scale))
    if "down_lora_a" in lora:
        made.down_below[:, :rank].copy_(given("down_lora_a"))
        made.down_right[:, :, :rank].copy_(given("down_lora_b", scale))
    return made


def forward(w: Bordered, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Outputs of the group's experts, [R, H] by row, of ``hidden`` [T, H]."""
    gate_up = _gate_up(w, hidden, rows)[1]
    h = _activated(w, gate_up, rows)
    return by_row(h, w.down[:, : w.hidden], rows.ends, rows.bounds)


def backward(
    w: Bordered,
    hidden: torch.Tensor,
    d_out: torch.Tensor,
    weights: torch.Tensor,
    rows: Rows,
    wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients by row: of hidden [R, H] bfloat16 and of the rows' weights [R] float32; and the LoRA's.

    ``d_out`` [T, H] is the gradient of the layer's output, ``weights`` [R] float32 what each row counts in
    it, 0 for padding. The LoRA's gradients [E, ...] come by name where ``wanted``, and with a rank.
    """
    hidden_size, inner, rank = w.hidden, w.inner, w.rank
    ends, bounds = rows.ends, rows.bounds
    x, gate_up = _gate_up(w, hidden, rows)
    h = _activated(w, gate_up, rows)
    wide = borders(rank)[1]
    d = operations.gather(d_out, rows.tokens, wide)
    if wide:
        d[:, hidden_size:] = by_row(
            d[:, :hidden_size], w.down[:, :hidden_size, inner:].transpose(1, 2), ends, bounds
        )
    d_h = by_row(d, w.down[:, :, :inner].transpose(1, 2), ends, bounds)
    found: dict[str, torch.Tensor] = {}
    lora = wanted and rank > 0
    if lora:
        column = weights[:, None]
        z = (h[:, inner:] * (column * w.scale)).bfloat16()
        found["down_lora_b"] = over_rows(d[:, :hidden_size], z, ends, bounds)[:, :, :rank]
        thin = (d[:, hidden_size:] * column).bfloat16()
        found["down_lora_a"] = over_rows(thin, h[:, :inner], ends, bounds)[:, :rank]
    d_gate_up, d_weights = operations.activation_backward(
        gate_up, d_h, h, weights, inner, borders(rank)[0]
    )
    twice = 2 * inner
    if rank:
        d_gate_up[:, twice:] = by_row(
            d_gate_up[:, :twice],
            w.gate_up[:, :twice, hidden_size:].transpose(1, 2),
            ends,
            bounds,
        )
    d_x = by_row(d_gate_up, w.gate_up[:, :, :hidden_size].transpose(1, 2), ends, bounds)
    if lora:
        half = padded(rank)
        z = (x[:, hidden_size:] * w.scale).bfloat16()
        b = over_rows(d_gate_up[:, :twice], z, ends, bounds)
        a = over_rows(d_gate_up[:, twice:], x[:, :hidden_size], ends, bounds)
        for index, name in enumerate(("gate", "up")):
            here = slice(index * half, index * half + rank)
            found[f"{name}_lora_a"] = a[:, here]
            found[f"{name}_lora_b"] = b[:, index * inner : (index + 1) * inner, here]
    return d_x, d_weights, found


def _gate_up(w: Bordered, hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """x with z behind it [R, H + R'], and gate and up of it [R, 2I]."""
    twice, size = 2 * w.inner, w.hidden
    wide = borders(w.rank)[0]
    x = operations.gather(hidden, rows.tokens, wide)
    if wide:
        x[:, size:] = by_row(x[:, :size], w.gate_up[:, twice:, :size], rows.ends, rows.bounds)
    return x, by_row(x, w.gate_up[:, :twice], rows.ends, rows.bounds)


def _activated(w: Bordered, gate_up: torch.Tensor, rows: Rows) -> torch.Tensor:
    """silu(gate) * up, and its z behind it: [R, I + Q]."""
    wide = borders(w.rank)[1]
    h = operations.activation(gate_up, w.inner, wide)
    if wide:
        h[:, w.inner :] = by_row(
            h[:, : w.inner], w.down[:, w.hidden :, : w.inner], rows.ends, rows.bounds
        )
    return h
