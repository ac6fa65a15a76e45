"""The statistics of a report, each with its source. Pure numpy and scipy; seeded, so repeatable.

Scores lie in 0..1, differences in -1..1. Items of one cluster (a pair, rewordings of a question)
are not independent, so clusters are what is resampled and what is flipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20_240
_EXACT_CLUSTERS = 13  # 2**13 sign patterns are fewer than RESAMPLES: enumerate them


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` values in ``clusters`` clusters, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int


def _cluster_sums(
    values: Sequence[float], clusters: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and size of each cluster, in order of first appearance: two float arrays [G]."""
    index = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    where = np.array([index[name] for name in clusters], dtype=int)
    sums = np.bincount(where, weights=np.asarray(values, dtype=float), minlength=len(index))
    return sums, np.bincount(where, minlength=len(index)).astype(float)


def bootstrap_interval(
    values: Sequence[float],
    clusters: Sequence[str],
    *,
    bounds: tuple[float, float],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """Cluster bootstrap interval of a mean; of paired differences, when those are the values.

    Whole clusters are drawn with replacement (Field & Welsh 2007, J. R. Stat. Soc. B 69:369). The
    percentiles are taken further out, at Phi(-sqrt(G/(G-1)) t_{G-1}), because plain percentiles are
    too narrow for few clusters (Hesterberg 2015, Am. Stat. 69:371, "expanded percentile"). Where
    all clusters have one mean, nothing varies in a resample; then ``unseen_share`` of the population
    is taken to differ by as much as the bounds allow. A single cluster says nothing: its interval
    is all of ``bounds``. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values")
    sums, sizes = _cluster_sums(values, clusters)
    groups = len(sums)
    mean = float(sums.sum() / sizes.sum())
    low, high = bounds
    alpha = 1 - CONFIDENCE
    if groups > 1 and np.ptp(sums / sizes) < 1e-12:
        unseen = unseen_share(groups)
        low, high = mean - unseen * (mean - low), mean + unseen * (high - mean)
    elif groups > 1:
        draws = np.random.default_rng(seed).integers(0, groups, size=(resamples, groups))
        means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
        t_quantile = special.stdtrit(groups - 1, alpha / 2)
        tail = special.ndtr(np.sqrt(groups / (groups - 1)) * t_quantile)
        low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(
        mean, max(bounds[0], float(low)), min(bounds[1], float(high)), len(values), groups
    )


def unseen_share(clusters: int) -> float:
    """How much of the population may behave in a way that none of ``clusters`` showed.

    The upper end of the two-sided 95 % interval for 0 of G: 1 - 0.025^(1/G), the exact form of the
    rule of three (Hanley & Lippman-Hand 1983, JAMA 249:1743).
    """
    return 1 - ((1 - CONFIDENCE) / 2) ** (1 / clusters)


def sign_flip_p(
    differences: Sequence[float],
    clusters: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> float:
    """Two-sided p of "the differences are symmetric around 0" by flipping clusters' signs.

    Exact for at most 13 clusters (Fisher 1935, The Design of Experiments, section 21), else from
    ``resamples`` random patterns with (1 + hits) / (1 + resamples), which is never 0 (Phipson &
    Smyth 2010, Stat. Appl. Genet. Mol. Biol. 9:39). Raises ValueError for no differences.
    """
    if not differences:
        raise ValueError("no differences")
    sums, _ = _cluster_sums(differences, clusters)
    groups = len(sums)
    observed = abs(sums.sum()) - 1e-9  # sums in another order may differ in the last bits
    if groups <= _EXACT_CLUSTERS:
        patterns = (np.arange(2**groups)[:, None] >> np.arange(groups)) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ sums) >= observed))
    signs = 1 - 2 * np.random.default_rng(seed).integers(0, 2, size=(resamples, groups))
    hits = int(np.count_nonzero(np.abs(signs @ sums) >= observed))
    return (1 + hits) / (1 + resamples)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of a family of p-values (Holm 1979, Scand. J. Stat. 6:65)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted
