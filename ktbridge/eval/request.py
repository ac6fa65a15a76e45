"""Requests of `ktbridge eval`, one per bench, and the answers that each amounts to.

``plan_answers`` lists them for the run and for the dry run alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from typing_extensions import TypedDict

from ktbridge.errors import UsageError
from ktbridge.eval.arms import Arm, arm_card, discover_arms, parse_arms, parse_model
from ktbridge.eval.bench import (
    Bench,
    answer_limit,
    load_bench,
    load_compat,
    parse_extra_body,
    with_max_tokens,
    with_sampling,
)
from ktbridge.eval.judge.prompts import Judge, check_judge, parse_judge
from ktbridge.eval.results.compare import Gate, parse_gate, refuse_unknown
from ktbridge.eval.results.types import (
    ArmAnswer,
    ArmCard,
    ArmPlan,
    ItemRow,
    PartnerCard,
    PlanCounts,
    SlicePlan,
)
from ktbridge.eval.schema import Item
from ktbridge.eval.store import (
    ANSWERS,
    FAILED,
    JUDGE,
    NOT_RUN,
    AnswerRecord,
    Plan,
    PlannedSlice,
    read_ledger,
    read_run,
    request_key,
    run_directories,
)
from ktbridge.server_api.replies import OTHER_LIMIT


@dataclass(frozen=True)
class EvalRequest:
    """One bench's questions to some arms, and the directory where their answers are stored.

    ``slices`` () are all of the bench's; ``limit`` bounds the items, ``repeat`` is how often each is asked.
    ``partner`` plays the user in dialogues. ``concurrency`` requests are in flight; ``timeout`` and
    ``backoff`` are seconds. Raises UsageError for an unknown slice, and for dialogues without a partner or
    with one that may not see them.
    """

    bench: Bench
    arms: Sequence[Arm]
    directory: Path
    slices: tuple[str, ...] = ()
    limit: int | None = None
    repeat: int = 1
    partner: Arm | None = None
    judge: Judge | None = None
    judge_pairs: bool = False
    judge_may_be_remote: bool = False
    concurrency: int = 4
    timeout: float = 900.0
    backoff: float = 0.5
    api_key: str | None = None

    def __post_init__(self) -> None:
        bench = self.bench
        dialogues = [one for one in self.items if is_dialogue(one, bench)]  # refuses unknown slices
        if bench.partner is None or not dialogues:
            return
        if self.partner is not None:
            bench.refuse_remote(self.partner.url, "partner", "use a partner on loopback")
            return
        rest = [one.name for one in bench.slices if one.name not in bench.partner.slices]
        without = f", or leave them out with --slices {','.join(rest)}" if rest else ""
        raise UsageError(
            f"the bench {bench.name!r} has dialogues ({', '.join(bench.partner.slices)}) and no "
            "partner to hold them with.",
            f"give --partner MODEL@URL{without}",
        )

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The items to ask, in the bench's order."""
        return self.bench.select(self.slices, self.limit)

    @property
    def questions(self) -> int:
        """The number of items with questions for a judge."""
        return sum(bool(item.judge) for item in self.items)

    @property
    def dialogue_partner(self) -> Arm | None:
        """The partner, if any item is a dialogue."""
        return self.partner if any(is_dialogue(one, self.bench) for one in self.items) else None


# --- the answers that are asked for


@dataclass(frozen=True)
class AnswerRequest:
    """One answer to request: an arm's to an item, the ``repeat``-th time (from 0)."""

    key: str
    arm: Arm
    item: Item
    repeat: int


def plan_answers(
    request: EvalRequest, cards: Mapping[str, ArmCard], stored: Mapping[str, AnswerRecord]
) -> tuple[list[AnswerRequest], list[AnswerRequest]]:
    """Return all answers of the arms in ``cards`` (by name) in the order of asking, and those that aren't
    stored yet; ``stored`` are records by key.

    Items are asked of all arms in turn, round-robin over the slices, so that an interrupted run is still
    paired and covers every slice, and each item once before any is repeated.
    """
    wanted = [
        AnswerRequest(answer_key(cards[arm.name], arm, item, request.bench, nth), arm, item, nth)
        for nth in range(request.repeat)
        for item in request.bench.in_turn(request.items)
        for arm in request.arms
        if arm.name in cards
    ]
    missing = [one for one in wanted if one.key not in stored or stored[one.key]["outcome"] == FAILED]
    return wanted, missing


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


