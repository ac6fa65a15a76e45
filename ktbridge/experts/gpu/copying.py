"""Host memory to the device: straight from the checkpoint's pages, or through pinned memory.

Pages that are registered with the driver (``register``) are read at the link's full pace, without a copy in
RAM. Where that is refused, threads copy into a ring of pinned buffers first.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import torch

from ktbridge.experts.gpu.layout import ALIGNED, CopySpan, Group
from ktbridge.experts.gpu.ring import Arrival, Copier, LinkMeter, Processes
from ktbridge.files.sizes import size_text
from ktbridge.machine import read_machine

_PAGE = 4096
_OF_MEMORY = 0.9  # the part of RAM that registered pages may take: nothing moves them out
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
_STAGING_THREADS = 8
_PIECE = 32 << 20  # bytes of one copy: other transfers needn't wait for a whole group
_DIRECT = 128 << 20  # the same where Python starts each: 1,300 of 32 MB in a step took it 36 ms, by samples


def view_host_memory(address: int, size: int) -> torch.Tensor:
    """[size] uint8 of host memory, which the caller keeps alive."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


class _Done:
    def wait(self) -> None:
        """Return: the copy was made at once."""


class HostCopier(Copier):
    """Copies at once, for a device that is the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._sources = _Sources()

    def start(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> _Done:
        began = time.perf_counter()
        for source, offset in self._sources.of(group, self.processes):
            slot[offset : offset + len(source)] = source
        self.link.add(group.bytes, time.perf_counter() - began)
        if self.processes.sharing:
            self.processes.gather(_parts(group, slot, self.processes))
        return _Done()


class DirectCopier(Copier):
    """Copies by the GPU itself from registered pages: ``registration``'s, or whoever's they are.

    Groups that ``extend`` could not register are copied through pinned memory.
    """

    def __init__(self, device: torch.device, registration: Registration | None = None) -> None:
        super().__init__()
        self._stream, self._gathering = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._registration = registration
        self._sources = _Sources(piece=_DIRECT)
        self._refused: WeakSet[Group] = WeakSet()
        self._staged: StagedCopier | None = None

    def start(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> Arrival:
        processes = self.processes
        if group in self._refused and self._staged is not None:
            return self._staged.start(group, slot, after)
        slot.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            begun = self.link.begin(self._stream)
            for source, offset in self._sources.of(group, processes):
                slot[offset : offset + len(source)].copy_(source, non_blocking=True)
            ended = self.link.end(group.bytes, begun, self._stream)
        if not processes.sharing:
            return ended
        slot.record_stream(self._gathering)
        with torch.cuda.stream(self._gathering):  # the link goes on with the next group meanwhile
            self._gathering.wait_event(ended)
            processes.gather(_parts(group, slot, processes))
            return self._gathering.record_event()

    def extend(self, groups: Iterable[Group]) -> None:
        """Register ``groups``, too, or copy them through pinned memory."""
        done = self._registration
        if done is None:
            return
        new = [group for group in groups if group not in self._refused and not done.holds(group)]
        if not new:
            return
        reason = extend_registration(done, new)
        self._sources = _Sources((edge for at, size in done.regions for edge in (at, at + size)), _DIRECT)
        if reason:
            self._refused.update(new)
            self._staged = self._staged or make_staged_copier(self._stream.device, self.link)

    def close(self) -> None:
        """Let go of the registered pages: before the checkpoint's maps go."""
        if self._staged is not None:
            self._staged.close()
        self.release_pages()

    @property
    def can_share(self) -> bool:
        return not self._refused

    def abandon(self) -> None:
        self._registration = None

    def release_pages(self) -> None:
        if self._registration is not None:
            with torch.cuda.device(self._stream.device):  # garbage is collected in any thread
                self._registration.close()


