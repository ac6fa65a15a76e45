"""Ask a bench's questions of each arm and store the answers. Scoring is in ``results/``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ktbridge.codes import problem
from ktbridge.errors import Problem, ProblemsError, has_errors
from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import (
    Asked,
    AskingLoop,
    answer_key,
    build_request,
    is_dialogue,
    run_until_interrupt,
)
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.client import Client
from ktbridge.eval.dialogue import Dialogue, check_partner, hold_dialogue, partner_card
from ktbridge.eval.failures import is_refusal, remedy
from ktbridge.eval.preflight import Preflight, check_arms
from ktbridge.eval.results.types import ArmCard, Identical
from ktbridge.eval.rundir import BENCH as BENCH
from ktbridge.eval.rundir import BENCHES as BENCHES
from ktbridge.eval.rundir import RUN as RUN
from ktbridge.eval.rundir import make_plan, write_run
from ktbridge.eval.rundir import read_benches as read_benches
from ktbridge.eval.rundir import read_run as read_run
from ktbridge.eval.store import Store


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


@dataclass(frozen=True)
class Ask:
    """One answer to request: an arm's to an item, the ``repeat``-th time (from 0)."""

    key: str
    arm: Arm
    item: Item
    repeat: int


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
    options = {"timeout": timeout, "backoff": backoff, "api_key": api_key}
    chosen = slices or tuple(one.name for one in bench.slices)
    with Store(directory) as store:
        run = _Run(bench, arms, chosen, items, store, repeat, partner, concurrency, on_progress)
        return run_until_interrupt(run.collect(options, on_preflight))


class Pick(Protocol):
    """``max`` or ``min``."""

    def __call__(self, asks: Sequence[Ask], /, *, key: Callable[[Ask], int]) -> Ask: ...


def list_asks(
    bench: Bench,
    arms: Sequence[Arm],
    items: Sequence[Item],
    cards: Mapping[str, ArmCard],
    repeat: int,
) -> list[Ask]:
    """Every answer that a run requests, in order. ``cards`` are the arms' by name."""
    return [
        Ask(answer_key(cards[arm.name], arm, item, bench, nth), arm, item, nth)
        for nth in range(repeat)
        for item in bench.in_turn(items)
        for arm in arms
    ]


def _size(ask: Ask) -> int:
    """Estimate of a request's tokens: a third of its bytes, plus the answer's limit."""
    content = sum(len(message["content"].encode()) for message in ask.item.messages)
    return content // 3 + ask.item.max_tokens


