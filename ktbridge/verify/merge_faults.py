"""Name what a change O of weights is, if it isn't the LoRA delta D = B·A that should be there.

A *unit* is one matrix [rows, in], or gate and up of one expert one above the other, whose LoRA is one pair:
A [R, in] stacked, B [rows, R] block-diagonal, its scale within. One reading of O gives ``Evidence``: P = O·Aᵀ
and Q = Bᵀ·O. Every mistake that leaves A alone is B̃·A for some B̃, so that P says how well it fits:
k = ⟨P,B̃⟩/‖B̃A‖², and what it explains of ‖O‖² is k²·‖B̃A‖². Q says the same of mistakes that leave B alone.

===============================  ====================================================================
mistake                          B̃, Ã
===============================  ====================================================================
another scale                    B times k: alpha left out, rank of another, 1/world_size
some ranks                       some columns of B: c of O = B·diag(c)·A is 0 or k
a slice of rows, of columns      some rows of B, or columns of A, in n equal parts: one tensor-parallel rank
gate and up exchanged            B's rows of gate with up's columns
[g0 u0 g1 u1]                    B's rows in the order of n ranks' slices; n = I: interleaved, or not
B (or A) packed otherwise        columns of other experts' B: c = e·r + k read as k·E + e, or the reverse
===============================  ====================================================================

Mistakes of both factors (another expert's, another layer's, transposed, both packed otherwise) are proposed
by sketches (``Evidence.sketch``), and fitted by a reading of O of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.verify.merge_sums import ALLOWED_PLAIN, FURTHER, NOT_APPLIED, Floats, pair_norm

SCALE, RANKS, SLICE = "another scale", "some ranks only", "a slice only"
SWAPPED, ORDER, INTERLEAVED = "gate and up exchanged", "slices in another order", "interleaving"
EXPERT, LAYER, TRANSPOSED = "another expert's", "another layer's", "transposed"
PACKED_B, PACKED_A = "B packed otherwise", "A packed otherwise"
OTHER_A, OTHER_B, OTHER = "another A", "another B", "another adapter"
SKETCH = 64
"""Rows and columns of a sketch: the cosine of two that have nothing in common is some 0.2 at most."""
_SURE = 8.0  # standard errors from which on something is there
_FITS = 0.05  # share of ‖O‖ that may be left
_LIKELY = 0.5  # of 1, by a sketch
_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Pairs(NamedTuple):
    """The LoRA of a unit: ``a`` [R, in], ``b`` [rows, R] with the scale in it.

    ``rows`` and ``ranks`` of each block: of gate and of up, or of the only one.
    """

    a: Floats
    b: Floats
    rows: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def norm(self) -> float:
        return pair_norm(self.a, self.b)


def stack_pairs(blocks: Sequence[tuple[Floats, Floats]]) -> Pairs:
    """Return A [r, in] and B [out, r] of blocks one above the other as one pair."""
    rows, ranks = [len(b) for _, b in blocks], [len(a) for a, _ in blocks]
    both = np.zeros((sum(rows), sum(ranks)), np.float32)
    row = rank = 0
    for a, b in blocks:
        both[row : row + len(b), rank : rank + len(a)] = b
        row, rank = row + len(b), rank + len(a)
    return Pairs(np.concatenate([a for a, _ in blocks]), both, tuple(rows), tuple(ranks))


@dataclass
class Evidence:
    """Sums of one reading of O [rows, in]; ``noise`` is N², of ``values`` values.

    ``left`` P [rows, R], ``right`` Q [R, in], ``turned`` O·B [rows, R] where O is square.
    ``sketch`` [SKETCH, SKETCH] and ``thin`` [SKETCH, in] are random projections of O on both sides, and on
    one. ``allowed``: times N² that may be left over.
    """

    pairs: Pairs
    rows: int
    columns: int
    allowed: float = ALLOWED_PLAIN
    values: int = 0
    noise: float = 0.0
    oo: float = 0.0
    left: list[Floats] = field(default_factory=list)
    turned: list[Floats] = field(default_factory=list)
    right: Floats | None = None
    thin: Floats | None = None

    def add(self, first: int, change: Floats, noise: float) -> None:
        """Add rows of O from ``first`` on."""
        last = first + len(change)
        self.values += change.size
        self.noise += noise
        self.oo += float(np.vdot(change, change))
        self.left.append(change @ self.pairs.a.T)
        if self.is_square or self.has_square_blocks:
            self.turned.append(change @ self.pairs.b)
        right = self.pairs.b[first:last].T @ change
        thin = projection(self.rows)[:, first:last] @ change
        self.right = right if self.right is None else self.right + right
        self.thin = thin if self.thin is None else self.thin + thin

    @property
    def is_square(self) -> bool:
        return self.rows == self.columns

    @property
    def has_square_blocks(self) -> bool:
        return {self.columns} == set(self.pairs.rows)

    @property
    def sketch(self) -> Floats:
        assert self.thin is not None
        return self.thin @ projection(self.columns).T


class MergeFault(NamedTuple):
    """An explanation of O: k times the delta that ``name`` and ``detail`` describe.

    ``explained`` is its share of ‖O‖²; ``other``: the expert or layer that it belongs to; ``rank`` of O, or
    of what is left of it, if nothing explains all: 0 for none, -1 for more than ``SKETCH``. ``a_share`` and
    ``b_share``: of ‖O‖ within the rows of A, and the columns of B.
    """

    name: str
    detail: str = ""
    k: float = 0.0
    explained: float = 0.0
    other: int = -1
    rank: int = 0
    a_share: float = 0.0
    b_share: float = 0.0


class Candidate(NamedTuple):
    """Another pair whose delta O may be."""

    name: str
    detail: str
    pairs: Pairs
    other: int = -1


Project = Callable[[Floats], Floats]
"""Give A [R, in] of another pair, get O·Aᵀ [rows, R], by another reading."""


class Neighbors:
    """The rest of the adapter, for one unit; a method that isn't overridden proposes nothing."""

    def packed(self) -> Iterator[Candidate]:
        """Pairs whose B, A or both are read in another order."""
        return iter(())

    def experts(self) -> Iterator[tuple[int, Floats]]:
        """The sketches of other experts of the layer."""
        return iter(())

    def layers(self) -> Iterator[tuple[int, Floats]]:
        """The sketches of the same module in other layers."""
        return iter(())

    def pairs(self, name: str, number: int) -> Pairs:
        """The pair of another expert (``EXPERT``) or layer (``LAYER``)."""
        raise NotImplementedError


