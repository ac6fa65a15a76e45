"""Datasets mixed in proportions: which of the usable rows an epoch has, some perhaps several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import ProblemsError
from ktbridge.sft.config import TrainConfig

CONCAT = ("concat", "interleave_once")
"""Each row once. In which order makes no difference where all of them are shuffled together."""
STOPS = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}
"""LLaMA-Factory's names of when a mixture ends -> datasets'."""


@dataclass(frozen=True)
class Share:
    """What an epoch has of one dataset: ``distinct`` of its ``usable`` rows, ``seen`` with those that come
    again."""

    name: str
    usable: int
    distinct: int
    seen: int

    def __str__(self) -> str:
        if self.seen == self.distinct == self.usable:
            return f"{self.name} {self.seen:,} rows"
        each = f", each {self.seen / self.distinct:.1f} times" if self.seen > self.distinct else ""
        return f"{self.name} {self.seen:,} ({self.distinct:,} of {self.usable:,} rows{each})"


def mixed(
    rows: Sequence[int],
    origins: Sequence[int],
    names: Sequence[str],
    config: TrainConfig,
    refused: str = "",
) -> tuple[list[int], list[Share]]:
    """An epoch's rows, and what it has of each dataset; ``rows`` are those that can be used.

    ``origins``: of every row, which of ``names`` it is from. ``refused``: why others can't be used. In the
    order and of the number that datasets.interleave_datasets makes by ``mix_strategy``, ``interleave_probs``
    and ``seed``. Raises ProblemsError (KTD040) where a dataset has no row left.
    """
    given: list[list[int]] = [[] for _ in names]
    for row in rows:
        given[origins[row]].append(row)
    empty = [
        problem("KTD040", name, f"no row that can be used{f' ({refused})' if refused else ''}")
        for name, own in zip(names, given, strict=True)
        if not own
    ]
    if empty:
        raise ProblemsError("the datasets can't be mixed; nothing was started.", empty)
    if config.mix_strategy in CONCAT:
        order = list(rows)
    else:
        from datasets import Dataset, interleave_datasets

        found = interleave_datasets(
            [Dataset.from_dict({"row": own}) for own in given],
            list(config.interleave_probs) or None,
            config.seed,
            stopping_strategy=STOPS[config.mix_strategy],  # type: ignore[arg-type]
        )
        order = list(found["row"])
    seen = Counter(origins[row] for row in order)
    distinct = Counter(origins[row] for row in set(order))
    shares = [
        Share(name, len(own), distinct[place], seen[place])
        for place, (name, own) in enumerate(zip(names, given, strict=True))
    ]
    return order, shares
