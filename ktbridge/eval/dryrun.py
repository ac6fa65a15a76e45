"""Dry run: the requests that a run would send, without sending any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktbridge.eval.arms import Arm
from ktbridge.eval.asking import is_dialogue
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.dialogue import check_partner, partner_card
from ktbridge.eval.results.types import ArmCard
from ktbridge.eval.run import list_asks
from ktbridge.eval.rundir import read_run
from ktbridge.eval.store import FAILED, read_answers


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
    """What ``collect`` with the same arguments would ask, per arm, without any request.

    An answer counts as stored if ``directory`` has the arm with the same name, model, URL and sampling;
    a model that changed under the same name is detected only by the run's preflight. Raises what
    ``collect`` raises before its first request.
    """
    items = bench.select(slices, limit)
    check_partner(bench, items, partner)
    known = read_run(directory)["arms"]
    records = read_answers(directory)
    planned = []
    for arm in arms:
        card = _card(known.get(arm.name), arm, bench, partner)
        asks = list_asks(bench, [arm], items, {arm.name: card}, repeat)
        left = [
            ask for ask in asks if records.get(ask.key, {"outcome": FAILED})["outcome"] == FAILED
        ]
        counts = {one.name: sum(ask.item.slice == one.name for ask in asks) for one in bench.slices}
        planned.append(
            Planned(
                arm.name,
                {name: count for name, count in counts.items() if count},
                len(asks) - len(left),
                sum(_prompt_tokens(ask.item, bench) for ask in left),
                sum(ask.item.max_tokens * _turns(ask.item, bench) for ask in left),
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
    return turns * first + item.max_tokens * turns * (turns - 1) // 2
