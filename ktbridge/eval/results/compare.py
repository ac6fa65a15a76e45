"""Means per axis, slice and arm; contrasts of two arms with confidence interval and verdict.

Task, persona and judge are separate axes and never mixed. Only items that have a mark on the axis
in every arm are used.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ktbridge.eval.results.cards import BenchCard
from ktbridge.eval.results.types import (
    Axis,
    Contrast,
    ItemRow,
    JudgedPair,
    McNemar,
    Noise,
    Numbers,
    PairCounts,
)
from ktbridge.eval.stats import (
    Interval,
    benjamini_hochberg,
    holm,
    mcnemar_p,
    mean_interval,
    noise_floor,
    sign_flip_p,
    smallest_seen,
)
from ktbridge.eval.verdict import (
    CONFIRMED,
    OVERALL,
    in_headline,
    judge_contrast,
    level_of,
    own_slices,
    role_of,
)

Rows = Sequence[ItemRow]
_POINTS = {"win": 1.0, "tie": 0.0, "loss": -1.0}


def axes_of(card: BenchCard, rows: Rows) -> list[Axis]:
    """The axes of the results: persona only if the bench has one, judge only if one was used."""
    axes: list[Axis] = ["task"]
    if card["persona"]:
        axes.append("persona")
    if any("judge" in answer for row in rows for answer in row["answers"].values()):
        axes.append("judge")
    return axes


def compare(
    card: BenchCard, names: Sequence[str], rows: Rows
) -> tuple[dict[Axis, dict[str, dict[str, Numbers]]], list[Contrast]]:
    """Tables (axis -> slice -> arm -> numbers) and contrasts; ``card`` is the bench's card."""
    tables: dict[Axis, dict[str, dict[str, Numbers]]] = {}
    contrasts: list[Contrast] = []
    for axis in axes_of(card, rows):
        tables[axis] = {}
        found: list[_Compared] = []
        for name, group in _groups(card, axis, marked(rows, names, axis)):
            clusters = [row["cluster"] for row in group]
            scores = {arm: [row["answers"][arm][axis] for row in group] for arm in names}
            tables[axis][name] = {
                arm: numbers(mean_interval(values, clusters, bounds=(0.0, 1.0)))
                for arm, values in scores.items()
            }
            # Later minus earlier: expert - base, full - base, full - expert.
            found += [
                _Compared(axis, name, later, earlier, scores[later], scores[earlier], clusters)
                for earlier, later in itertools.combinations(names, 2)
            ]
        contrasts += _contrasts(card, names, found)
    return tables, contrasts


def marked(rows: Rows, names: Sequence[str], axis: Axis) -> list[ItemRow]:
    """The items that have a mark on ``axis`` in every arm."""
    return [row for row in rows if all(axis in row["answers"][name] for name in names)]


def _groups(card: BenchCard, axis: Axis, rows: Rows) -> list[tuple[str, list[ItemRow]]]:
    """All items of the axis, then those of each slice; empty groups are omitted."""
    own = own_slices(card, axis)
    groups = [(OVERALL, [row for row in rows if row["slice"] in own])]
    for one in card["slices"]:
        groups.append((one["name"], [row for row in rows if row["slice"] == one["name"]]))
    return [(name, group) for name, group in groups if group]


def _mcnemar(
    later: Sequence[float], earlier: Sequence[float], clusters: Sequence[str]
) -> McNemar | None:
    """For yes/no marks of independent items: counts of items gained and lost; else None."""
    if len(set(clusters)) < len(clusters) or not all(one in (0, 1) for one in (*later, *earlier)):
        return None
    counts = Counter(zip(later, earlier, strict=True))
    gained, lost = counts[1, 0], counts[0, 1]
    return {"gained": gained, "lost": lost, "p": round(mcnemar_p(gained, lost), 6)}


@dataclass(frozen=True)
class _Compared:
    """The marks of two arms on the items of a slice."""

    axis: Axis
    slice: str
    of: str
    minus: str
    later: Sequence[float]
    earlier: Sequence[float]
    clusters: Sequence[str]

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.later, self.earlier, strict=True)]


