"""Ask a bench's questions of each arm and store the answers; the asking loop. Scoring is in ``results/``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, Severity, has_errors
from ktbridge.eval.arms import Arm
from ktbridge.eval.bench import Bench, answer_limit
from ktbridge.eval.preflight import Preflight, check_arms
from ktbridge.eval.request import (
    AnswerRequest,
    EvalRequest,
    build_request,
    is_dialogue,
    partner_card,
    plan_answers,
    update_plan,
)
from ktbridge.eval.results.types import ArmCard, Identical, Message
from ktbridge.eval.schema import Item
from ktbridge.eval.store import ANSWERS, AnswerRecord, JudgementRecord, Ledger, RunFile, read_run, write_run
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import WHOLE, is_refusal, kind_of, remedy
from ktbridge.server_api.replies import Answer, Outcome

_SILENT = 6  # consecutive requests without any reply: the server is gone
_Record = TypeVar("_Record", AnswerRecord, JudgementRecord)
_Question = TypeVar("_Question")
_Result = TypeVar("_Result")
_Count = TypeVar("_Count", int, float)


@dataclass
class Progress:
    """Progress of a run: answers ``done`` of ``total``, ``stored`` of them before it began; failed
    attempts by kind, including those that a retry fixed; tokens of this run's answers."""

    done: int = 0
    total: int = 0
    stored: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Collected:
    """The result of one invocation: answers asked now and found stored, outcomes of all of them, and
    failed attempts by kind."""

    asked: int
    stored: int
    outcomes: dict[str, int]
    identical: list[Identical]
    problems: tuple[Problem, ...]
    faults: dict[str, int]


@dataclass(frozen=True)
class RunEvents:
    """Callbacks of a run; ``on_wait`` is told of long waits that a server asks for."""

    on_preflight: Callable[[Preflight], None] = lambda preflight: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_wait: Callable[[str], None] = lambda reason: None


def collect(request: EvalRequest, events: RunEvents = RunEvents()) -> Collected:
    """Preflight, then request the answers missing from the request's directory.

    The plan is written to run.json first. Arms may come in separate invocations; the directory collects
    them. Raises ProblemsError if preflight fails or a server refuses the requests, KtbridgeError if another
    run writes to the directory or a server stops answering. An interrupt (KeyboardInterrupt) passes through
    after everything received has been stored.
    """
    with Ledger(request.directory, ANSWERS) as store:
        return run_until_interrupt(_Run(request, events, store).collect())


