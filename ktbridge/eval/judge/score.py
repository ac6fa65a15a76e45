"""Read the stored judgements: scores, pairs, and the facts by which the judge is calibrated."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from ktbridge.errors import KtbridgeError, Problem
from ktbridge.eval import compat
from ktbridge.eval.bench import Bench
from ktbridge.eval.judge.calibration import (
    ComparedPair,
    Decision,
    check_trust,
    length_bias,
    position_bias,
    same_family,
    tally_anchors,
    tally_right,
)
from ktbridge.eval.judge.plan import Judge, JudgeRequest, JudgeScore, JudgingPlan, plan_judging
from ktbridge.eval.judge.prompts import VERSION, ReplyError
from ktbridge.eval.results.types import DigitMeans, ItemRow, Json, JudgeCard, JudgedPair, JudgeFacts
from ktbridge.eval.store import JUDGEMENTS, JudgementRecord, read_document, read_ledger, read_run
from ktbridge.schemas import fits

JUDGE = "judge.json"
Replies = Mapping[str, JudgeScore]  # by the request's key


class NamedJudge(TypedDict):
    """Content of judge.json: the judge to report; ``server`` is its entry of /v1/models."""

    model: str
    url: str
    version: str
    pairs: bool
    server: Json
    extra_body: NotRequired[Json]


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
    """Read judge.json: the judge to report, or None. Raises KtbridgeError if the file is invalid."""
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
    """Return the judge that a card of ``read_card`` names."""
    return Judge("judge", card["model"], card["url"], card.get("extra_body", {}))


def read_judgements(directory: Path, bench: Bench, rows: Sequence[ItemRow]) -> Judgements | None:
    """Return the judgements of judge.json's judge on ``rows`` (a report's items); None without a judge.

    A row needs ``id`` and ``answers`` (arm -> ``outcome``, ``text``; for a dialogue ``turns``; for
    several repeats ``repeats``, each with these).
    A function of the directory's files and ``rows``. Raises KtbridgeError for damaged files.
    """
    named = read_card(directory)
    if named is None:
        return None
    judge = named_judge(named)
    plan = plan_judging(bench, rows, judge, pairs=named["pairs"])
    stored = read_ledger(directory, JUDGEMENTS)
    replies = {one.key: _read(one, stored.get(one.key)) for one in plan.mixed()}
    records = [stored[key] for key in replies if key in stored]
    scores, decisions = _score(plan, replies)
    compared, known = _compare(plan.pairs, replies), _compare(plan.anchor_pairs, replies)
    outcomes = Counter(one.outcome for one in replies.values())
    valid = outcomes["ok"] + outcomes["parse-fail"]
    # Identical repeats count once.
    checks = {(one.of, one.key): one for one in plan.scores if one.form == "checks"}.values()
    verdicts = [verdict for one in checks for verdict in replies[one.key].verdicts]
    family = same_family(judge, named["server"], read_run(directory)["arms"].values())
    facts: JudgeFacts = {
        "model": judge.model,
        "url": judge.url,
        "extra_body": dict(judge.extra_body),
        "version": named["version"],
        "calls": sum(record["attempts"] for record in records),
        "outcomes": {name: outcomes[name] for name in sorted(outcomes)},
        "prompt_tokens": sum(record["prompt_tokens"] for record in records),
        "completion_tokens": sum(record["completion_tokens"] for record in records),
        "parse_fail_rate": _rate(outcomes["parse-fail"], valid),
        "yes_rate": _rate(sum(verdicts), len(verdicts)),
        "verdicts": len(verdicts),
        "flip_rate": _rate(sum(one.flipped for one in compared), len(compared)),
        "position_bias": position_bias(compared),
        "length_bias": length_bias("pairs", [one.decision for one in compared])
        or length_bias("checks", decisions),
        "anchors": tally_anchors(plan.anchors, replies),
        "anchor_pairs": tally_right(one.result == "win" for one in known),
        "pairs_unread": len(plan.pairs) // 2 - len(compared),
        "same_family": bool(family),
    }
    if means := _public_means(plan, replies):
        facts["digits"] = means
    if named["version"] != VERSION:
        facts["outdated"] = f"its prompts are version {named['version']}, ours are {VERSION}"
    problems, refused, pairs_refused = check_trust(facts, plan, replies, records, family)
    return Judgements(
        {} if refused else scores,
        [] if refused or pairs_refused else _pair_rows(plan, compared),
        {**facts, "refused": refused, "pairs_refused": pairs_refused},
        problems,
    )


def _rate(count: int, total: int) -> float | None:
    return round(count / total, 6) if total else None


def _read(request: JudgeRequest, record: JudgementRecord | None) -> JudgeScore:
    if record is None:
        return JudgeScore(None, "not-run")
    if record["outcome"] != "ok":
        return JudgeScore(None, record["outcome"])
    try:
        return request.read(record["reply"])
    except ReplyError:
        return JudgeScore(None, "parse-fail")


def _score(
    plan: JudgingPlan, replies: Replies
) -> tuple[dict[str, dict[str, JudgeScore]], list[Decision]]:
    """Return the scores, and each two arms' answers to an item by length and share."""
    scores: dict[str, dict[str, JudgeScore]] = {}
    decisions = []
    for item, requests in itertools.groupby(plan.scores, lambda one: one.item.id):
        scored = []
        for arm, group in itertools.groupby(requests, lambda one: one.of):
            repeats = list(group)
            score = _mean([replies[one.key] for one in repeats])
            scores.setdefault(item, {})[arm] = score
            if score.share is not None:
                length = round(sum(len(one.answers[0].text) for one in repeats) / len(repeats))
                scored.append((length, score.share, repeats[0].item.cluster))
        for (other, less, _), (length, share, cluster) in itertools.combinations(scored, 2):
            decisions.append(Decision((length, other), share - less, cluster))
    return scores, decisions


