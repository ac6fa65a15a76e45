"""The judge's requests and their keys: a function of bench, answers and judge alone.

Asking and reading build the same plan, so a stored judgement is looked up by its request alone.
Two arms that gave the same answer share one judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ktbridge.errors import UsageError
from ktbridge.eval import compat
from ktbridge.eval.arms import Arm, parse_model
from ktbridge.eval.bench import Bench, Item
from ktbridge.eval.judging import prompts
from ktbridge.eval.judging.anchors import Anchor, read_anchors
from ktbridge.eval.judging.prompts import Check, JsonSchema, Winner
from ktbridge.eval.results.types import ArmAnswer, ItemRow, Json, JudgeState, Message
from ktbridge.eval.store import Compared
from ktbridge.files import digests

Form = Literal["checks", "digit", "pair"]
_GOOD_DIGIT = 3  # of 0 to 5
_PAIR_OF_ARMS = ("full", "expert")
_OURS = {"messages", "model", "n", "response_format", "stream"}


@dataclass(frozen=True)
class Judge(Arm):
    """The model that judges: one more arm, with other prompts. ``extra_body`` are fields that override
    our request's; None removes one."""

    extra_body: Json = field(default_factory=dict)


def parse_judge(text: str, extra_body: Json | None = None) -> Judge:
    """Parse MODEL@URL. Raises UsageError if it or ``extra_body`` is invalid."""
    ours = sorted(_OURS & set(extra_body or {}))
    if ours:
        raise UsageError(
            f"--judge-extra-body sets {', '.join(ours)}, which judging sets itself.",
            "leave it out",
        )
    return Judge(**vars(parse_model("judge", text)), extra_body=extra_body or {})


def check_judge(bench: Bench, judge: Judge, may_be_remote: bool = False) -> None:
    """Checks before any request: may this judge see the data, are the anchors valid?

    Raises UsageError if private data would leave this machine, ProblemsError with every invalid
    anchor.
    """
    bench.refuse_remote_judge(judge.url, allowed=may_be_remote)
    read_anchors(bench)


@dataclass(frozen=True)
class JudgeReply:
    """What a judge replied to one question: checks, a digit or a winner if ``state`` is ok."""

    state: JudgeState
    checks: tuple[Check, ...] = ()
    digit: int | None = None
    winner: Winner | None = None

    @property
    def verdicts(self) -> list[bool]:
        """On one answer: of each check; of a digit whether it rates the answer as good."""
        if self.digit is not None:
            return [self.digit >= _GOOD_DIGIT]
        return [check.yes for check in self.checks]


@dataclass(frozen=True)
class Ask:
    """One judgement to request: of one answer (``checks``, ``digit``) or of two (``pair``).

    ``of`` and ``minus`` are the arms compared, or "good" and "bad" of an anchor; ``swapped`` means
    that ``minus`` is shown first. For one answer ``of`` is its arm, or the anchor's kind.
    """

    key: str
    form: Form
    item: Item
    messages: tuple[Message, ...]
    of: str
    minus: str = ""
    swapped: bool = False
    anchor: Anchor | None = None

    @property
    def schema(self) -> JsonSchema | None:
        """The JSON schema of the reply; None for a digit."""
        if self.form == "pair":
            return prompts.pair_schema()
        return prompts.checklist_schema(len(self.item.judge)) if self.form == "checks" else None

    @property
    def request(self) -> Json:
        """Fields of the request that the bench asks for."""
        return dict(compat.REQUEST) if self.form == "digit" else {}

    @property
    def compared(self) -> Compared:
        """Return what the record of a pair says of it; {} for one answer."""
        return {"minus": self.minus, "swapped": self.swapped} if self.form == "pair" else {}

    def read(self, reply: str) -> JudgeReply:
        """Parse the reply. Raises prompts.ReplyError if it is invalid."""
        if self.form == "pair":
            return JudgeReply("ok", winner=prompts.parse_pair(reply))
        if self.form == "checks":
            return JudgeReply("ok", checks=prompts.parse_checks(reply, len(self.item.judge)))
        digit = compat.first_digit(reply)
        if digit is None:
            start = " ".join(reply[:40].split())
            raise prompts.ReplyError(f"no digit from 0 to {compat.HIGHEST}: {start!r}")
        return JudgeReply("ok", digit=digit)


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
    """Return which arms are compared as (of, minus): the last with the first, and full with expert."""
    pairs = [(names[-1], names[0])] if len(names) > 1 else []
    if set(_PAIR_OF_ARMS) <= set(names) and _PAIR_OF_ARMS not in pairs:
        pairs.append(_PAIR_OF_ARMS)
    return pairs


