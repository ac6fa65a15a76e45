"""Layout of a layer's stored experts: in host memory, in a slot on the device, and as unpacked matrices.

A *group* is as many experts of one layer as fit a slot; its experts follow each other in host memory as far
as the checkpoint allows. A *span* is one copy: a range of host memory and its place in the slot. A ``Layer``
is what the executor knows of one. ``unpack_group`` makes the bordered bfloat16 matrices of a group from a
slot's bytes, which are as the checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from weakref import WeakKeyDictionary

import torch

from ktbridge.errors import UsageError
from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.layer_math import Biases, BorderedMatrices
from ktbridge.experts.weights import PROJECTIONS, ExpertWeights, Triple, from_mxfp4

ALIGNED = 256  # where spans begin in a slot: what CUDA's own allocations are aligned to
_GAP = 64  # bytes between two tensors that are still one copy; a shard's header is always longer


@dataclass(frozen=True)
class StoredMatrix:
    """One expert's matrix, or its scales, in host memory."""

    kind: str
    """A projection, or "gate.scale" and so on."""
    expert: int
    address: int
    tensor: torch.Tensor
    """Keeps the memory alive."""

    @property
    def bytes(self) -> int:
        return extent(self.tensor)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a matrix's, or vector's, first element to behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class CopySpan:
    """One copy: ``bytes`` from ``address`` in host memory to ``offset`` in the slot."""

    address: int
    offset: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Group:
    """Experts of a layer that are transferred together."""

    experts: tuple[int, ...]
    """Their numbers in the layer, in the order in which they are computed."""
    spans: tuple[CopySpan, ...]
    places: Mapping[str, tuple[int, ...]]
    """Offsets in a slot, in bytes, of each expert's tensor of a kind ("gate", "gate.scale" and so on)."""
    bytes: int
    """Bytes that the group takes in a slot."""
    kept: tuple[torch.Tensor, ...]
    """The host tensors, so that their memory outlives the copies."""


def group_experts(
    weights: Sequence[ExpertWeights], slot_bytes: int, where: str = "a layer"
) -> tuple[Group, ...]:
    """A layer's experts in groups of at most ``slot_bytes`` each, in the order of their addresses.

    ``weights`` are gate, up and down. The groups are of nearly equal size. Raises
    ``UsageError`` where one expert alone is larger than a slot, or rows aren't next to each other.
    """
    pieces = list(_pieces(weights))
    if any(not piece.tensor.is_contiguous() for piece in pieces) and not _take_turns(weights):
        raise UsageError(f"the experts of {where} have gaps between their rows: they can't be streamed.")
    by_expert: dict[int, list[StoredMatrix]] = {}
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


def _pieces(weights: Sequence[ExpertWeights]) -> Iterator[StoredMatrix]:
    for name, stored in zip(PROJECTIONS, weights, strict=True):
        for kind, stack in ((name, stored.weight), (f"{name}.scale", stored.scale)):
            for expert, tensor in enumerate(() if stack is None else stack):
                yield StoredMatrix(kind, expert, tensor.data_ptr(), tensor)


def _take_turns(weights: Sequence[ExpertWeights]) -> bool:
    """Return whether gate's and up's rows lie one after the other's, so that one copy has both."""
    gate, up, down = weights
    pairs = [(gate.weight, up.weight)]
    if gate.scale is not None and up.scale is not None:
        pairs.append((gate.scale, up.scale))
    rows_between = [
        (b[0].data_ptr() - a[0].data_ptr(), a[0].shape[-1] * a[0].element_size()) for a, b in pairs
    ]
    twice = all(a[0].stride(0) == b[0].stride(0) == 2 * a[0].shape[-1] for a, b in pairs)
    rest = (down.weight[0], *(() if down.scale is None else (down.scale[0],)))
    return (
        twice
        and all(between == row for between, row in rows_between)
        and all(each.is_contiguous() for each in rest)
    )


