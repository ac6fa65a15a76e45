"""The judge's requests and their keys: a function of bench, answers and judge alone.

Asking and reading build the same plan, so a stored judgement is looked up by its request alone.
Two arms that gave the same answer share one judgement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ktbridge.eval import compat
from ktbridge.eval.arms import sha256
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.judging import prompts
from ktbridge.eval.judging.anchors import Anchor, read_anchors
from ktbridge.eval.judging.judge import Judge

Row = Mapping[str, Any]
Form = Literal["checks", "digit", "pair"]
_PAIR_OF_ARMS = ("full", "expert")


@dataclass(frozen=True)
class Ask:
    """One judgement to request: of one answer (``checks``, ``digit``) or of two (``pair``).

    ``of`` and ``minus`` are the arms compared, or "good" and "bad" of an anchor; ``swapped`` means
    that ``minus`` is shown first. For one answer ``of`` is its arm, or the anchor's kind.
    """

    key: str
    form: Form
    item: Item
    messages: tuple[Mapping[str, str], ...]
    of: str
    minus: str = ""
    swapped: bool = False
    anchor: Anchor | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the reply; None for a digit."""
        if self.form == "pair":
            return prompts.pair_schema()
        return prompts.checklist_schema(len(self.item.judge)) if self.form == "checks" else None

    def read(self, reply: str) -> Any:
        """Parse the reply: tuple of Check, digit or winner. Raises prompts.ReplyError if invalid."""
        if self.form == "pair":
            return prompts.parse_pair(reply)
        if self.form == "checks":
            return prompts.parse_checks(reply, len(self.item.judge))
        digit = compat.parse_digit(reply)
        if digit is None:
            start = " ".join(reply[:40].split())
            raise prompts.ReplyError(f"not one digit from 0 to {compat.HIGHEST}: {start!r}")
        return digit


@dataclass(frozen=True)
class Plan:
    """All questions about one run to one judge.

    ``same`` lists pairs that need no judge, as both answers are byte-identical: (item, of, minus).
    """

    scores: tuple[Ask, ...]
    pairs: tuple[Ask, ...]
    anchors: tuple[Ask, ...]
    anchor_pairs: tuple[Ask, ...]
    same: tuple[tuple[Item, str, str], ...]

    def mixed(self) -> list[Ask]:
        """All requests, each key once, the anchors spread evenly among the rest."""
        rest = {ask.key: ask for ask in (*self.scores, *self.pairs)}
        known = {ask.key: ask for ask in (*self.anchors, *self.anchor_pairs)}
        placed = [((n + 0.5) / len(rest), ask) for n, ask in enumerate(rest.values())]
        placed += [((n + 0.5) / len(known), ask) for n, ask in enumerate(known.values())]
        ordered = [ask for _, ask in sorted(placed, key=lambda pair: pair[0])]
        return list({ask.key: ask for ask in ordered}.values())


def compared_arms(names: Sequence[str]) -> list[tuple[str, str]]:
    """Which arms are compared as (of, minus): the last with the first, and full with expert."""
    pairs = [(names[-1], names[0])] if len(names) > 1 else []
    if set(_PAIR_OF_ARMS) <= set(names) and _PAIR_OF_ARMS not in pairs:
        pairs.append(_PAIR_OF_ARMS)
    return pairs


def make_plan(bench: Bench, rows: Sequence[Row], judge: Judge, *, pairs: bool) -> Plan:
    """Plan the judgement of the ok answers in ``rows`` (a report's items) that have questions.

    Raises ProblemsError for invalid anchors.
    """
    items = {item.id: item for item in bench.items}
    digits = compat.is_compat(bench)
    scores: list[Ask] = []
    compared: list[Ask] = []
    same = []
    slices = set()
    # An arm that was never asked is in no report, so there is nothing to compare.
    asked = {
        name: None
        for row in rows
        for name, one in row["answers"].items()
        if one["outcome"] != "not-run"
    }
    for row in rows:
        item = items.get(row["id"])
        if item is None or not (digits or item.judge):
            continue
        ok = {name: one for name, one in row["answers"].items() if one["outcome"] == "ok"}
        for name, answer in ok.items():
            slices.add(item.slice)
            scores += [
                _score(judge, item, name, one["text"], _turns(one), None, digits)
                for one in ok_repeats(answer)
            ]
        for of, minus in compared_arms(list(asked)) if pairs else ():
            if not {of, minus} <= set(ok):
                continue
            shown = [(ok[name]["text"], _turns(ok[name])) for name in (of, minus)]
            if shown[0] == shown[1]:
                same.append((item, of, minus))
            else:
                compared += _both_orders(judge, item, (of, minus), shown, None, digits)
    anchors = [one for one in read_anchors(bench) if one.item.slice in slices]
    return Plan(
        tuple(scores),
        tuple(compared),
        tuple(_score(judge, one.item, one.kind, one.answer, (), one, digits) for one in anchors),
        tuple(_anchor_pairs(judge, anchors, digits)) if compared else (),
        tuple(same),
    )


def ok_repeats(answer: Row) -> list[Row]:
    """The ok answers among an arm's repeats of an item; the answer itself if asked once."""
    return [one for one in answer.get("repeats") or [answer] if one["outcome"] == "ok"]


def _turns(answer: Row) -> tuple[Mapping[str, str], ...]:
    return tuple(answer.get("turns") or ())


def _score(
    judge: Judge,
    item: Item,
    name: str,
    text: str,
    turns: Sequence[Mapping[str, str]],
    anchor: Anchor | None,
    digits: bool,
) -> Ask:
    form: Form = "digit" if digits else "checks"
    messages = (
        compat.judge_messages(item, text)
        if digits
        else prompts.checklist_messages(item, text, turns)
    )
    return Ask(_key(judge, messages), form, item, tuple(messages), name, anchor=anchor)


def _both_orders(
    judge: Judge,
    item: Item,
    names: tuple[str, str],
    shown: Sequence[tuple[str, Sequence[Mapping[str, str]]]],
    anchor: Anchor | None,
    digits: bool,
) -> list[Ask]:
    criteria = [compat.rubric(item.slice)] if digits else item.judge
    asks = []
    for swapped in (False, True):
        one, other = (shown[1], shown[0]) if swapped else (shown[0], shown[1])
        turns = (one[1], other[1])
        messages = prompts.pair_messages(item, criteria, one[0], other[0], turns)
        key = _key(judge, messages)
        asks.append(Ask(key, "pair", item, tuple(messages), *names, swapped, anchor))
    return asks


def _anchor_pairs(judge: Judge, anchors: Sequence[Anchor], digits: bool) -> list[Ask]:
    """The good answer of each anchor beside its bad one, in both orders."""
    by_name: dict[str, dict[str, Anchor]] = {}
    for one in anchors:
        by_name.setdefault(one.item.id, {})[one.kind] = one
    asks = []
    for kinds in by_name.values():
        if len(kinds) == 2:
            good, bad = kinds["good"], kinds["bad"]
            shown: list[tuple[str, tuple[()]]] = [(good.answer, ()), (bad.answer, ())]
            asks += _both_orders(judge, good.item, ("good", "bad"), shown, good, digits)
    return asks


def _key(judge: Judge, messages: Sequence[Mapping[str, str]]) -> str:
    asked: dict[str, Any] = {"judge": judge.model, "url": judge.url, "version": prompts.VERSION}
    if judge.extra_body:
        asked["extra_body"] = dict(judge.extra_body)
    return sha256({**asked, "messages": list(messages)})
