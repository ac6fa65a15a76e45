"""One generation at a time in a thread of its own, so that the event loop stays free.

Requests wait in a bounded queue. A continuous-batching scheduler can take this place: it needs
``submit`` and ``Job`` to stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from ktbridge.serve.local.decode import Cancelled, Event

log = logging.getLogger(__name__)


class QueueFull(Exception):
    """More requests wait than the server is willing to hold."""


class ServerStopping(Exception):
    """The server is going down and gives up this answer."""


class Job:
    """One request's generation: consume it with ``async for``; ``cancel`` when nobody listens."""

    def __init__(self, start: Callable[[Callable[[], bool]], Iterator[Event]]) -> None:
        """``start(cancelled)`` begins the generation; it runs in the worker's thread."""
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def _run(self) -> None:
        try:
            for event in self._start(self._cancelled.is_set):
                self._deliver(event)
            self._deliver(None)
        except Cancelled:
            self._deliver(ServerStopping())  # read by nobody unless the server cancelled it
        except Exception as error:
            log.exception("a generation failed")
            self._deliver(error)

    def _deliver(self, event: Event | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the event loop has closed: the server is gone
            self.cancel()


class Worker:
    """The thread and its queue."""

    def __init__(self, max_waiting: int = 64) -> None:
        self._queue: queue.Queue[Job | None] = queue.Queue(max_waiting)
        self._stopping = False
        self._current: Job | None = None
        self._thread = threading.Thread(target=self._work, name="ktbridge-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises QueueFull or ServerStopping."""
        if self._stopping:
            raise ServerStopping
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise QueueFull from None

    def close(self) -> None:
        """Take no more jobs and cancel those there are; does not wait."""
        self._stopping = True
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job._deliver(ServerStopping())
        if (current := self._current) is not None:
            current.cancel()
        self._queue.put(None)

    def join(self, timeout: float = 10) -> None:
        """Wait for the thread to end, after ``close``."""
        self._thread.join(timeout)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._current = job
            if self._stopping:
                job.cancel()
            job._run()
            self._current = None
