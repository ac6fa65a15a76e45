"""Read the stored judgements: scores, pairs, and the facts by which the judge is calibrated.

Every interval is computed by ``stats.mean_interval`` over the clusters of the bench. ``check_trust`` is
the table of reasons to doubt a judge.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from typing_extensions import NotRequired, TypedDict

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.eval.bench import Bench
from ktbridge.eval.judge import prompts
from ktbridge.eval.judge.prompts import Judge, JudgeRequest, JudgeScore, JudgingPlan, Kind, Winner
from ktbridge.eval.results import types
from ktbridge.eval.results.compare import round_interval
from ktbridge.eval.results.types import Json, JudgeCard, LengthBias, PositionBias, Tally
from ktbridge.eval.store import JUDGE, JUDGEMENTS, JudgementRecord, read_document, read_ledger, read_run
from ktbridge.schemas import fits
from ktbridge.server_api.served_names import split_name

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
    pairs: list[types.JudgedPair]
    card: JudgeCard
    problems: list[Problem]

    @property
    def cost(self) -> types.Cost:
        """Tokens of the judge, over all its replies."""
        card = self.card
        return {
            "prompt_tokens": card["prompt_tokens"],
            "completion_tokens": card["completion_tokens"],
            "answers": card["calls"],
        }


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


def read_judgements(directory: Path, bench: Bench, rows: Sequence[types.ItemRow]) -> Judgements | None:
    """Return the judgements of judge.json's judge on ``rows`` (a report's items); None without a judge.

    A row needs ``id`` and ``answers`` (arm -> ``outcome``, ``text``; for a dialogue ``turns``; for
    several repeats ``repeats``, each with these).
    A function of the directory's files and ``rows``. Raises KtbridgeError for damaged files.
    """
    named = read_card(directory)
    if named is None:
        return None
    judge = named_judge(named)
    plan = prompts.plan_judging(bench, rows, judge, pairs=named["pairs"])
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
    card: JudgeCard = {
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
        "refused": False,
        "pairs_refused": False,
    }
    if means := _public_means(plan, replies):
        card["digits"] = means
    if named["version"] != prompts.VERSION:
        card["outdated"] = f"its prompts are version {named['version']}, ours are {prompts.VERSION}"
    problems = check_trust(card, plan, replies, records, family)
    errors = {one.code for one in problems if one.severity == "error"}
    # Missing judgements are an error, but no reason to omit the others.
    card["refused"] = bool(errors & {"KTB876", "KTB878"} or (outcomes and not outcomes["ok"]))
    card["pairs_refused"] = "KTB886" in errors
    pairs = [] if card["refused"] or card["pairs_refused"] else _pair_rows(plan, compared)
    return Judgements({} if card["refused"] else scores, pairs, card, problems)


def _rate(count: int, total: int) -> float | None:
    return round(count / total, 6) if total else None


def _read(request: JudgeRequest, record: JudgementRecord | None) -> JudgeScore:
    if record is None:
        return JudgeScore(None, "not-run")
    if record["outcome"] != "ok":
        return JudgeScore(None, record["outcome"])
    try:
        return request.read(record["reply"])
    except prompts.ReplyError:
        return JudgeScore(None, "parse-fail")


def _score(plan: JudgingPlan, replies: Replies) -> tuple[dict[str, dict[str, JudgeScore]], list[Decision]]:
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


def _pair_rows(plan: JudgingPlan, compared: Sequence[ComparedPair]) -> list[types.JudgedPair]:
    judged = [(one.item, one.of, one.minus, one.result, one.flipped, False) for one in compared]
    judged += [(item.id, of, minus, "tie", False, True) for item, of, minus in plan.same]
    names = ("item", "of", "minus", "result", "flipped", "same")
    return [cast("types.JudgedPair", dict(zip(names, one, strict=True))) for one in judged]


def _public_means(plan: JudgingPlan, replies: Replies) -> dict[str, types.DigitMeans]:
    """Return means on the public scale by arm, over every reply that there is; {} for a bench without
    digits."""
    found: dict[str, dict[str, list[int | None]]] = {}
    for one in plan.scores:
        reply = replies[one.key]
        if one.form == "digit" and reply.outcome in ("ok", "parse-fail"):
            found.setdefault(one.of, {}).setdefault(one.item.slice, []).append(reply.digit)

    def mean(digits: Iterable[int | None]) -> float | None:
        read = [one for one in digits if one is not None]
        return round(sum(read) / len(read), 6) if read else None

    means: dict[str, types.DigitMeans] = {}
    for arm, modules in found.items():
        every = list(itertools.chain(*modules.values()))
        means[arm] = {
            "mean": mean(every),
            "mean_with_unread": mean(-1 if one is None else one for one in every),  # the script's
            "modules": {module: mean(digits) for module, digits in modules.items()},
            "answers": len(every),
            "unread": every.count(None),
        }
    return means


PASS = 0.7  # share of known verdicts that must be right, for good and for bad answers each
_MANY_PARSE_FAILS = 0.05
_FEW_ERRORS = 0.05
_MANY_FLIPS = 0.2
_ALWAYS = 0.98
_ENOUGH_VERDICTS = 20
_NO_PLACE: PositionBias = {"first_share": 0.5, "low": 0.0, "high": 1.0, "n": 0}
_NO_LENGTH: LengthBias = {
    "from": "pairs", "longer_share": 0.5, "low": 0.0, "high": 1.0, "n": 0, "excess": 0.0, "correlation": None
}  # fmt: skip


# --- comparisons of two answers, and biases


class Decision(NamedTuple):
    """A decision between two answers: ``outcome`` is above 0 where the first of them won."""

    lengths: tuple[int, int]
    outcome: float
    cluster: str


@dataclass(frozen=True)
class ComparedPair:
    """Two answers to one item, compared in both orders. ``verdicts``: with ``of`` shown first, then
    with ``minus`` shown first; ``lengths`` in characters, of ``of`` and ``minus``."""

    item: str
    cluster: str
    of: str
    minus: str
    verdicts: tuple[Winner, Winner]
    lengths: tuple[int, int]

    @property
    def flipped(self) -> bool:
        """Return whether the order changed the verdict."""
        return self.verdicts not in (("first", "second"), ("second", "first"), ("tie", "tie"))

    @property
    def result(self) -> types.PairResult:
        """Result of ``of``: win or loss if both orders agree, else tie."""
        results: dict[Winner, types.PairResult] = {"first": "win", "second": "loss", "tie": "tie"}
        return "tie" if self.flipped else results[self.verdicts[0]]

    @property
    def decision(self) -> Decision:
        outcome = {"win": 1.0, "loss": -1.0, "tie": 0.0}[self.result]
        return Decision(self.lengths, outcome, self.cluster)


def position_bias(compared: Sequence[ComparedPair]) -> PositionBias | None:
    """Return the share of the verdicts without ties that chose the answer shown first.

    Each pair is shown in both orders, so a judge that looks at the answers alone has exactly 0.5.
    """
    shown = [(verdict, one.cluster) for one in compared for verdict in one.verdicts]
    found = _share((verdict == "first", cluster) for verdict, cluster in shown if verdict != "tie")
    if found is None:
        return None
    return {"first_share": found["mean"], "low": found["low"], "high": found["high"], "n": found["n"]}


def length_bias(source: Literal["pairs", "checks"], decisions: Sequence[Decision]) -> LengthBias | None:
    """Return how often the longer of two answers won, excluding ties and equal lengths.

    ``excess`` is that share minus the 0.5 expected by chance; ``correlation`` is Pearson's between the
    log of the length ratio and the outcome, over each pair in both orders (the order within a pair
    is arbitrary, and both means are then 0). Longer answers may be better ones: this is an upper
    bound on the effect of length, not an estimate.
    """
    ratios = np.array([np.log(a / b) if a and b else 0.0 for (a, b), *_ in decisions])
    outcomes = np.array([one.outcome for one in decisions])
    products = ratios * outcomes
    found = _share(
        (product > 0, one.cluster) for product, one in zip(products, decisions, strict=True) if product
    )
    if found is None:
        return None
    scale = np.sqrt(ratios @ ratios * (outcomes @ outcomes))
    return {
        "from": source,
        "longer_share": found["mean"],
        "low": found["low"],
        "high": found["high"],
        "n": found["n"],
        "excess": round(found["mean"] - 0.5, 6),
        "correlation": round(float(products.sum() / scale), 6) if scale else None,
    }


def _share(decisions: Iterable[tuple[bool, str]]) -> types.Numbers | None:
    """Return how many of (decision, cluster) are true, with an interval; None of none."""
    decided = list(decisions)
    values, clusters = [float(one) for one, _ in decided], [cluster for _, cluster in decided]
    return round_interval(values, clusters, (0.0, 1.0)) if decided else None


# --- answers of known quality


def tally_anchors(requests: Sequence[JudgeRequest], replies: Mapping[str, JudgeScore]) -> types.AnchorTallies:
    """Return how many of the known verdicts were right, by the anchors' kind and by slice and kind.

    Anchors without a verdict don't count.
    """
    known = [
        (one.item.slice, one.of, replies[one.key].verdicts[number] == expected)
        for one in requests
        if replies[one.key].outcome == "ok"
        for number, expected in one.expected.items()
    ]

    def tally(slices: Collection[str], *kinds: Kind) -> Tally:
        return tally_right(right for name, kind, right in known if kind in kinds and name in slices)

    slices = dict.fromkeys(name for name, _, _ in known)
    return {
        **tally(slices, "good", "bad"),
        "good": tally(slices, "good"),
        "bad": tally(slices, "bad"),
        "slices": {name: {"good": tally([name], "good"), "bad": tally([name], "bad")} for name in slices},
    }


def tally_right(verdicts: Iterable[bool]) -> Tally:
    right = list(verdicts)
    return {"asked": len(right), "right": sum(right)}


# --- reasons to doubt a judge


class Doubt(NamedTuple):
    """A reason to doubt a judge where it ``holds``; severity and next step are the code's by default."""

    code: str
    holds: object
    found: str
    expected: str
    severity: Severity | None = None
    next_step: str | None = None
    place: str = ""


