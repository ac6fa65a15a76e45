"""Which row of the sorted work belongs to which token: routing for grouped products.

Every token has K slots, one for each of its experts. Slots are sorted by expert, in the order in which the
experts are computed, and each expert's rows are padded to a multiple of ``PAD``, which grouped products over
rows ask for. Rows of padding stand for token 0 with weight 0, as do rows behind the last expert's: how many
rows there are is on the device alone, so arrays have the most that there can be (``operations.rows_for``).

Where a layer is computed in parts, the host needs the number of rows of each: then they are copied to it, and
waited for when the first part is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ktbridge.experts.gpu.operations import Routed


@dataclass(eq=False, slots=True)
class Part:
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
    """Where its rows are among all; None: they are all there are."""
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
    """Rows, sorted by expert and padded, of T tokens with K experts each."""

    def __init__(self, routed: Routed) -> None:
        self.tokens, self.slots = routed.tokens, routed.slots
        self.rows, self.ends = routed.rows, routed.ends
        self._host: torch.Tensor | None = None
        self._there: torch.cuda.Event | None = None
        self._bounds: tuple[int, ...] | None = None
        self._parts: dict[tuple[tuple[int, ...], int | None], tuple[tuple[Part, ...], ...]] = {}

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

    def parts(self, starts: tuple[int, ...], most: int | None) -> tuple[tuple[Part, ...], ...]:
        """The parts of each group: these begin at the places ``starts``, and are cut at ``most`` rows.

        ``starts`` ends with the number of experts. An expert's rows are not cut: one that has more than
        ``most`` is a part of its own. It has at most T, padded, where no token has it twice.
        """
        key = starts, most
        found = self._parts.get(key)
        if found is None:
            if self.at_once(starts, most):
                part = Part(0, starts[1], self.tokens, self.slots, self.ends, None)
                found = ((part,),)
            else:
                found = tuple(tuple(self._cut(*ends, most)) for ends in pairwise(starts))
            self._parts[key] = found
        return found

    def _cut(self, first: int, end: int, most: int | None) -> Iterator[Part]:
        """The parts of the experts at the places ``first`` to ``end``."""
        bounds = self.bounds
        for place in range(first + 1, end + 1):
            if place == end or (most is not None and bounds[place + 1] - bounds[first] > most):
                yield self._part(first, place)
                first = place

    def _part(self, first: int, end: int) -> Part:
        bounds = self.bounds
        start, stop = bounds[first], bounds[end]
        ends = self.ends[first:end]
        return Part(
            first,
            end,
            self.tokens[start:stop],
            self.slots[start:stop],
            ends - start if start else ends,
            slice(start, stop),
            tuple(bound - start for bound in bounds[first : end + 1]),
        )


class OutsideIds:
    """Ids that are no expert's: seen by the device, told to the host when it needs no waiting."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._found: list[torch.Tensor] = []
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def note(self, outside: torch.Tensor, last: bool) -> None:
        """Remember a call's flag [1]; ``last``: of a pass, so that the host is told soon.

        Raises ``IndexError`` where a pass before had such an id.
        """
        if outside.device.type == "cpu":
            self._raise(int(outside))
            return
        if self._coming is not None and self._coming[1].query():
            self.check()
        self._found.append(outside)
        if last or len(self._found) >= _FLAGS:
            self.look()

    def look(self) -> None:
        """Begin to tell the host what was found so far."""
        if not self._found:
            return
        found = torch.cat(self._found).sum(dtype=torch.int32)
        self._found.clear()
        if self._coming is not None:
            self.check()
        host = torch.empty((), dtype=torch.int32, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        self._coming = host, torch.cuda.current_stream(found.device).record_event()

    def check(self) -> None:
        """Raise ``IndexError`` if the last ``look`` found something; waits for what it looked at."""
        if self._coming is None:
            return
        host, there = self._coming
        there.synchronize()
        self._coming = None
        self._raise(int(host))

    def _raise(self, found: int) -> None:
        if found:
            raise IndexError(f"topk_ids has an id outside 0 to {self._experts - 1}.")


_FLAGS = 256  # kept at most before the host is told
