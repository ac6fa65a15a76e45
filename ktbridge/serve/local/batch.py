"""Continuous batching: answers begin and end at any step, and all in progress advance together.

A prompt is run alone (prefill), a chunk at a time, so that the others go on between its chunks; then its row
joins their cache. Each ``step`` is one forward of one token per row, whatever arm a row belongs to.
``Worker`` is the thread that computes a server's answers, and the queue in front of it: the event loop stays
free.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import Cache

from ktbridge.serve.local.caches import Source, take_rows
from ktbridge.serve.local.engine import LocalEngine
from ktbridge.serve.local.sampling import (
    AnswerStream,
    Event,
    Finish,
    Sampling,
    TextDelta,
    TokenLogprob,
    prompt_logprobs,
)
from ktbridge.server_api.served_names import ServedArm

log = logging.getLogger(__name__)

ALONE = 4096  # tokens per chunk when no other answer waits: activations and logits need memory


class Listener(Protocol):
    """The requester: receives events by choice, and reports when it was cancelled."""

    @property
    def cancelled(self) -> bool: ...

    def deliver(self, choice: int, event: Event) -> None: ...

    def fail(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Ask:
    """One prompt to continue ``n`` times. Its choices are numbered from ``first``."""

    arm: ServedArm
    prompt: Sequence[int]
    sampling: Sampling
    listener: Listener
    n: int = 1
    first: int = 0
    images: Callable[[], Mapping[str, torch.Tensor]] | None = None
    """Reads the prompt's images, of which ``prompt`` has the tokens, for the vision tower."""

    @property
    def longest(self) -> int:
        """Maximum tokens of each of its rows."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass
class Row:
    """One answer in progress. ``length``: its tokens in the cache; ``shift``: from there to positions."""

    ask: Ask
    choice: int
    answer: AnswerStream
    length: int
    shift: int = 0


@dataclass
class Prefill:
    """A prompt of which ``done`` tokens are computed. ``entries``: their logprobs, where asked for."""

    ask: Ask
    done: int = 0
    shift: int = 0
    cache: Cache | None = None
    entries: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Batch:
    """The answers in progress, and the one prompt that is being prefilled to join them.

    ``running``: maximum rows. ``cells``: maximum cache positions, rows times the longest possible
    row. ``chunk``: tokens of a prompt per prefill chunk while other answers wait.
    """

    model: LocalEngine
    running: int
    cells: int
    chunk: int = 512
    rows: list[Row] = field(default_factory=list)
    pending: Prefill | None = None
    _cache: Cache | None = None

    def fits(self, ask: Ask) -> bool:
        """Return whether ``ask`` can begin now; always true if nothing else runs."""
        if not self.rows:
            return True
        count = len(self.rows) + ask.n
        longest = max(ask.longest, *(row.ask.longest for row in self.rows))
        return count <= self.running and count * longest <= self.cells

    def begin(self, ask: Ask) -> None:
        """Take the next prompt up; ``advance`` computes it. There must be no other."""
        assert self.pending is None
        self.pending = Prefill(ask)

    def advance(self) -> None:
        """Run the next chunk of the pending prompt, if there is one and it isn't cancelled.

        After the last chunk each choice's first token is delivered, and the rows that go on join.
        A failure affects this request only.
        """
        prefill = self.pending
        if prefill is None:
            return
        ask = prefill.ask
        if ask.listener.cancelled:
            self.pending = None
            return
        try:
            logits = self._next_chunk(prefill)
            if prefill.done < len(ask.prompt):
                return
            self.pending = None
            rows = []
            for i in range(ask.n):
                answer = AnswerStream(self.model.tokens, self.model.stop_ids, ask.sampling, i)
                row = Row(ask, ask.first + i, answer, len(ask.prompt), prefill.shift)
                if ask.sampling.prompt_logprobs:
                    ask.listener.deliver(row.choice, TextDelta("", tuple(prefill.entries)))
                if self._take(row, logits):
                    rows.append(row)
            if rows and prefill.cache is not None:
                self._join(rows, prefill.cache)
        except Exception as error:
            log.exception("a prompt failed")
            self.pending = None
            ask.listener.fail(error)

    def _next_chunk(self, prefill: Prefill) -> torch.Tensor:
        """Logits [V], float32, after the next chunk of a prompt."""
        ask, start = prefill.ask, prefill.done
        if ask.images:
            logits, prefill.cache, prefill.shift = self.model.prefill_seen(ask.arm, ask.prompt, ask.images())
            prefill.done = len(ask.prompt)
            return logits[-1].float()
        end = len(ask.prompt)
        if self.model.chunkable:
            end = min(end, start + (self.chunk if self.rows else ALONE))
        scoring = ask.sampling.prompt_logprobs
        logits, prefill.cache = self.model.prefill(ask.arm, ask.prompt[start:end], scoring, prefill.cache)
        prefill.done = end
        if scoring:
            top = ask.sampling.top_logprobs or 0
            # Our last token predicts the first of the next chunk, whose logprob is computed here.
            entries = prompt_logprobs(logits, ask.prompt[start : end + 1], top)
            prefill.entries += entries[1:] if start else entries
        return logits[-1].float()

    def step(self) -> None:
        """Generate one token for every row that isn't cancelled."""
        self._keep([row for row in self.rows if not row.ask.listener.cancelled])
        if not self.rows or self._cache is None:
            return
        rows = self.rows
        try:
            logits = self.model.step(
                [row.ask.arm for row in rows],
                [row.answer.token for row in rows],
                [row.length for row in rows],
                self._cache,
                [row.shift for row in rows],
            )
        except Exception as error:
            # The cache may be half-written: no row can continue from it.
            log.exception("a step failed")
            self._drop_rows(error)
            return
        for row in rows:
            row.length += 1
        logits = logits.float()  # at once, and not in each thing that is done with a row
        self._keep([row for row, its in zip(rows, logits, strict=True) if self._take(row, its)])

    def drop_all(self, error: BaseException) -> None:
        """Abort every answer in progress, and the pending prompt."""
        if self.pending is not None:
            self.pending.ask.listener.fail(error)
        self._drop_rows(error)
        self.pending = None

    def _drop_rows(self, error: BaseException) -> None:
        for row in self.rows:
            row.ask.listener.fail(error)
        self.rows, self._cache = [], None

    def _take(self, row: Row, logits: torch.Tensor) -> bool:
        """Choose a row's next token; returns whether the row continues."""
        try:
            events = row.answer.take(logits)
        except Exception as error:
            log.exception("an answer failed")
            row.ask.listener.fail(error)
            return False
        for event in events:
            row.ask.listener.deliver(row.choice, event)
        return not (events and isinstance(events[-1], Finish))

    def _join(self, rows: list[Row], cache: Cache) -> None:
        sources: list[Source] = [(cache, [0] * len(rows))]
        if self._cache is not None:
            sources.insert(0, (self._cache, range(len(self.rows))))
        self.rows = self.rows + rows
        self._cache = take_rows(sources, self._width())

    def _keep(self, rows: list[Row]) -> None:
        if len(rows) == len(self.rows):
            return
        kept = {id(row) for row in rows}
        places = [i for i, row in enumerate(self.rows) if id(row) in kept]
        self.rows = rows
        if self._cache is not None:
            self._cache = take_rows([(self._cache, places)], self._width()) if rows else None

    def _width(self) -> int:
        return max(row.length for row in self.rows)


# --- the thread that computes ----------------------------------------------------------------------

JobEvent = tuple[int, Event] | BaseException | None  # an event of a choice, a failure, or the end


class QueueFull(Exception):
    """The queue of waiting prompts is full."""


class ServerStopping(Exception):
    """The server is shutting down and aborts this answer."""


class Outbox:
    """Passes events from the worker's thread to the event loop, after the step that made them.

    So whoever reads the end of an answer finds its place free. The loop is woken once per step.
    """

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
            self._changed.wait_for(lambda: self._closed or self._waiting or self.running)
            return not self._closed

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
