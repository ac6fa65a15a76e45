"""What one group of experts computes on sorted rows, forward and backward, with its LoRA.

``W x + s B A x`` costs one grouped product more than ``W x``, and a thin one: the matrices lie in memory
with a border, s B to their right and A below them,

    gate and up  [E, 2I + R, H + R]      down  [E, H + Q, I + Q]
        [ W   sB ]                           [ W   sB ]
        [ A   0  ]                           [ A   0  ]

so z = A x is the product with the rows below, and W x + s B z the product of (x, z) with those above.
Backward, (d, d s B) times the left columns is d W + d s B A. R is twice the rank and Q the rank, each rounded
up to 8. With dropout the thin products have inputs of their own, rows without what is dropped, and backward
adds theirs where the input was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ktbridge.experts.dropout import Dropout, Mask
from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.operations import by_row, over_rows
from ktbridge.experts.gpu.placement import borders, padded
from ktbridge.experts.gpu.routing import Rows
from ktbridge.experts.weights import SILU, Gating


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
    gating: Gating = SILU
    gate_up_bias: torch.Tensor | None = None
    """[E, 2I]"""
    down_bias: torch.Tensor | None = None
    """[E, H]"""

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


def forward(
    w: Bordered, hidden: torch.Tensor, rows: Rows, dropout: Dropout | None = None
) -> torch.Tensor:
    """Outputs of the group's experts, [R, H] by row, of ``hidden`` [T, H]."""
    masks = _masks(w, rows, dropout)
    gate_up = _gate_up(w, hidden, rows, masks)[1]
    h, _ = _activated(w, gate_up, rows, masks)
    y = by_row(h, w.down[:, : w.hidden], rows.ends, rows.bounds)
    if w.down_bias is not None:
        operations.add_bias(y, w.down_bias, rows.owners())
    return y