def _mean(repeats: Sequence[JudgeScore]) -> JudgeScore:
    """Return the mean share of the repeats that have one, with the checks of the first of them."""
    read = [one for one in repeats if one.share is not None]
    if len(repeats) == 1 or not read:
        return repeats[0]
    shares = [one.share or 0.0 for one in read]
    return JudgeScore(round(sum(shares) / len(shares), 6), "ok", read[0].checks)


def _compare(requests: Sequence[JudgeRequest], replies: Replies) -> list[ComparedPair]:
    """Return the pairs with a valid verdict in both orders."""
    compared = []
    for one, swapped in zip(requests[::2], requests[1::2], strict=True):
        first, second = replies[one.key].winner, replies[swapped.key].winner
        if first is not None and second is not None:
            sizes = (len(one.answers[0].text), len(one.answers[1].text))
            places = (one.item.id, one.item.cluster, one.of, one.minus)
            compared.append(ComparedPair(*places, (first, second), sizes))
    return compared


def _pair_rows(plan: JudgingPlan, compared: Sequence[ComparedPair]) -> list[JudgedPair]:
    rows: list[JudgedPair] = [
        {
            "item": one.item,
            "of": one.of,
            "minus": one.minus,
            "result": one.result,
            "flipped": one.flipped,
            "same": False,
        }
        for one in compared
    ]
    return rows + [
        {"item": item.id, "of": of, "minus": minus, "result": "tie", "flipped": False, "same": True}
        for item, of, minus in plan.same
    ]


def _public_means(plan: JudgingPlan, replies: Replies) -> dict[str, DigitMeans]:
    """Return means on the public scale, over every reply that there is; {} for a bench without digits."""
    found: dict[str, dict[str, list[int | None]]] = {}
    for one in plan.scores:
        reply = replies[one.key]
        if one.form == "digit" and reply.outcome in ("ok", "parse-fail"):
            found.setdefault(one.of, {}).setdefault(one.item.slice, []).append(reply.digit)
    return compat.public_means(found)
