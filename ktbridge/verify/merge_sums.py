"""Was W' = W + D written, as far as the storage could keep it? Sums over values, and what they say.

O = W' - W is the change that is found, D = scale·B·A the delta that should be there, E = O - D. With each
value comes the step to the next one that its storage has, so that rounding has an energy that can be
expected: N² = Σ step²/12. What is judged, in this order:

* no value changed: *not applied*, or *rounded away* if the storage could keep nothing of D;
* k = ⟨O,D⟩/‖D‖² is 1, and ‖E‖² is rounding, also where only A's row space is looked at (in which rounding has
  r/in of its energy, and mistakes of B all of theirs): *applied*;
* the same within the row space, but not outside: *further changes*.

Where D is no larger than the steps, ‖E‖² is within rounding whatever was written. There D is added and
rounded here, to D* (``rint((W + D)/step)·step - W``), and O is compared with that. k is then what the storage
kept of D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
APPLIED, NOT_APPLIED, ROUNDED = "applied", "not applied", "rounded away"
FURTHER, UNEXPLAINED = "further changes", "unexplained"
FOUR_BIT = "quantized to 4 bits and dequantized"
SAME, CHANGED, DIFFERS = "unchanged", "changed without LoRA", "differs"
RESOLVED = 12.0
"""‖D‖²/N² from which on rounding doesn't bias k: steps are no larger than D."""
KEPT = 0.5
"""Share of a delta below which the storage lost more of it than it kept, as ``ktbridge merge`` has it."""
ALLOWED = 2.5
"""Times N² that may be left over: quantized once from other values than the base's."""
ALLOWED_PLAIN = 5.0
"""The same of BF16, F16 and F32: rounded twice, or toward zero."""
GROUP = 32
"""Values in a row that share a scale in every 4-bit format (NF4, FP4, INT4, MXFP4)."""
_ARITHMETIC = 4e-4  # of ‖D‖²: products rounded to bfloat16 twice
_NEAR = 0.02  # of k
_ALIKE = 0.25  # of ‖D*‖²
_FEW = 1e-3  # share of values that may change beside what is expected


@dataclass
class Sums:
    """Sums over the values of one matrix; ``_star`` those of the delta that is rounded here.

    ``oo`` ‖O‖², ``ww`` ‖W‖², ``od`` ⟨O,D⟩, ``dd`` ‖D‖², ``ee`` ‖O - D‖², ``pe`` the same within A's row
    space. ``xx`` ‖O - D*‖², ``px`` the same within A's row space. ``off_grid``: values of W that the merged
    storage can't have. ``allowed``: times N² that may be left.
    """

    rows: int
    columns: int
    rank: int = 0
    allowed: float = ALLOWED_PLAIN
    values: int = 0
    changed: int = 0
    unfinite: int = 0
    ww: float = 0.0
    oo: float = 0.0
    od: float = 0.0
    dd: float = 0.0
    pe: float = 0.0
    noise: float = 0.0
    moved_star: int = 0
    off_grid: int = 0
    oo_star: float = 0.0
    od_star: float = 0.0
    xx: float = 0.0
    px: float = 0.0
    has_star: bool = False

    def add(
        self, block: RowBlock, factors: Factors | None = None, first: int = 0, star: bool = False
    ) -> None:
        """Add rows of the matrix from ``first`` on; ``star``: D is to be rounded here, too.

        D isn't formed otherwise: ⟨O,D⟩ = ⟨O·Aᵀ,B⟩, and (O - D)·Aᵀ = O·Aᵀ - B·(A·Aᵀ).
        """
        change = block.change
        self.values += change.size
        energy = square_norm(change)
        if not math.isfinite(energy):
            self.unfinite += int(change.size - np.count_nonzero(np.isfinite(change)))
            return
        self.changed += block.changed
        self.oo += energy
        self.ww += square_norm(block.base)
        self.noise += block.noise
        if factors is None:
            return
        b = factors.b[first : first + len(change)]
        left = change @ factors.turned_a
        self.od += float(np.vdot(left, b))
        left -= b @ factors.gram
        self.pe += square_norm(left @ factors.within)
        if star:
            self._add_star(block, b @ factors.a, factors.row_space)

    def _add_star(self, block: RowBlock, delta: Floats, row_space: Floats) -> None:
        self.has_star = True
        base, steps = block.base, block.steps
        safe = np.where(steps > 0, steps, np.float32(1))
        rounded = np.rint((base + delta) / safe)
        rounded *= safe
        rounded -= base
        self.off_grid += int(np.count_nonzero(np.abs(np.rint(base / safe) * safe - base) > safe * 1e-3))
        self.moved_star += int(np.count_nonzero(np.abs(rounded) > safe * 1e-3))
        self.oo_star += square_norm(rounded)
        self.od_star += float(np.vdot(rounded, delta))
        rounded -= block.change
        self.xx += square_norm(rounded)
        self.px += square_norm(rounded @ row_space.T)

    @property
    def ee(self) -> float:
        """‖O - D‖²; what its terms lose to each other is far below what arithmetic is allowed."""
        return max(0.0, self.oo - 2 * self.od + self.dd)

    @property
    def may_be_left(self) -> float:
        """‖O - D‖² of a right merge, at most."""
        return self.allowed * self.noise + _ARITHMETIC * self.dd

    @property
    def k(self) -> float:
        """The scale at which D is in O, by least squares."""
        return self.od / self.dd if self.dd else 0.0

    @property
    def k_star(self) -> float:
        """The share of D that the storage could keep: k of a right merge."""
        return self.od_star / self.dd if self.has_star and self.dd else 1.0

    @property
    def sigma(self) -> float:
        """The standard error of k that rounding makes."""
        return math.sqrt(self.noise / self.values / self.dd) if self.dd and self.values else 0.0

    @property
    def residue(self) -> float:
        """‖O - kD‖/‖O‖: 0 if nothing but D was added, at whatever scale."""
        if not self.oo:
            return 0.0
        left = self.oo - (self.od**2 / self.dd if self.dd else 0.0)
        return math.sqrt(max(0.0, left) / self.oo)


