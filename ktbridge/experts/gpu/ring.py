"""A ring of slots on the GPU, into which groups of experts cross before they are needed.

Forward visits the groups in order, backward in reverse. Whatever is needed next and isn't there crosses as
soon as a slot is free, and the slot that gives way is the one needed last (Belady's rule; the order of use is
known). So with S slots of N groups a pass of forward and backward moves 2 (N - S) groups: what is in the ring
at a turn is used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ktbridge.experts.gpu.layout import Group

_NOW, _NEVER = -1, 1 << 60  # steps


class Arrival(Protocol):
    """What can be waited for: an event, or one that is still to be recorded."""

    def wait(self) -> None:
        """Have the current stream wait for it."""


class Meter(Protocol):
    """Counts what crosses."""

    def watch(self) -> None:
        """Begin to count."""

    def crossed(self) -> tuple[int, float]:
        """Bytes, and seconds that the link was busy with them, since the last call."""


class Copier(Protocol):
    """Moves a group's bytes to the device."""

    @property
    def link(self) -> Meter:
        """Return what has crossed."""

    def extend(self, groups: Iterable[Group]) -> None:
        """Be able to copy ``groups``, too, which need not be those that it was made for."""

    def start(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> Arrival:
        """Begin to copy into ``slot``, once the event ``after`` (or None) has come; returns its end.

        Copies are made in the order of the calls. An error may be raised here or by the event's ``wait``.
        """

    def close(self) -> None:
        """Let go of threads and registered pages, once what was started has been copied. Again: nothing."""


@dataclass(eq=False)
class _Slot:
    buffer: torch.Tensor
    holds: int | None = None
    ready: Arrival | None = None
    """The event after which its bytes are there."""
    free: torch.cuda.Event | None = None
    """The event after which they have been used."""
    busy: bool = False
    """Whether it is between ``take`` and ``give_back``."""


@dataclass
class Ring:
    """``groups`` in the order of forward; ``count`` slots of ``slot_bytes`` each on ``device``."""

    groups: list[Group]
    slot_bytes: int
    count: int
    device: torch.device
    copier: Copier
    crossings: int = 0
    """How many groups have crossed so far."""
    _slots: list[_Slot] = field(default_factory=list)
    _there: dict[int, _Slot] = field(default_factory=dict)
    """The slot of each group that is in one."""
    _orders: dict[tuple[int, bool, bool], dict[int, int]] = field(default_factory=dict)

    bytes: int = field(init=False)
    """What all slots take."""

    def __post_init__(self) -> None:
        self.bytes = self.slot_bytes * self.count
        self._make_slots()

    def _make_slots(self) -> None:
        self._slots = [
            _Slot(torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device))
            for _ in range(min(max(self.count, 1), len(self.groups)))
        ]
        for slot in self._slots:
            # The allocator gives memory that what is queued in this stream may still be using.
            slot.free = self._event()

    def take(self, index: int, forward: bool, turns: bool) -> torch.Tensor:
        """The slot that holds group ``index``, for work in the current stream; ``give_back`` it after.

        ``forward``: on the way to higher numbers. ``turns``: backward will follow, so that the last groups
        are needed first; without it the next pass begins at group 0. Groups may be asked for in any order,
        one at a time; only the time that it takes depends on it.

        Raises what the copy raised; the group crosses again when it is asked for again.
        """
        slot = self._there.get(index)
        if slot is None:
            slot = self._load(index, _NOW, self._order(index, forward, turns))
        assert slot is not None, "a slot that was taken has not been given back"
        slot.busy = True
        try:
            self._ahead(index, forward, turns)
            if slot.ready is not None:
                slot.ready.wait()
        except BaseException:
            slot.busy = False
            self._forget(slot)
            raise
        return slot.buffer

    def give_back(self, index: int, forward: bool, turns: bool) -> None:
        """What the current stream was asked to do with group ``index`` so far is all that needs its slot."""
        slot = self._there[index]
        slot.busy = False
        slot.free = self._event()
        self._ahead(index, forward, turns)

    def empty(self) -> None:
        """Let go of all slots, once what is being copied into them has come; no group is there any more."""
        for slot in self._slots:
            if slot.ready is not None:
                with suppress(Exception):  # nobody waits for its bytes now
                    slot.ready.wait()
        self._slots, self._there = [], {}

    def _event(self) -> torch.cuda.Event | None:
        """The event that the current stream has come so far; None on the CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def _ahead(self, index: int, forward: bool, turns: bool) -> None:
        """Start the copies that there are slots for, soonest needed first."""
        order = self._order(index, forward, turns)
        for coming, step in order.items():
            if coming not in self._there and not self._load(coming, step, order):
                return

    def _load(self, coming: int, step: int, order: dict[int, int]) -> _Slot | None:
        """Start the copy of ``coming``, needed at ``step``, in the slot of what is needed last.

        None where all slots are in use, or hold what is needed sooner.
        """
        free = [slot for slot in self._slots if not slot.busy]
        if not free:
            return None
        latest = max(free, key=lambda slot: _NEVER if slot.holds is None else order[slot.holds])
        if latest.holds is not None and step >= order[latest.holds]:
            return None
        self._forget(latest)  # until the copy has begun
        latest.ready = self.copier.start(self.groups[coming], latest.buffer, latest.free)
        latest.holds = coming
        self._there[coming] = latest
        self.crossings += 1
        return latest

    def _forget(self, slot: _Slot) -> None:
        if slot.holds is not None:
            del self._there[slot.holds]
        slot.holds = None

    def _order(self, now: int, forward: bool, turns: bool) -> dict[int, int]:
        """When each group is needed after ``now``, in steps from it, soonest first."""
        known = self._orders.get((now, forward, turns))
        if known is not None:
            return known
        last = len(self.groups)
        if forward:
            order = [*range(now + 1, last)]
            order += [*range(last - 1, -1, -1)] if turns else [*range(now + 1)]
        else:
            order = [*range(now - 1, -1, -1), *range(last)]
        first: dict[int, int] = {}
        for step, index in enumerate(order):
            first.setdefault(index, step)
        self._orders[now, forward, turns] = first
        return first
