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
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, has_errors
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
from ktbridge.eval.schema import Item, Partner
from ktbridge.eval.store import (
    ANSWERS,
    AnswerRecord,
    JudgementRecord,
    Ledger,
    RunFile,
    read_run,
    write_run,
)
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
    """One invocation's work, inside its store."""

    def __init__(
        self, request: EvalRequest, events: RunEvents, store: Ledger[AnswerRecord]
    ) -> None:
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
            plan = plan_answers(request, cards, store.records)
            progress.done = progress.stored = len(plan.wanted) - len(plan.missing)
            progress.total = len(plan.wanted)
            self._events.on_progress(progress)
            probed = await self._probe_token_limits(plan.missing, preflight)
            await self._loop.ask_all([one for one in plan.missing if one.key not in probed])
        outcomes = Counter[str](store.records[one.key]["outcome"] for one in plan.wanted)
        return Collected(
            len(plan.missing),
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
                preflight.problems.append(
                    problem("KTB809", f"arm {name}", found, "one partner for all arms")
                )

    async def _probe_token_limits(
        self, missing: Sequence[AnswerRequest], preflight: Preflight
    ) -> set[str]:
        """Send each arm its largest request, then its smallest if the largest is refused.

        A token limit that is too low for the server is found before the other items are sent. Returns the
        keys of the requests sent. Raises ProblemsError if a server refuses its smallest request as well.
        """
        single = [one for one in missing if not is_dialogue(one.item, self._request.bench)]
        sent: dict[str, AnswerRequest] = {}

        async def find_refused(arms: Sequence[Arm], largest: bool) -> dict[Arm, AnswerRequest]:
            by_size = sorted(single, key=_estimate_tokens, reverse=largest)
            found = [next((one for one in by_size if one.arm == arm), None) for arm in arms]
            first = [one for one in found if one]
            await self._loop.ask_all([one for one in first if one.key not in sent])
            sent.update({one.key: one for one in first})
            return {one.arm: one for one in first if self._is_refused(one)}

        largest = await find_refused(self._request.arms, True)
        smallest = await find_refused(list(largest), False)
        problems = [self._refusal(one, smallest.get(arm)) for arm, one in largest.items()]
        preflight.problems += problems
        if has_errors(problems):
            raise ProblemsError(
                "a server refuses what the bench asks; the rest was not asked.", problems
            )
        if problems:
            self._events.on_preflight(Preflight({}, problems=problems))
        return set(sent)

    def _is_refused(self, asked: AnswerRequest) -> bool:
        record = self._store.records[asked.key]
        failed = record["outcome"] == "http-error"
        return failed and is_refusal(record["status"], record["detail"])

    def _refusal(self, largest: AnswerRequest, smallest: AnswerRequest | None) -> Problem:
        asked = smallest or largest
        record = self._store.records[asked.key]
        which = "even its smallest request" if smallest else "its largest request"
        limit = answer_limit(asked.item, self._request.bench)
        return problem(
            "KTB805",
            f"arm {largest.arm.name}",
            f"{which} ({limit} answer tokens) is refused: {record['detail']}",
            "an answer to every request",
            remedy(record["status"], record["detail"]),
            severity="error" if smallest else "warning",
        )

    async def _ask(self, asked: AnswerRequest) -> Asked[AnswerRecord]:
        arm, item, bench, nth = asked.arm, asked.item, self._request.bench, asked.repeat
        partner = self._request.partner
        if partner is not None and is_dialogue(item, bench):
            done = await hold_dialogue(arm, item, bench, nth, partner, self._clients)
        else:
            answer = await self._clients[arm.url].chat(build_request(arm, item, bench, nth))
            done = Dialogue(answer, [], arm.url)
        answer = done.answer
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
            record["turns"] = done.turns
        if not is_silent(answer.outcome == "http-error", answer.status, answer.detail):
            return Asked(record, done.url)
        step = remedy(answer.status, answer.detail) if answer.status else ""
        return Asked(record, done.url, answer.detail, step)

    def _count(self, asked: Asked[AnswerRecord]) -> None:
        self._progress.done += 1
        self._progress.prompt_tokens += asked.record["prompt_tokens"] or 0
        self._progress.completion_tokens += asked.record["completion_tokens"] or 0
        self._events.on_progress(self._progress)


def _estimate_tokens(asked: AnswerRequest) -> int:
    """Estimate of a request's tokens: a third of its bytes, plus the answer's limit."""
    content = sum(len(message["content"].encode()) for message in asked.item.messages)
    return content // 3 + asked.item.max_tokens


# --- dialogues, and the loop that serves arms and judges alike


# --- the request for an item


# --- dialogues with a partner model that plays the user


@dataclass(frozen=True)
class Dialogue:
    """``answer`` has all the arm's turns as its text; ``turns`` are the messages after the item's own;
    ``url`` is the server that was asked last."""

    answer: Answer
    turns: list[Message]
    url: str


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
