"""Which row of the sorted work belongs to which token: routing for grouped products.

Every token has K slots, one for each of its experts. Slots are sorted by expert, in the order in which the
experts are computed, and each expert's rows are padded to a multiple of ``PAD``, which grouped products over
rows (the LoRA's gradients) ask for. Rows of padding stand for token 0 with weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD = 16


@dataclass(frozen=True)
class Rows:
    """A group's share of the sorted rows."""

    tokens: torch.Tensor
    """[R] int64: the token of each row."""
    slots: torch.Tensor
    """[R] int64: its place in the flat [T * K]; T * K for padding."""
    ends: torch.Tensor
    """[E] int32 on the device: where each expert's rows end, counted from the group's first."""
    bounds: tuple[int, ...]
    """The same on the host, after a 0."""

    def owners(self) -> torch.Tensor:
        """[R] int64: each row's expert, counted from the group's first."""
        rows = torch.arange(len(self.tokens), dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, rows, right=True)


@dataclass(frozen=True)
class Routing:
    """R rows, sorted by expert and padded, of T tokens with K experts each."""

    tokens: torch.Tensor
    """[R] int64: the token of each row."""
    slots: torch.Tensor
    """[R] int64: its place in the flat [T * K] of weights; T * K for padding."""
    rows: torch.Tensor
    """[T, K] int64: the row of each of a token's slots."""
    ends: torch.Tensor
    """[E] int32 on the device: where each expert's rows end, in the order of computing."""
    bounds: tuple[int, ...]
    """The same on the host, after a 0: E + 1 numbers."""

    def of_experts(self, first: int, end: int) -> tuple[Rows, slice]:
        """The rows of the experts at places ``first`` to ``end``, and where they are among all."""
        start = self.bounds[first]
        where = slice(start, self.bounds[end])
        bounds = tuple(bound - start for bound in self.bounds[first : end + 1])
        tokens, slots = self.tokens[where], self.slots[where]
        return Rows(tokens, slots, self.ends[first:end] - start, bounds), where

    def row_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights`` [T, K] float32 by row: [R], 0 for padding."""
        flat = torch.cat((weights.reshape(-1), weights.new_zeros(1)))
        return flat[self.slots]


def route(ids: torch.Tensor, place: torch.Tensor) -> Routing:
    """The routing of ``ids`` [T, K]; ``place`` [E] int64 is each expert's place in the order of computing.

    Waits for the device once: products over a group of experts need their number of rows.
    Raises ``IndexError`` where an id is no expert's.
    """
    slots, experts = ids.numel(), len(place)
    flat = ids.reshape(-1)
    outside = ((flat < 0) | (flat >= experts)).any()
    at = place[flat.clamp(0, experts - 1)]
    sorted_at, order = at.sort(stable=True)
    # Where each expert's slots begin: bincount would wait for the device once more.
    first = torch.searchsorted(sorted_at, torch.arange(experts + 1, device=ids.device))
    before, counts = first[:-1], first.diff()
    *host, wrong = torch.cat((counts, outside[None])).tolist()
    if wrong:
        raise IndexError(f"topk_ids has an id outside 0 to {experts - 1}.")
    bounds = [0]
    for count in host:
        bounds.append(bounds[-1] + -(-count // PAD) * PAD)
    padded = (counts + PAD - 1) // PAD * PAD
    ends = padded.cumsum(0)
    starts = ends - padded
    row = starts[sorted_at] + torch.arange(slots, device=ids.device) - before[sorted_at]
    by_row = torch.full((bounds[-1],), slots, dtype=torch.int64, device=ids.device)
    by_row[row] = order
    rows = torch.empty(slots, dtype=torch.int64, device=ids.device)
    rows[order] = row
    tokens = (by_row // max(ids.shape[1], 1)).remainder(max(len(ids), 1))
    return Routing(tokens, by_row, rows.view(ids.shape), ends.int(), tuple(bounds))