def check_trust(
    card: JudgeCard,
    plan: JudgingPlan,
    replies: Replies,
    records: Sequence[JudgementRecord],
    family: Collection[str],
) -> list[Problem]:
    """Return the problems of a judge. ``records`` are the stored judgements of the plan, ``family`` the model
    families shared with the arms."""
    outcomes, anchors, pairs = card["outcomes"], card["anchors"], card["anchor_pairs"]
    ok, total = outcomes.get("ok", 0), sum(outcomes.values())
    unread, failed = outcomes.get("parse-fail", 0), outcomes.get("judge-error", 0)
    waiting, outdated = outcomes.get("not-run", 0), card.get("outdated")
    fails = any(one["right"] < PASS * one["asked"] for one in _asked(anchors))
    kinds: list[Kind] = ["good", "bad"]
    mute = [
        kind for kind in kinds if any(one.of == kind for one in plan.anchors) and not anchors[kind]["asked"]
    ]
    flips = card["flip_rate"] or 0.0
    place, length = card["position_bias"] or _NO_PLACE, card["length_bias"] or _NO_LENGTH
    first = place["low"] > 0.5
    share = place["first_share"] if first else 1 - place["first_share"]

    def detail(outcome: str) -> str:
        details = (one["detail"] for one in records if one["outcome"] == outcome)
        return next(details, "it was read by other rules")

    doubts = (
        Doubt("KTB879", (card["parse_fail_rate"] or 0) > _MANY_PARSE_FAILS,
              f"{unread} of {total} replies could not be read, not even when told so: {detail('parse-fail')}",
              "the form that was asked for; what can't be read is no score",
              severity="warning" if ok else "error"),
        Doubt("KTB880", failed,
              f"{failed} of {total} judgements failed: {detail('judge-error')}", "a reply to each",
              severity="warning" if ok and failed <= _FEW_ERRORS * total else "error"),
        Doubt("KTB885", waiting,
              f"{waiting} of {total} judgements were not asked for" + (f" ({outdated})" if outdated else ""),
              "a judgement of every answer"),
        _monotony(card, plan, replies),
        Doubt("KTB875", not plan.anchors,
              "the bench has no anchors, so nothing shows what this judge is worth",
              "a few known-good and known-bad answers a slice"),
        # None left after parse failures or errors; unless all failed, no error reports that yet.
        Doubt("KTB876", mute,
              f"none of the {' and '.join(mute)} anchors got a verdict", "verdicts on known answers",
              next_step="see why its replies can't be read or didn't come, above; else choose another"),
        Doubt("KTB876", fails,
              f"it fails on answers of known worth: {_on_known(anchors)}",
              f"at least {PASS:.0%} of each; its judgements are left out"),
        *(Doubt("KTB877", not fails and any(2 * one["right"] <= one["asked"] for one in _asked(known)),
                f"it does no better than a coin on answers of known worth: {_on_known(known)}",
                "a judge that tells good from bad in every slice", place=f", slice {name}")
          for name, known in anchors["slices"].items()),
        Doubt("KTB886",
              plan.anchor_pairs and not (pairs["asked"] and pairs["right"] >= PASS * pairs["asked"]),
              f"the good answer won over the bad one, in both orders, in {pairs['right']} of"
              f" {pairs['asked']} known pairs", f"at least {PASS:.0%}; its comparisons are left out"),
        Doubt("KTB881", not place["low"] <= 0.5 <= place["high"],
              f"position bias: {share:.0%} of {place['n']} verdicts chose the answer shown"
              f" {'first' if first else 'second'}",
              "half; both orders were asked, and where they disagree it is a tie"),
        Doubt("KTB882", flips > _MANY_FLIPS,
              f"{flips:.0%} of its comparisons change with the order",
              f"at most {_MANY_FLIPS:.0%}; these are ties, so differences look smaller"),
        Doubt("KTB883", length["low"] > 0.5,
              f"length bias: of {length['n']} decisions between two answers {length['longer_share']:.0%}"
              f" [{length['low']:.0%}, {length['high']:.0%}] went to the longer one",
              "about half, unless longer answers are better here"),
        Doubt("KTB884", family,
              f"it is of the family that it judges ({', '.join(sorted(family))})",
              "a judge of another family: models favor their own kind"),
    )  # fmt: skip
    where = f"judge {card['model']}"
    return [
        problem(one.code, where + one.place, one.found, one.expected, one.next_step, one.severity)
        for one in doubts
        if one.holds
    ]


