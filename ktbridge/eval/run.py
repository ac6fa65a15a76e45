"""Ask a bench's questions of each arm and store the answers. Scoring is in ``results/``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, has_errors
from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import (
    Asked,
    AskingLoop,
    Dialogue,
    build_request,
    hold_dialogue,
    is_dialogue,
    is_silent,
    partner_card,
    run_until_interrupt,
)
from ktbridge.eval.bench import answer_limit
from ktbridge.eval.preflight import Preflight, check_arms
from ktbridge.eval.request import AnswerRequest, EvalRequest, plan_answers, update_plan
from ktbridge.eval.results.types import ArmCard, Identical
from ktbridge.eval.store import ANSWERS, AnswerRecord, Ledger, RunFile, read_run, write_run
from ktbridge.server_api.client import Client
from ktbridge.server_api.failures import is_refusal, remedy


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