def partner_card(partner: Arm | None) -> PartnerCard | None:
    """The partner's entry in an arm's card in run.json."""
    return {"model": partner.model, "url": partner.url} if partner else None


# --- the dry run


class PlannedArm(TypedDict):
    name: str
    slices: dict[str, int]
    wanted: int
    stored: int
    to_ask: int
    prompt_tokens: int
    completion_tokens_at_most: int


class PlannedBench(TypedDict):
    """Answers to be asked for, of one bench (schema ``ktbridge.eval-plan/1``)."""

    bench: str
    version: str
    directory: str
    sampling: dict[str, object]
    max_tokens: int | None
    arms: list[PlannedArm]
    judge: dict[str, object] | None


def describe_plan(request: EvalRequest) -> PlannedBench:
    """Describe what a run of ``request`` would ask, without asking anything.

    An answer counts as stored if the directory has the arm with the same name, model, URL and sampling;
    a model that changed under the same name is detected only by the run's preflight.
    """
    bench, judge = request.bench, request.judge
    known = read_run(request.directory)["arms"]
    cards = {arm.name: _expected_card(known.get(arm.name), arm, request) for arm in request.arms}
    wanted, missing = plan_answers(request, cards, read_ledger(request.directory, ANSWERS))
    judged: dict[str, object] | None = None
    if judge:
        most = request.questions * len(request.arms) * request.repeat
        judged = {"model": judge.model, "url": judge.url}
        judged |= {"pairs": request.judge_pairs, "answers": most}
    return {
        "bench": bench.name,
        "version": bench.version,
        "directory": str(request.directory),
        "sampling": dict(bench.sampling),
        "max_tokens": bench.max_tokens,
        "arms": [_describe_arm(arm, bench, wanted, missing) for arm in request.arms],
        "judge": judged,
    }


def _describe_arm(
    arm: Arm, bench: Bench, all_wanted: Sequence[AnswerRequest], missing: Sequence[AnswerRequest]
) -> PlannedArm:
    wanted = [one.item for one in all_wanted if one.arm == arm]
    left = [one.item for one in missing if one.arm == arm]
    counts = Counter(item.slice for item in wanted)
    return {
        "name": arm.name,
        "slices": {one.name: counts[one.name] for one in bench.slices if counts[one.name]},
        "wanted": len(wanted),
        "stored": len(wanted) - len(left),
        "to_ask": len(left),
        "prompt_tokens": sum(_prompt_tokens(item, bench) for item in left),
        "completion_tokens_at_most": sum(answer_limit(item, bench) * _turns(item, bench) for item in left),
    }


def _expected_card(known: ArmCard | None, arm: Arm, request: EvalRequest) -> ArmCard:
    """The card that a run would give to an arm, as far as its card in run.json tells."""
    card = arm_card(arm, {}, request.bench.sampling)
    # A server that lists its own fingerprint may move to another port.
    same = known is not None and (
        (known["url"] == arm.url or "fingerprint" in known["server"])
        and (known["model"], known["sampling"]) == (arm.model, card["sampling"])
    )
    card["fingerprint"] = known["fingerprint"] if known is not None and same else ""
    if partner := partner_card(request.partner):
        card["partner"] = partner
    return card


def _turns(item: Item, bench: Bench) -> int:
    return bench.partner.turns if bench.partner and is_dialogue(item, bench) else 1


def _prompt_tokens(item: Item, bench: Bench) -> int:
    """Estimate: one token per ideograph and per four other characters; 8 per message for the template.
    A dialogue's prompt grows by two answers per turn, here of half the limit each."""
    text = "".join(message["content"] for message in item.messages)
    wide = sum("\u2e80" <= char <= "\u9fff" or char > "\uf8ff" for char in text)
    first = wide + (len(text) - wide) // 4 + 8 * len(item.messages)
    turns = _turns(item, bench)
    return turns * first + answer_limit(item, bench) * turns * (turns - 1) // 2


# --- the plan in run.json


