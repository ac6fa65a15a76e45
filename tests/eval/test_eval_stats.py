"""The statistics against simulation and against numbers that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special
from scipy import stats as reference

from ktbridge.eval.stats import (
    benjamini_hochberg,
    count_ends,
    detectable_effect,
    holm,
    interval_rows,
    mcnemar_p,
    mean_interval,
    noise_floor,
    normal_cdf,
    power,
    sign_flip_p,
    sign_flip_rows,
    smallest_seen,
    t_cdf,
    t_quantile,
    unseen_share,
)

RUNS = 4000
BOUNDS = (-1.0, 1.0)
SHARE = (0.0, 1.0)


def names(count):
    return [str(i) for i in range(count)]


def draw(kind, clusters, rng, effect=0.0):
    """Paired differences [RUNS, clusters] of two runs of one arm (plus ``effect``)."""
    shape = (RUNS, clusters)
    if kind == "binary":  # a mark that changes on a quarter of the items
        uniform, half = rng.random(shape), (0.25 + np.array([effect, -effect])) / 2
        return np.where(uniform < half[0], 1.0, np.where(uniform < half.sum(), -1.0, 0.0))
    if kind == "thirds":  # three checks an item; half of the items never change
        marks = rng.integers(0, 4, (2, *shape)) / 3
        return np.where(rng.random(shape) < 0.5, 0.0, marks[0] - marks[1]) + effect
    hard = rng.uniform(0.2, 0.8, shape)  # graded: an item's level and two independent noises
    return rng.beta(8 * hard, 8 * (1 - hard)) - rng.beta(8 * hard, 8 * (1 - hard)) + effect


def rates(differences, sizes=None, truth=0.0):
    """(coverage, false positives) in percent."""
    sizes = np.ones(differences.shape[1]) if sizes is None else sizes
    low, high = interval_rows(differences, sizes, BOUNDS, 800, 3)
    covered = np.mean((low <= truth + 1e-9) & (high >= truth - 1e-9))
    return 100 * covered, 100 * np.mean(sign_flip_rows(differences, 800, 5) < 0.05)


# Shapes fine enough for a level of 5 % to exist: nearly it must be met, from both sides.
FINE = {"graded": (8, 12, 16, 40), "thirds": (16, 30, 40), "binary": (40, 80, 200)}
# With so few yes/no marks hardly any p-value exists near 5 %: the errors must be on the safe side.
TINY = (4, 5, 6, 8, 12, 16)


@pytest.mark.parametrize(
    ("kind", "clusters", "covered", "false"),
    [
        *((kind, count, 97, 3.5) for kind in FINE for count in FINE[kind]),
        *((kind, count, 100, 0) for kind in FINE for count in TINY if count not in FINE[kind]),
    ],
)
def test_two_runs_of_one_arm_differ_in_5_of_100_and_are_covered_in_95(kind, clusters, covered, false):
    coverage, found = rates(draw(kind, clusters, np.random.default_rng([17, clusters])))
    assert 93 <= coverage <= covered
    # At 5 and 6 graded clusters the two (four) most extreme of 2^G patterns are 6.25 %.
    assert false <= found <= (7.5 if kind == "graded" and clusters in (5, 6) else 6.5)


@pytest.mark.parametrize(("kind", "clusters"), [("graded", 12), ("binary", 80), ("thirds", 30)])
def test_a_true_difference_is_covered_as_well(kind, clusters):
    coverage, found = rates(draw(kind, clusters, np.random.default_rng(5), effect=0.1), truth=0.1)
    assert 93 <= coverage <= 97
    assert found > 8


def test_eight_slices_together_find_nothing_in_95_of_100_runs():
    # The shape of nekobench: Holm over its slices keeps the chance of any false finding.
    rng = np.random.default_rng(29)
    shapes = [("graded", 40)] * 3 + [("binary", 40)] * 3 + [("thirds", 15), ("binary", 30)]
    ps = np.stack([sign_flip_rows(draw(*shape, rng), 800, 5) for shape in shapes], axis=1)
    any_found = np.mean([min(holm(row)) < 0.05 for row in ps[:1500].tolist()])
    unadjusted = np.mean(ps[:1500].min(axis=1) < 0.05)
    assert any_found <= 0.065
    assert unadjusted > 0.2, "what it would be without Holm"


def test_pairs_count_once():
    # 15 pairs whose two items move together: taken for 30 items they would find far too much.
    rng = np.random.default_rng(11)
    shared = rng.uniform(-0.3, 0.3, (RUNS, 15))
    pairs = shared[..., None] + rng.uniform(-0.1, 0.1, (RUNS, 15, 2))
    coverage, false = rates(pairs.sum(axis=-1), np.full(15, 2.0))
    assert 93 <= coverage <= 97
    assert 3.5 <= false <= 6.5
    _, naive = rates(pairs.reshape(RUNS, 30))
    assert naive > 12


@pytest.mark.parametrize(("share", "count"), [(0.9, 12), (0.9, 40), (0.5, 8), (0.97, 40)])
def test_shares_are_covered(share, count):
    wins = np.random.default_rng(3).binomial(count, share, 2000)
    ends = {
        k: mean_interval([1.0] * k + [0.0] * (count - k), names(count), bounds=SHARE)
        for k in set(wins.tolist())
    }
    covered = np.mean([ends[k].low <= share <= ends[k].high for k in wins.tolist()])
    assert 0.92 <= covered <= 0.985


# --- against scipy and by hand


def test_intervals_agree_with_scipy_where_scipy_has_them():
    values = np.random.default_rng(2).uniform(-0.4, 0.6, 9)
    ours = mean_interval(values.tolist(), names(9), bounds=BOUNDS)
    theirs = reference.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    share = mean_interval([1.0] * 7 + [0.0] * 5, names(12), bounds=SHARE)
    theirs = reference.binomtest(7, 12).proportion_ci(0.95, "wilson")
    assert (share.low, share.high) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize(
    ("values", "bounds", "method"),
    [
        ([0.1, 0.4, 0.3], BOUNDS, "t"),
        (np.random.default_rng(1).uniform(0, 0.5, 40).tolist(), BOUNDS, "bootstrap"),
        ([1.0, 0.0] * 20, SHARE, "wilson"),
        ([1.0, 0.0] * 20, BOUNDS, "bootstrap"),
    ],
)
def test_the_interval_that_is_reported_is_chosen_by_shape(values, bounds, method):
    assert mean_interval(values, names(len(values)), bounds=bounds).method == method


def test_a_share_of_pairs_is_no_surer_than_its_pairs():
    pairs = [str(i // 2) for i in range(20)]
    halves, ones = [1.0, 1.0, 0.0, 0.0] * 5, [1.0] * 20
    together = mean_interval(halves, pairs, bounds=SHARE)
    apart = mean_interval(halves, names(20), bounds=SHARE)
    assert together.mean == apart.mean == 0.5
    assert together.high - together.low > 1.3 * (apart.high - apart.low)
    all_right = mean_interval(ones, pairs, bounds=SHARE)
    assert all_right.low < mean_interval(ones, names(20), bounds=SHARE).low < 1


def test_clusters_are_what_is_resampled():
    values = [0.25, 0.75] * 10
    tied = mean_interval(values * 4, names(20) * 4, bounds=SHARE)
    free = mean_interval(values * 4, names(80), bounds=SHARE)
    assert tied.mean == free.mean == 0.5
    assert (tied.n, tied.clusters, free.clusters) == (80, 20, 80)
    assert tied.high - tied.low > 1.8 * (free.high - free.low)


@pytest.mark.parametrize("count", [12, 40])
def test_equal_values_are_not_certainty(count):
    same = mean_interval([0.0] * count, names(count), bounds=BOUNDS)
    assert same.high == pytest.approx(1 - 0.025 ** (1 / count))  # 0.265, 0.088
    assert same.low == -same.high
    halves = mean_interval([0.1, 0.9] * count, [str(i // 2) for i in range(2 * count)], bounds=SHARE)
    share = unseen_share(count) / 2
    assert (halves.low, halves.high) == pytest.approx((0.5 - share, 0.5 + share))
    alone = mean_interval([0.4, 0.6], ["a", "a"], bounds=SHARE)
    assert (alone.low, alone.high) == SHARE


def test_sign_flip_enumerates_few_clusters_and_counts_ties_half():
    assert sign_flip_p([1.0] * 5, list("abcde")) == 1 / 32
    assert sign_flip_p([1.0, 1.0, 1.0, 0.0], list("abcd")) == 1 / 8
    assert sign_flip_p([0.4, 0.2, -0.1], list("abc")) == (2 + 1) / 8
    assert sign_flip_p([0.0, 0.0], ["a", "b"]) == 1.0
    # Flipped together: two clusters, not four items.
    assert sign_flip_p([1.0] * 4, list("aabb")) == 1 / 4
    assert 0 < sign_flip_p([0.1] * 40, names(40)) < 2e-4


@pytest.mark.parametrize(("gained", "lost"), [(3, 9), (0, 6), (12, 1), (5, 5), (0, 0), (1, 0)])
def test_mcnemar_is_the_sign_flip_of_yes_and_no(gained, lost):
    marks = [1.0] * gained + [-1.0] * lost + [0.0] * max(0, 13 - gained - lost)
    assert mcnemar_p(gained, lost) == pytest.approx(sign_flip_p(marks, names(len(marks))))
    if gained != lost:
        total, fewer = gained + lost, min(gained, lost)
        exact = reference.binomtest(fewer, total).pvalue
        assert mcnemar_p(gained, lost) == pytest.approx(exact - reference.binom.pmf(fewer, total, 0.5))


def test_how_many_items_that_agree_exclude_a_margin():
    # A kind of loss that none of them shows: 36 are enough for a margin of 0.1, 35 are not.
    assert unseen_share(36) < 0.1 < unseen_share(35)
    assert unseen_share(1) == pytest.approx(0.975)


def test_adjusted_p_values_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == benjamini_hochberg([]) == []
    ps = [0.01, 0.2, 0.04, 0.03, 0.9]
    assert benjamini_hochberg(ps) == pytest.approx(reference.false_discovery_control(ps))


def test_nothing_to_average_is_refused():
    with pytest.raises(ValueError, match="no values"):
        mean_interval([], [], bounds=SHARE)
    with pytest.raises(ValueError, match="no values"):
        sign_flip_p([], [])


# --- planning


def test_power_is_what_simulation_finds():
    effect, sd, clusters = 0.15, 0.25, 20
    draws = effect + sd * np.random.default_rng(6).standard_normal((6000, clusters))
    seen = reference.ttest_1samp(draws, 0, axis=1).pvalue < 0.05
    assert power(effect, sd, clusters) == pytest.approx(np.mean(seen), abs=0.02)
    assert power(0.0, sd, clusters) == pytest.approx(0.05)
    assert power(0.9, 0.05, clusters) == 1.0
    effects = np.linspace(0, 1, 60)
    for count in (3, 8, 40, 300):
        curve = [power(float(e), 0.3, count) for e in effects]
        assert all(math.isfinite(one) for one in curve)
        assert np.all(np.diff(curve) >= -1e-6)


def test_the_smallest_effect_that_a_slice_can_show():
    found = detectable_effect(0.5, 40)
    assert power(found, 0.5, 40) == pytest.approx(0.8, abs=1e-6)
    assert 0.22 < found < 0.23  # 2.8 sd / sqrt(n) and a little for t
    assert detectable_effect(0.5, 2) is None
    differences = [0.5, -0.5] * 20
    seen = smallest_seen(differences, names(40), 0.05 / 3)
    assert power(seen, np.std(differences, ddof=1), 40, 0.05 / 3) == pytest.approx(0.8, abs=1e-6)
    # Four items that all agree have a mid-p of 1/16: nothing can be seen, whatever its size.
    assert smallest_seen([1.0] * 4, names(4)) is None


@pytest.mark.parametrize(
    ("count", "lost", "gained"),
    [(20, 0, 0), (30, 0, 0), (30, 1, 0), (42, 1, 0), (100, 0, 0), (30, 1, 1), (100, 9, 9)],
)
def test_the_change_that_is_told_shows_in_8_of_10_runs(count, lost, gained):
    """Of yes/no marks with such changes, those that are the same in all items before it among them."""
    seen = smallest_seen([-1.0] * lost + [1.0] * gained + [0.0] * (count - lost - gained), names(count))
    draws = np.random.default_rng(3).random((500, count))
    more = gained / count
    changes = np.where(draws < seen + more, -1.0, np.where(draws < seen + 2 * more, 1.0, 0.0))
    confirmed = sign_flip_rows(changes) < 0.05
    assert 0.7 < confirmed.mean() < 0.95


@pytest.mark.parametrize("count", [36, 40, 50, 60, 80, 100])
def test_a_loss_of_the_margin_is_excluded_in_1_of_40_runs_at_most(count):
    """Exact: yes/no marks, a tenth of the population lost and nothing gained, a margin of a tenth."""

    def kept(lost):
        changes = [-1.0] * lost + [0.0] * (count - lost)
        low = mean_interval(changes, names(count), bounds=BOUNDS).low
        return min(low, count_ends(changes, names(count))[0]) > -0.1

    share = sum(reference.binom.pmf(lost, count, 0.1) for lost in range(count) if kept(lost))
    assert share <= 0.025
    ends = count_ends([-1.0] + [0.0] * (count - 1), names(count))
    exact = reference.binomtest(1, count).proportion_ci(method="exact")
    assert ends[0] == pytest.approx(-exact.high)


def test_the_noise_of_two_runs():
    floor = noise_floor([1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.0], list("abcd"))
    sd = np.std([0.0, 1.0, 0.0, -0.5], ddof=1)
    assert floor == pytest.approx(reference.t.ppf(0.975, 3) * sd / 2)
    assert noise_floor([0.1, 0.2], [0.2, 0.2], ["a", "a"]) is None
    with pytest.raises(ValueError, match="two runs"):
        noise_floor([1.0], [1.0, 0.0], ["a", "b"])


# --- our distributions against scipy's, which reports used before

FREEDOMS = (1, 2, 3, 4, 7, 12, 19, 30, 100, 1000, 20_000)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_students_t_with_and_without_a_shift(freedom):
    for p in (0.025, 0.2, 0.6, 0.9, 0.975, 0.99, 0.995, 0.9995):
        assert t_quantile(freedom, p) == pytest.approx(special.stdtrit(freedom, p), rel=1e-12)
    for shift in (0.0, 0.1, 1.0, 2.8, 4.0, 7.0, 15.0, 30.0):
        for t in (-12.7, -2.0, -0.5, 0.0, 0.3, 1.0, 2.5, 4.0, 12.7, 40.0, 300.0):
            theirs = special.nctdtr(freedom, shift, t) if shift else special.stdtr(freedom, t)
            if not math.isnan(theirs):  # scipy has no number where it is below 1e-16
                assert t_cdf(freedom, t, shift) == pytest.approx(theirs, abs=1e-13)


def test_the_normal_distribution_and_fair_coins():
    for x in (-9.0, -3.0, -0.1, 0.0, 1.0, 4.0):
        assert normal_cdf(x) == pytest.approx(special.ndtr(x), rel=1e-13)
    for n in (1, 2, 9, 50, 333, 3000):
        for fewer in {0, 1, n // 3, (n - 1) // 2}:
            if 2 * fewer < n:
                below = special.bdtr(fewer - 1, n, 0.5) if fewer else 0.0
                theirs = below + special.bdtr(fewer, n, 0.5)
                assert mcnemar_p(fewer, n - fewer) == pytest.approx(theirs, rel=1e-12)