def _monotony(card: JudgeCard, plan: JudgingPlan, replies: Replies) -> Doubt:
    """Return the doubt about a judge that gives every answer the same verdict: that says nothing."""
    share, count, words = card["yes_rate"] or 0.0, card["verdicts"], ("yes", "no")
    digits = [one for one in (*plan.scores, *plan.anchors) if one.form == "digit"]
    if good := [verdict for one in digits for verdict in replies[one.key].verdicts]:
        share, count, words = sum(good) / len(good), len(good), ("3 or more", "less than 3")
    # Very good answers deserve a yes to everything, so only the known-bad ones count as evidence.
    kind: Kind = "bad" if share > 0.5 else "good"
    asked, right = (card["anchors"][kind][name] for name in ("asked", "right"))
    convicted = asked and right <= (1 - PASS) * asked
    on_known = f", and {asked - right} of {asked} on known-{kind} answers" if asked else ""
    useless = "; these judgements are useless" if convicted or not asked else ""
    return Doubt(
        "KTB878",
        count >= _ENOUGH_VERDICTS and not 1 - _ALWAYS < share < _ALWAYS,
        f"it nearly always says {words[share <= 0.5]}: {share:.0%} of {count} verdicts{on_known}",
        f"verdicts that tell answers apart{useless}",
        "error" if convicted else "warning",
    )


