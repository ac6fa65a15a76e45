"""The thin product in numpy against the kernels', bit for bit: merged weights don't depend on who merges."""

from __future__ import annotations

import numpy as np
import pytest

from ktbridge import _kernels
from ktbridge.adapter import merge_values
from ktbridge.adapter.merge_values import _add_by_kernel, _add_by_numpy, _tiles

# The plain path has no fused multiply-add.
FUSED = [isa for isa in _kernels.isa_available() if isa != "scalar"]
pytestmark = pytest.mark.skipif(not FUSED, reason="this CPU has no fused multiply-add")


def test_a_tile_is_the_kernels():
    assert merge_values._TILE == _kernels.DOUBLE


def numbers(
    random: np.random.Generator, shape: tuple[int, ...], low: int, high: int, bits: int
) -> np.ndarray:
    """float32 of so many mantissa bits and of exponents from ``low`` to ``high``: few bits make many ties."""
    whole = random.integers(-(1 << bits), 1 << bits, shape).astype(np.float64)
    return (whole * 2.0 ** random.integers(low - bits, high - bits, shape)).astype(np.float32)


@pytest.mark.parametrize("isa", FUSED)
@pytest.mark.parametrize("halves", [True, False], ids=["BF16", "F32"])
@pytest.mark.parametrize(
    ("factors", "old", "bits"),
    [
        ((-7, -3), (-6, -2), 23),  # as trained
        ((-10, 30), (-30, 5), 13),  # sums of two products that end between two float32
        ((-62, -42), (-127, -100), 13),  # subnormal sums
        ((40, 75), (0, 5), 13),  # sums that aren't finite
    ],
    ids=["trained", "ties", "subnormal", "infinite"],
)
def test_numpy_gives_the_kernels_bits(factors, old, bits, halves, isa, monkeypatch):
    monkeypatch.setenv("KTBRIDGE_ISA", isa)
    random = np.random.default_rng(5)
    for _ in range(40):
        rows, rank, columns = (int(random.integers(1, most)) for most in (90, 33, 300))
        left = numbers(random, (rows, rank), *factors, bits)
        right = numbers(random, (rank, columns), *factors, bits)
        whole = numbers(random, (rows, columns + 9), *old, 23)
        whole[:, ::7] = 0
        if halves:
            whole = (whole.view(np.uint32) >> 16).astype(np.uint16)
        theirs, ours = whole.copy(), whole.copy()
        moved = _add_by_kernel(theirs[:, 4 : 4 + columns], left, _tiles(right))
        assert _add_by_numpy(ours[:, 4 : 4 + columns], left, _tiles(right)) == moved
        if moved is not None:  # else nothing is written of it
            assert ours.tobytes() == theirs.tobytes()


def test_a_sum_is_rounded_once():
    """1 + 2^-23 + 2^-24 - 2^-54 is below the middle of two float32; float64 has the middle, which goes up."""
    left = np.array([[1, 2.0**-12 * (1 + 2.0**-15)]], np.float32)
    right = np.array([[1 + 2.0**-23], [2.0**-12 * (1 - 2.0**-15)]], np.float32)
    values = np.zeros((1, 1), np.float32)
    assert _add_by_numpy(values, left, _tiles(right)) == 1
    assert values.item() == 1 + 2.0**-23
