"""Read the stored judgements, and calibrate the judge by its anchors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ktbridge.errors import KtbridgeError
from ktbridge.eval import compat
from ktbridge.eval.bench import Bench
from ktbridge.eval.judging import bias
from ktbridge.eval.judging.bias import Comparison
from ktbridge.eval.judging.judge import Judge, same_family
from ktbridge.eval.judging.plan import Ask, Plan, Row, make_plan, ok_repeats
from ktbridge.eval.judging.prompts import VERSION, ReplyError
from ktbridge.eval.judging.trust import good_digit, tally_anchors, tally_pairs, trust
from ktbridge.eval.results.types import JudgeCheck, JudgedPair
from ktbridge.eval.rundir import read_run
from ktbridge.eval.store import JudgeOutcome, read_journal

JUDGE = "judge.json"
State = JudgeOutcome | Literal["not-run"]
Said = tuple[State, Any]  # one judgement: its outcome, and the parsed reply or None
_CARD = {"model": str, "url": str, "version": str, "pairs": bool, "server": dict}
_CARD["extra_body"] = dict


@dataclass(frozen=True)
class JudgeScore:
    """A judge's score of one answer. ``share`` is the share of yes, or digit/5; None where there
    is none. ``checks``: {"id", "question", "yes": True, False or None for a digit, "evidence"}."""

    share: float | None
    outcome: State
    checks: tuple[JudgeCheck, ...] = ()


@dataclass(frozen=True)
class Judgements:
    """Everything that a report needs about a judge.

    ``scores``: item id -> arm -> JudgeScore, for the ok answers to items with questions; empty if
    the judge failed its anchors or gave no valid reply, which an error in ``problems`` then
    reports. ``pairs``: {"item", "of", "minus", "result" ("win" | "loss" | "tie", for ``of``), "flipped",
    "same"} (``same``: byte-identical, so a tie without asking); empty if it failed on the anchor
    pairs. ``problems`` are Problem.as_dict().
    """

    scores: Mapping[str, Mapping[str, JudgeScore]]
    pairs: list[JudgedPair]
    card: dict[str, Any]
    problems: list[dict[str, str]]


def read_card(directory: Path) -> dict[str, Any] | None:
    """judge.json: the judge to report, or None. Raises KtbridgeError if the file is invalid."""
    path = directory / JUDGE
    try:
        card = {"extra_body": {}, **json.loads(path.read_text("utf-8"))}
        if any(type(card[key]) is not kind for key, kind in _CARD.items()):
            raise TypeError
        json.dumps(card, ensure_ascii=False, allow_nan=False).encode()
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise KtbridgeError(
            f"{str(path)!r} is not a judge's card.",
            "delete it and run the same `ktbridge eval --judge` again; the judgements are kept",
        ) from None
    return dict(card)


def named_judge(card: Mapping[str, Any]) -> Judge:
    """The judge that a card of ``read_card`` names."""
    return Judge(card["model"], card["url"], card["extra_body"])


def read_judgements(directory: Path, bench: Bench, rows: Sequence[Row]) -> Judgements | None:
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
    records = read_journal(directory)
    parsed = {ask.key: _read(ask, records.get(ask.key)) for ask in plan.mixed()}
    scores = _scores(plan, parsed)
    compared, unread = _compare(plan.pairs, parsed, rows)
    lengths = {
        row["id"]: [
            (_length(row["answers"][arm]), score.share)
            for arm, score in scores.get(row["id"], {}).items()
            if score.share is not None
        ]
        for row in rows
    }
    kept = {key: records[key] for key in parsed if key in records}
    outcomes = Counter(outcome for outcome, _ in parsed.values())
    read = outcomes["ok"] + outcomes["parse-fail"]
    verdicts = _verdicts(plan, parsed)
    clusters = {item.id: item.cluster for item in bench.items}
    cards = read_run(directory)["arms"].values()
    family = same_family(judge, named["server"], cards)
    known, _ = _compare(plan.anchor_pairs, parsed, ())
    card: dict[str, Any] = {
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
        or bias.length_bias_of_scores(lengths, clusters),
        "anchors": tally_anchors(plan.anchors, parsed),
        "anchor_pairs": tally_pairs(known),
        "pairs_unread": unread,
        "same_family": bool(family),
    }
    if named["version"] != VERSION:
        card["outdated"] = f"its prompts are version {named['version']}, ours are {VERSION}"
    verdict = trust(card, plan, kept, family, _digits(plan, parsed))
    card["refused"], card["pairs_refused"] = verdict.refused, verdict.pairs_refused
    return Judgements(
        {} if verdict.refused else scores,
        [] if verdict.refused or verdict.pairs_refused else _pair_rows(plan, compared),
        card,
        [problem.as_dict() for problem in verdict.problems],
    )


def _read(ask: Ask, record: Mapping[str, Any] | None) -> Said:
    if record is None:
        return "not-run", None
    if record["outcome"] != "ok":
        return record["outcome"], None
    try:
        return "ok", ask.read(record["reply"])
    except ReplyError:
        return "parse-fail", None


def _scores(plan: Plan, parsed: Mapping[str, Said]) -> dict[str, dict[str, JudgeScore]]:
    repeats: dict[tuple[str, str], list[JudgeScore]] = {}
    for ask in plan.scores:
        repeats.setdefault((ask.item.id, ask.of), []).append(_score(ask, *parsed[ask.key]))
    scores: dict[str, dict[str, JudgeScore]] = {}
    for (item, arm), every in repeats.items():
        scores.setdefault(item, {})[arm] = _mean(every)
    return scores


def _score(ask: Ask, outcome: State, value: Any) -> JudgeScore:
    if outcome != "ok":
        return JudgeScore(None, outcome)
    if ask.form == "digit":
        question = compat.rubric(ask.item.slice)
        digit: JudgeCheck = {
            "id": "digit",
            "question": question,
            "yes": None,
            "evidence": str(value),
        }
        share = round(value / compat.HIGHEST, 6)
        return JudgeScore(share, "ok", (digit,))
    checks: tuple[JudgeCheck, ...] = tuple(
        {"id": f"q{n}", "question": question, "yes": one.yes, "evidence": one.evidence}
        for n, (question, one) in enumerate(zip(ask.item.judge, value, strict=True), 1)
    )
    return JudgeScore(round(sum(one.yes for one in value) / len(value), 6), "ok", checks)


def _mean(repeats: Sequence[JudgeScore]) -> JudgeScore:
    """The mean share of the repeats that have one, with the checks of the first of them."""
    shares = [one.share for one in repeats if one.share is not None]
    if len(repeats) == 1 or not shares:
        return repeats[0]
    first = next(one for one in repeats if one.share is not None)
    return JudgeScore(round(sum(shares) / len(shares), 6), "ok", first.checks)


def _verdicts(plan: Plan, parsed: Mapping[str, Said]) -> list[bool]:
    """Every yes/no verdict on the arms' answers; identical repeats count once."""
    asks = {(ask.of, ask.key): ask for ask in plan.scores if ask.form == "checks"}
    return [
        check.yes
        for ask in asks.values()
        if parsed[ask.key][0] == "ok"
        for check in parsed[ask.key][1]
    ]