def backward(
    w: Bordered,
    hidden: torch.Tensor,
    d_out: torch.Tensor,
    weights: torch.Tensor,
    rows: Rows,
    wanted: bool,
    dropout: Dropout | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients by row: of hidden [R, H] bfloat16 and of the rows' weights [R] float32; and the LoRA's.

    ``d_out`` [T, H] is the gradient of the layer's output, ``weights`` [R] float32 what each row counts in
    it, 0 for padding. The LoRA's gradients [E, ...] come by name where ``wanted``, and with a rank;
    ``dropout`` is the forward's.
    """
    inner, rank = w.inner, w.rank
    ends, bounds = rows.ends, rows.bounds
    masks = _masks(w, rows, dropout)
    thin_x, gate_up, seen = _gate_up(w, hidden, rows, masks)
    h, seen_h = _activated(w, gate_up, rows, masks)
    d = operations.gather(d_out, rows.tokens, borders(rank)[1])
    if rank:
        right = w.down[:, : w.hidden, inner:]
        d[:, w.hidden :] = by_row(d[:, : w.hidden], right.transpose(1, 2), ends, bounds)
    d_h = _left(w.down[:, :, :inner], d, w.hidden, rows, masks[2:])
    lora = wanted and rank > 0
    found = _down_gradients(w, d, h, seen_h, weights, rows) if lora else {}
    by_bias = None
    if w.down_bias is not None:
        by_bias = operations.bias_products(d, w.down_bias, rows.owners())
    del d, seen_h
    d_gate_up, d_weights = operations.activation_backward(
        gate_up, d_h, h, weights, inner, borders(rank)[0], w.gating
    )
    if by_bias is not None:
        d_weights += by_bias
    del d_h, h, gate_up
    if rank:
        right = w.gate_up[:, : 2 * inner, w.hidden :]
        d_gate_up[:, 2 * inner :] = by_row(
            d_gate_up[:, : 2 * inner], right.transpose(1, 2), ends, bounds
        )
    if lora:
        found |= _gate_up_gradients(w, d_gate_up, thin_x, seen, rows)
    del seen  # with dropout there are more rows to come
    d_x = _left(w.gate_up[:, :, : w.hidden], d_gate_up, 2 * inner, rows, masks[:2])
    return d_x, d_weights, found


def _masks(w: Bordered, rows: Rows, dropout: Dropout | None) -> tuple[Mask, ...]:
    """What gate, up and down keep of their inputs; nothing where they keep all."""
    if dropout is None or not w.rank:
        return ()
    return tuple(Mask(dropout, projection, rows.slots) for projection in range(3))


def _left(
    matrices: torch.Tensor, d: torch.Tensor, width: int, rows: Rows, masks: tuple[Mask, ...]
) -> torch.Tensor:
    """``d`` times the left columns of bordered matrices, of which the first ``width`` rows are W's."""
    if not masks:
        return by_row(d, matrices.transpose(1, 2), rows.ends, rows.bounds)
    above = matrices[:, :width].transpose(1, 2)
    total = by_row(d[:, :width], above, rows.ends, rows.bounds)
    thin = (d.shape[1] - width) // len(masks)
    parts = []
    for index in range(len(masks)):
        here = slice(width + index * thin, width + (index + 1) * thin)
        below = matrices[:, here].transpose(1, 2)
        parts.append(by_row(d[:, here], below, rows.ends, rows.bounds))
    operations.add_kept(total, parts, masks)
    return total


def _down_gradients(
    w: Bordered,
    d: torch.Tensor,
    h: torch.Tensor,
    seen: torch.Tensor,
    weights: torch.Tensor,
    rows: Rows,
) -> dict[str, torch.Tensor]:
    """The gradients of down's LoRA [E, ...], whose A has ``seen``."""
    column, ends, bounds = weights[:, None], rows.ends, rows.bounds
    z = (h[:, w.inner :] * (column * w.scale)).bfloat16()
    thin = (d[:, w.hidden :] * column).bfloat16()
    return {
        "down_lora_b": over_rows(d[:, : w.hidden], z, ends, bounds)[:, :, : w.rank],
        "down_lora_a": over_rows(thin, seen, ends, bounds)[:, : w.rank],
    }


def _gate_up_gradients(
    w: Bordered,
    d_gate_up: torch.Tensor,
    thin_x: torch.Tensor,
    seen: tuple[torch.Tensor, ...],
    rows: Rows,
) -> dict[str, torch.Tensor]:
    """The gradients of gate's and up's LoRA [E, ...]; ``d_gate_up`` has its d s B behind it.

    ``thin_x`` is z, and ``seen`` what both A had, or what each had.
    """
    inner, ends, bounds = w.inner, rows.ends, rows.bounds
    thin = d_gate_up[:, 2 * inner :].chunk(len(seen), dim=1)
    z = (thin_x * w.scale).bfloat16()
    b = over_rows(d_gate_up[:, : 2 * inner], z, ends, bounds)
    a = [over_rows(d, x, ends, bounds) for d, x in zip(thin, seen, strict=True)]
    found = {}
    for index, name in enumerate(("gate", "up")):
        here = slice(index * padded(w.rank), index * padded(w.rank) + w.rank)
        found[f"{name}_lora_a"] = a[0][:, here] if len(a) == 1 else a[index][:, : w.rank]
        found[f"{name}_lora_b"] = b[:, index * inner : (index + 1) * inner, here]
    return found


def _gate_up(
    w: Bordered, hidden: torch.Tensor, rows: Rows, masks: tuple[Mask, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """z of x [R, R'], gate and up of it [R, 2I], and what A had of x [R, H]: of both, or of each."""
    twice, size = 2 * w.inner, w.hidden
    wide, half = borders(w.rank)
    x = operations.gather(hidden, rows.tokens, wide)
    seen = tuple(operations.keep(hidden, rows.tokens, mask) for mask in masks[:2])
    if wide and not masks:
        x[:, size:] = by_row(x[:, :size], w.gate_up[:, twice:, :size], rows.ends, rows.bounds)
    for index, kept in enumerate(seen):
        first = index * half
        below = w.gate_up[:, twice + first : twice + first + half, :size]
        x[:, size + first : size + first + half] = by_row(kept, below, rows.ends, rows.bounds)
    gate_up = by_row(x, w.gate_up[:, :twice], rows.ends, rows.bounds)
    if w.gate_up_bias is not None:
        operations.add_bias(gate_up, w.gate_up_bias, rows.owners())
    if masks:
        return x[:, size:].clone(), gate_up, seen  # and not x
    return x[:, size:], gate_up, (x[:, :size],)


def _activated(
    w: Bordered, gate_up: torch.Tensor, rows: Rows, masks: tuple[Mask, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """h, and its z behind it: [R, I + Q]; and what A had of it, [R, I]."""
    wide = borders(w.rank)[1]
    h = operations.activation(gate_up, w.inner, wide, w.gating)
    seen = operations.keep(h[:, : w.inner], None, masks[2]) if masks else h[:, : w.inner]
    if wide:
        h[:, w.inner :] = by_row(seen, w.down[:, w.hidden :, : w.inner], rows.ends, rows.bounds)
    return h, seen
