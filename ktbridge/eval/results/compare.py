"""Means per axis, slice and arm; contrasts of two arms with confidence interval and verdict.

Task, persona and judge are separate axes and never mixed. Only items that have a mark on the axis
in every arm are used. ``decide_verdict`` gives every contrast its verdict, in both directions by one rule.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

from ktbridge.eval import stats
from ktbridge.eval.results.types import (
    Axis,
    BenchCard,
    Contrast,
    ItemRow,
    JudgedPair,
    McNemar,
    Noise,
    Numbers,
    PairCounts,
    Results,
    Role,
    VerdictWord,
)

ALPHA = 0.05
FALSE_DISCOVERIES = 0.10  # the share of false names among slices that are named
OVERALL = "overall"
CONFIRMED: Final[tuple[VerdictWord, ...]] = ("improved", "dropped")
LOSSES: Final[tuple[VerdictWord, ...]] = ("dropped", "may have dropped")
NULLS: Final[tuple[VerdictWord, ...]] = ("within margin", "inconclusive")
_POINTS = {"win": 1.0, "tie": 0.0, "loss": -1.0}

Rows = Sequence[ItemRow]
Tables = dict[Axis, dict[str, dict[str, Numbers]]]


# --- the decision


def decide_verdict(
    role: Role, axis: Axis, contrast: Numbers, p: float, p_adjusted: float, margin: float
) -> VerdictWord:
    """Return the verdict of a contrast: improved, dropped, may have …, within margin or inconclusive.

    A change needs an interval that excludes 0. It is improved or dropped if p is below 0.05 and
    ``p_adjusted`` agrees: of a slice at 0.10 (Benjamini-Hochberg), of a whole axis at 0.05. An
    exploratory contrast "may have" changed at most. "within margin" means: for task and judge not worse
    by ``margin`` or more (non-inferior), for the persona neither worse nor better by that much. It also
    needs enough clusters that a kind of loss which none of them showed could not exceed the margin
    (36 for a margin of 0.1): a few items that happen to agree do not prove absence.
    """
    level = FALSE_DISCOVERIES if role == "slice" else ALPHA
    confirmed = role != "exploratory" and p < ALPHA and p_adjusted <= level
    if contrast["low"] > 0:
        return "improved" if confirmed else "may have improved"
    if contrast["high"] < 0:
        return "dropped" if confirmed else "may have dropped"
    kept = contrast["low"] > -margin and stats.unseen_share(contrast["clusters"]) < margin
    if kept and (axis != "persona" or contrast["high"] < margin):
        return "within margin"
    return "inconclusive"


def is_in_headline(role: Role, verdict: VerdictWord) -> bool:
    """Return whether the first line names the contrast: whole axes always, slices if they changed."""
    return role == "overall" or (role == "slice" and verdict in CONFIRMED)


def own_slices(card: BenchCard, axis: str) -> list[str]:
    """Return the slices that are there for ``axis``; for the judge all of them."""
    return [one["name"] for one in card["slices"] if axis in ("judge", one["primary"])]


def find_contrast(results: Results, axis: str, name: str, of: str, minus: str) -> Contrast | None:
    """Return the contrast of two arms on one axis and slice, or None."""
    for contrast in results["contrasts"]:
        place = (contrast["axis"], contrast["slice"], contrast["of"], contrast["minus"])
        if place == (axis, name, of, minus):
            return contrast
    return None


# --- means and contrasts


def list_axes(card: BenchCard, rows: Rows) -> list[Axis]:
    """Return the axes of the results: persona only if the bench has one, judge only if one was used."""
    axes: list[Axis] = ["task"]
    if card["persona"]:
        axes.append("persona")
    if any("judge" in answer for row in rows for answer in row["answers"].values()):
        axes.append("judge")
    return axes


def compare_arms(
    card: BenchCard, names: Sequence[str], rows: Rows
) -> tuple[Tables, list[Contrast]]:
    """Return tables (axis -> slice -> arm -> numbers) and contrasts of the arms ``names``."""
    tables: Tables = {}
    contrasts: list[Contrast] = []
    for axis in list_axes(card, rows):
        tables[axis] = {}
        marked = [row for row in rows if all(axis in row["answers"][name] for name in names)]
        own = own_slices(card, axis)
        groups = [(OVERALL, [row for row in marked if row["slice"] in own])]
        for one in card["slices"]:
            groups.append((one["name"], [row for row in marked if row["slice"] == one["name"]]))
        pairs: list[tuple[Contrast, list[float], list[str]]] = []
        for slice_, group in groups:
            if not group:
                continue
            clusters = [row["cluster"] for row in group]
            marks = {arm: [row["answers"][arm][axis] for row in group] for arm in names}
            tables[axis][slice_] = {
                arm: round_interval(values, clusters, (0.0, 1.0)) for arm, values in marks.items()
            }
            # Later minus earlier: expert - base, full - base, full - expert.
            for minus, of in itertools.combinations(names, 2):
                changes = [a - b for a, b in zip(marks[of], marks[minus], strict=True)]
                contrast: Contrast = {
                    "axis": axis,
                    "slice": slice_,
                    "of": of,
                    "minus": minus,
                    **round_interval(changes, clusters),
                    "p": round(stats.sign_flip_p(changes, clusters), 6),
                    "mcnemar": _mcnemar(marks[of], marks[minus], clusters),
                    "p_holm": 1.0,
                    "role": _role(slice_, own, (minus, of) == (names[0], names[-1])),
                    "p_adjusted": 1.0,
                    "headline": False,
                    "verdict": "inconclusive",
                    "detectable": None,
                }
                pairs.append((contrast, changes, clusters))
        _decide(pairs, card["margin"])
        contrasts += [contrast for contrast, *_ in pairs]
    return tables, contrasts


def round_interval(
    values: Sequence[float], clusters: Sequence[str], bounds: tuple[float, float] = (-1.0, 1.0)
) -> Numbers:
    """Return the mean with its 95 % interval; of differences, unless ``bounds`` are others."""
    found = stats.mean_interval(values, clusters, bounds=bounds)
    mean, low, high = (round(number, 6) for number in (found.mean, found.low, found.high))
    return {"mean": mean, "low": low, "high": high, "n": found.n, "clusters": found.clusters}


def _mcnemar(
    later: Sequence[float], earlier: Sequence[float], clusters: Sequence[str]
) -> McNemar | None:
    """Count items gained and lost, for yes/no marks of independent items; else return None."""
    if len(set(clusters)) < len(clusters) or not {*later, *earlier} <= {0, 1}:
        return None
    counts = Counter(zip(later, earlier, strict=True))
    gained, lost = counts[1, 0], counts[0, 1]
    return {"gained": gained, "lost": lost, "p": round(stats.mcnemar_p(gained, lost), 6)}


def _role(slice_: str, own: Sequence[str], main: bool) -> Role:
    """Return the question that a contrast answers; ``main``: of the last arm minus the first."""
    if slice_ == OVERALL:
        return "overall" if main else "pair"
    return "slice" if main and slice_ in own else "exploratory"


def _decide(
    pairs: Sequence[tuple[Contrast, Sequence[float], Sequence[str]]], margin: float
) -> None:
    """Adjust p of an axis's contrasts over what belongs together, and decide the verdicts.

    Holm corrects whole axes over the pairs of arms, and slices over slices × pairs. The slices that are
    there for the axis, of the last arm minus the first, are a family of their own.
    """
    contrasts = [contrast for contrast, *_ in pairs]
    whole = [one for one in contrasts if one["slice"] == OVERALL]
    parts = [one for one in contrasts if one["slice"] != OVERALL]
    own = [one for one in parts if one["role"] == "slice"]
    for family in (whole, parts):
        for one, p in zip(family, stats.holm([one["p"] for one in family]), strict=True):
            one["p_holm"] = round(p, 6)
            one["p_adjusted"] = one["p"] if one["role"] == "overall" else one["p_holm"]
    for one, p in zip(own, stats.benjamini_hochberg([one["p"] for one in own]), strict=True):
        one["p_adjusted"] = round(p, 6)
    for one, changes, clusters in pairs:
        role, axis = one["role"], one["axis"]
        one["verdict"] = decide_verdict(role, axis, one, one["p"], one["p_adjusted"], margin)
        one["headline"] = is_in_headline(role, one["verdict"])
        if one["verdict"] in CONFIRMED:
            continue
        # The p below which it would be confirmed, if it were the only one of its family.
        family = {"pair": whole, "slice": own, "exploratory": parts}.get(role, [one])
        level = min(ALPHA, (FALSE_DISCOVERIES if role == "slice" else ALPHA) / len(family))
        seen = stats.smallest_seen(changes, clusters, level)
        one["detectable"] = None if seen is None else round(seen, 6)


# --- judged pairs, and the noise of repeats


def count_pairs(pairs: Sequence[JudgedPair], rows: Rows) -> list[PairCounts]:
    """Count judged pairs per contrast: wins, ties and losses of the later arm; ``mean`` is their balance.

    A pair on which the two orders disagree is a tie and counted as ``flipped``.
    """
    clusters = {row["id"]: row["cluster"] for row in rows}
    groups: dict[tuple[str, str], list[JudgedPair]] = {}
    for pair in pairs:
        if pair["item"] in clusters:
            groups.setdefault((pair["of"], pair["minus"]), []).append(pair)
    counted: list[PairCounts] = []
    for (of, minus), group in sorted(groups.items()):
        points = [_POINTS[pair["result"]] for pair in group]
        names = [clusters[pair["item"]] for pair in group]
        tally = Counter(pair["result"] for pair in group)
        found = round_interval(points, names)
        p = round(stats.sign_flip_p(points, names), 6)
        counted.append(
            {
                "of": of,
                "minus": minus,
                "win": tally["win"],
                "tie": tally["tie"],
                "loss": tally["loss"],
                "flipped": sum(bool(pair["flipped"]) for pair in group),
                **found,
                "p": p,
                "verdict": decide_verdict("overall", "judge", found, p, p, margin=0.0),
            }
        )
    return counted


def measure_noise(
    rows: Rows, names: Sequence[str], axes: Sequence[Axis]
) -> dict[str, dict[Axis, Noise]]:
    """Compare the second repeat with the first, per arm and axis: differences without a cause.

    ``floor`` is the difference of means that this noise alone exceeds in 5 of 100 runs.
    """
    noise: dict[str, dict[Axis, Noise]] = {name: {} for name in names}
    for name, axis in itertools.product(names, axes):
        repeats = [(row["cluster"], row["answers"][name]["repeats"]) for row in rows]
        both = [(where, a, b) for where, (a, b, *_) in repeats if axis in a and axis in b]
        if not both:
            continue
        clusters = [cluster for cluster, *_ in both]
        before, after = [a[axis] for _, a, _ in both], [b[axis] for *_, b in both]
        changes = [b - a for a, b in zip(before, after, strict=True)]
        floor = stats.noise_floor(before, after, clusters)
        noise[name][axis] = {
            **round_interval(changes, clusters),
            "changed": round(sum(abs(one) > 1e-12 for one in changes) / len(changes), 6),
            "floor": None if floor is None else round(floor, 6),
        }
    return noise
