"""Read the stored judgements, and calibrate the judge by its anchors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from ktbridge.errors import KtbridgeError, Problem
from ktbridge.eval import compat
from ktbridge.eval.bench import Bench
from ktbridge.eval.judging import bias
from ktbridge.eval.judging.bias import Comparison
from ktbridge.eval.judging.plan import Ask, Judge, JudgeReply, Plan, make_plan, ok_repeats
from ktbridge.eval.judging.prompts import VERSION, ReplyError
from ktbridge.eval.judging.trust import same_family, tally_anchors, tally_pairs, trust
from ktbridge.eval.results.types import (
    ArmAnswer,
    DigitMeans,
    ItemRow,
    Json,
    JudgeCard,
    JudgeCheck,
    JudgedPair,
    JudgeFacts,
    JudgeState,
)
from ktbridge.eval.rundir import read_run
from ktbridge.eval.store import JUDGEMENTS, JudgementRecord, read_document, read_ledger
from ktbridge.schemas import fits

JUDGE = "judge.json"
Rows = Sequence[ItemRow]


class NamedJudge(TypedDict):
    """judge.json: the judge to report; ``server`` is its entry of /v1/models."""

    model: str
    url: str
    version: str
    pairs: bool
    server: Json
    extra_body: NotRequired[Json]


@dataclass(frozen=True)
class JudgeScore:
    """A judge's score of one answer. ``share`` is the share of yes, or digit/5; None where there
    is none."""

    share: float | None
    outcome: JudgeState
    checks: tuple[JudgeCheck, ...] = ()


@dataclass(frozen=True)
class Judgements:
    """Everything that a report needs about a judge.

    ``scores``: item id -> arm -> JudgeScore, for the ok answers to items with questions; empty if
    the judge failed its anchors or gave no valid reply, which an error in ``problems`` then
    reports. ``pairs`` is empty if it failed on the anchor pairs.
    """

    scores: Mapping[str, Mapping[str, JudgeScore]]
    pairs: list[JudgedPair]
    card: JudgeCard
    problems: list[Problem]


def read_card(directory: Path) -> NamedJudge | None:
    """judge.json: the judge to report, or None. Raises KtbridgeError if the file is invalid."""
    path = directory / JUDGE
    try:
        card = read_document(path)
    except FileNotFoundError:
        return None
    if not fits(card, NamedJudge):
        raise KtbridgeError(
            f"{str(path)!r} is not a judge's card.",
            "delete it and run the same `ktbridge eval --judge` again; the judgements are kept",
        )
    return card


def named_judge(card: NamedJudge) -> Judge:
    """The judge that a card of ``read_card`` names."""
    return Judge("judge", card["model"], card["url"], card.get("extra_body", {}))


def read_judgements(directory: Path, bench: Bench, rows: Rows) -> Judgements | None:
    """The judgements of judge.json's judge on ``rows`` (a report's items); None without a judge.

    A row needs ``id`` and ``answers`` (arm -> ``outcome``, ``text``; for a dialogue ``turns``; for
    several repeats ``repeats``, each with these).
    A function of the directory's files and ``rows``. Raises KtbridgeError for damaged files.
    """
    named = read_card(directory)
    if named is None:
        return None
    judge = named_judge(named)
    plan = make_plan(bench, rows, judge, pairs=named["pairs"])
    records = read_ledger(directory, JUDGEMENTS)
    replies = {ask.key: _read(ask, records.get(ask.key)) for ask in plan.mixed()}
    kept = {key: records[key] for key in replies if key in records}
    scores = _scores(plan, replies)
    compared, unread = _compare(plan.pairs, replies, rows)
    known, _ = _compare(plan.anchor_pairs, replies, ())
    outcomes = Counter(one.state for one in replies.values())
    read = outcomes["ok"] + outcomes["parse-fail"]
    verdicts = _verdicts(plan, replies)
    clusters = {item.id: item.cluster for item in bench.items}
    family = same_family(judge, named["server"], read_run(directory)["arms"].values())
    facts: JudgeFacts = {
        "model": judge.model,
        "url": judge.url,
        "extra_body": dict(judge.extra_body),
        "version": named["version"],
        "calls": sum(record["attempts"] for record in kept.values()),
        "outcomes": {name: outcomes[name] for name in sorted(outcomes)},
        "prompt_tokens": sum(record["prompt_tokens"] for record in kept.values()),
        "completion_tokens": sum(record["completion_tokens"] for record in kept.values()),
        "parse_fail_rate": round(outcomes["parse-fail"] / read, 6) if read else None,
        "yes_rate": round(sum(verdicts) / len(verdicts), 6) if verdicts else None,
        "verdicts": len(verdicts),
        "flip_rate": bias.flip_rate(compared),
        "position_bias": bias.position_bias(compared),
        "length_bias": bias.length_bias_of_pairs(compared)
        or bias.length_bias_of_scores(_lengths(scores, rows), clusters),
        "anchors": tally_anchors(plan.anchors, replies),
        "anchor_pairs": tally_pairs(known),
        "pairs_unread": unread,
        "same_family": bool(family),
    }
    if means := _public_means(plan, replies):
        facts["digits"] = means
    if named["version"] != VERSION:
        facts["outdated"] = f"its prompts are version {named['version']}, ours are {VERSION}"
    verdict = trust(facts, plan, kept, family, _digits(plan, replies))
    return Judgements(
        {} if verdict.refused else scores,
        [] if verdict.refused or verdict.pairs_refused else _pair_rows(plan, compared),
        {**facts, "refused": verdict.refused, "pairs_refused": verdict.pairs_refused},
        list(verdict.problems),
    )


def _read(ask: Ask, record: JudgementRecord | None) -> JudgeReply:
    if record is None:
        return JudgeReply("not-run")
    if record["outcome"] != "ok":
        return JudgeReply(record["outcome"])
    try:
        return ask.read(record["reply"])
    except ReplyError:
        return JudgeReply("parse-fail")


def _scores(plan: Plan, replies: Mapping[str, JudgeReply]) -> dict[str, dict[str, JudgeScore]]:
    repeats: dict[tuple[str, str], list[JudgeScore]] = {}
    for ask in plan.scores:
        repeats.setdefault((ask.item.id, ask.of), []).append(_score(ask, replies[ask.key]))
    scores: dict[str, dict[str, JudgeScore]] = {}
    for (item, arm), every in repeats.items():
        scores.setdefault(item, {})[arm] = _mean(every)
    return scores


def _score(ask: Ask, reply: JudgeReply) -> JudgeScore:
    if reply.state != "ok":
        return JudgeScore(None, reply.state)
    if reply.digit is not None:
        digit: JudgeCheck = {
            "id": "digit",
            "question": ask.item.judge[0],
            "yes": None,
            "evidence": str(reply.digit),
        }
        return JudgeScore(round(reply.digit / compat.HIGHEST, 6), "ok", (digit,))
    checks: tuple[JudgeCheck, ...] = tuple(
        {"id": f"q{n}", "question": question, "yes": one.yes, "evidence": one.evidence}
        for n, (question, one) in enumerate(zip(ask.item.judge, reply.checks, strict=True), 1)
    )
    return JudgeScore(round(sum(reply.verdicts) / len(checks), 6), "ok", checks)


def _mean(repeats: Sequence[JudgeScore]) -> JudgeScore:
    """The mean share of the repeats that have one, with the checks of the first of them."""
    shares = [one.share for one in repeats if one.share is not None]
    if len(repeats) == 1 or not shares:
        return repeats[0]
    first = next(one for one in repeats if one.share is not None)
    return JudgeScore(round(sum(shares) / len(shares), 6), "ok", first.checks)


def _verdicts(plan: Plan, replies: Mapping[str, JudgeReply]) -> list[bool]:
    """Every yes/no verdict on the arms' answers; identical repeats count once."""
    asks = {(ask.of, ask.key): ask for ask in plan.scores if ask.form == "checks"}
    return [verdict for ask in asks.values() for verdict in replies[ask.key].verdicts]