def update_plan(before: Plan, request: EvalRequest) -> Plan:
    """The directory's plan with the items of ``request`` for its arms.

    For each arm it replaces the plan of the request's slices; other slices and arms are kept, because they
    may be asked by separate commands.
    """
    order = [one.name for one in request.bench.slices]
    counts = Counter(item.slice for item in request.items)
    plan: Plan = {name: dict(slices) for name, slices in before.items()}
    for arm in request.arms:
        old = plan.get(arm.name, {})
        kept = {name: old[name] for name in old.keys() - (request.slices or order)}
        now: dict[str, PlannedSlice] = {
            name: {"items": count, "repeat": request.repeat} for name, count in counts.items()
        }
        both = kept | now
        known = [name for name in order if name in both]
        plan[arm.name] = {name: both[name] for name in [*known, *sorted(both.keys() - set(known))]}
    return plan


def compare_plan(plan: Plan, bench: Bench, arms: Sequence[str], rows: Sequence[ItemRow]) -> PlanCounts:
    """Return how much of the plan for ``arms`` was asked, regardless of the outcome.

    An item is missing if an arm that it was planned for has no first answer.
    """
    answers = {row["id"]: row["answers"] for row in rows}
    slices: dict[str, SlicePlan] = {}
    by_arm: dict[str, ArmPlan] = {arm: {"answers": 0, "missing": 0} for arm in arms if arm in plan}
    turn = Counter[str]()
    for item in bench.items:
        turn[item.slice] += 1
        own = {arm: plan[arm].get(item.slice) for arm in by_arm}
        wanted = {arm: one["repeat"] for arm, one in own.items() if one and turn[item.slice] <= one["items"]}
        if not wanted:
            continue
        had = {arm: _count_asked(answers.get(item.id, {}).get(arm)) for arm in wanted}
        row = slices.setdefault(item.slice, {"items": 0, "missing": 0})
        row["items"] += 1
        row["missing"] += not all(had.values())
        for arm, count in wanted.items():
            by_arm[arm]["answers"] += count
            by_arm[arm]["missing"] += max(0, count - had[arm])
    return {
        "items": sum(one["items"] for one in slices.values()),
        "missing_items": sum(one["missing"] for one in slices.values()),
        "answers": sum(one["answers"] for one in by_arm.values()),
        "missing_answers": sum(one["missing"] for one in by_arm.values()),
        "slices": slices,
        "arms": by_arm,
    }


def _count_asked(answer: ArmAnswer | None) -> int:
    """The number of an item's repeats that were asked; 0 if the first wasn't."""
    outcomes = [one["outcome"] for one in answer.get("repeats", [answer])] if answer else [NOT_RUN]
    return 0 if outcomes[0] == NOT_RUN else sum(one != NOT_RUN for one in outcomes)


# --- from the command line


@dataclass(frozen=True)
class EvalOptions:
    """The options of `ktbridge eval` that say what is asked of whom, as they were typed."""

    benches: Sequence[str]
    compat: str | None
    items: Sequence[str]
    arms: Sequence[str]
    server: str | None
    out: Path
    slices: str | None
    limit: int | None
    repeat: int
    max_tokens: int | None
    extra_body: str | None
    partner: str | None
    judge: str | None
    judge_pairs: bool
    judge_extra_body: str | None
    judge_may_be_remote: bool
    fail_on: Sequence[str]
    concurrency: int
    timeout: float


def read_requests(given: EvalOptions, api_key: str | None) -> tuple[list[EvalRequest], list[Gate]]:
    """Parse and check all options: a request per bench, and the conditions that fail the build.

    The only request sent is for the list of models, with --server. Raises UsageError or ProblemsError for
    invalid options.
    """
    if bool(given.arms) == bool(given.server):
        raise UsageError(
            "give arms with --arm NAME=MODEL@URL, or let --server URL find them.",
            "one of the two" if given.arms else "try --server http://127.0.0.1:8000",
        )
    gates = [parse_gate(text) for text in given.fail_on]
    fields = parse_extra_body(given.extra_body or "{}")
    benches = [with_max_tokens(with_sampling(one, fields), given.max_tokens) for one in _load_benches(given)]
    folders = run_directories(given.out, [one.name for one in benches])
    judged_before = any((folder / JUDGE).is_file() for folder in folders)
    refuse_unknown(gates, benches, judged=bool(given.judge) or judged_before)
    slices = _choose_slices(benches, given.slices)
    judge = _read_judge(given, benches)
    partner = parse_model("partner", given.partner) if given.partner else None
    if partner and not any(one.partner for one in benches):
        raise UsageError("--partner: no bench here has dialogues.", "leave --partner out")
    requests = [
        EvalRequest(
            bench=bench,
            arms=parse_arms(given.arms),
            directory=folder,
            slices=slices[bench.name],
            limit=given.limit,
            repeat=given.repeat,
            partner=partner,
            judge=judge,
            judge_pairs=given.judge_pairs,
            judge_may_be_remote=given.judge_may_be_remote,
            concurrency=given.concurrency,
            timeout=given.timeout,
            api_key=api_key,
        )
        for bench, folder in zip(benches, folders, strict=True)
    ]
    if given.server:  # asked last: what else is wrong is told without any request
        arms = discover_arms(given.server, api_key)
        requests = [replace(one, arms=arms) for one in requests]
    return requests, gates


