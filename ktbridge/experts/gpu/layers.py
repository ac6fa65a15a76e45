"""One layer's experts as the executor knows them: which cross in which group, which the CPU computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ktbridge.experts.gpu.cold import ColdExperts
from ktbridge.experts.gpu.layer_math import Bordered
from ktbridge.experts.gpu.layout import Group, layer_groups
from ktbridge.experts.modules import Triple


@dataclass(eq=False)
class Layer:
    """The order of computing is that of the groups, then the cold experts."""

    weights: Triple
    groups: tuple[Group, ...]
    cold: ColdExperts | None
    """The experts that the CPU computes."""
    experts: tuple[int, ...]
    """All experts in the order of computing."""
    starts: tuple[int, ...]
    """The place in that order of each group's first expert, and behind the last group's."""
    place: torch.Tensor
    """[E] int64 on the device: each expert's place in that order."""
    order: torch.Tensor | None
    """The experts that the GPU computes, int64 on the device; None: all, in their own order."""
    first: int = -1
    """Number of its first group in the ring; -1 where it is resident."""
    resident: tuple[Bordered, ...] = ()

    @property
    def hot(self) -> int:
        """How many experts the GPU computes."""
        return self.starts[-1]


def lay_out(
    weights: Triple, slot_bytes: int, device: torch.device, cold: ColdExperts | None, where: str
) -> Layer:
    """The layer of ``weights`` in groups of at most ``slot_bytes``, but for ``cold``; ``where`` names it.

    Raises ``UsageError`` as ``layer_groups``.
    """
    aside = cold.experts if cold else ()
    hot = [expert for expert in range(weights[0].count) if expert not in set(aside)]
    groups = layer_groups(weights, slot_bytes, where, hot) if hot else ()
    experts = (*(expert for group in groups for expert in group.experts), *aside)
    place = torch.empty(len(experts), dtype=torch.int64)
    place[torch.tensor(experts)] = torch.arange(len(experts))
    in_order = not cold and list(experts) == sorted(experts)
    return Layer(
        weights,
        groups,
        cold,
        experts,
        tuple(accumulate((len(group.experts) for group in groups), initial=0)),
        place.to(device),
        None if in_order else torch.tensor(experts[: len(hot)], dtype=torch.int64, device=device),
    )
