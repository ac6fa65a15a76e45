"""Mathematics of one group of experts on sorted rows, forward and backward, with its LoRA.

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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.operations import GradientTargets, LoraInputs, RoutedRows, RowWeights, by_row
from ktbridge.experts.gpu.placement import border_widths
from ktbridge.experts.lora import Dropout, Mask
from ktbridge.experts.weights import SILU, Gating


@dataclass(eq=False, slots=True)
class RowPart:
    """Experts of one group that are multiplied at once, and their share of the sorted rows."""

    first: int
    """The place, in the order of computing, of the first expert."""
    end: int
    tokens: torch.Tensor
    """[R] int64: the token of each row."""
    slots: torch.Tensor
    """[R] int64: its place in the flat [T * K]; T * K for padding."""
    ends: torch.Tensor
    """[E] int32 on the device: where each expert's rows end, counted from the part's first."""
    where: slice | None
    """Place of its rows among all; None: they are all there are."""
    bounds: tuple[int, ...] | None = None
    """``ends`` on the host, after a 0, where they are known there."""
    _owners: torch.Tensor | None = None

    def owners(self) -> torch.Tensor:
        """[R] int64: each row's expert, counted from the part's first; the last one's for rows behind."""
        if self._owners is None:
            rows = torch.arange(len(self.tokens), dtype=torch.int32, device=self.ends.device)
            found = torch.searchsorted(self.ends, rows, right=True)
            self._owners = found.clamp_(max=len(self.ends) - 1)
        return self._owners


class Routing:
    """Rows, sorted by expert and padded, of T tokens with K experts each.

    Every token has K slots, one for each of its experts. Slots are sorted by expert, in the order of
    computing, and each expert's rows are padded to a multiple of ``PAD``, which grouped products
    over rows ask for. Rows of padding stand for token 0 with weight 0, as do rows behind the last expert's:
    the number of rows is on the device alone, so arrays have the most that there can be
    (``operations.rows_for``). Where a layer is computed in parts, the host needs the number of rows of each:
    then they are copied to it, and waited for when the first part is computed.
    """

    def __init__(self, routed: RoutedRows) -> None:
        self.tokens, self.slots = routed.tokens, routed.slots
        self.rows, self.ends = routed.rows, routed.ends
        self._host: torch.Tensor | None = None
        self._there: torch.cuda.Event | None = None
        self._bounds: tuple[int, ...] | None = None
        self._parts: dict[tuple[tuple[int, ...], int | None], tuple[tuple[RowPart, ...], ...]] = {}

    def fetch(self) -> None:
        """Begin to copy the ends to the host."""
        if self.ends.device.type == "cuda":
            shape = self.ends.shape
            self._host = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=True)
            self._host.copy_(self.ends, non_blocking=True)
            self._there = torch.cuda.current_stream(self.ends.device).record_event()

    @property
    def bounds(self) -> tuple[int, ...]:
        """The ends on the host, after a 0; waits for them the first time."""
        if self._bounds is None:
            if self._there is not None:
                self._there.synchronize()
            ends = self.ends if self._host is None else self._host
            self._bounds = 0, *ends.tolist()
            self._host = self._there = None
        return self._bounds

    def at_once(self, starts: tuple[int, ...], most: int | None) -> bool:
        """Return whether there is one part, however the rows are distributed: see ``parts``."""
        return len(starts) == 2 and (most is None or len(self.tokens) <= most)

    def parts(self, starts: tuple[int, ...], most: int | None) -> tuple[tuple[RowPart, ...], ...]:
        """The parts of each group: these begin at the places ``starts``, and are cut at ``most`` rows.

        ``starts`` ends with the number of experts. An expert's rows are not cut: one that has more than
        ``most`` is a part of its own. It has at most T, padded, where no token has it twice.
        """
        key = starts, most
        found = self._parts.get(key)
        if found is None:
            if self.at_once(starts, most):
                part = RowPart(0, starts[1], self.tokens, self.slots, self.ends, None)
                found = ((part,),)
            else:
                found = tuple(tuple(self._cut(*ends, most)) for ends in pairwise(starts))
            self._parts[key] = found
        return found

    def _cut(self, first: int, end: int, most: int | None) -> Iterator[RowPart]:
        """The parts of the experts at the places ``first`` to ``end``."""
        bounds = self.bounds
        for place in range(first + 1, end + 1):
            if place == end or (most is not None and bounds[place + 1] - bounds[first] > most):
                yield self._part(first, place)
                first = place

    def _part(self, first: int, end: int) -> RowPart:
        bounds = self.bounds
        start, stop = bounds[first], bounds[end]
        ends = self.ends[first:end]
        return RowPart(
            first,
            end,
            self.tokens[start:stop],
            self.slots[start:stop],
            ends - start if first else ends,  # not a view in the middle: ``launch_route`` says why
            slice(start, stop),
            tuple(bound - start for bound in bounds[first : end + 1]),
        )


