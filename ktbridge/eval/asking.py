"""How an item is asked: its request and the answer's key, a dialogue with a partner, the asking loop.

The loop serves arms and judges alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.arms import Arm
from ktbridge.eval.bench import Bench, Item, Partner
from ktbridge.eval.results.types import ArmCard, Message, PartnerCard
from ktbridge.eval.store import AnswerRecord, JudgementRecord, Ledger, request_key
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import WHOLE, kind_of
from ktbridge.server_api.replies import OTHER_LIMIT, Answer, Outcome

_SILENT = 6  # consecutive requests without any reply: the server is gone
_Record = TypeVar("_Record", AnswerRecord, JudgementRecord)
_Question = TypeVar("_Question")
_Result = TypeVar("_Result")
_Count = TypeVar("_Count", int, float)


# --- the request for an item


def build_request(arm: Arm, item: Item, bench: Bench, repeat: int = 0) -> dict[str, object]:
    """The request for one item: the bench's sampling, the item's messages and token limit.

    Greedy answers are repeated with the same request, which measures the engine's own noise; sampled
    ones, if the bench has a seed, with ``seed + repeat``.
    """
    sampling = dict(bench.sampling)
    seed = sampling.get("seed")
    if repeat and sampling.get("temperature") != 0 and type(seed) is int:
        sampling["seed"] = seed + repeat
    messages = [dict(message) for message in item.messages]
    # Sampling may name the limit as newer servers do.
    limit = {} if OTHER_LIMIT in sampling else {"max_tokens": item.max_tokens}
    return {"model": arm.model, "messages": messages, **limit, **sampling}


def with_limit(request: dict[str, object], most: int) -> dict[str, object]:
    """``request`` with its limit of tokens lowered to ``most``."""
    name = OTHER_LIMIT if OTHER_LIMIT in request else "max_tokens"
    asked = request[name]
    return {**request, name: min(most, asked) if isinstance(asked, int) else most}


def is_dialogue(item: Item, bench: Bench) -> bool:
    """Return whether a partner model continues the dialogue with the arm on this item."""
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


# --- dialogues with a partner model that plays the user


@dataclass(frozen=True)
class Dialogue:
    """``answer`` has all the arm's turns as its text; ``turns`` are the messages after the item's own;
    ``url`` is the server that was asked last."""

    answer: Answer
    turns: list[Message]
    url: str


def check_partner(bench: Bench, items: tuple[Item, ...], partner: Arm | None) -> None:
    """Raise UsageError if dialogues among ``items`` have no partner, or may not be sent to this one."""
    if bench.partner is None or not any(is_dialogue(item, bench) for item in items):
        return
    if partner is None:
        rest = [one.name for one in bench.slices if one.name not in bench.partner.slices]
        without = f", or leave them out with --slices {','.join(rest)}" if rest else ""
        raise UsageError(
            f"the bench {bench.name!r} has dialogues ({', '.join(bench.partner.slices)}) and no "
            "partner to hold them with.",
            f"give --partner MODEL@URL{without}",
        )
    try:
        bench.refuse_remote_judge(partner.url)
    except UsageError:
        raise UsageError(
            f"the data of {bench.name!r} is private and the partner "
            f"{urlsplit(partner.url).hostname!r} is another machine.",
            "use a partner on loopback",
        ) from None


def partner_card(partner: Arm | None) -> PartnerCard | None:
    """The partner's entry in an arm's card in run.json."""
    return {"model": partner.model, "url": partner.url} if partner else None


async def hold_dialogue(
    arm: Arm, item: Item, bench: Bench, repeat: int, partner: Arm, clients: Mapping[str, Client]
) -> Dialogue:
    """Ask turn by turn; the arm has the first turn and the last. A failed turn ends the dialogue.

    A failed request, from either side, makes its outcome http-error; an arm's turn that is empty,
    truncated or thinking only gives the whole dialogue that outcome.
    """
    assert bench.partner is not None
    turns: list[Message] = []
    given: list[Answer] = []
    request = build_request(arm, item, bench, repeat)
    for turn in range(1, bench.partner.turns + 1):
        answer = await clients[arm.url].chat({**request, "messages": [*item.messages, *turns]})
        given.append(answer)
        if answer.outcome != "ok":
            detail = f"turn {turn}" + (f": {answer.detail}" if answer.detail else "")
            return Dialogue(_whole(given, answer.outcome, detail), turns, arm.url)
        turns.append({"role": "assistant", "content": answer.text})
        if turn == bench.partner.turns:
            break
        asked = {
            **request,
            "model": partner.model,
            "messages": _seen_by_partner(item, bench.partner, turns),
        }
        reply = await clients[partner.url].chat(asked)
        if reply.outcome not in ("ok", "truncated"):
            detail = f"turn {turn}: the partner's is {reply.outcome}"
            detail += f": {reply.detail}" if reply.detail else ""
            failed = replace(_whole(given, "http-error", detail), status=reply.status)
            return Dialogue(failed, turns, partner.url)
        turns.append({"role": "user", "content": reply.text})
    return Dialogue(_whole(given, "ok", ""), turns, arm.url)


def _seen_by_partner(item: Item, partner: Partner, turns: list[Message]) -> list[Message]:
    """The dialogue with user and assistant swapped. The instruction and the scene are a first user
    message, as many templates require one before any answer, and some support no system message."""
    scene = [message["content"] for message in item.messages if message["role"] == "system"]
    other = {"user": "assistant", "assistant": "user"}
    messages = [*item.messages, *turns]
    return [
        {"role": "user", "content": "\n\n".join([partner.system.strip(), *scene])},
        *(
            {"role": other[message["role"]], "content": message["content"]}
            for message in messages
            if message["role"] in other
        ),
    ]


def _whole(given: list[Answer], outcome: Outcome, detail: str) -> Answer:
    """One answer from an arm's turns; tokens and seconds are sums, None if a turn has none."""

    def total(counts: list[_Count | None]) -> _Count | None:
        known = [one for one in counts if one is not None]
        return sum(known[1:], known[0]) if len(known) == len(counts) else None

    seconds = total([one.seconds for one in given])
    return Answer(
        outcome,
        "\n\n".join(one.text for one in given if one.text),
        "\n\n".join(one.thinking for one in given if one.thinking),
        detail,
        given[-1].status,
        total([one.prompt_tokens for one in given]),
        total([one.completion_tokens for one in given]),
        None if seconds is None else round(seconds, 3),
    )


