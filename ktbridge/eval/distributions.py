"""Student's t and the binomial distribution for ``stats``: a few formulas in place of scipy's 143 MB.

T, noncentral with shift d and n degrees of freedom, is (Z + d) / S, where Z is normal and n S^2 chi-squared:
P(T <= t) is the mean of Phi(t S - d). Over y = log S it is an integral of an analytic function that vanishes
at both ends, for which the trapezoidal rule is exact to the last digits (Trefethen & Weideman 2014, The
exponentially convergent trapezoidal rule, SIAM Review 56:385). The tests compare with scipy.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_NEGLIGIBLE = 45.0  # exp(-45): 3e-20
_STEP = 0.5  # of the narrower of the two features of the integrand, over which it changes by e
_ROUNDS = (
    200  # of Newton's method: it is done after ten but far out, where t has few degrees of freedom
)


def normal_cdf(x: float) -> float:
    """P(Z <= x) of the normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_quantile(p: float) -> float:
    """The x with P(Z <= x) = p, 0 < p < 1 (Wichura 1988, Appl. Stat. 37:477)."""
    return NormalDist().inv_cdf(p)


def t_cdf(freedom: int, t: float, shift: float = 0.0) -> float:
    """P(T <= t) with ``freedom`` degrees of freedom, noncentral by ``shift``."""
    logs, weights = _spread(freedom, shift)
    return float(weights @ _normal(t * np.exp(logs) - shift))


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, p: float) -> float:
    """The t with P(T <= t) = p, 0 < p < 1, for ``freedom`` degrees of freedom."""
    if p < 0.5:
        return -t_quantile(freedom, 1 - p)
    scales = np.exp(_spread(freedom, 0.0)[0])
    weights = _spread(freedom, 0.0)[1]
    t = normal_quantile(p)  # below it; P is concave from 0 on, so that each step stays below it
    for _ in range(_ROUNDS):
        slope = float(weights @ (scales * np.exp(-0.5 * np.square(t * scales))))
        step = (p - float(weights @ _normal(t * scales))) * math.sqrt(2 * math.pi) / slope
        t += step
        if abs(step) <= 1e-14 * abs(t):
            break
    return t


def binomial_mid_p(fewer: int, n: int) -> float:
    """P(X < fewer) + P(X = fewer) / 2 of ``n`` fair coins, rounded once."""
    term, below = 1, 0
    for k in range(fewer):
        below += term
        term = term * (n - k) // (k + 1)
    return (2 * below + term) / (1 << (n + 1))


@lru_cache(maxsize=256)
def _spread(freedom: int, shift: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``normal_cdf`` of each value: numpy has no error function."""
    scaled = (values * -math.sqrt(0.5)).tolist()
    return 0.5 * np.array([math.erfc(value) for value in scaled])