def explain_change(evidence: Evidence, neighbors: Neighbors, project: Project) -> MergeFault:
    """Return the mistake that explains O best; ``NOT_APPLIED`` if it is rounding, ``OTHER`` if none does."""
    found = [*_by_left(evidence), *_by_right(evidence)]
    if not _decided(evidence, found):
        for candidate in neighbors.packed():
            found.append(_fit_pair(evidence, candidate, project))
    if not _decided(evidence, found):
        found += _transposed(evidence)
    for name, others in ((EXPERT, neighbors.experts), (LAYER, neighbors.layers)):
        if _decided(evidence, found):
            break
        for number in _likely(evidence, others()):
            candidate = Candidate(name, "", neighbors.pairs(name, number), number)
            found.append(_fit_pair(evidence, candidate, project))
    return _best(evidence, found) or _unknown(evidence, found)


def sketch_pair(pairs: Pairs) -> Floats:
    """Return the sketch of B·A [SKETCH, SKETCH]."""
    rows, columns = len(pairs.b), pairs.a.shape[1]
    return (projection(rows) @ pairs.b) @ (pairs.a @ projection(columns).T)


@lru_cache(maxsize=8)
def projection(size: int) -> Floats:
    """Return the random matrix [SKETCH, size] of sketches."""
    made: Floats = np.random.default_rng(size).standard_normal((SKETCH, size), np.float32)
    return made / np.float32(math.sqrt(SKETCH))


