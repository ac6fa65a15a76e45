"""Statistical power of a bench before it is run; and the noise between two runs of one arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from ktbridge.eval.stats import CONFIDENCE, cluster_sums, standard_error, unseen_share

POWER = 0.8
# Standard deviations of a paired difference. A yes/no mark that changes on a share d of the items,
# equally often for better and for worse, has sqrt(d); marks with thirds or checklists lie between.
SPREADS: Mapping[str, float] = {
    "yes/no, 1 in 10 items changes": math.sqrt(0.1),
    "yes/no, 1 in 4 items changes": math.sqrt(0.25),
    "graded, sd 0.25": 0.25,
}


@dataclass(frozen=True)
class Noise:
    """Two runs of one arm: differences without a cause.

    ``mean`` is the difference of the means, ``sd`` the standard deviation of the difference between
    clusters, ``changed`` the share of items whose mark changed, ``floor`` the difference of means that
    this noise alone exceeds in 5 of 100 runs (t over clusters; None for one cluster).
    """

    mean: float
    sd: float
    changed: float
    floor: float | None
    n: int


def noise_floor(first: Sequence[float], second: Sequence[float], clusters: Sequence[str]) -> Noise:
    """Compare an A/A repeat, item by item. Raises ValueError for no items or unequal lengths."""
    if not first or len(first) != len(second):
        raise ValueError("two runs of the same items are needed")
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    sums, sizes = cluster_sums(differences.tolist(), clusters)
    groups = len(sums)
    spread = float(np.std(sums / sizes, ddof=1)) if groups > 1 else 0.0
    floor = None
    if groups > 1:
        quantile = float(special.stdtrit(groups - 1, (1 + CONFIDENCE) / 2))
        floor = quantile * spread / math.sqrt(groups)
    changed = float(np.mean(np.abs(differences) > 1e-12))
    return Noise(float(differences.mean()), spread, changed, floor, len(first))


def power(effect: float, sd: float, clusters: int, alpha: float = 1 - CONFIDENCE) -> float:
    """The probability that a two-sided paired t test at ``alpha`` detects ``effect``.

    The statistic is noncentral t with G-1 degrees of freedom and noncentrality effect sqrt(G)/sd
    (Cohen 1988, Statistical Power Analysis, section 2.3). 0 for fewer than two clusters.
    """
    if clusters < 2:
        return 0.0
    if sd <= 0:
        return 1.0 if effect else alpha
    freedom = clusters - 1
    shift = abs(effect) * math.sqrt(clusters) / sd
    critical = float(special.stdtrit(freedom, 1 - alpha / 2))
    if shift > critical + 8 * math.sqrt(1 + critical * critical / (2 * freedom)):
        return 1.0  # beyond eight standard deviations, where nctdtr loses precision
    above = 1 - float(special.nctdtr(freedom, shift, critical))
    # Detected with the wrong sign; from shift 4 on less than 1e-8, again beyond nctdtr's precision.
    below = float(special.nctdtr(freedom, shift, -critical)) if shift < 4 else 0.0
    return above + below


def detectable_effect(
    sd: float, clusters: int, *, alpha: float = 1 - CONFIDENCE, chance: float = POWER
) -> float | None:
    """The smallest difference detected with probability ``chance``; None if even 1 is not.

    Found by bisection on ``power``, which grows with the effect.
    """
    low, high = 0.0, 1.0
    if power(high, sd, clusters, alpha) < chance:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if power(middle, sd, clusters, alpha) >= chance else (middle, high)
        )
    return high


def smallest_seen(
    differences: Sequence[float], clusters: Sequence[str], alpha: float = 1 - CONFIDENCE
) -> float | None:
    """``detectable_effect`` for the spread of these differences: reported beside a null result.

    Their standard error is taken between clusters, so it includes unequal sizes. If all clusters have
    the same mean, it is the effect that none of them may have shown (``unseen_share``). None if no
    difference could be detected: G clusters that all agree give the sign-flip test a mid-p of 2^-G,
    and no less. ``alpha`` is divided by the number of contrasts for the worst case under Holm.
    """
    sums, sizes = cluster_sums(differences, clusters)
    groups = len(sums)
    if groups < 2 or 2.0**-groups >= alpha:
        return None
    error = float(standard_error(sums[None], sizes)[0])
    if error < 1e-12:
        return unseen_share(groups)
    return detectable_effect(error * math.sqrt(groups), groups, alpha=alpha)


def power_table(
    clusters: Mapping[str, int],
    spreads: Mapping[str, float] = SPREADS,
    *,
    alpha: float = 1 - CONFIDENCE,
    chance: float = POWER,
) -> list[dict[str, float | int | str | None]]:
    """For each slice (name -> clusters) the smallest detectable difference under each spread.

    One row per slice: ``slice``, ``clusters`` and one key per spread. Not corrected for multiple
    slices: pass ``alpha`` / number of slices for the worst case under Holm.
    """
    rows: list[dict[str, float | int | str | None]] = []
    for name, count in clusters.items():
        row: dict[str, float | int | str | None] = {"slice": name, "clusters": count}
        for label, sd in spreads.items():
            found = detectable_effect(sd, count, alpha=alpha, chance=chance)
            row[label] = None if found is None else round(found, 3)
        rows.append(row)
    return rows
