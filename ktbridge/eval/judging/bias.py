"""A judge's biases: position bias and length bias.

Every interval is computed by ``stats.mean_interval`` over the clusters of the bench.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ktbridge.eval.judging.prompts import Winner
from ktbridge.eval.results.types import LengthBias, PairResult, PositionBias
from ktbridge.eval.stats import mean_interval


@dataclass(frozen=True)
class Comparison:
    """Two answers to one item, compared in both orders. ``verdicts``: with ``of`` shown first, then
    with ``minus`` shown first; ``lengths`` in characters, of ``of`` and ``minus``."""

    item: str
    cluster: str
    of: str
    minus: str
    verdicts: tuple[Winner, Winner]
    lengths: tuple[int, int]

    @property
    def winners(self) -> tuple[str, str]:
        """The winner under each order: an arm's name, or "" for a tie."""
        names = {"first": self.of, "second": self.minus, "tie": ""}
        swapped = {"first": self.minus, "second": self.of, "tie": ""}
        return names[self.verdicts[0]], swapped[self.verdicts[1]]

    @property
    def flipped(self) -> bool:
        """Return whether the order changed the verdict."""
        return self.winners[0] != self.winners[1]

    @property
    def result(self) -> PairResult:
        """For ``of``: win or loss if both orders agree, else tie."""
        if self.flipped or not self.winners[0]:
            return "tie"
        return "win" if self.winners[0] == self.of else "loss"


def flip_rate(compared: Sequence[Comparison]) -> float | None:
    """The share of pairs whose verdict changed with the order; None for no pairs."""
    if not compared:
        return None
    return round(sum(one.flipped for one in compared) / len(compared), 6)


def position_bias(compared: Sequence[Comparison]) -> PositionBias | None:
    """The share of the verdicts without ties that chose the answer shown first.

    Each pair is shown in both orders, so a judge that looks at the answers alone has exactly 0.5.
    """
    shown = [(verdict, one.cluster) for one in compared for verdict in one.verdicts]
    decided = [(verdict == "first", cluster) for verdict, cluster in shown if verdict != "tie"]
    if not decided:
        return None
    mean, low, high = _share(decided)
    return {"first_share": mean, "low": low, "high": high, "n": len(decided)}


def length_bias(
    source: Literal["pairs", "checks"],
    lengths: Sequence[tuple[int, int]],
    outcomes: Sequence[float],
    clusters: Sequence[str],
) -> LengthBias | None:
    """Return how often the longer of two answers won, excluding ties and equal lengths.

    ``lengths`` are those of the two answers, ``outcomes`` are above 0 where the first one won.
    ``excess`` is that share minus the 0.5 expected by chance; ``correlation`` is Pearson's between the
    log of the length ratio and the outcome, over each pair in both orders (the order within a pair
    is arbitrary, and both means are then 0). Longer answers may be better ones: this is an upper
    bound on the effect of length, not an estimate.
    """
    decided = []
    products = squares = ratios = 0.0
    for (one, other), outcome, cluster in zip(lengths, outcomes, clusters, strict=True):
        ratio = math.log(one / other) if one and other else 0.0
        products += ratio * outcome
        ratios += ratio * ratio
        squares += outcome * outcome
        if ratio and outcome:
            decided.append(((ratio > 0) == (outcome > 0), cluster))
    if not decided:
        return None
    mean, low, high = _share(decided)
    scale = math.sqrt(ratios * squares)
    return {
        "from": source,
        "longer_share": mean,
        "low": low,
        "high": high,
        "n": len(decided),
        "excess": round(mean - 0.5, 6),
        "correlation": round(products / scale, 6) if scale else None,
    }


def length_bias_of_pairs(compared: Sequence[Comparison]) -> LengthBias | None:
    """``length_bias`` of pair verdicts; a verdict that changes with the order counts as a tie."""
    outcome = {"win": 1.0, "loss": -1.0, "tie": 0.0}
    return length_bias(
        "pairs",
        [one.lengths for one in compared],
        [outcome[one.result] for one in compared],
        [one.cluster for one in compared],
    )


def length_bias_of_scores(
    scored: Mapping[str, Sequence[tuple[int, float]]], clusters: Mapping[str, str]
) -> LengthBias | None:
    """``length_bias`` of shares: item id -> (length, share) of each arm, compared pairwise."""
    lengths, outcomes, kept = [], [], []
    for item, answers in scored.items():
        for n, (length, share) in enumerate(answers):
            for other_length, other_share in answers[:n]:
                lengths.append((length, other_length))
                outcomes.append(share - other_share)
                kept.append(clusters[item])
    return length_bias("checks", lengths, outcomes, kept)


def _share(decided: Sequence[tuple[bool, str]]) -> tuple[float, float, float]:
    """Mean, low and high of (decision, cluster) pairs."""
    values = [float(decision) for decision, _ in decided]
    found = mean_interval(values, [cluster for _, cluster in decided], bounds=(0.0, 1.0))
    return round(found.mean, 6), round(found.low, 6), round(found.high, 6)
