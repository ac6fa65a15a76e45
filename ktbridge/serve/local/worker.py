"""The thread that computes, and the queue in front of it. The event loop stays free."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ktbridge.serve.local.batch import Ask, Batch
from ktbridge.serve.local.sampling import Event, Finish

log = logging.getLogger(__name__)

JobEvent = tuple[int, Event] | BaseException | None  # an event of a choice, a failure, or the end


class QueueFull(Exception):
    """The queue of waiting prompts is full."""


class ServerStopping(Exception):
    """The server is shutting down and aborts this answer."""


class Outbox:
    """Passes events from the worker's thread to the event loop, which is woken once per step."""

    def __init__(self) -> None:
        self._events: list[tuple[Job, JobEvent]] = []

    def put(self, job: Job, event: JobEvent) -> None:
        self._events.append((job, event))

    def send(self) -> None:
        """Hand on what was put; in the worker's thread, like ``put``."""
        events, self._events = self._events, []
        if not events:
            return
        try:
            events[0][0].loop.call_soon_threadsafe(_receive, events)
        except RuntimeError:  # the event loop has closed: the server is gone
            for job, _ in events:
                job.cancel()


def _receive(events: Sequence[tuple[Job, JobEvent]]) -> None:
    for job, event in events:
        job.events.put_nowait(event)


class Job:
    """One request: consume its events with ``async for``; ``cancel`` when the client is gone."""

    def __init__(self, choices: int, outbox: Outbox) -> None:
        """``choices``: how many answers it has; the events end once each has finished."""
        self._unfinished = choices
        self._outbox = outbox
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[JobEvent] = asyncio.Queue()
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while (event := await self.events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def deliver(self, choice: int, event: Event) -> None:
        self._outbox.put(self, (choice, event))
        if isinstance(event, Finish):
            self._unfinished -= 1
            if self._unfinished == 0:
                self._outbox.put(self, None)

    def fail(self, error: BaseException) -> None:
        """End the request; its other choices are aborted, too."""
        self._outbox.put(self, error)
        self.cancel()


class Worker:
    """Admits waiting prompts, one chunk per step, and advances running answers, until closed."""

    def __init__(self, batch: Batch, max_waiting: int = 64) -> None:
        self._batch = batch
        self._max_waiting = max_waiting
        self._waiting: deque[Ask] = deque()
        self._changed = threading.Condition()
        self._draining = False
        self._closed = False
        self.failure: BaseException | None = None
        """What ended the thread; None as long as it lives, and after ``close``."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called in the thread as its last act."""
        self.outbox = Outbox()
        self._thread = threading.Thread(target=self._work, name="ktbridge-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._batch.rows) + (self._batch.pending is not None)

    def submit(self, asks: Sequence[Ask]) -> None:
        """Queue one request's prompts, all or none. Raises QueueFull or ServerStopping."""
        with self._changed:
            if self._draining:
                raise ServerStopping
            # A cancelled prompt takes no place in the queue.
            self._waiting = deque(ask for ask in self._waiting if not ask.listener.cancelled)
            if len(self._waiting) + len(asks) > self._max_waiting:
                raise QueueFull
            self._waiting.extend(asks)
            self._changed.notify()

    def drain(self) -> None:
        """Accept no more requests; those accepted are still answered."""
        with self._changed:
            self._draining = True

    def close(self) -> None:
        """Abort all requests; does not wait."""
        with self._changed:
            self._draining = self._closed = True
            self._changed.notify()

    def join(self, timeout: float = 10) -> None:
        """Wait for the thread to end, after ``close``."""
        self._thread.join(timeout)

    def _work(self) -> None:
        try:
            while self._wait_for_work():
                if (ask := self._next()) is not None:
                    self._batch.begin(ask)
                for compute in (self._batch.advance, self._batch.step):
                    compute()
                    self.outbox.send()
        except BaseException as error:
            log.critical("the thread that computes has died", exc_info=True)
            self.failure = error
        with self._changed:
            self._draining = True  # nobody takes a prompt from here
        self._batch.drop_all(ServerStopping())
        for ask in self._waiting:
            ask.listener.fail(ServerStopping())
        self.outbox.send()
        self._waiting.clear()
        if self.failure is not None:
            self.on_failure()

    def _wait_for_work(self) -> bool:
        """False once closed."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            return not self._closed

    def _has_work(self) -> bool:
        batch = self._batch
        return bool(self._closed or self._waiting or batch.rows or batch.pending)

    def _next(self) -> Ask | None:
        """The next prompt (first in, first out), if there is room for it."""
        if self._batch.pending is not None:
            return None
        with self._changed:
            while self._waiting and self._waiting[0].listener.cancelled:
                self._waiting.popleft()
            if self._waiting and self._batch.fits(self._waiting[0]):
                return self._waiting.popleft()
            return None
