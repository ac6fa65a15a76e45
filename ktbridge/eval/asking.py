"""The asking loop that arms and judges share; the exact request for an item, and its answer's key."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.eval.arms import Arm
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.results.types import ArmCard
from ktbridge.eval.store import Ledger, Record, request_key

_SILENT = 6  # consecutive requests without any reply: the server is gone
_Question = TypeVar("_Question")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Asked:
    """One question asked: the record to store, the server asked last, and what was the matter if
    that one gave no reply at all ("" if it gave any, an error included)."""

    record: Record
    url: str
    silence: str = ""


@dataclass
class AskingLoop(Generic[_Question]):
    """Asks questions, ``concurrency`` at a time, and stores each answer before the next question.

    ``ask`` sends one question; ``on_stored`` gets its result. After several consecutive requests to
    a server without any reply it is considered gone: KtbridgeError "``who``URL stopped answering",
    with ``next_step``. The counts carry over from one call to the next.
    """

    ask: Callable[[_Question], Awaitable[Asked]]
    store: Ledger
    concurrency: int
    on_stored: Callable[[Asked], None]
    who: str
    next_step: str

    def __post_init__(self) -> None:
        self._silent: Counter[str] = Counter()

    async def ask_all(self, questions: Iterable[_Question]) -> None:
        queue = iter(questions)
        workers = [asyncio.create_task(self._work(queue)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            # After the first failure (a full disk) the others must stop asking. Before Python 3.12
            # wait_for may lose a cancellation, so the queue is emptied as well.
            deque(queue, maxlen=0)
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, queue: Iterator[_Question]) -> None:
        for question in queue:
            asked = await self.ask(question)
            self.store.add(asked.record)
            self._silent[asked.url] = self._silent[asked.url] + 1 if asked.silence else 0
            if self._silent[asked.url] >= _SILENT:
                raise KtbridgeError(
                    f"{self.who}{asked.url} stopped answering ({asked.silence}).", self.next_step
                )
            self.on_stored(asked)


def run_until_interrupt(work: Coroutine[None, None, _Result]) -> _Result:
    """``asyncio.run`` whose Ctrl-C always cancels the work as a whole, which stores what it received,
    and then raises KeyboardInterrupt. Before Python 3.11 it would hit whichever task is running."""
    try:
        return asyncio.run(_cancelled_by_interrupt(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _cancelled_by_interrupt(work: Coroutine[None, None, _Result]) -> _Result:
    task = asyncio.ensure_future(work)
    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals there
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    return await task


def build_request(arm: Arm, item: Item, bench: Bench, repeat: int = 0) -> dict[str, Any]:
    """The request for one item: the bench's sampling, the item's messages and token limit.

    Greedy answers are repeated with the same request, which measures the engine's own noise; sampled
    ones, if the bench has a seed, with ``seed + repeat``.
    """
    sampling = dict(bench.sampling)
    seed = sampling.get("seed")
    if repeat and sampling.get("temperature") != 0 and type(seed) is int:
        sampling["seed"] = seed + repeat
    return {
        "model": arm.model,
        "messages": [dict(message) for message in item.messages],
        "max_tokens": item.max_tokens,
        **sampling,
    }


def is_dialogue(item: Item, bench: Bench) -> bool:
    """Whether a partner model continues the dialogue with the arm on this item."""
    return bench.partner is not None and item.slice in bench.partner.slices


def answer_key(card: ArmCard, arm: Arm, item: Item, bench: Bench, repeat: int = 0) -> str:
    """The key of an arm's answer to an item. ``card`` is the arm's in run.json.

    A dialogue's key covers the partner too: its model and URL (in the card), system message, turns.
    """
    request = build_request(arm, item, bench, repeat)
    if bench.partner is not None and is_dialogue(item, bench):
        partner = {"system": bench.partner.system, "turns": bench.partner.turns}
        request["partner"] = {**(card.get("partner") or {}), **partner}
    return request_key(card["fingerprint"], request, repeat)