def _load_benches(given: EvalOptions) -> list[Bench]:
    names, items = given.benches, given.items
    if bool(names) == bool(given.compat):
        raise UsageError(
            "give --bench NAME, or --compat NAME for a public set as it is.", "--bench nekobench is ours"
        )
    if given.compat:
        scripts = [path for path in map(Path, items) if path.suffix in (".ipynb", ".py")]
        questions = [path for path in map(Path, items) if path not in scripts]
        if len(questions) != 1 or len(scripts) > 1:
            raise UsageError(
                f"--compat {given.compat} reads one file of questions, and for a judge its script (.ipynb).",
                "give your copies with --items, once each",
            )
        return [load_compat(given.compat, questions[0], scripts[0] if scripts else None)]
    if len(names) == 1:
        if len(items) > 1:
            raise UsageError("one bench reads one --items file.", "give one")
        return [load_bench(names[0], Path(items[0]) if items else None)]
    files = {}
    for text in items:
        name, equals, file = text.partition("=")
        if not equals or name not in names:
            raise UsageError(
                f"with several benches --items {text!r} must say whose it is.", f"write it as {names[0]}=FILE"
            )
        files[name] = Path(file)
    return [load_bench(name, files.get(name)) for name in names]


def _choose_slices(benches: Sequence[Bench], text: str | None) -> dict[str, tuple[str, ...]]:
    """The selected slices per bench; of several benches, one without any selected slice is refused,
    since that is probably a mistake."""
    if text is None:
        return {one.name: () for one in benches}
    known = {one.name: [each.name for each in one.slices] for one in benches}
    every = list(dict.fromkeys(name for names in known.values() for name in names))
    chosen = tuple(name.strip() for name in text.split(",") if name.strip())
    step = f"choose from {', '.join(every)}"
    if not chosen:
        raise UsageError(f"--slices {text!r} names no slice.", step)
    if len(benches) == 1:
        return {benches[0].name: chosen}
    if unknown := [name for name in chosen if name not in every]:
        raise UsageError(f"no bench has a slice {', '.join(map(repr, unknown))}.", step)
    slices = {bench: tuple(name for name in chosen if name in names) for bench, names in known.items()}
    if empty := [bench for bench, names in slices.items() if not names]:
        raise UsageError(
            f"--slices {text!r} leaves nothing of the bench {empty[0]!r}.",
            f"leave that bench out, or add one of {', '.join(known[empty[0]])}",
        )
    return slices


def _read_judge(given: EvalOptions, benches: Sequence[Bench]) -> Judge | None:
    if not given.judge:
        if given.judge_pairs or given.judge_extra_body:
            option = "--judge-pairs" if given.judge_pairs else "--judge-extra-body"
            raise UsageError(f"{option} needs a judge.", "give --judge MODEL@URL")
        return None
    judge = parse_judge(given.judge, parse_extra_body(given.judge_extra_body or "{}", "--judge-extra-body"))
    if given.compat and not any(item.judge for bench in benches for item in bench.items):
        raise UsageError(
            f"--compat {given.compat} has no prompts for a judge without the public script.",
            "give your copy of it with another --items, or --no-judge",
        )
    if given.compat and given.judge_pairs:
        raise UsageError("--judge-pairs: the public script has no pairs.", "leave it out")
    for bench in benches:
        check_judge(bench, judge, given.judge_may_be_remote)
    return judge
