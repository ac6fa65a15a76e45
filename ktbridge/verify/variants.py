"""Ways in which an adapter may be on a server: the right ones, and the wrong ones worth naming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

HALVES = ("expert", "nonexpert")


@dataclass(frozen=True)
class Variant:
    """The base with some of an adapter, done right or wrong.

    ``expert`` and ``nonexpert`` multiply the scale that the adapter asks for: 0 leaves that half out.
    ``swapped``: gate's LoRA is in up's place and up's in gate's. ``shift``: expert e has the LoRA of
    expert e + shift (modulo E). ``without``: (half, layer) that have none. ``unrotated``: the keys of
    attention have no position, which is the engine's mistake and not the adapter's.
    """

    expert: float = 0.0
    nonexpert: float = 0.0
    swapped: bool = False
    shift: int = 0
    without: frozenset[tuple[str, int]] = frozenset()
    unrotated: bool = False

    def scaled(self, scales: Mapping[str, float]) -> Variant:
        """The same with these halves at these multiples."""
        return replace(
            self,
            expert=scales.get("expert", self.expert),
            nonexpert=scales.get("nonexpert", self.nonexpert),
        )

    def scale(self, half: str, layer: int) -> float:
        """The multiple at which ``half`` is there in a decoder layer (-1: outside of all layers)."""
        if (half, layer) in self.without:
            return 0.0
        return self.expert if half == "expert" else self.nonexpert


STANDARD = {
    "base": Variant(),
    "expert": Variant(expert=1),
    "nonexpert": Variant(nonexpert=1),
    "full": Variant(expert=1, nonexpert=1),
}
"""What a server may rightly be, by name."""


def standard_variants(expert: bool, nonexpert: bool) -> dict[str, Variant]:
    """Those that an adapter with these halves makes."""
    return {
        name: variant
        for name, variant in STANDARD.items()
        if (expert or not variant.expert) and (nonexpert or not variant.nonexpert)
    }