def _asked(known: types.KindTallies | types.AnchorTallies) -> list[Tally]:
    return [one for one in (known["good"], known["bad"]) if one["asked"]]


def _on_known(known: types.KindTallies | types.AnchorTallies) -> str:
    good, bad = known["good"], known["bad"]
    return (
        f"right on {good['right']} of {good['asked']} verdicts about good ones and on"
        f" {bad['right']} of {bad['asked']} about bad ones"
    )


def same_family(judge: Judge, server: Json, cards: Iterable[types.ArmCard]) -> set[str]:
    """Return the families that the judge shares with the arms; {its name} if it is the same model.

    ``server`` is the judge's /v1/models entry, ``cards`` the arms' cards of run.json. Names are weak
    evidence: an empty set does not prove independence.
    """
    served = split_name(judge.model)[0]
    theirs: set[str] = set()
    for card in cards:
        theirs |= _families(card["model"], card["server"])
        if split_name(card["model"])[0] == served:
            return {served}
    return _families(judge.model, server) & theirs


def _families(model: str, entry: Json) -> set[str]:
    """Return the families named in a model's name and in the paths of its /v1/models entry."""
    names = [one for one in (model, entry.get("root"), entry.get("parent")) if isinstance(one, str)]
    words = re.findall(r"[a-z]+", " ".join(names).lower())
    # "chatglm" and "codellama" count; "yi" is too short to be searched for at a word's end.
    return {
        family
        for name, family in prompts.FAMILIES.items()
        for word in words
        if word == name or (len(name) > 2 and word.endswith(name))
    }