def rank_of(thin: Floats, rows: int, noise: float, values: int) -> int:
    """Return the rank of a matrix above its rounding, by its ``thin`` projection; -1 if it isn't seen.

    Noise of variance v = N²/values gives ``thin`` singular values up to √(v·rows)·(1 + √(in/SKETCH)).
    """
    columns = thin.shape[1]
    limit = math.sqrt(noise / max(values, 1) * rows) * (1 + math.sqrt(columns / SKETCH))
    found = np.linalg.svd(thin, compute_uv=False)
    largest = float(found[0]) if found.size else 0.0
    count = int(np.count_nonzero(found > max(2 * limit, 1e-4 * largest)))
    return -1 if count >= min(SKETCH, min(thin.shape)) - 1 and count < min(rows, columns) else count


def tensor_parallel_order(inner: int, parts: int) -> NDArray[np.intp]:
    """Rows of [gate; up], 2·``inner`` of them, in the order [g0, u0, g1, u1, …] of ``parts`` ranks."""
    rows = np.arange(2 * inner).reshape(2, parts, inner // parts)
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(-1)


def _by_left(evidence: Evidence) -> Iterator[MergeFault]:
    """Mistakes that leave A as it is."""
    pairs = evidence.pairs
    left = np.concatenate(evidence.left)
    gram = pairs.a.astype(np.float64) @ pairs.a.T

    def fit(name: str, b: Floats, detail: str = "") -> MergeFault:
        norm = float(np.sum((b.T.astype(np.float64) @ b) * gram))
        return _fault(evidence, name, float(np.vdot(left, b)), norm, detail)

    yield fit(SCALE, pairs.b)
    if len(pairs.rows) == 2 and pairs.rows[0] == pairs.rows[1]:
        inner = pairs.rows[0]
        yield fit(SWAPPED, np.concatenate((pairs.b[inner:], pairs.b[:inner])))
        for parts in (2, 4, 8, 16, 32):
            if inner % parts == 0 and parts < inner:
                order = tensor_parallel_order(inner, parts)
                detail = f"gate and up in slices of {parts} ranks, [g0 u0 g1 u1 …]"
                yield fit(ORDER, pairs.b[order], detail)
                detail = f"gate and up as if they came in slices of {parts} ranks"
                yield fit(ORDER, pairs.b[np.argsort(order)], detail)
        order = tensor_parallel_order(inner, inner)
        detail = "gate and up alternate, and should be one after the other"
        yield fit(INTERLEAVED, pairs.b[order], detail)
        detail = "gate and up one after the other, and should alternate"
        yield fit(INTERLEAVED, pairs.b[np.argsort(order)], detail)
    yield from _some_ranks(evidence, left, gram)
    energy = np.einsum("ij,jk,ik->i", pairs.b, gram, pairs.b)
    products = np.einsum("ij,ij->i", left, pairs.b, dtype=np.float64)
    yield from _some_parts(evidence, products, energy, "rows")


def _by_right(evidence: Evidence) -> Iterator[MergeFault]:
    """Mistakes that leave B as it is."""
    pairs, right = evidence.pairs, evidence.right
    assert right is not None
    gram = pairs.b.T.astype(np.float64) @ pairs.b
    energy = np.einsum("ji,jk,ki->i", pairs.a, gram, pairs.a)
    products = np.einsum("ji,ji->i", right, pairs.a, dtype=np.float64)
    yield from _some_parts(evidence, products, energy, "columns")


def _some_ranks(evidence: Evidence, left: Floats, gram: NDArray[np.float64]) -> Iterator[MergeFault]:
    """O = B·diag(c)·A with c of 0 and k, the same of both blocks."""
    pairs = evidence.pairs
    rank = pairs.ranks[0]
    if rank < 2 or any(each != rank for each in pairs.ranks):
        return
    count = len(pairs.ranks)
    whole = (pairs.b.T.astype(np.float64) @ pairs.b) * gram
    inner = np.einsum("ij,ij->j", left, pairs.b, dtype=np.float64)
    by_rank = inner.reshape(count, rank).sum(0)
    grams = whole.reshape(count, rank, count, rank).sum((0, 2))
    c = np.linalg.lstsq(grams, by_rank, rcond=1e-6)[0]
    kept = c > max(c.max(), 0.0) / 2
    if kept.all() or not kept.any():
        return
    detail = f"ranks {number_ranges(np.flatnonzero(kept))} of {rank}"
    yield _fault(evidence, RANKS, float(by_rank[kept].sum()), float(grams[kept][:, kept].sum()), detail)


def _some_parts(
    evidence: Evidence, products: NDArray[np.float64], energy: NDArray[np.float64], what: str
) -> Iterator[MergeFault]:
    """D on some of n equal parts of each block's rows, or of the columns."""
    blocks = evidence.pairs.rows if what == "rows" else (evidence.columns,)
    ends = np.cumsum((0, *blocks))
    names = ("gate", "up") if len(blocks) == 2 else ("",)
    best: MergeFault | None = None
    for parts in (1, *_PARTS):
        if any(size % parts for size in blocks) or (parts == 1 and len(blocks) == 1):
            continue
        edges = [int(ends[n] + size // parts * p) for n, size in enumerate(blocks) for p in range(parts)]
        found, norms = np.add.reduceat(products, edges), np.add.reduceat(energy, edges)
        k = found / np.where(norms > 0, norms, 1)
        kept = (k > max(float(k.max()), 0.0) / 2) & (norms > 0)
        if kept.all() or not kept.any():
            continue
        said = [
            f"{names[n]} {'' if parts == 1 else number_ranges(np.flatnonzero(members)) + ' '}".strip()
            for n, members in enumerate(kept.reshape(len(blocks), parts))
            if members.any()
        ]
        detail = f"{what}: " if parts > 1 else ""
        detail += f"{' and '.join(filter(None, said))}"
        detail += f" of {parts} slices" if parts > 1 else " only"
        fault = _fault(evidence, SLICE, float(found[kept].sum()), float(norms[kept].sum()), detail)
        # Finer parts explain a little more of the noise.
        if best is None or fault.explained > 1.02 * best.explained:
            best = fault
    if best is not None:
        yield best


def _transposed(evidence: Evidence) -> Iterator[MergeFault]:
    """O = Dᵀ of a square unit, or of each of its square blocks: ⟨O,Dᵀ⟩ = ⟨O·B,Aᵀ⟩."""
    if not evidence.turned:
        return
    pairs, turned = evidence.pairs, np.concatenate(evidence.turned)
    detail = "the delta's rows are columns"
    if evidence.is_square:
        inner = float(np.vdot(turned, np.ascontiguousarray(pairs.a.T)))
        yield _fault(evidence, TRANSPOSED, inner, pairs.norm, detail)
    if evidence.has_square_blocks and len(pairs.rows) > 1:
        inner, row, rank = 0.0, 0, 0
        for rows, ranks in zip(pairs.rows, pairs.ranks, strict=True):
            part = turned[row : row + rows, rank : rank + ranks]
            inner += float(np.vdot(part, pairs.a[rank : rank + ranks].T))
            row, rank = row + rows, rank + ranks
        yield _fault(evidence, TRANSPOSED, inner, pairs.norm, detail)


def _fit_pair(evidence: Evidence, candidate: Candidate, project: Project) -> MergeFault:
    pairs = candidate.pairs
    left = np.concatenate(evidence.left) if pairs.a is evidence.pairs.a else project(pairs.a)
    inner, norm = float(np.vdot(left, pairs.b)), pairs.norm
    fault = _fault(evidence, candidate.name, inner, norm, candidate.detail)
    return fault._replace(other=candidate.other)


def _likely(evidence: Evidence, others: Iterator[tuple[int, Floats]]) -> list[int]:
    """The three others whose sketches are most like O's."""
    own = evidence.sketch
    size = float(np.linalg.norm(own)) or 1.0
    found = []
    for number, sketch in others:
        cosine = float(np.vdot(own, sketch)) / (size * (float(np.linalg.norm(sketch)) or 1.0))
        found.append((cosine, number))
    seen = 1.0 - min(0.9, evidence.noise / max(evidence.oo, 1e-300))
    return [number for cosine, number in sorted(found, reverse=True)[:3] if cosine > _LIKELY * seen]


def _fault(evidence: Evidence, name: str, inner: float, norm: float, detail: str) -> MergeFault:
    if norm <= 0 or evidence.oo <= 0:
        return MergeFault(name, detail)
    return MergeFault(name, detail, inner / norm, inner**2 / norm / evidence.oo)


def _holds(evidence: Evidence, fault: MergeFault) -> bool:
    """Return whether nothing but rounding is left of O, and what explains it is more than rounding."""
    left = (1 - fault.explained) * evidence.oo
    sure = _SURE**2 * evidence.noise / max(evidence.values, 1)
    return (
        fault.k > 0
        and fault.explained * evidence.oo > max(sure, 0.5 * (evidence.oo - 1.5 * evidence.noise))
        and left <= evidence.allowed * evidence.noise + _FITS**2 * evidence.oo
    )


def _best(evidence: Evidence, found: Sequence[MergeFault]) -> MergeFault | None:
    """Return the one that holds and explains most; of equals the simpler, which comes earlier."""
    best: MergeFault | None = None
    for fault in found:
        if _holds(evidence, fault) and (best is None or fault.explained > 1.05 * best.explained):
            best = fault
    return best


def _decided(evidence: Evidence, found: Sequence[MergeFault]) -> bool:
    """Return whether O is explained so well that no other explanation has to be looked for."""
    best = _best(evidence, found)
    return best is not None and (1 - best.explained) * evidence.oo <= max(
        1.5 * evidence.noise, _FITS**2 * evidence.oo
    )


def _unknown(evidence: Evidence, found: Sequence[MergeFault]) -> MergeFault:
    """Describe O where no mistake explains it: whose rows and columns, and which rank."""
    pairs, thin = evidence.pairs, evidence.thin
    assert thin is not None
    usual = found[0]
    sure = _SURE**2 * evidence.noise / max(evidence.values, 1)
    # What is there beside D has a product with it by chance, which is large only in tiny matrices.
    chance = math.sqrt(evidence.oo / max(pairs.norm * evidence.values, 1e-300))
    there = usual.explained * evidence.oo > sure and abs(usual.k - 1) < max(0.1, 4 * chance)
    if not there and evidence.oo <= 1.5 * evidence.noise:
        return MergeFault(NOT_APPLIED, "no more than rounding is changed")
    a_share, b_share = _shares(evidence)
    if there:
        thin = thin - (projection(evidence.rows) @ pairs.b) @ pairs.a * np.float32(usual.k)
    rank = rank_of(thin, evidence.rows, evidence.noise, evidence.values)
    seen = 1 - min(0.9, evidence.noise / evidence.oo)
    name = OTHER
    if there:
        name = FURTHER
    elif a_share**2 > 0.8 * seen > b_share**2 / 0.8:
        name = OTHER_B
    elif b_share**2 > 0.8 * seen > a_share**2 / 0.8:
        name = OTHER_A
    return MergeFault(name, "", usual.k, usual.explained, -1, rank, a_share, b_share)


def _shares(evidence: Evidence) -> tuple[float, float]:
    """‖O·Π(rows of A)‖/‖O‖ and ‖Π(columns of B)·O‖/‖O‖, from P and Q."""
    pairs, right = evidence.pairs, evidence.right
    assert right is not None
    left = np.concatenate(evidence.left)
    found = []
    for gram, product in (
        (pairs.a.astype(np.float64) @ pairs.a.T, left),
        (pairs.b.T.astype(np.float64) @ pairs.b, right.T),
    ):
        inverse = np.linalg.pinv(gram, rcond=1e-6, hermitian=True)
        energy = float(np.einsum("ij,jk,ik->", product, inverse, product, dtype=np.float64))
        found.append(math.sqrt(min(1.0, max(0.0, energy / evidence.oo))) if evidence.oo else 0.0)
    return found[0], found[1]


def number_ranges(found: Iterable[int]) -> str:
    """Return "0-3, 6" of 0, 1, 2, 3, 6, which are in order."""
    numbers = np.fromiter(found, np.intp)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs if len(run))
