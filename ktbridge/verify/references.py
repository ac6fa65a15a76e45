"""What served logprobs are compared with: vectors by reference name, and how far apart two vectors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


def mean_distance(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean |Δ| of two vectors of equal length."""
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


@dataclass(frozen=True)
class References:
    """Logprob vectors by reference name, and mean |bfloat16 - float32| of each (the noise floor)."""

    logprobs: Mapping[str, Sequence[float]]
    noise: Mapping[str, float]
    rounded: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, exact: Mapping[str, Sequence[float]], rounded: Mapping[str, Sequence[float]]
    ) -> References:
        """From logprobs in float32 and in bfloat16."""
        noise = {name: mean_distance(exact[name], rounded[name]) for name in exact}
        return cls(exact, noise, rounded)

    def with_floor(self, least: float) -> References:
        """Return the same with a noise of at least ``least``, as what identical requests differed by."""
        return replace(self, noise={key: max(value, least) for key, value in self.noise.items()})

    def at(self, places: Sequence[int]) -> References:
        """Those of some of the tokens."""
        if not self.rounded:
            raise ValueError("references without the rounded logprobs can't be divided")

        def some(vectors: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
            return {name: [vector[n] for n in places] for name, vector in vectors.items()}

        return References.of(some(self.logprobs), some(self.rounded))
