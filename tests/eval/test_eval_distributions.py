"""Our distributions against scipy's, which reports used before: the same numbers to 1e-12."""

from __future__ import annotations

import math

import pytest

from ktbridge.eval.stats import (
    binomial_mid_p,
    normal_cdf,
    normal_quantile,
    t_cdf,
    t_quantile,
)

special = pytest.importorskip("scipy.special")
FREEDOMS = (1, 2, 3, 4, 7, 12, 19, 30, 100, 1000, 20_000)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_quantiles_of_t(freedom: int) -> None:
    for p in (0.025, 0.2, 0.6, 0.9, 0.975, 0.99, 0.995, 0.9995):
        assert t_quantile(freedom, p) == pytest.approx(special.stdtrit(freedom, p), rel=1e-12)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_t_with_and_without_a_shift(freedom: int) -> None:
    for shift in (0.0, 0.1, 1.0, 2.8, 4.0, 7.0, 15.0, 30.0):
        for t in (-12.7, -2.0, -0.5, 0.0, 0.3, 1.0, 2.5, 4.0, 12.7, 40.0, 300.0):
            theirs = special.nctdtr(freedom, shift, t) if shift else special.stdtr(freedom, t)
            if not math.isnan(theirs):  # scipy has no number where it is below 1e-16
                assert t_cdf(freedom, t, shift) == pytest.approx(theirs, abs=1e-13)


def test_the_normal_distribution() -> None:
    for x in (-9.0, -3.0, -0.1, 0.0, 1.0, 4.0):
        assert normal_cdf(x) == pytest.approx(special.ndtr(x), rel=1e-13)
    for p in (1e-12, 0.025, 0.3, 0.5, 0.975, 0.9999):
        assert normal_quantile(p) == pytest.approx(special.ndtri(p), rel=1e-13)


def test_fair_coins() -> None:
    for n in (1, 2, 9, 50, 333, 3000):
        for fewer in {0, 1, n // 3, n // 2}:
            point = special.bdtr(fewer, n, 0.5) - (special.bdtr(fewer - 1, n, 0.5) if fewer else 0)
            theirs = special.bdtr(fewer, n, 0.5) - point / 2
            assert binomial_mid_p(fewer, n) == pytest.approx(theirs, rel=1e-12)
