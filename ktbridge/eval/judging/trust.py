"""Judge calibration: its anchors decide; other doubts are reported beside its numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import Problem, has_errors
from ktbridge.eval.judging.bias import Comparison
from ktbridge.eval.judging.plan import Ask, Judge, JudgeReply, Plan
from ktbridge.eval.results.cards import (
    AnchorTallies,
    ArmCard,
    Json,
    JudgeFacts,
    KindTallies,
    Tally,
)
from ktbridge.eval.store import JudgementRecord
from ktbridge.server_api.served_names import split_name

PASS = 0.7  # share of known verdicts that must be right, for good and for bad answers each
_SLICE_PASS = 0.5  # below this a judge is no better than chance in a slice
_MANY_PARSE_FAILS = 0.05
_FEW_ERRORS = 0.05
_MANY_FLIPS = 0.2
_ALWAYS = 0.98
_ENOUGH_VERDICTS = 20
# Names of model families; a model's name may contain several (a distilled model's does).
_FAMILIES = """
    baichuan claude command deepseek ernie falcon gemini gemma glm gpt granite grok hunyuan internlm kimi
    llama mimo minimax mistral mixtral moonlight nemotron olmo olmoe phi qwen qwq yi
""".split()
# Different names of one vendor's models, which are trained on each other's output.
_KIN = {
    "qwq": "qwen",
    "mixtral": "mistral",
    "moonlight": "kimi",
    "gemma": "gemini",
    "olmoe": "olmo",
}


@dataclass(frozen=True)
class Trust:
    """The verdict on a judge: whether the report omits its scores and its pairs."""

    refused: bool
    pairs_refused: bool
    problems: tuple[Problem, ...]


def tally_anchors(asks: Sequence[Ask], parsed: Mapping[str, JudgeReply]) -> AnchorTallies:
    """Return how many of the known verdicts were right: {asked, right, good, bad, slices}, each of the last
    three (by kind; slice -> kind) holding {asked, right}. Anchors without a verdict don't count."""
    every = _no_tallies()
    slices: dict[str, KindTallies] = {}
    for ask in asks:
        reply = parsed[ask.key]
        if reply.state != "ok" or ask.anchor is None:
            continue
        here = slices.setdefault(ask.item.slice, _no_tallies())
        for number, expected in ask.anchor.expected.items():
            for tally in (every[ask.anchor.kind], here[ask.anchor.kind]):
                tally["asked"] += 1
                tally["right"] += reply.verdicts[number] == expected
    good, bad = _kinds(every)
    return {
        "asked": good["asked"] + bad["asked"],
        "right": good["right"] + bad["right"],
        "good": good,
        "bad": bad,
        "slices": slices,
    }


def _no_tallies() -> KindTallies:
    return {"good": {"asked": 0, "right": 0}, "bad": {"asked": 0, "right": 0}}


def tally_pairs(compared: Sequence[Comparison]) -> Tally:
    """In how many pairs of a good and a bad answer the good one won in both orders."""
    right = sum(one.result == "win" for one in compared)
    return {"asked": len(compared), "right": right}


def trust(
    card: JudgeFacts,
    plan: Plan,
    records: Mapping[str, JudgementRecord],
    family: Collection[str],
    digits: Sequence[bool],
) -> Trust:
    """All problems of a judge, from its card and its requests.

    ``records`` are the stored judgements of the plan, ``family`` the model families shared with the
    arms, ``digits`` whether each digit rated its answer as good.
    """
    where = f"judge {card['model']}"
    missing = _missing(where, card, records)
    doubts = [*_always(where, card, digits), *_anchors(where, card, plan)]
    # Missing judgements are an error, but no reason to omit the others.
    refused = has_errors(doubts) or (has_errors(missing) and not card["outcomes"].get("ok"))
    problems = [*missing, *doubts]
    pairs = _known_pairs(where, card, plan)
    problems += pairs
    problems += _biases(where, card)
    if family:
        problems.append(
            problem(
                "KTB884",
                where,
                f"it is of the family that it judges ({', '.join(sorted(family))})",
                "a judge of another family: models favour their own kind",
            )
        )
    pairs_refused = has_errors(pairs)
    return Trust(refused, pairs_refused, tuple(problems))


