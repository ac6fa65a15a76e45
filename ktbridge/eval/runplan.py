"""The plan of a run as stored in run.json, and how much of it was never asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ktbridge.eval.bench import Bench, Item

# Arm -> slice -> {"items": how many of the slice, from its first on; "repeat": how often each}
Plan = dict[str, dict[str, dict[str, int]]]
NOT_RUN = "not-run"


def make_plan(
    before: Mapping[str, Any],
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
        now = {name: {"items": n, "repeat": repeat} for name, n in counts.items()}
        order = [one.name for one in bench.slices]
        both = kept | now
        plan[arm] = {name: both[name] for name in sorted(both, key=_rank(order))}
    return plan


def _rank(order: Sequence[str]) -> Any:
    return lambda name: (order.index(name) if name in order else len(order), name)


def is_plan(value: Any) -> bool:
    """Whether ``value`` is a valid result of ``make_plan``."""
    return isinstance(value, dict) and all(
        isinstance(slices, dict)
        and all(
            isinstance(one, dict)
            and one.keys() == {"items", "repeat"}
            and all(type(number) is int and number > 0 for number in one.values())
            for one in slices.values()
        )
        for slices in value.values()
    )


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
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """How much of the plan for ``arms`` was asked, regardless of the outcome.

    An item is missing if an arm that it was planned for has no first answer. ``slice_of``: the
    slice of each item by id.
    """
    answers = {row["id"]: row["answers"] for row in rows}
    slices = {name: {"items": 0, "missing": 0} for name in dict.fromkeys(slice_of.values())}
    by_arm = {arm: {"answers": 0, "missing": 0} for arm in arms if arm in planned}
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


def _had(answer: Mapping[str, Any] | None) -> int:
    """How many of an item's repeats were asked, including the first; else 0."""
    if answer is None or answer["outcome"] == NOT_RUN:
        return 0
    repeats = answer.get("repeats", [answer])
    if repeats[0]["outcome"] == NOT_RUN:
        return 0
    return sum(one["outcome"] != NOT_RUN for one in repeats)