class RowBlock(NamedTuple):
    """Rows of both checkpoints; ``changed``: values that differ, ``steps``: of the merged one's storage.

    ``base_steps``: of the base's, where it was rounded anew; None where that doesn't count.
    """

    base: Floats
    merged: Floats
    change: Floats
    changed: int
    steps: Floats
    base_steps: Floats | None

    @property
    def noise(self) -> float:
        """N²: the energy that rounding is expected to have."""
        steps = [self.steps] if self.base_steps is None else [self.steps, self.base_steps]
        return sum(square_norm(np.ascontiguousarray(s)) / 12 * (self.base.size / s.size) for s in steps)


class Factors:
    """LoRA of one matrix: ``a`` [r, in], ``b`` [out, r] with the scale in it, and what follows from A.

    ``gram`` A·Aᵀ [r, r]; ``within`` [r, rank]: O·Aᵀ·within is O in an orthonormal basis of A's rows, which is
    ``row_space`` [rank, in]; ``norm`` ‖B·A‖².
    """

    def __init__(self, a: Floats, b: Floats) -> None:
        self.a, self.b = a, b
        self.turned_a = np.ascontiguousarray(a.T)
        gram = a.astype(np.float64) @ a.T
        values, vectors = np.linalg.eigh(gram)
        there = values > 1e-8 * max(float(values[-1]), 1e-300)
        self.gram: Floats = gram.astype(np.float32)
        self.within: Floats = (vectors[:, there] / np.sqrt(values[there])).astype(np.float32)
        self.norm = pair_norm(a, b)

    @property
    def row_space(self) -> Floats:
        return np.ascontiguousarray(self.within.T) @ self.a


def needs_star(norm: float, first: RowBlock, values: int) -> bool:
    """Return whether a delta of ``norm`` ‖D‖² has to be rounded here, by the first rows of its matrix."""
    return norm < RESOLVED * first.noise * values / first.base.size


def judge_sums(sums: Sums) -> str:
    """Return one of ``APPLIED``, ``NOT_APPLIED``, ``ROUNDED``, ``FURTHER``, or ``UNEXPLAINED``."""
    if sums.unfinite:
        return UNEXPLAINED
    few = max(1.0, _FEW * sums.values)
    if not sums.changed:
        could = sums.moved_star > few if sums.has_star else sums.dd > 0
        return NOT_APPLIED if could else ROUNDED
    share = sums.rank / sums.columns
    spread = 1 + 6 * math.sqrt(2 / max(1, sums.rows * sums.rank))
    inside = sums.allowed * sums.noise * share * spread + _ARITHMETIC * sums.dd
    total = sums.may_be_left
    error = max(_NEAR, 6 * sums.sigma)
    if not sums.has_star:
        if sums.pe <= inside:
            return APPLIED if sums.ee <= total else FURTHER
        return UNEXPLAINED
    if sums.xx <= _NEAR * sums.oo_star:
        return APPLIED if sums.k_star >= KEPT else ROUNDED
    if 6 * sums.sigma > KEPT:  # D can't be seen in what rounding leaves
        return ROUNDED if sums.oo <= total else UNEXPLAINED
    # Rounding to another grid is as good as random: it hides D, and doesn't swallow it.
    hidden = sums.off_grid > few and sums.ee <= total and abs(sums.k - 1) <= error
    if hidden and sums.pe <= inside:
        return APPLIED
    if (
        sums.xx <= _ALIKE * sums.oo_star
        and abs(sums.k - sums.k_star) <= error
        and sums.px <= 2 * inside
        and sums.ee <= total
    ):
        return APPLIED if sums.k_star >= KEPT else ROUNDED
    return UNEXPLAINED


def judge_without(sums: Sums) -> str:
    """Return ``SAME`` or ``CHANGED`` for a tensor without LoRA: the same up to another storage's rounding."""
    if sums.unfinite:
        return CHANGED
    return SAME if not sums.changed or sums.oo <= sums.allowed * sums.noise else CHANGED


def has_few_values(rows: Floats) -> bool:
    """Return whether ``GROUP`` values in a row are 16 different ones at most, as 4 bits have them."""
    ordered = np.sort(rows.reshape(-1, GROUP), axis=1)
    distinct = 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)
    return bool(np.mean(distinct <= 16) > 0.99)


def pair_norm(a: Floats, b: Floats) -> float:
    """Return ‖B·A‖² without forming it."""
    return float(np.sum((b.T.astype(np.float64) @ b) * (a.astype(np.float64) @ a.T)))


def square_norm(values: Floats) -> float:
    """Return the sum of squares."""
    return float(np.vdot(values, values))
