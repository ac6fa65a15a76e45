"""Host memory of the expert kernels: what a forward keeps, and what a pass needs besides.

The formulas are those of kernels/moe/{pass.h,gate_up.cpp,forward.cpp,backward.cpp}: memory is counted in
tiles of 16 x 32 bfloat16 (1 KB), an expert's tokens in strips of 16 and doubles of 32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_TILE = 1024
_LARGE, _HUGE_PAGE = 1 << 20, 2 << 20
_WORKSPACE = 4 << 20  # panels, factors and results of one thread: about three times L2


@dataclass(frozen=True)
class Pass:
    """One layer's pass: E experts, K of them per token, hidden H, intermediate I, LoRA rank r, T tokens."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    rank: int
    tokens: int

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k


def saved_bytes(size: Pass, retain: bool, strips: float = 0, doubles: float = 0) -> float:
    """What ``MoELoRAExperts.saved_bytes`` will be, for ``strips`` and ``doubles`` of tokens.

    Where they aren't given, those of a router that spreads tokens at random. "retain" keeps g and u,
    both activations keep the three thin products.
    """
    strips = strips or blocks(size, 16)
    doubles = doubles or blocks(size, 32)
    inner = _buffer(strips * _tiles(size.inner) * _TILE)
    thin = _buffer(3 * doubles * _strips(size.rank) * _TILE)
    return thin + (2 * inner if retain else 0)


def host_bytes(size: Pass, retain: bool, threads: int) -> float:
    """What the kernels take during a layer's backward, beyond all that forwards saved.

    [dg du] with their thin products, dX by slot, the gradient of the routing weights, and g and u
    again under "recompute". A forward needs less: h and y.
    """
    strips, doubles = blocks(size, 16), blocks(size, 32)
    inner, rank = _tiles(size.inner), _tiles(size.rank)
    row = (_tiles(size.hidden) + 1) * 64
    taken = (
        strips * (2 * inner + 2 * rank) * _TILE,
        size.slots * row,
        size.slots * inner * 4,
        3 * doubles * _strips(size.rank) * _TILE,
    )
    again = 0.0 if retain else 2 * _buffer(strips * inner * _TILE)
    return sum(map(_buffer, taken)) + again + threads * _WORKSPACE


def blocks(size: Pass, width: int) -> float:
    """Expected blocks of ``width`` slots over all experts, tokens being routed at random.

    The sum of E[ceil(n / width)] with n binomial, approximated as Poisson below 400 slots an expert and
    by n / width + 1/2 above.
    """
    mean = size.slots / size.experts
    if mean > 400:
        return size.experts * (mean / width + 0.5)
    chance, expected = math.exp(-mean), 0.0
    for count in range(int(mean + 12 * math.sqrt(mean)) + 20):
        expected += chance * -(-count // width)
        chance *= mean / (count + 1)
    return size.experts * expected


def _buffer(amount: float) -> float:
    """Large blocks are whole huge pages (kernels/common/recycler.cpp)."""
    return amount if amount < _LARGE else -(-amount // _HUGE_PAGE) * _HUGE_PAGE


def _tiles(reduction: int) -> int:
    return -(-reduction // 32)


def _strips(count: int) -> int:
    return -(-count // 16)
