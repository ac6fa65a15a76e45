"""Variants of an adapter on a server: the correct ones, and the errors worth naming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

HALVES = ("expert", "nonexpert")


@dataclass(frozen=True)
class Variant:
    """The base with parts of an adapter, applied correctly or not.

    ``expert`` and ``nonexpert`` multiply the scale that the adapter asks for: 0 leaves that half out.
    ``swapped``: gate's LoRA is in up's place and up's in gate's. ``shift``: expert e has the LoRA of
    expert e + shift (modulo E). ``without``: (half, layer) that have none. ``unrotated``: the keys of
    attention lack RoPE, which is the engine's error and not the adapter's.
    """

    expert: float = 0.0
    nonexpert: float = 0.0
    swapped: bool = False
    shift: int = 0
    without: frozenset[tuple[str, int]] = frozenset()
    unrotated: bool = False

    def scaled(self, scales: Mapping[str, float]) -> Variant:
        """A copy with these multipliers of the halves."""
        return replace(
            self,
            expert=scales.get("expert", self.expert),
            nonexpert=scales.get("nonexpert", self.nonexpert),
        )

    def scale(self, half: str, layer: int) -> float:
        """The multiplier of ``half`` in a decoder layer (-1: outside of all layers)."""
        if (half, layer) in self.without:
            return 0.0
        return self.expert if half == "expert" else self.nonexpert


STANDARD = {
    "base": Variant(),
    "expert": Variant(expert=1),
    "nonexpert": Variant(nonexpert=1),
    "full": Variant(expert=1, nonexpert=1),
}
"""The correct variants by name."""


def standard_variants(expert: bool, nonexpert: bool) -> dict[str, Variant]:
    """The correct variants of an adapter with these halves."""
    return {
        name: variant
        for name, variant in STANDARD.items()
        if (expert or not variant.expert) and (nonexpert or not variant.nonexpert)
    }
