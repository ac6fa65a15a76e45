"""Damage that loads without a word: parts of an adapter that training can't have left as they are.

The pass over the values (``values``) notes three numbers of each matrix: its largest magnitude, its first
and its last value. They single out the few matrices that are read again here:

- A shard of a matrix, saved as if it were all of it, is zero but for one contiguous block of at most half
  its rows or columns: its first or its last value is zero.
- Equal matrices have equal numbers.

Training leaves no exact zeros in such blocks: A starts at random and every row of B gets a gradient. There
are three exceptions, which aren't looked at: routers, whose rows are experts that may never be
selected; embeddings, whose columns are tokens that may never occur; and ranks that are zero in both A and
B, with which a conversion fills up a lower rank. PEFT before 0.19 saves fused experts with inputs and
outputs exchanged, so either of A and B may be the one that starts at zero: rules hold for both alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import Adapter, ExpertStack, Part
from ktbridge.adapter.checks import many
from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity
from ktbridge.model import TensorRef
from ktbridge.model.families import ROUTER
from ktbridge.model.tensor import as_float32

MOST_SHARDS = 64
FAR = 1000.0
"""Factor between a layer's largest value and the layers' median from which the layer is reported: what
Adam leaves differs by tens between layers, leftovers of scaling and unset memory by far more."""
_FEW_ROWS = 8  # below, a block of rows may be zero by chance
_FEW_LAYERS, _FEW_EXPERTS = 3, 8  # below, routing alone may select one block of the experts
_ALIKE = 1e-3  # singular values below this part of the largest are rounding
_SHOWN = 6


class _Format(NamedTuple):
    integer: Any
    magnitude: int  # every bit but the sign
    infinity: int  # bit pattern of +inf: anything not below is infinite or NaN
    rounded: int  # fraction bits that bfloat16, with 7 of them, drops


BLOCK_FORMATS = {
    "BF16": _Format(np.uint16, 0x7FFF, 0x7F80, 0),
    "F16": _Format(np.uint16, 0x7FFF, 0x7C00, 0x7),
    "F32": _Format(np.uint32, 0x7FFFFFFF, 0x7F800000, 0xFFFF),
}


class Side(NamedTuple):
    """The numbers of all A, or all B, of one projection or module: arrays [E], or [1].

    ``bad``: a value is NaN or infinite, or none was read; ``edge``: the first or the last value is zero;
    ``size``: the largest magnitude; ``mark``: equal for equal matrices.
    """

    zero: NDArray[np.bool_]
    bad: NDArray[np.bool_]
    edge: NDArray[np.bool_]
    size: NDArray[np.float32]
    mark: NDArray[np.uint64]


class Pair(NamedTuple):
    """A and B of one projection of a layer's experts, or of one module.

    ``name``: the module's path in its layer ("self_attn.q_proj"); ``tensors`` and ``sides`` have "A" and
    "B", as far as the adapter has them; ``stacks`` have them of experts.
    """

    layer: int
    name: str
    tensors: dict[str, list[Part]]
    sides: dict[str, Side]
    stacks: dict[str, ExpertStack]

    @property
    def zero(self) -> NDArray[np.bool_]:
        """Mask of the pairs that add nothing, [E] or [1]: A or B is zero."""
        first, *others = self.sides.values()
        same = others and len(others[0].zero) == len(first.zero)
        return first.zero | others[0].zero if same else (others[0] if others else first).zero

    @property
    def whole(self) -> bool:
        """Return whether each A has its B: other pairs are reported elsewhere."""
        counts = {len(side.zero) for side in self.sides.values()}
        counts |= {stack.count for stack in self.stacks.values()}
        return len(self.sides) == 2 and len(counts) == 1

    @property
    def live(self) -> NDArray[np.bool_]:
        """Mask of the pairs that can be looked at: finite, and not zero."""
        return ~(self.zero | self.sides["A"].bad | self.sides["B"].bad)

    def ref(self, half: str, index: int) -> TensorRef:
        """Return where the A or B of one expert is."""
        ref = self.part(half, index).ref
        return ref.item(index) if self.stacks and self.stacks[half].fused is not None else ref

    def part(self, half: str, index: int) -> Part:
        """The tensor that has the A or B of one expert."""
        tensors = self.tensors[half]
        return tensors[index] if len(tensors) > 1 else tensors[0]


def check_damage(adapter: Adapter, pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report what training can't have left, of pairs that are whole. Raises KtbridgeError as reading does."""
    experts = [pair for pair in pairs if pair.stacks]
    yield from _check_shards(pairs)
    yield from _check_ranks(pairs)
    yield from _check_equal(adapter, experts)
    yield from _check_trained_block(adapter, experts)
    yield from _check_sizes(adapter, pairs)


# --- one rank's share of a sharded tensor


