"""The statistics of a report, each with its source. Pure numpy; seeded, so repeatable.

Scores lie in 0..1, differences in -1..1. Items of one cluster (a pair, rewordings of a question,
repeats of one question) are not independent, so clusters are resampled and flipped. Functions work on
rows, one row per experiment, so that the simulations in the tests run the same code as a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20_240
_EXACT_CLUSTERS = 13  # 2**13 sign patterns are fewer than RESAMPLES: enumerate them
FEW_CLUSTERS = 20  # below this the bootstrap's percentiles are coarse, so t is used
_TINY = 1e-12
POWER = 0.8


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` values in ``clusters`` clusters, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int
    method: str = ""


def cluster_sums(values: Sequence[float], clusters: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and size of each cluster, in order of first appearance: two float arrays [G]. Raises ValueError
    for no values."""
    if not len(values):
        raise ValueError("no values")
    index = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    where = np.array([index[name] for name in clusters], dtype=int)
    sums = np.bincount(where, weights=np.asarray(values, dtype=float), minlength=len(index))
    return sums, np.bincount(where, minlength=len(index)).astype(float)


# --- intervals


def mean_interval(
    values: Sequence[float], clusters: Sequence[str], *, bounds: tuple[float, float]
) -> Interval:
    """The reported interval of a mean (or of a mean paired difference).

    Binary values (every value 0 or 1, bounds 0..1) get ``wilson``, fewer than 20 clusters ``t``, the rest
    ``bootstrap``: in simulations the coverage of each is closest to 95 % there. A single cluster of several
    values carries no information: its interval is all of ``bounds``. Raises ValueError for no values.
    """
    sums, sizes = cluster_sums(values, clusters)
    groups, total = len(sums), int(sizes.sum())
    binary = bounds == (0.0, 1.0) and all(value in (0, 1) for value in values)
    low, high = bounds
    if binary and (groups > 1 or total == 1):
        low, high = _wilson(sums, sizes)
    elif groups > 1:
        low, high = (float(end[0]) for end in interval_rows(sums[None], sizes, bounds))
    method = "wilson" if binary else "t" if groups < FEW_CLUSTERS else "bootstrap"
    low, high = max(bounds[0], low), min(bounds[1], high)
    return Interval(float(sums.sum() / total), low, high, total, groups, method)