def _missing(where: str, card: JudgeFacts, records: Mapping[str, JudgementRecord]) -> list[Problem]:
    problems = []
    outcomes, total = card["outcomes"], sum(card["outcomes"].values())

    def detail(outcome: str) -> str:
        details = (one["detail"] for one in records.values() if one["outcome"] == outcome)
        return str(next(details, "it was read by other rules"))

    failed = outcomes.get("parse-fail", 0)
    if failed and (card["parse_fail_rate"] or 0) > _MANY_PARSE_FAILS:
        problems.append(
            problem(
                "KTB879",
                where,
                f"{failed} of {total} replies could not be read, not even when told so:"
                f" {detail('parse-fail')}",
                "the form that was asked for; what can't be read is no score",
                severity="warning" if outcomes.get("ok") else "error",
            )
        )
    errors = outcomes.get("judge-error", 0)
    if errors:
        problems.append(
            problem(
                "KTB880",
                where,
                f"{errors} of {total} judgements failed: {detail('judge-error')}",
                "a reply to each",
                severity="warning"
                if outcomes.get("ok") and errors <= _FEW_ERRORS * total
                else "error",
            )
        )
    waiting = outcomes.get("not-run", 0)
    if waiting:
        problems.append(
            problem(
                "KTB885",
                where,
                f"{waiting} of {total} judgements were not asked for"
                + (f" ({card['outdated']})" if "outdated" in card else ""),
                "a judgement of every answer",
            )
        )
    return problems


def _always(where: str, card: JudgeFacts, digits: Sequence[bool]) -> list[Problem]:
    """A judge that gives every answer the same verdict carries no information."""
    rate, count, words = card["yes_rate"], card["verdicts"], ("yes", "no")
    if digits:
        rate, count, words = sum(digits) / len(digits), len(digits), ("3 or more", "less than 3")
    if rate is None or count < _ENOUGH_VERDICTS or 1 - _ALWAYS < rate < _ALWAYS:
        return []
    bad, good = card["anchors"]["bad"], card["anchors"]["good"]
    word, wrong = (words[0], bad) if rate > 0.5 else (words[1], good)
    # Very good answers deserve a yes to everything, so only the known-bad ones count as evidence.
    convicted = wrong["asked"] and wrong["right"] <= (1 - PASS) * wrong["asked"]
    known = "bad" if wrong is bad else "good"
    found = f"it nearly always says {word}: {rate:.0%} of {count} verdicts"
    if wrong["asked"]:
        found += (
            f", and {wrong['asked'] - wrong['right']} of {wrong['asked']} on known-{known} answers"
        )
    return [
        problem(
            "KTB878",
            where,
            found,
            "verdicts that tell answers apart; these judgements are useless"
            if convicted or not wrong["asked"]
            else "verdicts that tell answers apart",
            severity="error" if convicted else "warning",
        )
    ]


def _anchors(where: str, card: JudgeFacts, plan: Plan) -> list[Problem]:
    counts = card["anchors"]
    if not plan.anchors:
        return [
            problem(
                "KTB875",
                where,
                "the bench has no anchors, so nothing shows what this judge is worth",
                "a few known-good and known-bad answers a slice",
            )
        ]
    if not counts["asked"]:
        # None left after parse failures or errors; unless all failed, no error reports that yet.
        found = "none of the anchors got a verdict"
        next_step = "see why its replies can't be read or didn't come, above; else choose another"
        return [problem("KTB876", where, found, "verdicts on known answers", next_step)]
    if any(one["asked"] and one["right"] < PASS * one["asked"] for one in _kinds(counts)):
        return [
            problem(
                "KTB876",
                where,
                f"it fails on answers of known worth: {_words(counts)}",
                f"at least {PASS:.0%} of each; its judgements are left out",
            )
        ]
    return [
        problem(
            "KTB877",
            f"{where}, slice {name}",
            f"it does no better than a coin on answers of known worth: {_words(one)}",
            "a judge that tells good from bad in every slice",
        )
        for name, one in counts["slices"].items()
        if any(
            kind["asked"] and kind["right"] <= _SLICE_PASS * kind["asked"] for kind in _kinds(one)
        )
    ]