def _contrasts(
    card: BenchCard, names: Sequence[str], compared: Sequence[_Compared]
) -> list[Contrast]:
    """Contrasts of an axis: intervals, p, p adjusted over what belongs together, and the verdicts.

    Holm corrects whole axes over the pairs of arms, and slices over slices × pairs. The slices that are
    there for the axis, of the last arm minus the first, are a family of their own.
    """
    p = [round(sign_flip_p(one.differences, one.clusters), 6) for one in compared]
    roles = [role_of(card, names, (one.axis, one.slice, one.of, one.minus)) for one in compared]
    p_holm, family = [1.0] * len(compared), [1] * len(compared)
    for overall in (True, False):
        mine = [i for i, one in enumerate(compared) if (one.slice == OVERALL) == overall]
        for i, adjusted in zip(mine, holm([p[i] for i in mine]), strict=True):
            p_holm[i], family[i] = round(adjusted, 6), len(mine)
    p_adjusted = [p[i] if role == "overall" else p_holm[i] for i, role in enumerate(roles)]
    own = [i for i, role in enumerate(roles) if role == "slice"]
    for i, adjusted in zip(own, benjamini_hochberg([p[i] for i in own]), strict=True):
        p_adjusted[i], family[i] = round(adjusted, 6), len(own)
    contrasts: list[Contrast] = []
    for i, one in enumerate(compared):
        found = numbers(mean_interval(one.differences, one.clusters, bounds=(-1.0, 1.0)))
        word = judge_contrast(roles[i], one.axis, found, p[i], p_adjusted[i], card["margin"])
        seen = None
        if word not in CONFIRMED:
            level = level_of(roles[i], family[i])
            seen = smallest_seen(one.differences, one.clusters, level)
        contrasts.append(
            {
                "axis": one.axis,
                "slice": one.slice,
                "of": one.of,
                "minus": one.minus,
                **found,
                "p": p[i],
                "mcnemar": _mcnemar(one.later, one.earlier, one.clusters),
                "p_holm": p_holm[i],
                "role": roles[i],
                "p_adjusted": p_adjusted[i],
                "headline": in_headline(roles[i], word),
                "verdict": word,
                "detectable": None if seen is None else round(seen, 6),
            }
        )
    return contrasts


def numbers(interval: Interval) -> Numbers:
    return {
        "mean": round(interval.mean, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
        "n": interval.n,
        "clusters": interval.clusters,
    }


def count_pairs(pairs: Sequence[JudgedPair], rows: Rows) -> list[PairCounts]:
    """Judged pairs per contrast: wins, ties and losses of the later arm; ``mean`` is their balance.

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
        found = numbers(mean_interval(points, names, bounds=(-1.0, 1.0)))
        p = round(sign_flip_p(points, names), 6)
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
                "verdict": judge_contrast("overall", "judge", found, p, p, margin=0.0),
            }
        )
    return counted


def repeat_noise(
    rows: Rows, names: Sequence[str], axes: Sequence[Axis]
) -> dict[str, dict[Axis, Noise]]:
    """A/A: the second repeat minus the first, per arm and axis; differences without a cause.

    ``floor`` is the difference of means that this noise alone exceeds in 5 of 100 runs.
    """
    noise: dict[str, dict[Axis, Noise]] = {}
    for name in names:
        noise[name] = {}
        for axis in axes:
            both = []
            for row in rows:
                first, second = row["answers"][name]["repeats"][:2]
                if axis in first and axis in second:
                    both.append((row["cluster"], first[axis], second[axis]))
            if not both:
                continue
            clusters = [cluster for cluster, _, _ in both]
            before, after = [a for _, a, _ in both], [b for _, _, b in both]
            differences = [b - a for a, b in zip(before, after, strict=True)]
            floor = noise_floor(before, after, clusters)
            changed = sum(abs(one) > 1e-12 for one in differences) / len(differences)
            noise[name][axis] = {
                **numbers(mean_interval(differences, clusters, bounds=(-1.0, 1.0))),
                "changed": round(changed, 6),
                "floor": None if floor is None else round(floor, 6),
            }
    return noise