def interval_rows(
    sums: np.ndarray,
    sizes: np.ndarray,
    bounds: tuple[float, float],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[np.ndarray, np.ndarray]:
    """Ends [R] of the intervals of R experiments over G > 1 clusters: ``sums`` [R, G], ``sizes`` [G].

    Student's, with the variance taken between clusters. The mean is a ratio of sums, linearised: var =
    G/(G-1) sum_g (s_g - mean n_g)^2 / N^2, with G-1 degrees of freedom (Cochran 1977, Sampling Techniques,
    section 9A.2; Miller 2024, "Adding error bars to evals", section 2.2, for benches).

    For many clusters also the cluster bootstrap, whose draws the experiments share (Field & Welsh 2007, J.
    R. Stat. Soc. B 69:369). The percentiles are taken further out, at Phi(-sqrt(G/(G-1)) t_{G-1}), because
    plain percentiles are too narrow for few clusters (Hesterberg 2015, Am. Stat. 69:371, "expanded
    percentile"). The end that reaches further is taken: near the ceiling or the floor a few clusters differ
    and the percentiles alone cover 93 %.

    If all clusters have the same mean, the variance is 0, and a width of 0 would claim certainty:
    ``unseen_share`` of the population is then assumed to differ by as much as the bounds allow.
    """
    groups = sums.shape[1]
    mean, reach = sums.sum(axis=1) / sizes.sum(), _t_reach(groups)
    half = reach * standard_error(sums, sizes)
    low, high = mean - half, mean + half
    if groups >= FEW_CLUSTERS:
        times = draw_clusters(groups, resamples, seed)
        means = (sums @ times.T) / (times @ sizes)
        tail = normal_cdf(-math.sqrt(groups / (groups - 1)) * reach)
        ends = np.quantile(means, [tail, 1 - tail], axis=1)
        low, high = np.minimum(ends[0], low), np.maximum(ends[1], high)
    alike = np.ptp(sums / sizes, axis=1) < _TINY
    share = unseen_share(groups)
    low = np.where(alike, mean - share * (mean - bounds[0]), low)
    return low, np.where(alike, mean + share * (bounds[1] - mean), high)


def draw_clusters(groups: int, resamples: int, seed: int) -> np.ndarray:
    """Number of times that each cluster is drawn, [B, G]: one matrix product serves every experiment."""
    draws = np.random.default_rng(seed).integers(0, groups, size=(resamples, groups))
    flat = (draws + groups * np.arange(resamples)[:, None]).ravel()
    times = np.bincount(flat, minlength=resamples * groups)
    return times.reshape(resamples, groups).astype(float)


def _wilson(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927, J. Am. Stat. Assoc. 22:209).

    With clusters of several items n is divided by the design effect, and z becomes t of G-1 (Korn &
    Graubard 1998, Surv. Methodol. 24:193).
    """
    groups, total = len(sums), float(sizes.sum())
    share = float(sums.sum() / total)
    z, effective = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), total
    if total > groups:
        z = _t_reach(groups)
        simple = share * (1 - share) / total
        ratio = float(standard_error(sums[None], sizes)[0]) ** 2 / simple if simple > 0 else 0.0
        # All equal: the sample size is the number of clusters, and never more than the items.
        effective = min(total, total / ratio) if ratio > _TINY else float(groups)
    center = (share + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * math.sqrt(share * (1 - share) / effective + z * z / (4 * effective**2))
    half /= 1 + z * z / effective
    return center - half, center + half


def unseen_share(clusters: int) -> float:
    """The largest share of the population that may behave in a way that none of ``clusters`` showed.

    The upper end of the two-sided 95 % interval for 0 of G: 1 - 0.025^(1/G), the exact form of the
    rule of three (Hanley & Lippman-Hand 1983, JAMA 249:1743).
    """
    return 1 - ((1 - CONFIDENCE) / 2) ** (1 / clusters)


def count_ends(differences: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """Ends of a mean difference by how many clusters got worse, and how many better.

    Exact where one kind has few or none (Clopper & Pearson 1934, Biometrika 26:404), and t is too narrow; the
    limits of both shares, times the root mean square of their changes, are combined as Zou & Donner have it
    (2008, Stat. Med. 27:1693).
    """
    means = _cluster_shares(differences, clusters)
    groups, mean = len(means), float(means.mean())

    def limits(changes: np.ndarray) -> tuple[float, float]:
        """Distances to the ends of the share of clusters that changed, times the size of changes."""
        found = changes[changes > _TINY]
        size = math.sqrt(np.square(found).mean()) if len(found) else 1.0
        share = len(found) / groups
        least = 1 - _largest_share(groups - len(found), groups)
        return size * (share - least), size * (_largest_share(len(found), groups) - share)

    (fewer_better, more_better), (fewer_worse, more_worse) = limits(means), limits(-means)
    return mean - math.hypot(fewer_better, more_worse), mean + math.hypot(more_better, fewer_worse)


def _cluster_shares(values: Sequence[float], clusters: Sequence[str]) -> np.ndarray:
    """Parts of the mean by cluster, [G], times their number: their mean is that of all values."""
    sums, sizes = cluster_sums(values, clusters)
    shares: np.ndarray = sums * len(sums) / sizes.sum()
    return shares


@lru_cache(maxsize=4096)
def _largest_share(count: int, groups: int) -> float:
    """The upper end of the exact two-sided 95 % interval for ``count`` of ``groups``."""
    low, high = count / groups, 1.0
    for _ in range(40 if count < groups else 0):
        middle = (low + high) / 2
        more = _binomial_cdf(count, groups, middle) > (1 - CONFIDENCE) / 2
        low, high = (middle, high) if more else (low, middle)
    return high


def _binomial_cdf(count: int, groups: int, share: float) -> float:
    """P(X <= ``count``) of ``groups`` draws, each 1 with probability ``share``."""
    if count < 0 or share >= 1:
        return float(count >= groups)
    if share <= 0:
        return 1.0
    whole, odds = math.lgamma(groups + 1), math.log(share) - math.log1p(-share)
    ways = (whole - math.lgamma(k + 1) - math.lgamma(groups - k + 1) + k * odds for k in range(count + 1))
    return min(1.0, sum(math.exp(each + groups * math.log1p(-share)) for each in ways))


def standard_error(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Standard error [R] of each row's mean, between clusters."""
    groups, total = sums.shape[1], sizes.sum()
    mean = sums.sum(axis=1, keepdims=True) / total
    spread = np.square(sums - mean * sizes).sum(axis=1)
    return np.sqrt(groups / (groups - 1) * spread) / total


# --- tests of "no difference"


def sign_flip_p(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """Two-sided mid-p of "the differences are symmetric around 0", see ``sign_flip_rows``. Raises ValueError
    for no differences."""
    sums, _ = cluster_sums(differences, clusters)
    return float(sign_flip_rows(sums[None])[0])


def sign_flip_rows(sums: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Mid-p [R] of R experiments with cluster sums [R, G], by flipping clusters' signs.

    All patterns for at most 13 clusters (Fisher 1935, The Design of Experiments, section 21), else
    ``resamples`` random ones plus the observed one, so that p is never 0 (Phipson & Smyth
    2010, Stat. Appl. Genet. Mol. Biol. 9:39). Patterns that are exactly as extreme count half
    (Lancaster 1961, J. Am. Stat. Assoc. 56:223): counted fully, the test of yes/no marks rejects
    far less often than its nominal level (Fagerland et al. 2013, BMC Med. Res. Methodol. 13:91).
    Differences that add up to 0 give p = 1.
    """
    signs = draw_signs(sums.shape[1], resamples, seed)
    flipped = np.abs(sums @ signs.T)
    observed = np.abs(sums.sum(axis=1))[:, None]
    # Floating-point sums in another order may differ in the last bits.
    beyond = np.count_nonzero(flipped > observed + 1e-9, axis=1)
    equal = np.count_nonzero(np.abs(flipped - observed) <= 1e-9, axis=1)
    seen = 0 if sums.shape[1] <= _EXACT_CLUSTERS else 1
    p = (beyond + 0.5 * (equal + seen)) / (len(signs) + seen)
    return np.where(observed[:, 0] <= 1e-9, 1.0, p)


def draw_signs(groups: int, resamples: int, seed: int) -> np.ndarray:
    """Signs of the clusters, [B, G]: every pattern for few clusters, else random ones."""
    if groups <= _EXACT_CLUSTERS:
        bits = (np.arange(2**groups)[:, None] >> np.arange(groups)) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(resamples, groups))
    return 1.0 - 2 * bits


def mcnemar_p(gained: int, lost: int) -> float:
    """Two-sided mid-p of "``gained`` and ``lost`` (items right in one arm only) are equally likely".

    McNemar 1947, Psychometrika 12:153, on the binomial instead of its chi-squared limit, as mid-p
    (Fagerland et al. 2013, above). It equals ``sign_flip_p`` on yes/no items without clusters.
    """
    if gained == lost:
        return 1.0
    fewer, total = min(gained, lost), gained + lost
    below = sum(math.comb(total, k) for k in range(fewer))
    return (2 * below + math.comb(total, fewer)) / 2**total


# --- multiple tests


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of a family of p-values (Holm 1979, Scand. J. Stat. 6:65)."""
    p, order = np.array(p_values, dtype=float), np.argsort(p_values, kind="stable")
    steps = np.arange(len(p), 0, -1) * p[order]
    p[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return p.tolist()


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Step-up adjustment: named at 0.10, at most 10 % of the names are false on average (Benjamini &
    Hochberg 1995, J. R. Stat. Soc. B 57:289)."""
    p, order = np.array(p_values, dtype=float), np.argsort(p_values, kind="stable")[::-1]
    steps = len(p) / np.arange(len(p), 0, -1) * p[order]
    p[order] = np.minimum(1.0, np.minimum.accumulate(steps))
    return p.tolist()


# --- the noise between two runs of one arm, and power


def noise_floor(first: Sequence[float], second: Sequence[float], clusters: Sequence[str]) -> float | None:
    """The difference of means that the noise between two runs of one arm alone exceeds in 5 of 100
    runs: t over the clusters' mean differences (``first`` and ``second`` are marks of the same items).
    None for one cluster. Raises ValueError for no items or unequal lengths."""
    if len(first) != len(second):
        raise ValueError("two runs of the same items are needed")
    sums, sizes = cluster_sums(np.subtract(second, first).tolist(), clusters)
    groups = len(sums)
    if groups == 1:
        return None
    return _t_reach(groups) * float(np.std(sums / sizes, ddof=1)) / math.sqrt(groups)


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
    critical = t_quantile(freedom, 1 - alpha / 2)
    if shift > critical + 8 * math.sqrt(1 + critical * critical / (2 * freedom)):
        return 1.0  # beyond eight standard deviations
    # The second is detected with the wrong sign.
    return 1 - t_cdf(freedom, critical, shift) + t_cdf(freedom, -critical, shift)


def detectable_effect(sd: float, clusters: int, *, alpha: float = 1 - CONFIDENCE) -> float | None:
    """The smallest difference that the t test detects in 8 of 10 runs; None if even 1 is not."""
    return _smallest(lambda effect: power(effect, sd, clusters, alpha))


def _smallest(chance: Callable[[float], float]) -> float | None:
    """The smallest effect, found by bisection, whose ``chance``, which grows with it, reaches ``POWER``."""
    low, high = 0.0, 1.0
    if chance(high) < POWER:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle) >= POWER else (middle, high)
    return high


def smallest_seen(
    differences: Sequence[float], clusters: Sequence[str], alpha: float = 1 - CONFIDENCE
) -> float | None:
    """The smallest true change that would be confirmed in 8 of 10 runs: reported beside a null result.

    A change adds to the spread that was seen, as some of the clusters that didn't change come to: of the
    size that others changed by, or of 1. And it has to show in enough of them: k clusters that all agree
    give the sign-flip test a mid-p of 2^-k, and no less. None if no difference could be detected. ``alpha``
    is the level of the test after correction, in its worst case.
    """
    means = _cluster_shares(differences, clusters)
    groups, changed = len(means), means[np.abs(means) > _TINY]
    least = math.floor(-math.log2(alpha)) + 1
    if groups < max(2, least):
        return None
    spread, still = float(means.var(ddof=1)), 1 - len(changed) / groups
    size = math.sqrt(np.square(changed).mean()) if len(changed) else 1.0

    def chance(effect: float) -> float:
        more = still * effect * max(0.0, size - effect)
        shown = 1 - _binomial_cdf(least - 1, groups, min(1.0, effect / size))
        return min(power(effect, math.sqrt(spread + more), groups, alpha), shown)

    return _smallest(chance)


# --- Student's t: a few formulas in place of scipy's 143 MB (tests compare)
#
# T, noncentral with shift d and n degrees of freedom, is (Z + d) / S, where Z is normal and n S^2
# chi-squared: P(T <= t) is the mean of Phi(t S - d). Over y = log S it is an integral of an analytic
# function that vanishes at both ends, for which the trapezoidal rule is exact to the last digits
# (Trefethen & Weideman 2014, The exponentially convergent trapezoidal rule, SIAM Review 56:385).

_NEGLIGIBLE = 45.0  # exp(-45): 3e-20
_STEP = 0.5  # of the narrower of the two features of the integrand, over which it changes by e
# Of Newton's method, which is done after ten but far out, where t has few degrees of freedom.
_ROUNDS = 200


def normal_cdf(x: float) -> float:
    """P(Z <= x) of the normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def t_cdf(freedom: int, t: float, shift: float = 0.0) -> float:
    """P(T <= t) with ``freedom`` degrees of freedom, noncentral by ``shift``."""
    logs, weights = _spread(freedom, shift)
    return float(weights @ _normal(t * np.exp(logs) - shift))


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, p: float) -> float:
    """The t with P(T <= t) = p, 0 < p < 1, for ``freedom`` degrees of freedom."""
    if p < 0.5:
        return -t_quantile(freedom, 1 - p)
    logs, weights = _spread(freedom, 0.0)
    scales = np.exp(logs)
    t = NormalDist().inv_cdf(p)  # below it; P is concave from 0 on, so that each step stays below it
    for _ in range(_ROUNDS):
        slope = float(weights @ (scales * np.exp(-0.5 * np.square(t * scales))))
        step = (p - float(weights @ _normal(t * scales))) * math.sqrt(2 * math.pi) / slope
        t += step
        if abs(step) <= 1e-14 * abs(t):
            break
    return t


def _t_reach(groups: int) -> float:
    """Half-width of a 95 % t interval over ``groups`` clusters, in standard errors."""
    return t_quantile(groups - 1, (1 + CONFIDENCE) / 2)


@lru_cache(maxsize=256)
def _spread(freedom: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Points of log S, S^2 being chi-squared over its ``freedom``, and their weights, whose sum is 1."""
    # The logarithm of the density is n (y - exp(2 y) / 2), largest at y = 0.
    far = 2 * _NEGLIGIBLE / freedom
    high, low = far, 0.0
    for _ in range(60):
        high = 0.5 * math.log1p(2 * high + far)
        low = 0.5 * (math.expm1(2 * low) - far)
    step = _STEP / math.sqrt(shift * shift + 2 * freedom + 10)
    logs = np.arange(math.floor(low / step), math.ceil(high / step) + 1).astype(np.float64) * step
    weights = np.exp(freedom * (logs - 0.5 * np.expm1(2 * logs)))
    return logs, weights / weights.sum()


def _normal(values: np.ndarray) -> np.ndarray:
    """``normal_cdf`` of each value: numpy has no error function."""
    scaled = (values * -math.sqrt(0.5)).tolist()
    return 0.5 * np.array([math.erfc(value) for value in scaled])
