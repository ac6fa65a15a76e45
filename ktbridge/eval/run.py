"""Ask a bench's questions of each arm and store the answers. Scoring is in ``results/``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, has_errors
from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import (
    Asked,
    AskingLoop,
    Dialogue,
    build_request,
    check_partner,
    hold_dialogue,
    is_dialogue,
    is_silent,
    partner_card,
    run_until_interrupt,
)
from ktbridge.eval.bench import Bench, Item, answer_limit
from ktbridge.eval.plan import Ask, list_asks, make_plan
from ktbridge.eval.preflight import Preflight, check_arms
from ktbridge.eval.results.cards import ArmCard
from ktbridge.eval.results.types import Identical
from ktbridge.eval.rundir import RunFile, read_run, write_run
from ktbridge.eval.store import ANSWERS, AnswerRecord, Ledger
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


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Collected:
    """The result of one invocation: answers asked now and found stored, outcomes of all of them, and
    failed attempts by kind."""

    asked: int
    stored: int
    outcomes: dict[str, int]
    identical: list[Identical]
    problems: tuple[Problem, ...]
    faults: dict[str, int] = field(default_factory=dict)


def collect(
    bench: Bench,
    arms: Sequence[Arm],
    directory: Path,
    *,
    slices: tuple[str, ...] = (),
    limit: int | None = None,
    repeat: int = 1,
    partner: Arm | None = None,
    concurrency: int = 4,
    timeout: float = 900.0,
    backoff: float = 0.5,
    api_key: str | None = None,
    on_preflight: Callable[[Preflight], None] | None = None,
    on_progress: OnProgress | None = None,
    on_wait: Callable[[str], None] = lambda told: None,
) -> Collected:
    """Preflight, then request the answers missing from ``directory``; ``concurrency`` at a time.

    The plan is written to run.json first. Items are asked of all arms in turn, round-robin over the
    slices, so that an interrupted run is still paired and covers every slice, and each item once
    before any is repeated (``repeat`` times in all). ``partner`` plays the user in a bench's
    dialogues. Arms may come in separate invocations; ``directory`` collects them. Raises UsageError
    for an unknown slice or a missing partner, ProblemsError if preflight fails or a server refuses
    the requests, KtbridgeError if another run writes to ``directory`` or a server stops answering.
    An interrupt (KeyboardInterrupt) passes through after everything received has been stored.
    """
    items = bench.select(slices, limit)
    check_partner(bench, items, partner)
    if not any(is_dialogue(item, bench) for item in items):
        partner = None
    chosen = slices or tuple(one.name for one in bench.slices)
    with Ledger(directory, ANSWERS) as store:
        run = _Run(
            bench=bench,
            arms=arms,
            chosen=chosen,
            items=items,
            repeat=repeat,
            partner=partner,
            store=store,
            concurrency=concurrency,
            open_client=lambda url: Client(
                url, timeout=timeout, backoff=backoff, api_key=api_key, on_wait=on_wait
            ),
            on_preflight=on_preflight or (lambda preflight: None),
            on_progress=on_progress or (lambda progress: None),
        )
        return run_until_interrupt(run.collect())


def _size(ask: Ask) -> int:
    """Estimate of a request's tokens: a third of its bytes, plus the answer's limit."""
    content = sum(len(message["content"].encode()) for message in ask.item.messages)
    return content // 3 + ask.item.max_tokens


@dataclass
class _Run:
    """One invocation's work, inside its store."""

    bench: Bench
    arms: Sequence[Arm]
    chosen: Sequence[str]
    items: Sequence[Item]
    repeat: int
    partner: Arm | None
    store: Ledger[AnswerRecord]
    concurrency: int
    open_client: Callable[[str], Client]
    on_preflight: Callable[[Preflight], None]
    on_progress: OnProgress
    clients: dict[str, Client] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._asking = AskingLoop(
            self._ask,
            self.store,
            self.concurrency,
            self._count,
            "",
            "see to the server and run the same command again; what was answered is stored",
        )

    async def collect(self) -> Collected:
        run = read_run(self.store.directory)
        async with contextlib.AsyncExitStack() as stack:
            asked = [*self.arms, *([self.partner] if self.partner else [])]
            for url in dict.fromkeys(one.url for one in asked):
                self.clients[url] = await stack.enter_async_context(self.open_client(url))
                # One counter of failures for all servers.
                self.clients[url].faults = self.progress.faults
            preflight = await check_arms(
                self.arms, self.clients, self.bench, run["probes"], self.partner
            )
            self._name_partner(run["arms"], preflight)
            self.on_preflight(preflight)
            write_run(self.store.directory, self._described(run, preflight), self.bench)
            arms = [arm for arm in self.arms if "refused" not in preflight.cards[arm.name]]
            asks = list_asks(self.bench, arms, self.items, preflight.cards, self.repeat)
            todo = [ask for ask in asks if not self.store.has(ask.key)]
            self.progress.done = self.progress.stored = len(asks) - len(todo)
            self.progress.total = len(asks)
            self.on_progress(self.progress)
            refused = await self._ask_largest(todo, preflight)
            await self._asking.ask_all([ask for ask in todo if ask.key not in refused])
        outcomes = Counter[str](self.store.records[ask.key]["outcome"] for ask in asks)
        return Collected(
            len(todo),
            self.progress.stored,
            dict(outcomes),
            preflight.identical,
            tuple(preflight.problems),
            {kind: count for kind, count in self.progress.faults.items() if count},
        )

    def _described(self, before: RunFile, preflight: Preflight) -> RunFile:
        """run.json with what this invocation adds. Probe hashes stay those of an arm's first run, the
        baseline for drift; the date is that of the directory's first run."""
        names = [arm.name for arm in self.arms]
        probes = dict(before["probes"])
        for fingerprint, hashes in preflight.probes.items():
            probes[fingerprint] = {**hashes, **probes.get(fingerprint, {})}
        return {
            "arms": {**before["arms"], **preflight.cards},
            "probes": probes,
            "repeat": max(self.repeat, before["repeat"]),
            "plan": make_plan(
                before["plan"] or {}, self.bench, names, self.chosen, self.items, self.repeat
            ),
            "date": before["date"],
        }

    def _name_partner(self, before: Mapping[str, ArmCard], preflight: Preflight) -> None:
        """Record the dialogue partner in each arm's card; warn if it differs from before."""
        now = partner_card(self.partner)
        for name, card in preflight.cards.items():
            old = before.get(name)
            same = old is not None and old["fingerprint"] == card["fingerprint"]
            if partner := now or (old.get("partner") if old is not None and same else None):
                card["partner"] = partner
        others = {
            name: f"{card['partner']['model']}@{card['partner']['url']}"
            for name, card in before.items()
            if now and name not in preflight.cards and card.get("partner") not in (None, now)
        }
        for name, other in others.items():
            preflight.problems.append(
                problem(
                    "KTB809",
                    f"arm {name}",
                    f"its dialogues were held with {other}",
                    "one partner for all arms",
                )
            )

    async def _ask_largest(
        self,
        todo: Sequence[Ask],
        preflight: Preflight,
    ) -> set[str]:
        """Ask each arm its largest request first, and its smallest if that is refused: a token limit that
        a server rejects is found before the other questions. Returns the keys asked.

        Raises ProblemsError if the smallest is refused as well.
        """
        asked: dict[str, Ask] = {}

        async def refused(largest: bool, arms: Sequence[Arm]) -> dict[str, Ask]:
            wanted = []
            for arm in arms:
                mine = [ask for ask in todo if ask.arm == arm and not self._is_dialogue(ask)]
                wanted += sorted(mine, key=_size, reverse=largest)[:1]
            await self._asking.ask_all([ask for ask in wanted if ask.key not in asked])
            asked.update({ask.key: ask for ask in wanted})
            records = {ask.arm.name: (ask, self.store.records[ask.key]) for ask in wanted}
            return {
                name: ask
                for name, (ask, record) in records.items()
                if record["outcome"] == "http-error"
                and is_refusal(record["status"], record["detail"])
            }

        largest = await refused(True, self.arms)
        smallest = await refused(False, [arm for arm in self.arms if arm.name in largest])
        found = [self._refusal(ask, smallest.get(name)) for name, ask in largest.items()]
        preflight.problems += found
        if has_errors(found):
            raise ProblemsError(
                "a server refuses what the bench asks; the rest was not asked.", found
            )
        if found:
            self.on_preflight(Preflight({}, problems=found))
        return set(asked)

    def _refusal(self, largest: Ask, smallest: Ask | None) -> Problem:
        record = self.store.records[(smallest or largest).key]
        which = "even its smallest request" if smallest else "its largest request"
        limit = answer_limit((smallest or largest).item, self.bench)
        return problem(
            "KTB805",
            f"arm {largest.arm.name}",
            f"{which} ({limit} answer tokens) is refused: {record['detail']}",
            "an answer to every request",
            remedy(record["status"], record["detail"]),
            severity="error" if smallest else "warning",
        )

    def _is_dialogue(self, ask: Ask) -> bool:
        return is_dialogue(ask.item, self.bench)

    async def _ask(self, ask: Ask) -> Asked[AnswerRecord]:
        if self.partner is not None and self._is_dialogue(ask):
            done = await hold_dialogue(
                ask.arm, ask.item, self.bench, ask.repeat, self.partner, self.clients
            )
        else:
            request = build_request(ask.arm, ask.item, self.bench, ask.repeat)
            done = Dialogue(await self.clients[ask.arm.url].chat(request), [], ask.arm.url)
        answer = done.answer
        record: AnswerRecord = {
            "key": ask.key,
            "arm": ask.arm.name,
            "item": ask.item.id,
            "outcome": answer.outcome,
            "text": answer.text,
            "thinking": answer.thinking,
            "detail": answer.detail,
            "status": answer.status,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "seconds": answer.seconds,
        }
        if ask.repeat:
            record["repeat"] = ask.repeat
        if self._is_dialogue(ask):
            record["turns"] = done.turns
        if not is_silent(answer.outcome == "http-error", answer.status, answer.detail):
            return Asked(record, done.url)
        step = remedy(answer.status, answer.detail) if answer.status else ""
        return Asked(record, done.url, answer.detail, step)

    def _count(self, asked: Asked[AnswerRecord]) -> None:
        self.progress.done += 1
        self.progress.prompt_tokens += asked.record["prompt_tokens"] or 0
        self.progress.completion_tokens += asked.record["completion_tokens"] or 0
        self.on_progress(self.progress)
