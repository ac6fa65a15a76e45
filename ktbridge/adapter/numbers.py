"""Rank, alpha and scale of a LoRA pair, and what several of them have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple


class Numbers(NamedTuple):
    """Rank and alpha of one module, or of one half of an adapter.

    ``over`` is what alpha is divided by where that isn't the tensors' own rank: 0 if it is.
    """

    rank: int
    alpha: float
    rslora: bool = False
    over: int = 0

    @property
    def scale(self) -> float:
        """The multiplier of B A: alpha/r, or alpha/sqrt(r) under rsLoRA."""
        over = self.over or self.rank
        return self.alpha / (math.sqrt(over) if self.rslora else over)

    @property
    def plain_alpha(self) -> float:
        """The alpha that gives the same scale at the tensors' rank without rsLoRA."""
        if self.over in (0, self.rank):
            return self.alpha * (math.sqrt(self.rank) if self.rslora else 1.0)
        if self.rslora:
            return whole(self.scale * self.rank)
        return float(Fraction(self.alpha) * self.rank / self.over)

    def at(self, rank: int) -> Numbers:
        """The numbers of the same scale with tensors of another rank."""
        return self if rank == self.rank else self._replace(rank=rank, over=self.over or self.rank)

    def ratio(self, other: Numbers) -> float | None:
        """This scale over the other one if that is a power of two, exactly; None if it isn't."""
        squared = self._squared / other._squared
        up, down = squared.numerator, squared.denominator
        if up & (up - 1) or down & (down - 1):
            return None
        exponent = up.bit_length() - down.bit_length()
        return None if exponent % 2 else float(2.0 ** (exponent // 2))

    @property
    def _squared(self) -> Fraction:
        over = self.over or self.rank
        return Fraction(self.alpha) ** 2 / (over if self.rslora else over**2)


def whole(alpha: float) -> float:
    """``alpha``, as an integer if it is one within float error."""
    near = round(alpha)
    return float(near) if math.isclose(alpha, near, rel_tol=1e-15) else alpha


def common_numbers(numbers: Iterable[Numbers], usual: Numbers) -> Numbers:
    """One rank and alpha for several modules: the widest rank, and ``usual``'s scale if a module has it.

    Otherwise the scale that most of them have.
    """
    counts = Counter(numbers)
    if not counts:
        return usual
    rank = max(each.rank for each in counts)
    scales: Counter[float] = Counter()
    for each, count in counts.items():
        scales[each.scale] += count
    scale = usual.scale if usual.scale in scales else scales.most_common(1)[0][0]
    alike = [each for each in counts if each.scale == scale]
    return next((each for each in alike if each.rank == rank), alike[0].at(rank))
