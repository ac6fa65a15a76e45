"""Host memory to the device: straight from the checkpoint's pages, or through pinned memory.

Pages that are registered with the driver (``register``) cross at the link's full pace without a copy in RAM.
Where that is refused, threads copy into a ring of pinned buffers first.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ktbridge.experts.gpu.layout import Group, Span
from ktbridge.machine import read_machine
from ktbridge.units import size_text

_PAGE = 4096
_OF_MEMORY = 0.9  # the part of RAM that registered pages may take: nothing moves them out
_READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY
_STAGING_THREADS = 8
_PIECE = 32 << 20  # bytes of one copy: what else crosses needn't wait for a whole group


def host_bytes(address: int, size: int) -> torch.Tensor:
    """[size] uint8 of host memory, which the caller keeps alive."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


class InPlace:
    """Copies at once, for a device that is the CPU."""

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> None:
        for span in group.spans:
            slot[span.offset : span.offset + span.bytes] = host_bytes(span.address, span.bytes)

    def close(self) -> None:
        """Nothing is held."""


class Registered:
    """Copies by the GPU itself from registered pages: ``registration``'s, or whoever's they are."""

    def __init__(self, device: torch.device, registration: Registration | None = None) -> None:
        self._stream = torch.cuda.Stream(device)
        self._registration = registration

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> Any:
        slot.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for source, offset in _sources(group):
                slot[offset : offset + len(source)].copy_(source, non_blocking=True)
            return self._stream.record_event()

    def close(self) -> None:
        """Let go of the registered pages: before the checkpoint's maps go."""
        if self._registration is not None:
            self._registration.close()


class Staged:
    """Copies through ``buffers`` pinned buffers that ``threads`` threads fill, until ``close``."""

    def __init__(self, device: torch.device, threads: int, buffers: int = 4) -> None:
        self._stream = torch.cuda.Stream(device)
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "ktbridge-copy")
        self._pinned = [
            torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)
        ]
        self._sent: list[Any] = [None] * buffers
        self._next = 0
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ktbridge-stage")
        self._thread.start()

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> _Promise:
        promise = _Promise()
        self._work.put((group, slot, after, promise))
        return promise

    def close(self) -> None:
        """End the threads, once what was started has been copied. Nothing may be started after it."""
        if not self._thread.is_alive():
            return
        self._work.put(None)
        self._thread.join()
        self._pool.shutdown()
        self._stream.synchronize()

    def _run(self) -> None:
        torch.cuda.set_device(self._stream.device)
        while (work := self._work.get()) is not None:
            group, slot, after, promise = work
            try:
                promise.keep(self._copy(group, slot, after))
            except BaseException as error:  # raised where the copy is waited for
                promise.fail(error)
            del work, group, slot, after, promise  # not held while there is nothing to do

    def _copy(self, group: Group, slot: torch.Tensor, after: Any) -> Any:
        slot.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for source, offset in _sources(group):
                which = self._next = (self._next + 1) % len(self._pinned)
                if self._sent[which] is not None:
                    self._sent[which].synchronize()
                pinned = self._pinned[which][: len(source)]
                self._fill(pinned, source)
                slot[offset : offset + len(source)].copy_(pinned, non_blocking=True)
                # Waited for asleep: the threads that copy want the core.
                self._sent[which] = torch.cuda.Event(blocking=True)
                self._sent[which].record(self._stream)
            return self._stream.record_event()

    def _fill(self, pinned: torch.Tensor, source: torch.Tensor) -> None:
        """``source`` into ``pinned``, a share in each thread; memmove, as torch would start its own."""
        size, into, out_of = len(source), pinned.data_ptr(), source.data_ptr()
        share = -(-size // self.threads)

        def copy(at: int) -> None:
            ctypes.memmove(into + at, out_of + at, min(share, size - at))

        list(self._pool.map(copy, range(0, size, share)))


class _Promise:
    """An event that another thread will record."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def keep(self, event: Any) -> None:
        self._event = event
        self._there.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._there.set()

    def wait(self) -> None:
        """Have the current stream wait for the event."""
        self._there.wait()
        if self._error is not None:
            raise self._error
        self._event.wait()


@functools.lru_cache(maxsize=4096)
def _sources_of(spans: tuple[Span, ...]) -> tuple[tuple[torch.Tensor, int], ...]:
    return tuple(
        (host_bytes(span.address + at, min(_PIECE, span.bytes - at)), span.offset + at)
        for span in spans
        for at in range(0, span.bytes, _PIECE)
    )


def _sources(group: Group) -> tuple[tuple[torch.Tensor, int], ...]:
    """Host bytes and their place in the slot, in pieces."""
    return _sources_of(group.spans)


class Registration:
    """Host pages that the GPU may read by itself, until ``close``."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.bytes = 0

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
    spans = [span for group in groups for span in group.spans]
    if too_much := more_than_memory(spans, read_machine().usable_memory):
        return too_much
    if not pages_are_ours(spans):
        return "the experts are in memory of this process whose pages hold other data too"
    done = Registration()
    torch.zeros(1, device="cuda")  # this thread has a context from here on
    for address, size in regions(spans):
        code = _driver().cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_READ_ONLY)
        )
        if code != 0:
            done.close()
            return _reason(code)
        done.regions.append((address, size))
        done.bytes += size
    return done


def more_than_memory(spans: Sequence[Span], memory: int | None) -> str:
    """Why so many pages can't all stay in ``memory`` bytes, as registered ones do; "" if they can."""
    whole = sum(size for _, size in regions(spans))
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


def pages_are_ours(spans: Sequence[Span]) -> bool:
    """Whether the pages of ``spans`` hold experts alone: they are a file's, or begin and end with a span."""
    files = _file_maps()
    ends = {span.address for span in spans} | {span.address + span.bytes for span in spans}
    for address, size in regions(spans):
        if any(start <= address and address + size <= end for start, end in files):
            continue
        if address not in ends or address + size not in ends:
            return False
    return True


def _file_maps() -> list[tuple[int, int]]:
    """Start and end of this process's maps of files, neighbouring ones of one file joined."""
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


def regions(spans: Sequence[Span]) -> list[tuple[int, int]]:
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


def copier_for(
    groups: list[Group], device: torch.device
) -> tuple[InPlace | Registered | Staged, str]:
    """What moves ``groups`` to ``device``, to be closed by the caller, and how it does, in words."""
    if device.type == "cpu":
        return InPlace(), "copied in memory"
    done = register(groups)
    if isinstance(done, Registration):
        return Registered(device, done), f"read in place ({size_text(done.bytes)} registered)"
    made = copied_once(device)
    return made, f"copied through pinned memory by {made.threads} threads: {done}"


def copied_once(device: torch.device) -> Staged:
    """What copies without registering pages, which would stay in RAM until the run ends."""
    return Staged(device, min(_STAGING_THREADS, torch.get_num_threads()))
