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
from typing import Any

import torch

from ktbridge.experts.gpu.layout import Group, Span

_PAGE = 4096
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_PIECE = 32 << 20  # bytes of one copy: what else crosses needn't wait for a whole group


def host_bytes(address: int, size: int) -> torch.Tensor:
    """[size] uint8 of host memory, which the caller keeps alive."""
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


class InPlace:
    """Copies at once, for a device that is the CPU."""

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> None:
        for span in group.spans:
            slot[span.offset : span.offset + span.bytes] = host_bytes(span.address, span.bytes)


class Registered:
    """Copies by the GPU itself from pages that ``register`` has registered."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> Any:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for source, offset in _sources(group):
                slot[offset : offset + len(source)].copy_(source, non_blocking=True)
            return self._stream.record_event()


class Staged:
    """Copies through pinned buffers that ``threads`` threads fill."""

    def __init__(self, device: torch.device, threads: int, buffers: int = 4) -> None:
        self._stream = torch.cuda.Stream(device)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "ktbridge-copy")
        self._pinned = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(buffers)]
        self._sent: list[Any] = [None] * buffers
        self._next = 0
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="ktbridge-stage").start()

    def start(self, group: Group, slot: torch.Tensor, after: Any) -> _Promise:
        promise = _Promise()
        self._work.put((group, slot, after, promise))
        return promise

    def _run(self) -> None:
        torch.cuda.set_device(self._stream.device)
        while True:
            group, slot, after, promise = self._work.get()
            try:
                promise.keep(self._copy(group, slot, after))
            except BaseException as error:  # raised where the copy is waited for
                promise.fail(error)

    def _copy(self, group: Group, slot: torch.Tensor, after: Any) -> Any:
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for source, offset in _sources(group):
                which = self._next = (self._next + 1) % len(self._pinned)
                if self._sent[which] is not None:
                    self._sent[which].synchronize()
                pinned = self._pinned[which][: len(source)]
                share = -(-len(source) // self._threads)
                parts = range(0, len(source), share)
                list(self._pool.map(lambda at: pinned[at : at + share].copy_(source[at : at + share]), parts))
                slot[offset : offset + len(source)].copy_(pinned, non_blocking=True)
                self._sent[which] = self._stream.record_event()
            return self._stream.record_event()


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
        for address, _ in self.regions:
            torch.cuda.cudart().cudaHostUnregister(address)
        self.regions = []


def register(groups: Iterable[Group]) -> Registration | str:
    """Register the pages of all groups, read only; where the driver refuses, its reason.

    All or nothing. A map must not go away before ``Registration.close``.
    """
    done = Registration()
    runtime = torch.cuda.cudart()
    for address, size in regions([span for group in groups for span in group.spans]):
        code = runtime.cudaHostRegister(address, size, _READ_ONLY)
        if int(code) != 0:
            done.close()
            return str(runtime.cudaGetErrorString(code))
        done.regions.append((address, size))
        done.bytes += size
    return done


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
