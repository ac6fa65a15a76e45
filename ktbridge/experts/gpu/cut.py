"""Which experts of a layer the CPU computes while the others cross to the GPU. Pure.

An expert's weights cost the link the same whatever its rows are, and the CPU mostly by rows, so the coldest
go to the CPU: as many as make the pass shortest, whose forward and backward each end when link, GPU and CPU
have all done their share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class Phase:
    """Seconds of a layer's forward, or of its backward, in a pass."""

    cold_expert: float
    """Of the CPU, for each expert that has rows."""
    cold_row: float
    """Of the CPU, for each row (a token at one of its experts)."""
    experts: float
    """Of the GPU, for all of the layer's experts."""
    outside: float = 0.0
    """Of the GPU, for what isn't routed experts."""

    def cold(self, experts: float, rows: float) -> float:
        """Of the CPU, for so many experts with rows and so many rows."""
        return experts * self.cold_expert + rows * self.cold_row

    def corrected(self, slower: float, outside: float) -> Phase:
        """With a CPU that is ``slower`` times as slow, and other seconds outside."""
        return Phase(self.cold_expert * slower, self.cold_row * slower, self.experts, outside)


@dataclass(frozen=True)
class Paces:
    """The measured times that a cut is computed from."""

    forward: Phase
    backward: Phase
    crossing: float
    """Seconds that one expert's weights take to cross, each way of a pass."""
    kept: float
    """Experts of a layer, on average, that are in the ring when a pass comes back to them."""

    def state(self) -> dict[str, Any]:
        """As a JSON document, for ``of``."""
        return asdict(self)

    @staticmethod
    def of(state: dict[str, Any]) -> Paces:
        """The paces that made ``state``."""
        forward, backward = (Phase(**state[name]) for name in ("forward", "backward"))
        return Paces(forward, backward, state["crossing"], state["kept"])


def by_heat(counts: Sequence[float]) -> list[int]:
    """Experts from the coldest to the hottest; of equals the lower number first."""
    return sorted(range(len(counts)), key=lambda expert: (counts[expert], expert))


def layer_seconds(counts: Sequence[float], paces: Paces) -> list[float]:
    """Seconds of a layer in a pass whose CPU computes the n coldest experts, for n = 0 to E.

    ``counts`` are the rows that each expert has in a pass.
    """
    order = by_heat(counts)
    rows = [0.0, *accumulate(counts[expert] for expert in order)]
    read = [0.0, *accumulate(min(1.0, counts[expert]) for expert in order)]
    whole = max(rows[-1], 1.0)

    def seconds(phase: Phase, cold: int) -> float:
        cpu = phase.cold(read[cold], rows[cold])
        gpu = phase.experts * (1 - rows[cold] / whole)
        link = max(0.0, len(order) - cold - paces.kept) * paces.crossing
        return max(link, phase.outside + max(cpu, gpu))

    phases = (paces.forward, paces.backward)
    return [sum(seconds(phase, cold) for phase in phases) for cold in range(len(order) + 1)]


def cold_seconds(counts: Sequence[float], paces: Paces) -> float:
    """Seconds of the CPU for experts with ``counts`` rows in a pass, forward and backward."""
    read = sum(min(1.0, count) for count in counts)
    return sum(phase.cold(read, sum(counts)) for phase in (paces.forward, paces.backward))


def coldest(counts: Sequence[float], paces: Paces, number: int | None = None) -> tuple[int, ...]:
    """The experts that the CPU should compute, or the ``number`` coldest."""
    if number is None:
        found = layer_seconds(counts, paces)
        number = found.index(min(found))
    return tuple(sorted(by_heat(counts)[:number]))
