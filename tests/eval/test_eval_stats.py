"""The statistics against simulation and against numbers that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ktbridge.eval.stats import bootstrap_interval, holm, sign_flip_p


def draw(rng, clusters, size, effect=0.0):
    """Differences in -1..1 with a cluster part: mean ``effect``, correlated within a cluster."""
    shared = np.repeat(rng.uniform(-0.3, 0.3, clusters), size)
    values = effect + shared + rng.uniform(-0.3, 0.3, clusters * size)
    return values.tolist(), np.repeat(np.arange(clusters), size).astype(str).tolist()


def test_intervals_cover_and_p_values_hold_their_level():
    rng = np.random.default_rng(7)
    runs = 600
    covered = rejected = 0
    for seed in range(runs):
        values, clusters = draw(rng, 12, 2)
        interval = bootstrap_interval(
            values, clusters, bounds=(-1.0, 1.0), resamples=400, seed=seed
        )
        covered += interval.low <= 0 <= interval.high
        rejected += sign_flip_p(values, clusters) < 0.05
    # Three standard errors of 600 draws around 95 % and 5 %.
    assert 0.92 <= covered / runs <= 0.985
    assert 0.02 <= rejected / runs <= 0.08


def test_a_real_effect_is_found():
    values, clusters = draw(np.random.default_rng(1), 30, 1, effect=0.3)
    interval = bootstrap_interval(values, clusters, bounds=(-1.0, 1.0))
    assert 0 < interval.low < 0.3 < interval.high
    assert sign_flip_p(values, clusters) < 0.001


def test_clusters_are_what_is_resampled():
    values = [0.0, 1.0] * 10
    tied = bootstrap_interval(values * 4, [str(i) for i in range(20)] * 4, bounds=(0.0, 1.0))
    free = bootstrap_interval(values * 4, [str(i) for i in range(80)], bounds=(0.0, 1.0))
    assert tied.mean == free.mean == 0.5
    assert (tied.n, tied.clusters, free.clusters) == (80, 20, 80)
    assert tied.high - tied.low > 1.8 * (free.high - free.low)


def test_equal_values_are_not_certainty():
    interval = bootstrap_interval([0.0] * 12, [str(i) for i in range(12)], bounds=(-1.0, 1.0))
    assert interval.high == pytest.approx(1 - 0.025 ** (1 / 12))  # 0.265
    assert interval.low == -interval.high
    pairs = bootstrap_interval([0.0, 1.0] * 4, list("aabbccdd"), bounds=(0.0, 1.0))
    assert pairs.low < 0.3
    assert pairs.high > 0.7
    alone = bootstrap_interval([0.4, 0.6], ["a", "a"], bounds=(0.0, 1.0))
    assert (alone.low, alone.high) == (0.0, 1.0)


def test_sign_flip_is_exact_for_few_clusters():
    assert sign_flip_p([1.0] * 5, list("abcde")) == 2 / 32
    assert sign_flip_p([1.0, 1.0, 1.0, 0.0], list("abcd")) == 2 / 8
    assert sign_flip_p([0.0, 0.0], ["a", "b"]) == 1.0
    # Flipped together: two clusters, not four items.
    assert sign_flip_p([1.0] * 4, list("aabb")) == 2 / 4
    assert sign_flip_p([0.1] * 40, [str(i) for i in range(40)]) == 1 / 10_001


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_nothing_to_average_is_refused():
    with pytest.raises(ValueError, match="no values"):
        bootstrap_interval([], [], bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="no differences"):
        sign_flip_p([], [])