class _Run:
    def __init__(self, request: EvalRequest, events: RunEvents, store: Ledger[AnswerRecord]) -> None:
        self._request, self._events, self._store = request, events, store
        self._clients: dict[str, Client] = {}
        self._progress = Progress()
        self._loop = AskingLoop(
            self._ask,
            store,
            request.concurrency,
            self._count,
            "",
            "see to the server and run the same command again; what was answered is stored",
        )

    async def collect(self) -> Collected:
        request, store, progress = self._request, self._store, self._progress
        run = read_run(request.directory)
        async with contextlib.AsyncExitStack() as stack:
            partner = request.dialogue_partner
            for url in dict.fromkeys(one.url for one in [*request.arms, partner] if one):
                client = Client(
                    url,
                    timeout=request.timeout,
                    backoff=request.backoff,
                    api_key=request.api_key,
                    on_wait=self._events.on_wait,
                )
                self._clients[url] = await stack.enter_async_context(client)
                client.faults = progress.faults  # one counter of failures for all servers
            preflight = await check_arms(request, self._clients, run["probes"])
            self._record_partner(run["arms"], preflight)
            self._events.on_preflight(preflight)
            write_run(request.directory, self._update_run(run, preflight), request.bench)
            cards = {name: card for name, card in preflight.cards.items() if "refused" not in card}
            wanted, missing = plan_answers(request, cards, store.records)
            progress.done = progress.stored = len(wanted) - len(missing)
            progress.total = len(wanted)
            self._events.on_progress(progress)
            probed = await self._probe_token_limits(missing, preflight)
            await self._loop.ask_all([one for one in missing if one.key not in probed])
        outcomes = Counter[str](store.records[one.key]["outcome"] for one in wanted)
        return Collected(
            len(missing),
            progress.stored,
            dict(outcomes),
            preflight.identical,
            tuple(preflight.problems),
            {kind: count for kind, count in progress.faults.items() if count},
        )

    def _update_run(self, before: RunFile, preflight: Preflight) -> RunFile:
        """run.json with what this invocation adds. Probe hashes stay those of an arm's first run, the
        baseline for drift; the date is that of the directory's first run."""
        probes = dict(before["probes"])
        for fingerprint, hashes in preflight.probes.items():
            probes[fingerprint] = {**hashes, **probes.get(fingerprint, {})}
        for name, card in preflight.cards.items():
            old = before["arms"].get(name)
            if old and "changed" in old and old["fingerprint"] == card["fingerprint"]:
                card.setdefault("changed", old["changed"])
        return {
            "arms": {**before["arms"], **preflight.cards},
            "probes": probes,
            "repeat": max(self._request.repeat, before["repeat"]),
            "plan": update_plan(before["plan"] or {}, self._request),
            "date": before["date"],
        }

    def _record_partner(self, before: Mapping[str, ArmCard], preflight: Preflight) -> None:
        """Record the dialogue partner in each arm's card; warn of arms that had another."""
        now = partner_card(self._request.dialogue_partner)
        for name, card in preflight.cards.items():
            old = before.get(name)
            same = old is not None and old["fingerprint"] == card["fingerprint"]
            if partner := now or (old.get("partner") if old is not None and same else None):
                card["partner"] = partner
        for name, card in before.items():
            other = card.get("partner")
            if now and other and other != now and name not in preflight.cards:
                found = f"its dialogues were held with {other['model']}@{other['url']}"
                preflight.problems.append(problem("KTB809", f"arm {name}", found, "one partner for all arms"))

    async def _probe_token_limits(self, missing: Sequence[AnswerRequest], preflight: Preflight) -> set[str]:
        """Send each arm its largest request, then its smallest if the largest is refused.

        A token limit that is too low for the server is found before the other items are sent. Returns the
        keys of the requests sent. Raises ProblemsError if a server refuses its smallest request as well.
        """
        single = [one for one in missing if not is_dialogue(one.item, self._request.bench)]
        by_arm = [[one for one in single if one.arm == arm] for arm in self._request.arms]
        sent: set[str] = set()

        async def find_refused(requests: Sequence[AnswerRequest]) -> dict[Arm, AnswerRequest]:
            await self._loop.ask_all([one for one in requests if one.key not in sent])
            sent.update(one.key for one in requests)
            found = [(one, self._store.records[one.key]) for one in requests]
            return {
                one.arm: one
                for one, record in found
                if record["outcome"] == "http-error" and is_refusal(record["status"], record["detail"])
            }

        largest = await find_refused([max(own, key=_estimate_tokens) for own in by_arm if own])
        again = [own for own in by_arm if own and own[0].arm in largest]
        smallest = await find_refused([min(own, key=_estimate_tokens) for own in again])
        problems = []
        for arm, one in largest.items():
            asked = smallest.get(arm, one)
            record = self._store.records[asked.key]
            which = "even its smallest request" if arm in smallest else "its largest request"
            limit = answer_limit(asked.item, self._request.bench)
            found = f"{which} ({limit} answer tokens) is refused: {record['detail']}"
            step = remedy(record["status"], record["detail"])
            severity: Severity = "error" if arm in smallest else "warning"
            where, expected = f"arm {arm.name}", "an answer to every request"
            problems.append(problem("KTB805", where, found, expected, step, severity))
        preflight.problems += problems
        if has_errors(problems):
            raise ProblemsError("a server refuses what the bench asks; the rest was not asked.", problems)
        if problems:
            self._events.on_preflight(Preflight({}, problems=problems))
        return sent

    async def _ask(self, asked: AnswerRequest) -> Asked[AnswerRecord]:
        arm, item, bench, nth = asked.arm, asked.item, self._request.bench, asked.repeat
        partner = self._request.partner
        turns: list[Message] = []
        if partner is not None and is_dialogue(item, bench):
            answer, url = await hold_dialogue(arm, item, bench, nth, partner, self._clients, turns)
        else:
            answer = await self._clients[arm.url].chat(build_request(arm, item, bench, nth))
            url = arm.url
        record: AnswerRecord = {
            "key": asked.key,
            "arm": arm.name,
            "item": item.id,
            "outcome": answer.outcome,
            "text": answer.text,
            "thinking": answer.thinking,
            "detail": answer.detail,
            "status": answer.status,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "seconds": answer.seconds,
        }
        if nth:
            record["repeat"] = nth
        if is_dialogue(item, bench):
            record["turns"] = turns
        if not is_silent(answer.outcome == "http-error", answer.status, answer.detail):
            return Asked(record, url)
        step = remedy(answer.status, answer.detail) if answer.status else ""
        return Asked(record, url, answer.detail, step)

    def _count(self, asked: Asked[AnswerRecord]) -> None:
        self._progress.done += 1
        self._progress.prompt_tokens += asked.record["prompt_tokens"] or 0
        self._progress.completion_tokens += asked.record["completion_tokens"] or 0
        self._events.on_progress(self._progress)