def _lengths(
    scores: Mapping[str, Mapping[str, JudgeScore]], rows: Rows
) -> dict[str, list[tuple[int, float]]]:
    """Item id -> (length, share) of each arm's answers that have a share."""
    return {
        row["id"]: [
            (_length(row["answers"][arm]), score.share)
            for arm, score in scores.get(row["id"], {}).items()
            if score.share is not None
        ]
        for row in rows
    }


def _length(answer: ArmAnswer) -> int:
    """The mean length of an arm's ok answers to an item, in characters."""
    texts = [one["text"] for one in ok_repeats(answer)]
    return round(sum(map(len, texts)) / len(texts))


def _pair_rows(plan: Plan, compared: Sequence[Comparison]) -> list[JudgedPair]:
    rows = [(one.item, one.of, one.minus, one.result, one.flipped, False) for one in compared] + [
        (item.id, of, minus, "tie", False, True) for item, of, minus in plan.same
    ]
    return [
        {
            "item": item,
            "of": of,
            "minus": minus,
            "result": result,
            "flipped": flipped,
            "same": same,
        }
        for item, of, minus, result, flipped, same in rows
    ]


def _digits(plan: Plan, replies: Mapping[str, JudgeReply]) -> list[bool]:
    """For a bench with digits: whether each digit rates its answer as good."""
    asks = [ask for ask in (*plan.scores, *plan.anchors) if ask.form == "digit"]
    return [verdict for ask in asks for verdict in replies[ask.key].verdicts]


def _public_means(plan: Plan, replies: Mapping[str, JudgeReply]) -> dict[str, DigitMeans]:
    """On the public scale, over every reply that there is; {} for a bench without digits."""
    found: dict[str, dict[str, list[int | None]]] = {}
    for ask in plan.scores:
        reply = replies[ask.key]
        if ask.form == "digit" and reply.state in ("ok", "parse-fail"):
            found.setdefault(ask.of, {}).setdefault(ask.item.slice, []).append(reply.digit)
    return compat.public_means(found)


def _compare(
    asks: Sequence[Ask], replies: Mapping[str, JudgeReply], rows: Rows
) -> tuple[list[Comparison], int]:
    """The pairs with a valid verdict in both orders, and the number of the others."""
    lengths = {
        (row["id"], arm): len(one.get("text", ""))
        for row in rows
        for arm, one in row["answers"].items()
    }
    compared, unread = [], 0
    for ask, swapped in zip(asks[::2], asks[1::2], strict=True):
        first, second = replies[ask.key].winner, replies[swapped.key].winner
        if first is None or second is None:
            unread += 1
            continue
        item = ask.item
        both = (lengths.get((item.id, ask.of), 0), lengths.get((item.id, ask.minus), 0))
        compared.append(Comparison(item.id, item.cluster, ask.of, ask.minus, (first, second), both))
    return compared, unread