def _group(experts: Sequence[int], by_expert: dict[int, list[StoredMatrix]]) -> Group:
    pieces = sorted(
        (piece for expert in experts for piece in by_expert[expert]), key=lambda piece: piece.address
    )
    spans, size, offsets = _placed(pieces)
    at = {(piece.kind, piece.expert): offset for piece, offset in zip(pieces, offsets, strict=True)}
    kinds = dict.fromkeys(piece.kind for piece in pieces)
    places = {kind: tuple(at[kind, expert] for expert in experts) for kind in kinds}
    return Group(tuple(experts), spans, places, size, tuple(piece.tensor for piece in pieces))


def _placed(pieces: Sequence[StoredMatrix]) -> tuple[tuple[CopySpan, ...], int, list[int]]:
    """Spans, the bytes that they take, and where each of the pieces, sorted by address, begins."""
    spans: list[CopySpan] = []
    offsets = []
    end = 0
    for piece in pieces:
        last = spans[-1] if spans else None
        behind = piece.address - (last.address + last.bytes) if last else -1
        # In one copy as far as the slot's views of it stay aligned to their elements. Up's rows may lie
        # between gate's: then it begins before gate's end.
        aligned = (end + behind) % piece.tensor.element_size() == 0
        if last and behind <= _GAP and aligned:
            offsets.append(end + behind)
            spans[-1] = CopySpan(
                last.address, last.offset, max(last.bytes, last.bytes + behind + piece.bytes)
            )
        else:
            begin = -(-end // ALIGNED) * ALIGNED
            offsets.append(begin)
            spans.append(CopySpan(piece.address, begin, piece.bytes))
        end = spans[-1].offset + spans[-1].bytes
    return tuple(spans), -(-end // ALIGNED) * ALIGNED, offsets


@dataclass(eq=False)
class Layer:
    """A layer's experts in the order of computing, which is that of its groups."""

    weights: Triple
    groups: tuple[Group, ...]
    starts: tuple[int, ...]
    """The place in that order of each group's first expert, and behind the last group's."""
    place: torch.Tensor
    """[E] int64 on the device: each expert's place in that order."""
    order: torch.Tensor | None
    """[E] int64 on the device: the expert at each place; None where they are in their own order."""
    biases: Biases | None = None
    """On the device, in that order."""
    first: int = -1
    """Number of its first group in the ring; -1 where it is resident."""
    resident: BorderedMatrices | None = None
    """All its matrices, where they stay on the device."""


def lay_out(weights: Triple, slot_bytes: int, device: torch.device, where: str) -> Layer:
    """Make the layer of ``weights`` in groups of at most ``slot_bytes``; ``where`` names it.

    Raises ``UsageError`` as ``group_experts``.
    """
    groups = group_experts(weights, slot_bytes, where)
    experts = tuple(expert for group in groups for expert in group.experts)
    place = torch.empty(len(experts), dtype=torch.int64)
    place[torch.tensor(experts)] = torch.arange(len(experts))
    in_order = list(experts) == sorted(experts)
    return Layer(
        weights,
        groups,
        tuple(accumulate((len(group.experts) for group in groups), initial=0)),
        place.to(device),
        None if in_order else torch.tensor(experts, dtype=torch.int64, device=device),
        _biases(weights, experts, device),
    )


def _biases(weights: Triple, experts: Sequence[int], device: torch.device) -> Biases | None:
    """The biases of ``experts``, in their order; None where there are none."""
    if all(each.bias is None for each in weights):
        return None

    def of(*parts: ExpertWeights) -> torch.Tensor:
        zeros = torch.zeros(parts[0].count, parts[0].rows, dtype=torch.bfloat16)
        rows = [zeros if part.bias is None else part.bias for part in parts]
        return torch.cat(rows, 1)[list(experts)].to(device)

    gate, up, down = weights
    return Biases(of(gate, up), of(down))


def unpack_group(
    group: Group, raw: torch.Tensor, weights: Sequence[ExpertWeights], into: BorderedMatrices
) -> None:
    """Fill ``into``, matrices of the group's experts, from ``raw`` [bytes] uint8, in the current stream.

    ``weights`` are the layer's gate, up and down, for dtypes and shapes. Borders are left as they are.
    """
    kernels = operations.triton_for(into.down)
    for name, stored, target in zip(PROJECTIONS, weights, into.weights, strict=True):
        if kernels:
            _unpack_at_once(kernels, name, group, raw, stored, target)
            continue
        for number, out in enumerate(target):  # float32 for one expert at a time
            value = _view(raw, group.places[name][number], stored.weight[0])
            scale = None
            if stored.scale is not None:
                scale = _view(raw, group.places[f"{name}.scale"][number], stored.scale[0])
            dequantize(stored, value, scale, out)


def _unpack_at_once(
    kernels: ModuleType, name: str, group: Group, raw: torch.Tensor, stored: ExpertWeights, out: torch.Tensor
) -> None:
    """Unpack one projection of a group in one kernel, wherever its experts are in ``raw``."""
    value = stored.weight[0]
    scale = value if stored.scale is None else stored.scale[0]
    of_scales = name if scale is value else f"{name}.scale"
    places = _places(group, name, value.element_size(), out.device)
    scale_places = _places(group, of_scales, scale.element_size(), out.device)
    steps = value.stride(0), scale.stride(0)
    kernels.fill_at(stored, raw.view(value.dtype), raw.view(scale.dtype), places, scale_places, steps, out)


_known: WeakKeyDictionary[Group, dict[tuple[str, torch.device], torch.Tensor]] = WeakKeyDictionary()


def _places(group: Group, kind: str, size: int, device: torch.device) -> torch.Tensor:
    """[n] int64 on the device: ``group.places`` of a kind, in its elements of ``size`` bytes."""
    known = _known.setdefault(group, {})
    if (kind, device) not in known:
        places = [place // size for place in group.places[kind]]
        known[kind, device] = torch.tensor(places, device=device)
    return known[kind, device]


def _view(raw: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """One expert's tensor from byte ``place`` of ``raw``, in the dtype, shape and strides of ``like``."""
    own = raw[place : place + extent(like)].view(like.dtype)
    return own.as_strided(like.shape, like.stride())


def dequantize(
    weights: ExpertWeights, stored: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Fill one expert's matrix ``out`` [rows, columns] bfloat16 from what is ``stored`` of it.

    ``stored`` [rows, columns], [rows, words] for int4 or [rows, bytes] for mxfp4; ``scale`` [row groups,
    column groups] or [rows], None for bfloat16. Values are multiplied by their scales in float32 and rounded
    to bfloat16 once, as in the CPU kernels. ``weights`` has the storage format.
    """
    if scale is None:
        out.copy_(stored)
        return
    rows, columns = out.shape
    if weights.storage == "mxfp4":
        out.copy_(from_mxfp4(stored, scale, columns))
        return
    if weights.storage == "fp8":
        # By bits, as float16 of a 256th, which holds it exactly; what e4m3 calls NaN reads as 480.
        bits = stored.view(torch.uint8).to(torch.int16)
        plain = (((bits & 128) << 8) | ((bits & 127) << 7)).view(torch.float16).float() * 256
    elif weights.storage == "int4":
        shifts = torch.arange(0, 32, 4, device=stored.device, dtype=torch.int32)
        nibbles = (stored[:, :, None] >> shifts) & 15
        plain = nibbles.to(torch.int8).reshape(rows, -1)[:, :columns].float() - 8
    else:
        plain = stored.float()
    wide = scale.float() if scale.dim() == 2 else scale.float()[:, None]
    if weights.row_group > 1:
        wide = wide.repeat_interleave(weights.row_group, 0)[:rows]
    if wide.shape[1] > 1:
        wide = wide.repeat_interleave(weights.column_group, 1)[:, :columns]
    out.copy_(plain.mul_(wide))