def _check_shards(pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report B with zero rows, A with zero columns, and ranks that only one of them has."""
    found: dict[tuple[str, int, Severity], dict[str, Part]] = defaultdict(dict)
    ranks: dict[str, Part] = {}
    lost = 0.0
    for pair in pairs:
        suspects = np.flatnonzero(pair.live & (pair.sides["A"].edge | pair.sides["B"].edge))
        if not len(suspects) or ROUTER.search(pair.name) or "embed" in pair.name:
            continue
        for index in suspects.tolist():
            a, b = (_bits(pair.ref(half, index)) != 0 for half in "AB")
            if a.ndim != 2 or b.ndim != 2:
                continue
            for half, axis, on in (("B", "rows", b.any(1)), ("A", "columns", a.any(0))):
                n = block_count(on) if len(on) >= _FEW_ROWS else 0
                if n:
                    part = pair.part(half, index)
                    # In a matrix of several projections, one may have been left out on purpose.
                    severity: Severity = "warning" if n < 4 and _is_joined(pair.name) else "error"
                    found[axis, n, severity][part.entry.name] = part
            in_a, in_b = a.any(1), b.any(0)
            one_sided, present = int((in_a ^ in_b).sum()), int((in_a | in_b).sum())
            if len(in_a) == len(in_b) and present > 1 and 2 * one_sided >= present:
                part = pair.part("A" if in_a.sum() < in_b.sum() else "B", index)
                ranks[part.entry.name] = part
                lost = max(lost, one_sided / present)
    for (axis, n, severity), parts in found.items():
        share = f"has values in one block of 1/{n} of its {axis} and zeros in all others"
        yield from many("KTB405", list(parts.values()), share, f"values in all {axis}", severity)
    if ranks:
        found_ranks = f"is zero in up to {lost:.0%} of the ranks that its partner has"
        yield from many("KTB406", list(ranks.values()), found_ranks, "both or neither", "error")


def block_count(on: NDArray[np.bool_]) -> int:
    """Return n if all that is set lies in one of n equal blocks, and fills it; 0 if there is no such n.

    The last block may be shorter, as PyTorch's chunks are.
    """
    places = np.flatnonzero(on)
    if not len(places):
        return 0
    start, stop, size = int(places[0]), int(places[-1]) + 1, len(on)
    if stop - start != len(places):
        return 0
    for n in range(2, min(MOST_SHARDS, size) + 1):
        width = -(-size // n)
        if start % width == 0 and stop == min(start + width, size):
            return n
    return 0


def _is_joined(name: str) -> bool:
    """Return whether a module computes several projections at once ("qkv_proj", "gate_up_proj")."""
    leaf = name.rpartition(".")[2]
    return any(word in leaf for word in ("qkv", "gate_up", "in_proj", "kv_", "c_attn", "W_pack"))


def _bits(piece: TensorRef) -> NDArray[Any]:
    """A matrix's values without their signs, as bit patterns."""
    layout = BLOCK_FORMATS[piece.dtype]
    words = np.frombuffer(piece.view(), layout.integer)
    return (words & layout.magnitude).reshape(piece.shape)


# --- ranks that are alike


def _check_ranks(pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report pairs both of whose matrices have a rank far under r.

    B alone proves nothing: with few tokens its gradient has a low rank. Of a projection's experts the middle
    one is looked at.
    """
    found: list[tuple[Part, int, int]] = []
    looked = 0
    for pair in pairs:
        live = np.flatnonzero(pair.live)
        if not len(live):
            continue
        looked += 1
        index = int(live[len(live) // 2])
        a, b = pair.ref("A", index), pair.ref("B", index)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            continue
        most = min(*a.shape, b.shape[0])
        limit = most // 4
        if not limit:
            continue
        # A sample has no more ranks than all, and mostly as many.
        if any(_rank(each, sample) > limit for sample in (4 * most, 0) for each in (a, b)):
            continue
        present = int(((_bits(a) != 0).any(1) | (_bits(b) != 0).any(0)).sum())
        if (rank := max(_rank(a), _rank(b))) <= min(most, present) // 4:
            found.append((pair.part("A", index), rank, present))
    if found:
        part, rank, of = found[0]
        share = f"has {rank} independent ranks of {of}; so have {len(found)} of {looked} looked at"
        yield problem("KTB406", part.where, share, f"more than {of // 4}", severity="warning")


def _rank(piece: TensorRef, sample: int = 0) -> int:
    """Return how many ranks of A [r, in] or B [out, r] differ, in about ``sample`` of its columns or rows."""
    layout, (rows, columns) = BLOCK_FORMATS[piece.dtype], piece.shape
    words = np.frombuffer(piece.view(), layout.integer)
    wide = words.reshape(piece.shape) if rows < columns else words.reshape(piece.shape).T
    step = max(1, max(rows, columns) // sample) if sample else 1
    sample_of = np.ascontiguousarray(wide[:, ::step])
    values = as_float32(sample_of.data.cast("B"), piece.dtype).reshape(sample_of.shape)
    values = values.astype(np.float64)
    largest = np.abs(values).max()
    if not largest:
        return 0
    values /= largest
    squares = np.linalg.eigvalsh(values @ values.T)
    return int((squares > squares[-1] * _ALIKE**2).sum())


# --- experts


def _check_equal(adapter: Adapter, pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report experts of one layer whose A and B are those of another."""
    found: list[tuple[Pair, NDArray[np.int64]]] = []
    alone = 0
    for pair in pairs:
        first = first_equals(pair)
        if (first != np.arange(len(first))).any():
            found.append((pair, first))
        else:
            alone += int(pair.live.sum()) > 1
    if not found:
        return
    lengths = {_equal_block(first, pair.live) for pair, first in found}
    pair, first = found[0]
    count, where = len(first), str(adapter.path)
    if not alone and len(lengths) == 1 and (length := lengths.pop()):
        size = "all" if length == count else f"each {length} neighboring"
        shared = f"{size} of a layer's {count} experts have equal LoRA, in every layer"
        yield problem("KTB407", where, shared, severity="info")
        return
    copies = np.flatnonzero(first != np.arange(count))
    several = f"; {len(copies)} experts there are such copies" if len(copies) > 1 else ""
    shown = f"{pair.name} of expert {copies[0]} in layer {pair.layer} is that of expert {first[copies[0]]}"
    more = f"{several}, in {len(found)} of {len(pairs)} layers and projections"
    yield problem("KTB407", where, shown + more, "LoRA of its own for each expert")


def first_equals(pair: Pair) -> NDArray[np.int64]:
    """Return for each expert the first one with equal A and B, [E]; those at zero are equal to none."""
    first = np.arange(len(pair.live))
    marks = pair.sides["A"].mark * np.uint64(0x9E3779B97F4A7C15) + pair.sides["B"].mark
    live = np.flatnonzero(pair.live)
    _, inverse, counts = np.unique(marks[live], return_inverse=True, return_counts=True)
    if not len(counts) or counts.max() < 2:
        return first
    for group in np.flatnonzero(counts > 1):
        members = live[inverse == group].tolist()
        while members:
            one, *others = members
            same = [other for other in others if _is_equal(pair, one, other)]
            first[same] = one
            members = [other for other in others if other not in same]
    return first


def _is_equal(pair: Pair, one: int, other: int) -> bool:
    """Return whether two experts have the same bytes; most that differ do so at their beginning."""
    for half in "AB":
        a, b = pair.ref(half, one), pair.ref(half, other)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        size = a.end - a.start
        for begin, end in ((0, min(size, 4096)), (min(size, 4096), size)):
            views = (each.file.view(each.start + begin, each.start + end) for each in (a, b))
            mine, others = (np.frombuffer(view, np.uint8) for view in views)
            if not np.array_equal(mine, others):
                return False
    return True


def _equal_block(first: NDArray[np.int64], live: NDArray[np.bool_]) -> int:
    """Return the length of neighboring blocks of equal experts that make up the layer; 0 if none does.

    Some trainers share one pair among all experts of a process: Megatron-Bridge does unless told otherwise.
    """
    experts = np.arange(len(first))
    for length in range(2, len(first) + 1):
        if len(first) % length == 0 and live.all() and (first == experts // length * length).all():
            return length
    return 0


def _check_trained_block(adapter: Adapter, pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report that in every layer the same block of experts is trained, and no other."""
    layers: dict[int, NDArray[np.bool_]] = {}
    for pair in pairs:
        before = layers.get(pair.layer)
        if before is not None and len(before) != len(pair.live):
            return
        layers[pair.layer] = pair.live if before is None else before | pair.live
    masks = list(layers.values())
    if len(masks) < _FEW_LAYERS or len(masks[0]) < _FEW_EXPERTS:
        return
    if not all(np.array_equal(mask, masks[0]) for mask in masks[1:]):
        return
    if n := block_count(masks[0]):
        on = np.flatnonzero(masks[0])
        found = f"experts {on[0]} to {on[-1]} have LoRA in each of {len(masks)} layers, all others none"
        yield problem("KTB408", str(adapter.path), f"{found} (1/{n} of {len(masks[0])})")


# --- sizes


def _check_sizes(adapter: Adapter, pairs: Sequence[Pair]) -> Iterator[Problem]:
    """Report layers whose largest value is far from that of the same module in most layers."""
    table: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for pair in pairs:
        if live := pair.live.nonzero()[0].tolist():
            for half, side in pair.sides.items():
                table[pair.name, half][pair.layer] = float(side.size[live].max())
    found = []
    for (name, half), sizes in table.items():
        if len(sizes) < _FEW_LAYERS:
            continue
        median = float(np.median(list(sizes.values())))
        for layer, size in sizes.items():
            if not median / FAR <= size <= median * FAR:
                found.append((layer, f"{half} of {name}", size, median))
    if found:
        layer, what, size, median = min(found)
        layers = sorted({each[0] for each in found})
        more = f" ({len(layers)} layers like it)" if len(layers) > 1 else ""
        shown = f"the largest value of {what} in layer {layer} is {size:.2g}{more}"
        yield problem("KTB409", str(adapter.path), shown, f"about {median:.2g}, the layers' median")
