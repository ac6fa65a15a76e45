"""Where a layer's stored experts lie in host memory, and how they travel: in groups, spans and runs.

Pure arithmetic over addresses. A *group* is as many experts of one layer as fit a slot; its experts follow
each other in host memory as far as the checkpoint allows. A *span* is one copy: a range of host memory and
its place in the slot. A *run* is what is found of one kind in the slot with constant steps, so that one
strided view has it: all gate matrices of eight neighbouring experts, for instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ktbridge.errors import UsageError
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights

ALIGNED = 256  # where spans begin in a slot: what CUDA's own allocations are aligned to
_GAP = 64  # bytes between two tensors that are still one copy; a shard's header is always longer


@dataclass(frozen=True)
class Piece:
    """One expert's matrix, or its scales, in host memory."""

    kind: str
    """A projection, or "gate.scale" and so on."""
    expert: int
    address: int
    tensor: torch.Tensor
    """Keeps the memory alive."""

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Span:
    """One copy: ``bytes`` from ``address`` in host memory to ``offset`` in the slot."""

    address: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Run:
    """``count`` tensors of one kind in a slot, ``step`` bytes apart from ``offset``.

    They belong to the experts at places ``first`` to ``first + count`` of the group's order.
    """

    kind: str
    first: int
    count: int
    offset: int
    step: int


@dataclass(frozen=True, eq=False)
class Group:
    """Experts of a layer that cross together."""

    experts: tuple[int, ...]
    """Their numbers in the layer, in the order in which they are computed."""
    spans: tuple[Span, ...]
    runs: tuple[Run, ...]
    bytes: int
    """What the group takes in a slot."""
    kept: tuple[torch.Tensor, ...]
    """The host tensors, so that their memory outlives the copies."""


def layer_groups(
    weights: Sequence[ExpertWeights],
    slot_bytes: int,
    where: str = "a layer",
    experts: Sequence[int] | None = None,
) -> tuple[Group, ...]:
    """A layer's experts in groups of at most ``slot_bytes`` each, in the order of their addresses.

    ``weights`` are gate, up and down; ``experts`` are those to cross, None for all. The groups are of nearly
    equal size. Raises ``UsageError`` where one expert alone is larger than a slot, or rows aren't next to
    each other.
    """
    wanted = range(weights[0].count) if experts is None else experts
    pieces = list(_pieces(weights, wanted))
    if any(not piece.tensor.is_contiguous() for piece in pieces):
        raise UsageError(
            f"the experts of {where} have gaps between their rows: they can't be streamed."
        )
    by_expert: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.address):
        by_expert.setdefault(piece.expert, []).append(piece)
    order = list(by_expert)  # of first addresses
    largest = max(_placed(by_expert[expert])[1] for expert in order)
    if largest > slot_bytes:
        raise UsageError(
            f"one expert of {where} takes {largest:,} bytes, more than a slot of {slot_bytes:,} bytes.",
            "Give the GPU more memory: a larger kt_gpu_memory.",
        )
    count = -(-len(order) // (slot_bytes // largest))
    while True:
        bounds = [len(order) * index // count for index in range(count + 1)]
        groups = tuple(_group(order[start:end], by_expert) for start, end in pairwise(bounds))
        if all(group.bytes <= slot_bytes for group in groups):
            return groups
        # Experts that lie between each other's tensors may take a little more together than alone.
        count += 1


def _pieces(weights: Sequence[ExpertWeights], experts: Sequence[int]) -> Iterator[Piece]:
    for name, stored in zip(PROJECTIONS, weights, strict=True):
        for kind, stack in ((name, stored.weight), (f"{name}.scale", stored.scale)):
            if stack is None:
                continue
            for expert in experts:
                tensor = stack[expert]
                yield Piece(kind, expert, tensor.data_ptr(), tensor)


def _group(experts: Sequence[int], by_expert: dict[int, list[Piece]]) -> Group:
    pieces = sorted(
        (piece for expert in experts for piece in by_expert[expert]),
        key=lambda piece: piece.address,
    )
    spans, size, offsets = _placed_all(pieces)
    place = {expert: index for index, expert in enumerate(experts)}
    at: dict[str, dict[int, int]] = {}
    for piece, offset in zip(pieces, offsets, strict=True):
        at.setdefault(piece.kind, {})[place[piece.expert]] = offset
    runs = tuple(run for kind, found in at.items() for run in _runs(kind, found))
    return Group(tuple(experts), spans, runs, size, tuple(piece.tensor for piece in pieces))


def _placed(pieces: Sequence[Piece]) -> tuple[tuple[Span, ...], int]:
    spans, size, _ = _placed_all(pieces)
    return spans, size


def _placed_all(pieces: Sequence[Piece]) -> tuple[tuple[Span, ...], int, list[int]]:
    """Spans, the bytes that they take, and where each of the pieces, sorted by address, begins."""
    spans: list[Span] = []
    offsets = []
    end = 0
    for piece in pieces:
        last = spans[-1] if spans else None
        behind = piece.address - (last.address + last.bytes) if last else -1
        # In one copy as far as the slot's views of it stay aligned to their elements.
        aligned = (end + behind) % piece.tensor.element_size() == 0
        if last and 0 <= behind <= _GAP and aligned:
            offsets.append(end + behind)
            spans[-1] = Span(last.address, last.offset, last.bytes + behind + piece.bytes)
        else:
            begin = -(-end // ALIGNED) * ALIGNED
            offsets.append(begin)
            spans.append(Span(piece.address, begin, piece.bytes))
        end = spans[-1].offset + spans[-1].bytes
    return tuple(spans), -(-end // ALIGNED) * ALIGNED, offsets


def _runs(kind: str, at: dict[int, int]) -> Iterator[Run]:
    """The places of one kind as progressions, as long as they go."""
    places = sorted(at)
    first = 0
    while first < len(places):
        last, step = first + 1, 0
        if last < len(places):
            step = at[places[last]] - at[places[first]]
            while last < len(places) and at[places[last]] - at[places[last - 1]] == step > 0:
                last += 1
        if last == first + 1:
            step = 0
        yield Run(kind, places[first], last - first, at[places[first]], step)
        first = last
