"""Host memory of the expert kernels: what a forward keeps, and what a pass needs besides.

The kernels themselves say how much that is for a number of strips of tokens; here those are estimated before
any token is routed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ktbridge import _kernels

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


def saved_bytes(
    size: Pass, retain: bool, strips: float | None = None, doubles: float | None = None
) -> int:
    """What ``MoELoRAExperts.saved_bytes`` will be, for ``strips`` and ``doubles`` of tokens.

    Where they aren't given, those of a router that spreads tokens at random. "retain" keeps g and u,
    both activations keep the three thin products.
    """
    load = _load(size, strips, doubles)
    return _kernels.saved_memory(size.hidden, size.inner, size.rank, load, _keep(retain))


def host_bytes(size: Pass, retain: bool, threads: int) -> int:
    """What the kernels take during a layer's backward, beyond all that forwards saved.

    A forward needs less: h and y.
    """
    load = _load(size)
    taken = _kernels.backward_memory(size.hidden, size.inner, size.rank, load, _keep(retain))
    return taken + threads * _WORKSPACE


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


def _load(size: Pass, strips: float | None = None, doubles: float | None = None) -> _kernels.Load:
    strips = blocks(size, _kernels.STRIP) if strips is None else strips
    doubles = blocks(size, _kernels.DOUBLE) if doubles is None else doubles
    return _kernels.Load(size.slots, round(strips), round(doubles))


def _keep(retain: bool) -> _kernels.Keep:
    return _kernels.Keep.retain if retain else _kernels.Keep.recompute