class _Run:
    """One invocation's work, inside its store."""

    def __init__(
        self,
        bench: Bench,
        arms: Sequence[Arm],
        chosen: Sequence[str],
        items: Sequence[Item],
        store: Store,
        repeat: int,
        partner: Arm | None,
        concurrency: int,
        on_progress: OnProgress | None,
    ) -> None:
        self._bench = bench
        self._arms = arms
        self._chosen = chosen
        self._items = items
        self._store = store
        self._repeat = repeat
        self._partner = partner
        self._report = on_progress or (lambda progress: None)
        self._progress = Progress()
        self._clients: dict[str, Client] = {}
        self._asking = AskingLoop(
            self._ask,
            store,
            concurrency,
            self._count,
            "",
            "see to the server and run the same command again; what was answered is stored",
        )

    async def collect(
        self, options: dict[str, Any], on_preflight: Callable[[Preflight], None] | None
    ) -> Collected:
        run = read_run(self._store.directory)
        async with contextlib.AsyncExitStack() as stack:
            asked = [*self._arms, *([self._partner] if self._partner else [])]
            for url in dict.fromkeys(one.url for one in asked):
                self._clients[url] = await stack.enter_async_context(Client(url, **options))
                # One counter of failures for all servers.
                self._clients[url].faults = self._progress.faults
            preflight = await check_arms(
                self._arms, self._clients, self._bench, run["probes"], self._partner
            )
            self._name_partner(run["arms"], preflight)
            if on_preflight:
                on_preflight(preflight)
            names = [arm.name for arm in self._arms]
            plan = make_plan(
                run["plan"] or {}, self._bench, names, self._chosen, self._items, self._repeat
            )
            write_run(
                self._store.directory,
                run,
                self._bench,
                preflight.cards,
                preflight.probes,
                self._repeat,
                plan,
            )
            arms = [arm for arm in self._arms if "refused" not in preflight.cards[arm.name]]
            asks = list_asks(self._bench, arms, self._items, preflight.cards, self._repeat)
            todo = [ask for ask in asks if not self._store.has(ask.key)]
            stored = len(asks) - len(todo)
            self._progress.done = self._progress.stored = stored
            self._progress.total = len(asks)
            self._report(self._progress)
            refused = await self._ask_largest(todo, preflight, on_preflight)
            await self._asking.ask_all([ask for ask in todo if ask.key not in refused])
        outcomes = Counter(self._store.records[ask.key]["outcome"] for ask in asks)
        return Collected(
            len(todo),
            stored,
            dict(outcomes),
            preflight.identical,
            tuple(preflight.problems),
            {kind: count for kind, count in self._progress.faults.items() if count},
        )

    def _name_partner(self, before: Mapping[str, ArmCard], preflight: Preflight) -> None:
        """Record the dialogue partner in each arm's card; warn if it differs from before."""
        now = partner_card(self._partner)
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
        on_preflight: Callable[[Preflight], None] | None,
    ) -> set[str]:
        """Ask each arm its largest request first, and its smallest if that is refused: a token limit that
        a server rejects is found before the other questions. Returns the keys asked.

        Raises ProblemsError if the smallest is refused as well.
        """
        asked: dict[str, Ask] = {}

        async def refused(pick: Pick, arms: Sequence[Arm]) -> dict[str, Ask]:
            wanted = []
            for arm in arms:
                mine = [ask for ask in todo if ask.arm == arm and not self._is_dialogue(ask)]
                wanted += [pick(mine, key=_size)] if mine else []
            await self._asking.ask_all([ask for ask in wanted if ask.key not in asked])
            asked.update({ask.key: ask for ask in wanted})
            records = {ask.arm.name: (ask, self._store.records[ask.key]) for ask in wanted}
            return {
                name: ask
                for name, (ask, record) in records.items()
                if record["outcome"] == "http-error" and is_refusal(record["status"])
            }

        largest = await refused(max, self._arms)
        smallest = await refused(min, [arm for arm in self._arms if arm.name in largest])
        found = [self._refusal(ask, smallest.get(name)) for name, ask in largest.items()]
        preflight.problems += found
        if has_errors(found):
            raise ProblemsError(
                "a server refuses what the bench asks; the rest was not asked.", found
            )
        if found and on_preflight:
            on_preflight(Preflight({}, problems=found))
        return set(asked)

    def _refusal(self, largest: Ask, smallest: Ask | None) -> Problem:
        record = self._store.records[(smallest or largest).key]
        which = "even its smallest request" if smallest else "its largest request"
        limit = build_request(largest.arm, (smallest or largest).item, self._bench)["max_tokens"]
        return problem(
            "KTB805",
            f"arm {largest.arm.name}",
            f"{which} ({limit} answer tokens) is refused: {record['detail']}",
            "an answer to every request",
            remedy(record["status"], record["detail"]),
            severity="error" if smallest else "warning",
        )

    def _is_dialogue(self, ask: Ask) -> bool:
        return is_dialogue(ask.item, self._bench)

    async def _ask(self, ask: Ask) -> Asked:
        if self._partner is not None and self._is_dialogue(ask):
            done = await hold_dialogue(
                ask.arm, ask.item, self._bench, ask.repeat, self._partner, self._clients
            )
        else:
            request = build_request(ask.arm, ask.item, self._bench, ask.repeat)
            done = Dialogue(await self._clients[ask.arm.url].chat(request), [], ask.arm.url)
        answer = done.answer
        record = {"key": ask.key, "arm": ask.arm.name, "item": ask.item.id, **answer.as_dict()}
        if ask.repeat:
            record["repeat"] = ask.repeat
        if self._is_dialogue(ask):
            record["turns"] = done.turns
        gone = answer.outcome == "http-error" and answer.status == 0
        return Asked(record, done.url, answer.detail if gone else "")

    def _count(self, asked: Asked) -> None:
        self._progress.done += 1
        self._progress.prompt_tokens += asked.record["prompt_tokens"] or 0
        self._progress.completion_tokens += asked.record["completion_tokens"] or 0
        self._report(self._progress)
