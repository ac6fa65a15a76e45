"""What a run is to ask: the plan in run.json, its requests in order, and the dry run that sends none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import answer_key, check_partner, is_dialogue, partner_card
from ktbridge.eval.bench import Bench, Item, answer_limit
from ktbridge.eval.results.types import ArmAnswer, ArmCard, ArmPlan, ItemRow, PlanCounts, SlicePlan
from ktbridge.eval.rundir import NOT_RUN, Plan, PlannedSlice, read_run
from ktbridge.eval.store import ANSWERS, FAILED, read_ledger


@dataclass(frozen=True)
class Ask:
    """One answer to request: an arm's to an item, the ``repeat``-th time (from 0)."""

    key: str
    arm: Arm
    item: Item
    repeat: int


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


# --- the plan in run.json


def make_plan(
    before: Plan,
    bench: Bench,
    arms: Sequence[str],
    chosen: Sequence[str],
    items: Sequence[Item],
    repeat: int,
) -> Plan:
    """The directory's plan updated with ``items`` for ``arms``, out of the slices ``chosen``.

    For each arm it replaces the plan of these slices; other slices and arms are kept, because they
    may be asked by separate commands.
    """
    counts = Counter(item.slice for item in items)
    plan: Plan = {name: dict(slices) for name, slices in before.items()}
    for arm in arms:
        kept = {name: one for name, one in plan.get(arm, {}).items() if name not in chosen}
        now: dict[str, PlannedSlice] = {
            name: {"items": n, "repeat": repeat} for name, n in counts.items()
        }
        both = kept | now
        known = [one.name for one in bench.slices if one.name in both]
        plan[arm] = {name: both[name] for name in [*known, *sorted(both.keys() - set(known))]}
    return plan


def planned_answers(plan: Plan, bench: Bench) -> dict[str, dict[str, int]]:
    """Arm -> item id -> how many answers are planned."""
    planned: dict[str, dict[str, int]] = {}
    for arm, slices in plan.items():
        planned[arm] = {}
        for name, one in slices.items():
            items = [item for item in bench.items if item.slice == name][: one["items"]]
            planned[arm] |= {item.id: one["repeat"] for item in items}
    return planned


def compare_plan(
    planned: Mapping[str, Mapping[str, int]],
    arms: Sequence[str],
    slice_of: Mapping[str, str],
    rows: Sequence[ItemRow],
) -> PlanCounts:
    """Return how much of the plan for ``arms`` was asked, regardless of the outcome.

    An item is missing if an arm that it was planned for has no first answer. ``slice_of``: the
    slice of each item by id.
    """
    answers = {row["id"]: row["answers"] for row in rows}
    slices: dict[str, SlicePlan] = {
        name: {"items": 0, "missing": 0} for name in dict.fromkeys(slice_of.values())
    }
    by_arm: dict[str, ArmPlan] = {
        arm: {"answers": 0, "missing": 0} for arm in arms if arm in planned
    }
    for item, name in slice_of.items():
        wanted = {arm: planned[arm][item] for arm in by_arm if item in planned[arm]}
        if not wanted:
            continue
        had = {arm: _had(answers.get(item, {}).get(arm)) for arm in wanted}
        slices[name]["items"] += 1
        slices[name]["missing"] += any(not count for count in had.values())
        for arm, count in wanted.items():
            by_arm[arm]["answers"] += count
            by_arm[arm]["missing"] += max(0, count - had[arm])
    slices = {name: one for name, one in slices.items() if one["items"]}
    return {
        "items": sum(one["items"] for one in slices.values()),
        "missing_items": sum(one["missing"] for one in slices.values()),
        "answers": sum(one["answers"] for one in by_arm.values()),
        "missing_answers": sum(one["missing"] for one in by_arm.values()),
        "slices": slices,
        "arms": by_arm,
    }


def _had(answer: ArmAnswer | None) -> int:
    """Return how many of an item's repeats were asked, including the first; else 0."""
    if answer is None or answer["outcome"] == NOT_RUN:
        return 0
    repeats = answer.get("repeats", [answer])
    if repeats[0]["outcome"] == NOT_RUN:
        return 0
    return sum(one["outcome"] != NOT_RUN for one in repeats)


# --- the dry run


@dataclass(frozen=True)
class Planned:
    """One arm's part of a bench: answers requested per slice and in total, how many are stored, and
    tokens of the remaining prompts (estimated) and answers (at most)."""

    arm: str
    slices: dict[str, int]
    stored: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def wanted(self) -> int:
        return sum(self.slices.values())


def plan_run(
    bench: Bench,
    arms: Sequence[Arm],
    directory: Path,
    *,
    slices: tuple[str, ...] = (),
    limit: int | None = None,
    repeat: int = 1,
    partner: Arm | None = None,
) -> list[Planned]:
    """Return what ``collect`` with the same arguments would ask, per arm, without any request.

    An answer counts as stored if ``directory`` has the arm with the same name, model, URL and sampling;
    a model that changed under the same name is detected only by the run's preflight. Raises what
    ``collect`` raises before its first request.
    """
    items = bench.select(slices, limit)
    check_partner(bench, items, partner)
    known = read_run(directory)["arms"]
    records = read_ledger(directory, ANSWERS)
    planned = []
    for arm in arms:
        card = _card(known.get(arm.name), arm, bench, partner)
        asks = list_asks(bench, [arm], items, {arm.name: card}, repeat)
        left = [
            ask for ask in asks if ask.key not in records or records[ask.key]["outcome"] == FAILED
        ]
        counts = {one.name: sum(ask.item.slice == one.name for ask in asks) for one in bench.slices}
        planned.append(
            Planned(
                arm.name,
                {name: count for name, count in counts.items() if count},
                len(asks) - len(left),
                sum(_prompt_tokens(ask.item, bench) for ask in left),
                sum(answer_limit(ask.item, bench) * _turns(ask.item, bench) for ask in left),
            )
        )
    return planned


def _card(card: ArmCard | None, arm: Arm, bench: Bench, partner: Arm | None) -> ArmCard:
    # A server that lists its own fingerprint may move to another port.
    same = card is not None and (
        (card["url"] == arm.url or "fingerprint" in card["server"])
        and (card["model"], card["sampling"]) == (arm.model, dict(bench.sampling))
    )
    fingerprint = card["fingerprint"] if card is not None and same else ""
    planned: ArmCard = {
        "name": arm.name,
        "url": arm.url,
        "model": arm.model,
        "server": {},
        "sampling": dict(bench.sampling),
        "fingerprint": fingerprint,
    }
    if now := partner_card(partner):
        planned["partner"] = now
    return planned


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