def _known_pairs(where: str, card: JudgeFacts, plan: Plan) -> list[Problem]:
    counts = card["anchor_pairs"]
    if not plan.anchor_pairs or not plan.pairs:
        return []
    if counts["right"] >= PASS * counts["asked"] and counts["asked"]:
        return []
    return [
        problem(
            "KTB886",
            where,
            f"the good answer won over the bad one, in both orders, in {counts['right']} of"
            f" {counts['asked']} known pairs",
            f"at least {PASS:.0%}; its comparisons are left out",
        )
    ]


def _biases(where: str, card: JudgeFacts) -> list[Problem]:
    problems = []
    place, length = card["position_bias"], card["length_bias"]
    if place and (place["low"] > 0.5 or place["high"] < 0.5):
        which = "first" if place["low"] > 0.5 else "second"
        share = place["first_share"] if which == "first" else 1 - place["first_share"]
        problems.append(
            problem(
                "KTB881",
                where,
                f"position bias: {share:.0%} of {place['n']} verdicts chose the answer shown {which}",
                "half; both orders were asked, and where they disagree it is a tie",
            )
        )
    if card["flip_rate"] is not None and card["flip_rate"] > _MANY_FLIPS:
        problems.append(
            problem(
                "KTB882",
                where,
                f"{card['flip_rate']:.0%} of its comparisons change with the order",
                f"at most {_MANY_FLIPS:.0%}; these are ties, so differences look smaller",
            )
        )
    if length and length["low"] > 0.5:
        ends = f"[{length['low']:.0%}, {length['high']:.0%}]"
        problems.append(
            problem(
                "KTB883",
                where,
                f"length bias: of {length['n']} decisions between two answers"
                f" {length['longer_share']:.0%} {ends} went to the longer one",
                "about half, unless longer answers are better here",
            )
        )
    return problems


def _kinds(counts: KindTallies | AnchorTallies) -> tuple[Tally, Tally]:
    return counts["good"], counts["bad"]


def _words(counts: KindTallies | AnchorTallies) -> str:
    good, bad = _kinds(counts)
    return (
        f"right on {good['right']} of {good['asked']} verdicts about good ones and on"
        f" {bad['right']} of {bad['asked']} about bad ones"
    )


def _families(names: Iterable[object]) -> set[str]:
    """The model families named in these model names or paths; other values are ignored."""
    found = set()
    for name in names:
        words = re.findall(r"[a-z]+", name.lower()) if isinstance(name, str) else []
        # "chatglm" and "codellama" count; "yi" is too short to be searched for at a word's end.
        found |= {
            _KIN.get(family, family)
            for family in _FAMILIES
            for word in words
            if word == family or (len(family) > 2 and word.endswith(family))
        }
    return found


def same_family(judge: Judge, server: Json, cards: Iterable[ArmCard]) -> set[str]:
    """The families that the judge shares with the arms; {its name} if it is the same model.

    ``server`` is the judge's /v1/models entry, ``cards`` the arms' cards of run.json. Names are weak
    evidence: an empty set does not prove independence.
    """
    mine = _families([judge.model, server.get("root"), server.get("parent")])
    theirs: set[str] = set()
    for card in cards:
        entry = card["server"]
        theirs |= _families([card["model"], entry.get("root"), entry.get("parent")])
        served, _ = split_name(card["model"])
        if split_name(judge.model)[0] == served:
            return {served}
    return mine & theirs