def _estimate_tokens(asked: AnswerRequest) -> int:
    """Estimate of a request's tokens: a third of its bytes, plus the answer's limit."""
    content = sum(len(message["content"].encode()) for message in asked.item.messages)
    return content // 3 + asked.item.max_tokens


# --- dialogues with a partner model that plays the user


async def hold_dialogue(
    arm: Arm,
    item: Item,
    bench: Bench,
    repeat: int,
    partner: Arm,
    clients: Mapping[str, Client],
    turns: list[Message],
) -> tuple[Answer, str]:
    """Ask turn by turn; the arm has the first turn and the last. A failed turn ends the dialogue.

    The messages after the item's own are added to ``turns``. Returns all the arm's turns as one answer, and
    the URL of the server that was asked last. A failed request, from either side, makes its outcome
    http-error; an arm's turn that is empty, truncated or thinking only gives the whole dialogue that outcome.
    """
    assert bench.partner is not None
    given: list[Answer] = []
    request = build_request(arm, item, bench, repeat)
    # The instruction and the scene are a first user message for the partner, as many templates require one
    # before any answer, and some support no system message.
    scene = [one["content"] for one in item.messages if one["role"] == "system"]
    opening = {"role": "user", "content": "\n\n".join([bench.partner.system.strip(), *scene])}
    other = {"user": "assistant", "assistant": "user"}
    for turn in range(1, bench.partner.turns + 1):
        answer = await clients[arm.url].chat({**request, "messages": [*item.messages, *turns]})
        given.append(answer)
        if answer.outcome != "ok":
            detail = f"turn {turn}" + (f": {answer.detail}" if answer.detail else "")
            return _join_turns(given, answer.outcome, detail), arm.url
        turns.append({"role": "assistant", "content": answer.text})
        if turn == bench.partner.turns:
            break
        said = [one for one in (*item.messages, *turns) if one["role"] in other]
        seen = [{"role": other[one["role"]], "content": one["content"]} for one in said]
        asked = {**request, "model": partner.model, "messages": [opening, *seen]}
        reply = await clients[partner.url].chat(asked)
        if reply.outcome not in ("ok", "truncated"):
            detail = f"turn {turn}: the partner's is {reply.outcome}"
            detail += f": {reply.detail}" if reply.detail else ""
            failed = replace(_join_turns(given, "http-error", detail), status=reply.status)
            return failed, partner.url
        turns.append({"role": "user", "content": reply.text})
    return _join_turns(given, "ok", ""), arm.url


def _join_turns(given: list[Answer], outcome: Outcome, detail: str) -> Answer:
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
    _silent: Counter[str] = field(default_factory=Counter, init=False)

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

    async def cancelled_by_interrupt() -> _Result:
        task = asyncio.ensure_future(work)
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: no signals there
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await task

    try:
        return asyncio.run(cancelled_by_interrupt())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
