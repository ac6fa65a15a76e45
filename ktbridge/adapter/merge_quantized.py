"""Merging into quantized weights: dequantize, add, requantize; and what of the delta is left afterwards.

The scheme stays: codes, groups, zero points and the scales' dtype are the checkpoint's. A delta that is much
smaller than the step between two codes is rounded away, so what became of it is measured: over the exact sum
S, what is stored of it Q, and the delta D, the relative error is ‖Q - S‖ / ‖S‖, and the share of the delta
that is kept 1 - ‖Q - S‖² / ‖D‖²: 1 if all of it is there, 0 if the weights might as well not have been
touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ktbridge.adapter.checks.layers import numbers
from ktbridge.adapter.floats import Floats
from ktbridge.adapter.merge_plan import Delta
from ktbridge.adapter.merge_values import add_products, not_finite, products_of
from ktbridge.adapter.storage import QuantizedStorage
from ktbridge.adapter.writer import Buffer
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.model import Checkpoint

BLOCK = 1 << 16  # values of one band, of some 60 bytes each
KEPT = 0.5
"""Share of a delta's squared norm below which quantization lost more of it than it kept."""


class Change(NamedTuple):
    """Sums over values: squares of the exact sum, of its error, of the delta and of what was changed.

    ``product``: of the delta with what was changed; ``moved`` of ``values`` are no longer the base's.
    """

    values: int = 0
    moved: int = 0
    exact: float = 0.0
    error: float = 0.0
    delta: float = 0.0
    changed: float = 0.0
    product: float = 0.0

    def plus(self, other: Change) -> Change:
        return Change._make(a + b for a, b in zip(self, other, strict=True))


@dataclass(frozen=True)
class Loss:
    """Loss by requantizing the weights of one storage in one layer (-1: outside the layers).

    ``relative_error`` is of the weights, ``kept`` the share of the delta's squared norm that is left,
    ``cosine`` that between the delta and what was changed.
    """

    layer: int
    storage: str
    weights: int
    relative_error: float
    kept: float
    cosine: float

    def as_dict(self) -> dict[str, object]:
        return dict(vars(self))


class Band(NamedTuple):
    """Rows of a matrix: their codes and their scales, each with its place in its shard, and the change."""

    codes: tuple[int, Buffer]
    scales: tuple[int, Buffer]
    change: Change


def requantized(checkpoint: Checkpoint, delta: Delta, number: int) -> Iterator[Band]:
    """The ``number``-th matrix of a quantized weight with its delta, band by band of whole groups.

    Memory: a band of ``BLOCK`` values (at least one row of groups), some 60 bytes each.
    """
    storage = delta.storage
    assert isinstance(storage, QuantizedStorage)
    products = products_of(delta.matrices[number], delta)
    high = storage.group[0]
    step = max(1, BLOCK // max(1, delta.columns) // high) * high
    begin, end = number * delta.rows, (number + 1) * delta.rows
    for first in range(begin, end, step):
        last = min(end, first + step)
        before = storage.read(checkpoint, first, last)
        old = storage.decode(before)
        exact = old.copy()
        if add_products(exact, products, first - begin) is None:
            raise not_finite(delta)
        rows, new = storage.encode(exact, before)
        yield Band(
            (
                storage.place_of_codes(first, last)[0],
                np.ascontiguousarray(rows.codes).data.cast("B"),
            ),
            (storage.place_of_scales(first, last)[0], storage.scale_bytes(rows.scales)),
            _change(old, exact, new),
        )


def losses(changes: Iterable[tuple[Delta, Change]]) -> tuple[Loss, ...]:
    """Layer by layer, storage by storage, what is left of the deltas."""
    sums: dict[tuple[int, str], Change] = {}
    weights: dict[tuple[int, str], int] = {}
    # In an order of their own: workers finish in any, and sums of floats depend on it.
    for delta, change in sorted(changes, key=lambda one: (one[0].entry.name, one[1])):
        key = (delta.layer, delta.storage.label)
        sums[key] = sums.get(key, Change()).plus(change)
        weights[key] = weights.get(key, 0) + 1
    return tuple(
        Loss(
            *key,
            weights[key],
            math.sqrt(one.error / one.exact) if one.exact else 0.0,
            1 - one.error / one.delta if one.delta else 1.0,
            one.product / math.sqrt(one.delta * one.changed) if one.changed * one.delta else 0.0,
        )
        for key, one in sorted(sums.items())
    )


def swallowed(found: Iterable[Loss]) -> Iterator[Problem]:
    """A warning for each storage in which more of the delta was lost than kept."""
    by_storage: dict[str, list[Loss]] = {}
    for loss in found:
        if loss.kept < KEPT:
            by_storage.setdefault(loss.storage, []).append(loss)
    for storage, members in by_storage.items():
        ends = (f"{pick(loss.kept for loss in members):.0%}" for pick in (min, max))
        share = " to ".join(dict.fromkeys(ends))
        layers = numbers(loss.layer for loss in members)
        yield problem(
            "KTB910",
            f"{storage} weights of layers {layers}",
            f"{share} of the adapter's delta is left: the rest is smaller than "
            "the step between two codes",
            f"{KEPT:.0%} and more",
        )


def _change(old: Floats, exact: Floats, new: Floats) -> Change:
    delta, change, error = exact - old, new - old, new - exact
    pairs = ((exact, exact), (error, error), (delta, delta), (change, change), (delta, change))
    sums = [float(np.einsum("ij,ij->", a, b, dtype=np.float64)) for a, b in pairs]
    return Change(old.size, int(np.count_nonzero(change)), *sums)