def make_plan(bench: Bench, rows: Sequence[ItemRow], judge: Judge, *, pairs: bool) -> Plan:
    """Plan the judgement of the ok answers in ``rows`` (a report's items) that have questions.

    Raises ProblemsError for invalid anchors.
    """
    items = {item.id: item for item in bench.items}
    digits = compat.is_compat(bench)
    pairs = pairs and not digits  # the public script has none
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
        if item is None or not item.judge:
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
                compared += _both_orders(judge, item, (of, minus), shown, None)
    anchors = [one for one in read_anchors(bench) if one.item.slice in slices]
    return Plan(
        tuple(scores),
        tuple(compared),
        tuple(_score(judge, one.item, one.kind, one.answer, (), one, digits) for one in anchors),
        tuple(_anchor_pairs(judge, anchors)) if compared else (),
        tuple(same),
    )


def digit_question(judge: Judge, bench: Bench) -> Ask:
    """The first anchor of a bench that is judged by digits, as its answers are asked about."""
    first = read_anchors(bench)[0]
    return _score(judge, first.item, first.kind, first.answer, (), first, digits=True)


def ok_repeats(answer: ArmAnswer) -> list[ArmAnswer]:
    """The ok answers among an arm's repeats of an item; the answer itself if asked once."""
    return [one for one in answer.get("repeats") or [answer] if one["outcome"] == "ok"]


def _turns(answer: ArmAnswer) -> tuple[Message, ...]:
    return tuple(answer.get("turns") or ())


def _score(
    judge: Judge,
    item: Item,
    name: str,
    text: str,
    turns: Sequence[Message],
    anchor: Anchor | None,
    digits: bool,
) -> Ask:
    form: Form = "digit" if digits else "checks"
    messages = (
        compat.judge_messages(item, text)
        if digits
        else prompts.checklist_messages(item, text, turns)
    )
    key = _key(judge, messages, compat.REQUEST if digits else {})
    return Ask(key, form, item, tuple(messages), name, anchor=anchor)


def _both_orders(
    judge: Judge,
    item: Item,
    names: tuple[str, str],
    shown: Sequence[tuple[str, Sequence[Message]]],
    anchor: Anchor | None,
) -> list[Ask]:
    asks = []
    for swapped in (False, True):
        one, other = (shown[1], shown[0]) if swapped else (shown[0], shown[1])
        turns = (one[1], other[1])
        messages = prompts.pair_messages(item, item.judge, one[0], other[0], turns)
        key = _key(judge, messages)
        asks.append(Ask(key, "pair", item, tuple(messages), *names, swapped, anchor))
    return asks


def _anchor_pairs(judge: Judge, anchors: Sequence[Anchor]) -> list[Ask]:
    """The good answer of each anchor beside its bad one, in both orders."""
    by_name: dict[str, dict[str, Anchor]] = {}
    for one in anchors:
        by_name.setdefault(one.item.id, {})[one.kind] = one
    asks = []
    for kinds in by_name.values():
        if len(kinds) == 2:
            good, bad = kinds["good"], kinds["bad"]
            shown: list[tuple[str, tuple[()]]] = [(good.answer, ()), (bad.answer, ())]
            asks += _both_orders(judge, good.item, ("good", "bad"), shown, good)
    return asks


def _key(judge: Judge, messages: Sequence[Message], request: Json | None = None) -> str:
    asked: dict[str, object] = {"judge": judge.model, "url": judge.url, "version": prompts.VERSION}
    if request:
        asked["request"] = dict(request)
    if judge.extra_body:
        asked["extra_body"] = dict(judge.extra_body)
    return digests.of_json({**asked, "messages": list(messages)})


# Names of model families; a model's name may contain several (a distilled model's does).
