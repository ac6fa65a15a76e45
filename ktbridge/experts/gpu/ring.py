"""A ring of slots on the GPU, into which groups of experts are transferred before they are needed.

Forward visits the groups in order, backward in reverse. The next group that isn't there is transferred as
soon as a slot is free, and the slot that gives way is the one needed last (Belady's rule; the order of use is
known). So with S slots of N groups a pass of forward and backward moves 2 (N - S) groups: what is in the ring
at a turn is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ktbridge.experts.gpu.layout import Group

_NOW, _NEVER = -1, 1 << 60  # steps


class Arrival(Protocol):
    """An event that can be waited for, though it may be still to be recorded."""

    def wait(self) -> None:
        """Have the current stream wait for it."""


class Processes:
    """The processes that compute the same layers, each for its own rows: here this one alone."""

    place, count = 0, 1
    sharing = False
    """True while all of them transfer the same groups: each a part, which it gives to the others."""

    def took(self, index: int, forward: bool, turns: bool) -> None:
        """Note that ``Ring.take`` was called."""

    def gather(self, parts: torch.Tensor) -> None:
        """Fill ``parts`` [n] uint8, of which this process has its own, from others, in the current stream."""

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for what this process's GPU does with the others'."""
        event.synchronize()

    def average(self, gradient: torch.Tensor) -> None:
        """Put the mean over the processes, all of them in the same backward, in the place of a gradient."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ``tensor`` [E, ...], a gradient, that this process needs."""
        return tensor


class LinkMeter:
    """Bytes transferred, and seconds that the link was busy with them, from ``watch`` to ``transferred``."""

    def __init__(self) -> None:
        self._watched = False
        self._done: tuple[int, float] = (0, 0.0)
        self._coming: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def watch(self) -> None:
        """Begin to count."""
        self._watched = True

    def transferred(self) -> tuple[int, float]:
        """Return bytes and seconds since ``watch`` of the copies that have ended, and stop counting."""
        total, seconds = self._done
        while self._coming and self._coming[0][2].query():
            size, begun, ended = self._coming.popleft()
            total, seconds = total + size, seconds + begun.elapsed_time(ended) / 1000
        self._watched, self._done = False, (0, 0.0)
        self._coming.clear()
        return total, seconds

    def begin(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """The event before a copy in ``stream``; None where nobody watches."""
        if not self._watched:
            return None
        return stream.record_event(torch.cuda.Event(enable_timing=True))

    def end(self, size: int, begun: torch.cuda.Event | None, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """The event behind that copy, of ``size`` bytes."""
        if begun is None:
            return stream.record_event()
        ended = stream.record_event(torch.cuda.Event(enable_timing=True))
        self._coming.append((size, begun, ended))
        return ended

    def add(self, size: int, seconds: float) -> None:
        """Count a copy that was made at once."""
        if self._watched:
            self._done = self._done[0] + size, self._done[1] + seconds


class Copier:
    """Moves a group's bytes to the device, or this one's part of them where ``processes`` share."""

    def __init__(self, link: LinkMeter | None = None) -> None:
        self.link = link or LinkMeter()
        self.processes = Processes()

    @property
    def can_share(self) -> bool:
        """Return whether it may transfer parts, in the order of calls."""
        return True

    def start(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> Arrival:
        """Begin to copy into ``slot``, once the event ``after`` (or None) has come; return its end.

        Copies are made in the order of the calls. An error may be raised here or by the event's ``wait``.
        """
        raise NotImplementedError

    def extend(self, groups: Iterable[Group]) -> None:
        """Prepare to copy ``groups``, too: nothing, unless a copier was made for certain groups."""

    def close(self) -> None:
        """Let go of threads and registered pages, once what was started has been copied. Again: nothing."""

    def abandon(self) -> None:
        """Leave everything as it is: the process ends, and the device may wait for others that don't come."""

    def release_pages(self) -> None:
        """Let go of registered pages alone, if there are any; waits for no thread. Again: nothing."""


@dataclass(eq=False)
class _Slot:
    buffer: torch.Tensor
    holds: int | None = None
    ready: Arrival | None = None
    """The event after which its bytes are there."""
    free: torch.cuda.Event | None = None
    """The event after which they have been used."""
    busy: bool = False
    """True between ``take`` and ``give_back``."""
    used: bool = True
    """False from the start of a copy until its bytes are taken."""


@dataclass
class Ring:
    """``groups`` in the order of forward; ``count`` slots of ``slot_bytes`` each on ``device``."""

    groups: list[Group]
    slot_bytes: int
    count: int
    device: torch.device
    copier: Copier
    transfers: int = 0
    """Groups transferred so far."""
    _slots: list[_Slot] = field(default_factory=list)
    _there: dict[int, _Slot] = field(default_factory=dict)
    """The slot of each group that is in one."""
    _orders: dict[tuple[int, bool, bool], dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
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

        Raises what the copy raised; the group is transferred again when it is asked for again.
        """
        self.copier.processes.took(index, forward, turns)
        slot = self._there.get(index)
        if slot is None:
            slot = self._load(index, _NOW, self._order(index, forward, turns))
        assert slot is not None, "a slot that was taken has not been given back"
        slot.busy = True
        try:
            self._ahead(index, forward, turns)
            slot.used = True
            if slot.ready is not None:
                slot.ready.wait()
        except BaseException:
            slot.busy = False
            self._forget(slot)
            raise
        return slot.buffer

    def give_back(self, index: int, forward: bool, turns: bool) -> None:
        """Free the slot of group ``index`` once the current stream has done what it was asked so far."""
        slot = self._there[index]
        slot.busy = False
        slot.free = self._event()
        self._ahead(index, forward, turns)

    def forget(self) -> None:
        """Transfer each group anew when it is asked for."""
        for slot in self._slots:
            self._forget(slot)

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
        latest.holds, latest.used = coming, False
        self._there[coming] = latest
        self.transfers += 1
        return latest

    def _forget(self, slot: _Slot) -> None:
        if slot.holds is not None:
            del self._there[slot.holds]
        slot.holds = None
        if not slot.used and slot.ready is not None:  # it may be still coming, in several streams
            with suppress(Exception):
                slot.ready.wait()
            slot.free, slot.used = self._event(), True

    def _order(self, now: int, forward: bool, turns: bool) -> dict[int, int]:
        """Return in how many steps after ``now`` each group is needed, soonest first."""
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