def _length(answer: Row) -> int:
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


def _digits(plan: Plan, parsed: Mapping[str, Said]) -> list[bool]:
    """For a bench with digits: whether each digit rates its answer as good."""
    asks = [ask for ask in (*plan.scores, *plan.anchors) if ask.form == "digit"]
    return [good_digit(parsed[ask.key][1]) for ask in asks if parsed[ask.key][0] == "ok"]


def _compare(
    asks: Sequence[Ask], parsed: Mapping[str, Said], rows: Sequence[Row]
) -> tuple[list[Comparison], int]:
    """The pairs with a valid verdict in both orders, and the number of the others."""
    texts = {
        (row["id"], arm): one.get("text", "") for row in rows for arm, one in row["answers"].items()
    }
    compared, unread = [], 0
    for ask, swapped in zip(asks[::2], asks[1::2], strict=True):
        first, second = parsed[ask.key], parsed[swapped.key]
        if first[0] != "ok" or second[0] != "ok":
            unread += 1
            continue
        lengths = (
            len(texts.get((ask.item.id, ask.of), "")),
            len(texts.get((ask.item.id, ask.minus), "")),
        )
        verdicts = (first[1], second[1])
        item = ask.item
        compared.append(Comparison(item.id, item.cluster, ask.of, ask.minus, verdicts, lengths))
    return compared, unread