@dataclass(frozen=True, eq=False)
class Biases:
    """Biases of gate and up [E, 2I], and of down [E, H]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def of(self, some: slice) -> Biases:
        """Return those of some experts."""
        return Biases(self.gate_up[some], self.down[some])


@dataclass(eq=False)
class BorderedMatrices:
    """Experts' matrices with their borders, bfloat16; its views are made once."""

    gate_up: torch.Tensor
    """[E, 2I + R, H + R]"""
    down: torch.Tensor
    """[E, H + Q, I + Q]"""
    hidden: int
    inner: int
    rank: int
    """The LoRA's rank, 0 for none: R and Q are what it takes rounded up."""
    gating: Gating = SILU
    biases: Biases | None = None

    @staticmethod
    def empty(experts: int, hidden: int, inner: int, rank: int, device: torch.device) -> BorderedMatrices:
        """Allocate the matrices of ``experts`` experts, with their borders 0."""
        more, less = border_widths(rank)
        shapes = (experts, 2 * inner + more, hidden + more), (experts, hidden + less, inner + less)
        gate_up, down = (torch.empty(each, dtype=torch.bfloat16, device=device) for each in shapes)
        gate_up[:, 2 * inner :].zero_()
        gate_up[:, :, hidden:].zero_()
        down[:, hidden:].zero_()
        down[:, :, inner:].zero_()
        return BorderedMatrices(gate_up, down, hidden, inner, rank)

    def like(self, gating: Gating, biases: Biases | None, count: int | None = None) -> BorderedMatrices:
        """The first ``count`` (None: all) of these matrices as those of a layer with its own gating."""
        sizes = self.hidden, self.inner, self.rank
        return BorderedMatrices(self.gate_up[:count], self.down[:count], *sizes, gating, biases)

    def of(self, first: int, end: int) -> BorderedMatrices:
        """Return those of some experts."""
        if (first, end) == (0, len(self.down)):
            return self
        some = slice(first, end)
        biases = None if self.biases is None else self.biases.of(some)
        return replace(self, gate_up=self.gate_up[some], down=self.down[some], biases=biases)

    @cached_property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate, up and down without borders."""
        gate_up, down = self.gate_up[:, :, : self.hidden], self.down[:, : self.hidden]
        gate, up = gate_up[:, : self.inner], gate_up[:, self.inner : 2 * self.inner]
        return gate, up, down[:, :, : self.inner]

    @cached_property
    def gate_up_above(self) -> torch.Tensor:
        """W and s B: [E, 2I, H + R]."""
        return self.gate_up[:, : 2 * self.inner]

    @cached_property
    def gate_up_below(self) -> torch.Tensor:
        """A: [E, R, H]."""
        return self.gate_up[:, 2 * self.inner :, : self.hidden]

    @cached_property
    def gate_up_left(self) -> torch.Tensor:
        """W and A, transposed: [E, H, 2I + R]."""
        return self.gate_up[:, :, : self.hidden].transpose(1, 2)

    @cached_property
    def gate_up_right(self) -> torch.Tensor:
        """s B, transposed: [E, R, 2I]."""
        return self.gate_up[:, : 2 * self.inner, self.hidden :].transpose(1, 2)

    @cached_property
    def down_above(self) -> torch.Tensor:
        """W and s B: [E, H, I + Q]."""
        return self.down[:, : self.hidden]

    @cached_property
    def down_below(self) -> torch.Tensor:
        """A: [E, Q, I]."""
        return self.down[:, self.hidden :, : self.inner]

    @cached_property
    def down_left(self) -> torch.Tensor:
        """W and A, transposed: [E, I, H + Q]."""
        return self.down[:, :, : self.inner].transpose(1, 2)

    @cached_property
    def down_right(self) -> torch.Tensor:
        """s B, transposed: [E, Q, H]."""
        return self.down[:, : self.hidden, self.inner :].transpose(1, 2)


@dataclass(slots=True)
class Activations:
    """Intermediate results of a part that its backward can use."""

    gate_up: torch.Tensor
    """[R, 2I]"""
    thin_x: torch.Tensor | None
    """z of x, [R, R']; None where x is gathered again anyway."""


def forward(
    w: BorderedMatrices,
    hidden: torch.Tensor,
    part: RowPart,
    dropout: Dropout | None = None,
    kept: list[Activations] | None = None,
) -> torch.Tensor:
    """Outputs of the part's experts, [R, H] by row, of ``hidden`` [T, H].

    What backward can take from here is added to ``kept``, where there is a list for it.
    """
    masks = _masks(w, part, dropout)
    x, _ = _inputs(w, hidden, part, masks)
    gate_up = _gate_up(w, x, part)
    if kept is not None:
        thin = None if masks or not w.rank else x[:, w.hidden :].contiguous()
        kept.append(Activations(gate_up, thin))
    del x
    h, _ = _activated(w, gate_up, part, masks)
    del gate_up
    y = by_row(h, w.down_above, part.ends, part.bounds)
    if w.biases is not None:
        operations.add_bias(y, w.biases.down, part.owners())
    return y


def backward(
    w: BorderedMatrices,
    hidden: torch.Tensor,
    d_out: torch.Tensor,
    weighing: RowWeights,
    part: RowPart,
    kept: Activations | None,
    dropout: Dropout | None,
    into: GradientTargets | None,
) -> torch.Tensor:
    """The gradient of hidden by row, [R, H]; the weights' goes to ``weighing``, and the LoRA's ``into``.

    ``d_out`` [T, H] is the gradient of the layer's output, and ``kept`` what forward left.
    """
    inner, ends = w.inner, part.ends
    masks = _masks(w, part, dropout)
    x = tokens = None
    if kept is None or kept.thin_x is None:
        x, apart = _inputs(w, hidden, part, masks)
        gate_up = _gate_up(w, x, part) if kept is None else kept.gate_up
        thin_x = x[:, w.hidden :]
        x_gate, x_up = apart or (x, x)
        del apart
    else:
        gate_up, thin_x, tokens = kept.gate_up, kept.thin_x, part.tokens
        x_gate = x_up = hidden
    if w.rank:
        d = operations.gather_thin(d_out, part.tokens, w.down_right, ends)
    else:
        d = operations.gather_rows(d_out, part.tokens, 0)
    more = None
    if w.biases is not None:
        more = operations.bias_products(d, w.biases.down, part.owners())
    d_h = _left(w.down_left, d, w.hidden, part, masks[2:])
    if not w.rank:
        d_gate_up = _activation_backward(gate_up, d_h, weighing, more, w)
        return by_row(d_gate_up, w.gate_up_left, ends, part.bounds)
    own = _activated(w, gate_up, part, masks) if masks else None  # its z isn't that of all of h
    d_gate_up, h = operations.activation_backward_thin(
        gate_up, d_h, weighing, w.gate_up_right, ends, w.down_below if own is None else None, more, w.gating
    )
    del d_h, gate_up, kept
    if into is not None:
        h, h_down = own or (h, None)
        assert h is not None
        seen = LoraInputs(x_gate, x_up, h if h_down is None else h_down, tokens)
        operations.lora_gradients(seen, thin_x, h, d, d_gate_up, weighing, ends, into)
        del seen, h_down
    del x, x_gate, x_up, thin_x, d, h, own  # the largest rows are still to come
    return _left(w.gate_up_left, d_gate_up, 2 * inner, part, masks[:2])


def _activation_backward(
    gate_up: torch.Tensor,
    d_h: torch.Tensor,
    weighing: RowWeights,
    more: torch.Tensor | None,
    w: BorderedMatrices,
) -> torch.Tensor:
    """``operations.activation_backward_thin`` without a LoRA."""
    h = operations.activation(gate_up, w.inner, 0, w.gating)
    by_row = weighing.by_row()
    d_gate_up, d_weights = operations.activation_backward(gate_up, d_h, h, by_row, w.inner, 0, w.gating)
    if more is not None:
        d_weights += more
    count = len(weighing.gradients)
    all_slots = torch.cat((weighing.gradients, d_weights.new_zeros(1)))  # the last one is padding's
    all_slots[weighing.slots] = d_weights
    weighing.gradients.copy_(all_slots[:count])
    return d_gate_up


def _left(
    left: torch.Tensor, d: torch.Tensor, width: int, part: RowPart, masks: tuple[Mask, ...]
) -> torch.Tensor:
    """``d`` times the left columns of bordered matrices, of which the first ``width`` rows are W's.

    ``left`` has them transposed.
    """
    if not masks:
        return by_row(d, left, part.ends, part.bounds)
    total = by_row(d[:, :width], left[:, :, :width], part.ends, part.bounds)
    thin = (d.shape[1] - width) // len(masks)
    parts = []
    for index in range(len(masks)):
        here = slice(width + index * thin, width + (index + 1) * thin)
        parts.append(by_row(d[:, here], left[:, :, here], part.ends, part.bounds))
    operations.add_kept(total, parts, masks)
    return total


def _masks(w: BorderedMatrices, part: RowPart, dropout: Dropout | None) -> tuple[Mask, ...]:
    """Return what gate, up and down keep of their inputs; nothing where they keep all."""
    if dropout is None or not w.rank:
        return ()
    return tuple(Mask(dropout, projection, part.slots) for projection in range(3))


def _inputs(
    w: BorderedMatrices, hidden: torch.Tensor, part: RowPart, masks: tuple[Mask, ...]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """x with its z behind it, [R, H + R']; and with dropout, what gate's and up's A had of x, [R, H] each."""
    size, (wide, half) = w.hidden, border_widths(w.rank)
    if not wide:
        return operations.gather_rows(hidden, part.tokens, 0), ()
    if not masks:
        return operations.gather_thin(hidden, part.tokens, w.gate_up_below, part.ends), ()
    x = operations.gather_rows(hidden, part.tokens, wide)
    seen = tuple(operations.keep(hidden, part.tokens, mask) for mask in masks[:2])
    for index, kept in enumerate(seen):
        first = index * half
        below = w.gate_up_below[:, first : first + half]
        x[:, size + first : size + first + half] = by_row(kept, below, part.ends, part.bounds)
    return x, seen


def _gate_up(w: BorderedMatrices, x: torch.Tensor, part: RowPart) -> torch.Tensor:
    """Gate and up of x, [R, 2I]."""
    gate_up = by_row(x, w.gate_up_above, part.ends, part.bounds)
    if w.biases is not None:
        operations.add_bias(gate_up, w.biases.gate_up, part.owners())
    return gate_up


def _activated(
    w: BorderedMatrices, gate_up: torch.Tensor, part: RowPart, masks: tuple[Mask, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h with its z behind it, [R, I + Q]; and with dropout, what down's A had of h, [R, I]."""
    inner, wide = w.inner, border_widths(w.rank)[1]
    if not masks and wide:
        return operations.activation_thin(gate_up, w.down_below, part.ends, w.gating), None
    h = operations.activation(gate_up, inner, wide, w.gating)
    if not masks:
        return h, None
    seen = operations.keep(h[:, :inner], None, masks[2])
    h[:, inner:] = by_row(seen, w.down_below, part.ends, part.bounds)
    return h, seen
