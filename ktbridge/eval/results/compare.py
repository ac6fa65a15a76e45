"""Means per axis, slice and arm; contrasts of two arms with confidence interval and verdict.

Task, persona and judge are separate axes and never mixed. Only items that have a mark on the axis
in every arm are used.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ktbridge.eval.power import noise_floor, smallest_seen
from ktbridge.eval.stats import Interval, holm, mcnemar_p, mean_interval, sign_flip_p
from ktbridge.eval.verdict import ALPHA, NULLS, OVERALL, judge_contrast

Rows = Sequence[Mapping[str, Any]]
_POINTS = {"win": 1.0, "tie": 0.0, "loss": -1.0}


def axes_of(card: Mapping[str, Any], rows: Rows) -> list[str]:
    """The axes of the results: persona only if the bench has one, judge only if one was used."""
    judged = any("judge" in answer for row in rows for answer in row["answers"].values())
    return ["task", *(["persona"] if card["persona"] else []), *(["judge"] if judged else [])]


def compare(
    card: Mapping[str, Any], names: Sequence[str], rows: Rows
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tables (axis -> slice -> arm -> numbers) and contrasts; ``card`` is the bench's card."""
    tables: dict[str, Any] = {}
    contrasts: list[dict[str, Any]] = []
    for axis in axes_of(card, rows):
        tables[axis] = {}
        found = []
        for name, group in _groups(card, axis, marked(rows, names, axis)):
            clusters = [row["cluster"] for row in group]
            scores = {arm: [row["answers"][arm][axis] for row in group] for arm in names}
            tables[axis][name] = {
                arm: numbers(mean_interval(values, clusters, bounds=(0.0, 1.0)))
                for arm, values in scores.items()
            }
            # Later minus earlier: expert - base, full - base, full - expert.
            found += [
                {"axis": axis, "slice": name, "of": later, "minus": earlier}
                | _contrast(scores[later], scores[earlier], clusters)
                | {"differences": _differences(scores[later], scores[earlier]), "in": clusters}
                for earlier, later in itertools.combinations(names, 2)
            ]
        _adjust(found, card["margin"])
        contrasts += found
    return tables, contrasts


def marked(rows: Rows, names: Sequence[str], axis: str) -> list[Mapping[str, Any]]:
    """The items that have a mark on ``axis`` in every arm."""
    return [row for row in rows if all(axis in row["answers"][name] for name in names)]


def _groups(
    card: Mapping[str, Any], axis: str, rows: Rows
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """All items of the axis, then those of each slice; empty groups are omitted."""
    own = {one["name"] for one in card["slices"] if axis in ("judge", one["primary"])}
    groups = [(OVERALL, [row for row in rows if row["slice"] in own])]
    for one in card["slices"]:
        groups.append((one["name"], [row for row in rows if row["slice"] == one["name"]]))
    return [(name, group) for name, group in groups if group]


def _contrast(
    later: Sequence[float], earlier: Sequence[float], clusters: Sequence[str]
) -> dict[str, Any]:
    differences = _differences(later, earlier)
    interval = mean_interval(differences, clusters, bounds=(-1.0, 1.0))
    return {
        **numbers(interval),
        "p": round(sign_flip_p(differences, clusters), 6),
        "mcnemar": _mcnemar(later, earlier, clusters),
    }


def _differences(later: Sequence[float], earlier: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(later, earlier, strict=True)]


def _mcnemar(
    later: Sequence[float], earlier: Sequence[float], clusters: Sequence[str]
) -> dict[str, Any] | None:
    """For yes/no marks of independent items: counts of items gained and lost; else None."""
    if len(set(clusters)) < len(clusters) or not all(one in (0, 1) for one in (*later, *earlier)):
        return None
    counts = Counter(zip(later, earlier, strict=True))
    gained, lost = counts[1, 0], counts[0, 1]
    return {"gained": gained, "lost": lost, "p": round(mcnemar_p(gained, lost), 6)}


def _adjust(contrasts: list[dict[str, Any]], margin: float) -> None:
    """Holm correction in two families per axis: the headline, and the slices. Then the verdicts, and
    for null results the smallest detectable effect with the family's correction."""
    for overall in (True, False):
        family = [one for one in contrasts if (one["slice"] == OVERALL) == overall]
        for one, p_holm in zip(family, holm([one["p"] for one in family]), strict=True):
            one["p_holm"] = round(p_holm, 6)
            one["verdict"] = judge_contrast(one, margin)
            differences, clusters = one.pop("differences"), one.pop("in")
            one["detectable"] = None
            if one["verdict"] in NULLS:
                seen = smallest_seen(differences, clusters, ALPHA / len(family))
                one["detectable"] = None if seen is None else round(seen, 6)


def numbers(interval: Interval) -> dict[str, Any]:
    return {
        "mean": round(interval.mean, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
        "n": interval.n,
        "clusters": interval.clusters,
    }


def count_pairs(pairs: Sequence[Mapping[str, Any]], rows: Rows) -> list[dict[str, Any]]:
    """Judged pairs per contrast: wins, ties and losses of the later arm; ``mean`` is their balance.

    A pair on which the two orders disagree is a tie and counted as ``flipped``.
    """
    clusters = {row["id"]: row["cluster"] for row in rows}
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        if pair["item"] in clusters:
            groups.setdefault((pair["of"], pair["minus"]), []).append(pair)
    counted = []
    for (of, minus), group in sorted(groups.items()):
        points = [_POINTS[pair["result"]] for pair in group]
        names = [clusters[pair["item"]] for pair in group]
        tally = Counter(pair["result"] for pair in group)
        counted.append(
            {
                "of": of,
                "minus": minus,
                **{name: tally[name] for name in _POINTS},
                "flipped": sum(bool(pair["flipped"]) for pair in group),
                **numbers(mean_interval(points, names, bounds=(-1.0, 1.0))),
                "p": round(sign_flip_p(points, names), 6),
            }
        )
    return counted


def repeat_noise(rows: Rows, names: Sequence[str], axes: Sequence[str]) -> dict[str, Any]:
    """A/A: the second repeat minus the first, per arm and axis; differences without a cause.

    ``floor`` is the difference of means that this noise alone exceeds in 5 of 100 runs.
    """
    noise: dict[str, Any] = {}
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
            clusters, first, second = map(list, zip(*both, strict=True))
            found = noise_floor(first, second, clusters)
            differences = [b - a for a, b in zip(first, second, strict=True)]
            noise[name][axis] = {
                **numbers(mean_interval(differences, clusters, bounds=(-1.0, 1.0))),
                "changed": round(found.changed, 6),
                "floor": None if found.floor is None else round(found.floor, 6),
            }
    return noise