# --- the loop


@dataclass(frozen=True)
class Asked(Generic[_Record]):
    """One question asked: the record to store, the server asked last, and what was the matter if that
    one gave no reply at all, or one that it would give to any question ("" if it gave another)."""

    record: _Record
    url: str
    silence: str = ""
    next_step: str = ""


def is_silent(outcome_failed: bool, status: int, detail: str) -> bool:
    """Return whether a request failed for what has nothing to do with the question."""
    return outcome_failed and (status == 0 or kind_of(status, detail) in WHOLE)


@dataclass
class AskingLoop(Generic[_Question, _Record]):
    """Asks questions, ``concurrency`` at a time, and stores each answer before the next question.

    ``ask`` sends one question; ``on_stored`` gets its result. After several consecutive requests that a
    server left without any reply, or would refuse whatever was asked (for the key, the quota), it is
    considered gone: KtbridgeError "``who``URL stopped answering", with ``next_step``. The counts carry over
    from one call to the next.
    """

    ask: Callable[[_Question], Awaitable[Asked[_Record]]]
    store: Ledger[_Record]
    concurrency: int
    on_stored: Callable[[Asked[_Record]], None]
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
                    f"{self.who}{asked.url} stopped answering ({asked.silence}).",
                    asked.next_step or self.next_step,
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