class StagedCopier(Copier):
    """Copies through ``buffers`` pinned buffers that ``threads`` threads fill, until ``close``."""

    def __init__(
        self, device: torch.device, threads: int, buffers: int = 4, link: LinkMeter | None = None
    ) -> None:
        super().__init__(link)
        self._stream = torch.cuda.Stream(device)
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "ktbridge-copy")
        here = (self._stream.device,)
        self._stage = ThreadPoolExecutor(1, "ktbridge-stage", torch.cuda.set_device, here)
        self._pinned = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)]
        self._sent: list[torch.cuda.Event | None] = [None] * buffers
        self._sources = _Sources()
        self._next = 0

    def start(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> _Staging:
        return _Staging(self._stage.submit(self._copy, group, slot, after))

    @property
    def can_share(self) -> bool:
        return False

    def close(self) -> None:
        """End the threads, once what was started has been copied. Nothing may be started after it."""
        self._stage.shutdown()
        self._pool.shutdown()
        self._stream.synchronize()

    def _copy(self, group: Group, slot: torch.Tensor, after: torch.cuda.Event | None) -> torch.cuda.Event:
        slot.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            begun = self.link.begin(self._stream)
            for source, offset in self._sources.of(group, self.processes):
                which = self._next = (self._next + 1) % len(self._pinned)
                if (before := self._sent[which]) is not None:
                    before.synchronize()
                pinned = self._pinned[which][: len(source)]
                self._fill(pinned, source)
                slot[offset : offset + len(source)].copy_(pinned, non_blocking=True)
                # Waited for asleep: the threads that copy want the core.
                self._sent[which] = sent = torch.cuda.Event(blocking=True)
                sent.record(self._stream)
            return self.link.end(group.bytes, begun, self._stream)

    def _fill(self, pinned: torch.Tensor, source: torch.Tensor) -> None:
        """``source`` into ``pinned``, a share in each thread; memmove, as torch would start its own."""
        size, into, out_of = len(source), pinned.data_ptr(), source.data_ptr()
        share = -(-size // self.threads)

        def copy(at: int) -> None:
            ctypes.memmove(into + at, out_of + at, min(share, size - at))

        list(self._pool.map(copy, range(0, size, share)))


class _Staging:
    """An event that another thread will record."""

    def __init__(self, recorded: Future[torch.cuda.Event]) -> None:
        self._recorded = recorded

    def wait(self) -> None:
        """Have the current stream wait for the event. Raises what kept the thread from recording it."""
        self._recorded.result().wait()


def _share(group: Group, processes: Processes) -> int:
    """Bytes of ``group`` that each of the processes transfers for all; the few behind them are everyone's."""
    return group.bytes // (ALIGNED * processes.count) * ALIGNED


def _parts(group: Group, slot: torch.Tensor, processes: Processes) -> torch.Tensor:
    """The parts of ``group`` in its ``slot``, in the order of the processes."""
    return slot[: _share(group, processes) * processes.count]


def _own(
    pieces: Iterable[tuple[torch.Tensor, int]], group: Group, processes: Processes
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield this process's part of ``pieces`` of the group, and what is in nobody's."""
    share = _share(group, processes)
    own = (share * processes.place, share * (processes.place + 1)), (share * processes.count, group.bytes)
    for source, offset in pieces:
        for first, last in own:
            begin, end = max(first, offset), min(last, offset + len(source))
            if begin < end:
                yield source[begin - offset : end - offset], begin


class _Sources:
    """Groups' host bytes and their place in the slot, in pieces of ``piece`` bytes at most.

    They end at the addresses ``cuts``: no copy may lie in two registrations, which the driver refuses.
    """

    def __init__(self, cuts: Iterable[int] = (), piece: int = _PIECE) -> None:
        self._cuts, self._piece = sorted(set(cuts)), piece
        self._known: dict[bool, WeakKeyDictionary[Group, list[tuple[torch.Tensor, int]]]] = {
            False: WeakKeyDictionary(),
            True: WeakKeyDictionary(),
        }

    def of(self, group: Group, processes: Processes) -> list[tuple[torch.Tensor, int]]:
        """Return what this process transfers: all, or its part where they share."""
        known = self._known[processes.sharing]
        found = known.get(group)
        if found is None:
            found = [
                (view_host_memory(span.address + start, end - start), span.offset + start)
                for span in group.spans
                for start, end in pairwise(self._edges(span))
            ]
            known[group] = found = [*_own(found, group, processes)] if processes.sharing else found
        return found

    def _edges(self, span: CopySpan) -> list[int]:
        cuts = (cut - span.address for cut in self._cuts)
        within = {cut for cut in cuts if 0 < cut < span.bytes}
        return sorted({*range(0, span.bytes, self._piece), span.bytes, *within})


class Registration:
    """Host pages that the GPU may read by itself, until ``close``."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        """(address, bytes) of each, in no order."""

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.regions)

    def holds(self, group: Group) -> bool:
        """Return whether all pages of ``group`` are registered."""
        return not subtract_regions(page_regions(group.spans), self.regions)

    def close(self) -> None:
        """Wait for the device and let go of the pages. Again: nothing."""
        if not self.regions:
            return
        torch.cuda.synchronize()  # copies out of them may be under way
        for address, _ in self.regions:
            _driver().cuMemHostUnregister(ctypes.c_void_p(address))
        self.regions = []


def register(groups: Iterable[Group]) -> Registration | str:
    """Register the pages of all groups, read only; where that can't be done, the reason.

    All or nothing. A map must not go away before ``Registration.close``. Pages that hold anything else are
    left alone: a copy whose memory is registered in part is an error of CUDA's, whoever makes it.
    """
    done = Registration()
    return extend_registration(done, groups) or done


def extend_registration(done: Registration, groups: Iterable[Group]) -> str:
    """Register the pages of ``groups`` that are not in ``done``, too; "", or why that can't be done."""
    spans = [span for group in groups for span in group.spans]
    if too_much := memory_obstacle(spans, read_machine().usable_memory, done.bytes):
        return too_much
    if not are_expert_pages(spans):
        return "the experts are in memory of this process whose pages hold other data too"
    torch.zeros(1, device="cuda")  # this thread has a context from here on
    more: list[tuple[int, int]] = []
    for address, size in subtract_regions(page_regions(spans), done.regions):
        code = _driver().cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_READ_ONLY)
        )
        if code != 0:
            for each, _ in more:
                _driver().cuMemHostUnregister(ctypes.c_void_p(each))
            return _reason(code)
        more.append((address, size))
    done.regions += more
    return ""


def subtract_regions(
    wanted: Sequence[tuple[int, int]], there: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return what of the regions ``wanted`` isn't in those that are ``there``."""
    left = []
    taken = sorted(there)
    for address, size in wanted:
        start, end = address, address + size
        for other, length in taken:
            if other + length <= start or other >= end:
                continue
            if other > start:
                left.append((start, other - start))
            start = other + length
        if start < end:
            left.append((start, end - start))
    return left


def memory_obstacle(spans: Sequence[CopySpan], memory: int | None, before: int = 0) -> str:
    """Return why these pages and ``before`` bytes can't all stay in ``memory`` bytes; "" if they can.

    Registered ones do.
    """
    whole = before + sum(size for _, size in page_regions(spans))
    if memory is None or whole <= _OF_MEMORY * memory:
        return ""
    return f"{size_text(whole)} of experts can't stay in {size_text(memory)} of memory"


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver itself: a refusal by the runtime would be raised by the next kernel that torch starts."""
    return ctypes.CDLL("libcuda.so.1")


def _reason(code: int) -> str:
    text = ctypes.c_char_p()
    if _driver().cuGetErrorString(code, ctypes.byref(text)) != 0 or text.value is None:
        return f"error {code} of the driver"
    return text.value.decode()


def are_expert_pages(spans: Sequence[CopySpan]) -> bool:
    """Return whether pages of ``spans`` hold experts alone: a file's, or pages between a span's ends."""
    files = _file_maps()
    ends = {span.address for span in spans} | {span.address + span.bytes for span in spans}
    for address, size in page_regions(spans):
        if any(start <= address and address + size <= end for start, end in files):
            continue
        if address not in ends or address + size not in ends:
            return False
    return True


def _file_maps() -> list[tuple[int, int]]:
    """Start and end of this process's maps of files, neighboring ones of one file joined."""
    found: list[tuple[int, int]] = []
    last = ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode = line.split()[:5]
        start, end = (int(number, 16) for number in span.split("-"))
        if inode == "0":
            continue
        if found and found[-1][1] == start and last == inode:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
        last = inode
    return found


def page_regions(spans: Sequence[CopySpan]) -> list[tuple[int, int]]:
    """(address, bytes) of whole pages that cover all spans, joined where they touch, in rising order."""
    found: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda span: span.address):
        start = span.address // _PAGE * _PAGE
        end = -(-(span.address + span.bytes) // _PAGE) * _PAGE
        if found and start <= found[-1][0] + found[-1][1]:
            first = found[-1][0]
            found[-1] = (first, max(end, first + found[-1][1]) - first)
        else:
            found.append((start, end - start))
    return found


def make_copier(
    groups: list[Group], device: torch.device
) -> tuple[HostCopier | DirectCopier | StagedCopier, str]:
    """Return what moves ``groups`` to ``device``, to be closed by the caller, and how it does, in words."""
    if device.type == "cpu":
        return HostCopier(), "copied in memory"
    done = register(groups)
    if isinstance(done, Registration):
        return DirectCopier(device, done), f"read in place ({size_text(done.bytes)} registered)"
    made = make_staged_copier(device)
    return made, f"copied through pinned memory by {made.threads} threads: {done}"


def make_staged_copier(device: torch.device, link: LinkMeter | None = None) -> StagedCopier:
    """Return what copies without registering pages, which would stay in RAM until the run ends."""
    return StagedCopier(device, min(_STAGING_THREADS, torch.get_num_threads()), link=link)
