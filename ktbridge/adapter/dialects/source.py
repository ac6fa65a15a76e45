"""The intermediate form of every dialect: one adapter, tensors by role, data loaded on demand.

All dialects hold the same numbers in different orders, so a tensor is handled as bit patterns: uint16
for BF16 and F16, uint32 for F32. Moving bits can't round, so every dialect
is exact by construction. Only ``to_bf16`` and ``times`` change values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktbridge.adapter.adapter import CONFIG_FILE
from ktbridge.adapter.keys import HALVES, PROJECTIONS
from ktbridge.adapter.scales import Numbers, plain_alpha
from ktbridge.adapter.values import rounding_findings, scaled_exactly, to_bf16
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.model import Entry, Fingerprint, Tensor, TensorFile
from ktbridge.model.stamps import Stamps
from ktbridge.model.tensorfile import DTYPE_BITS

Bits = NDArray[Any]
Slot = tuple[int, str, str]  # layer, "gate" | "up" | "down", "A" | "B"
BITS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<u2"),
    "F32": np.dtype("<u4"),
}


class Block(NamedTuple):
    """A tensor of known dtype and shape whose bit patterns are loaded on demand."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Bits]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def then(self, shape: tuple[int, ...], change: Callable[[Bits], Bits]) -> Block:
        """The same dtype, rearranged into another shape."""
        return Block(self.dtype, shape, lambda: change(self.load()))

    def times(self, factor: float, where: str) -> Block:
        """Values times a power of two; KtbridgeError on loading if one of them would round."""
        if factor == 1.0:
            return self

        def load() -> Bits:
            scaled = scaled_exactly(bytes_of(self.load()), self.dtype, factor)
            if scaled is None:
                raise KtbridgeError(
                    f"{where} has values that can't be scaled by {factor:g} in {self.dtype} "
                    "without rounding",
                    "choose a format with a scale of its own for either half: kt-split, peft-fused",
                )
            return np.frombuffer(scaled, BITS[self.dtype]).reshape(self.shape)

        return Block(self.dtype, self.shape, load)

    def to_bf16(self, where: str) -> Block:
        """Values rounded to bfloat16; KtbridgeError on loading if one would become infinite."""
        if self.dtype == "BF16":
            return self

        def load() -> Bits:
            rounded = to_bf16(bytes_of(self.load()), self.dtype)
            if rounded is None:
                raise KtbridgeError(
                    f"{where} has values that bfloat16 can't hold", "convert with --dtype keep"
                )
            return np.frombuffer(rounded, BITS["BF16"]).reshape(self.shape)

        return Block("BF16", self.shape, load)


def bytes_of(bits: Bits) -> memoryview:
    """The bytes of bit patterns, row by row."""
    whole: Any = np.ascontiguousarray(bits)
    return memoryview(whole).cast("B") if whole.size else memoryview(b"")


def block_of(file: TensorFile, entry: Entry) -> Block:
    """A tensor of a safetensors file, without reading it. Its dtype must be a key of BITS."""

    def load() -> Bits:
        # Not mapped: truncating a mapped file would kill the process (SIGBUS).
        data = file.read(entry.start, entry.end)
        return np.frombuffer(data, BITS[entry.dtype]).reshape(entry.shape)

    return Block(entry.dtype, entry.shape, load)


def block_of_tensor(dtype: str, shape: tuple[int, ...], tensor: Callable[[], Tensor]) -> Block:
    """A tensor loaded by a callback."""
    return Block(dtype, shape, lambda: np.frombuffer(tensor().data, BITS[dtype]).reshape(shape))


class LastLoaded:
    """Keeps the most recently loaded block: writing expert by expert loads each stack once."""

    def __init__(self) -> None:
        self._key: Any = None
        self._bits: Bits = np.empty(0, np.uint16)

    def __call__(self, key: Any, block: Block) -> Bits:
        if key != self._key:
            self._bits = np.ascontiguousarray(block.load())
            self._key = key
        return self._bits


@dataclass
class Source:
    """An adapter of any dialect.

    ``experts``: (layer, projection, half) -> stacked block: gate/up A [E,r,H], B [E,I,r]; down
    A [E,r,I], B [E,H,r]; all served at ``alpha/rank``. ``nonexpert``: PEFT key with
    ``base_model.model.`` -> A [r,in] or B [out,r], served at ``nonexpert_alpha/nonexpert_rank``, or
    at alpha/sqrt(rank) with ``use_rslora``. ``kept`` are configuration fields to preserve.
    ``prefix`` precedes ``layers.N`` in module paths, used if there is no non-expert key. ``stamps``:
    size, time and inode of the files read (``ktbridge.adapter.sources``). ``trained_on``: the base
    model's fingerprint, if a manifest has one.
    """

    path: Path
    format: str
    rank: int
    alpha: float
    nonexpert_rank: int
    nonexpert_alpha: float
    use_rslora: bool = False
    base_model: str | None = None
    prefix: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    experts: dict[Slot, Block] = field(default_factory=dict)
    nonexpert: dict[str, Block] = field(default_factory=dict)
    stamps: Stamps = field(default_factory=dict)
    trained_on: Fingerprint | None = None
    tensors_in: int = 0
    findings: list[Problem] = field(default_factory=list)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _, _ in self.experts}))

    @property
    def projections(self) -> tuple[str, ...]:
        """Adapted projections in the order gate, up, down."""
        present = {projection for _, projection, _ in self.experts}
        return tuple(name for name in PROJECTIONS if name in present)

    @property
    def num_experts(self) -> int:
        return max((block.shape[0] for block in self.experts.values()), default=0)

    @property
    def bytes_in(self) -> int:
        """Bytes of tensor data, as the raw layout counts them."""
        blocks = [*self.experts.values(), *self.nonexpert.values()]
        return sum(block.nbytes for block in blocks)

    @property
    def plain_alpha(self) -> float:
        """The alpha that gives the non-expert LoRA the same scale without rsLoRA."""
        return plain_alpha(Numbers(self.nonexpert_rank, self.nonexpert_alpha), self.use_rslora)

    def in_bf16(self) -> Source:
        """This adapter rounded to bfloat16, with a finding if that changes values."""
        blocks = [*self.experts.values(), *self.nonexpert.values()]
        self.findings += rounding_findings(str(self.path), (block.dtype for block in blocks))
        self.experts = {
            slot: block.to_bf16(f"{self.path}: layer {slot[0]} {slot[1]}_proj")
            for slot, block in self.experts.items()
        }
        self.nonexpert = {
            key: block.to_bf16(f"{self.path}: {key}") for key, block in self.nonexpert.items()
        }
        return self


def refusal(where: str, found: str, next_step: str, expected: str = "") -> Problem:
    """The requested format can't represent the adapter without changing its result."""
    return problem("KTB720", where, found, expected, next_step=next_step)


def note(where: str, found: str) -> Problem:
    """Conversion changed values (scaled, padded, rounded) or dropped some, and why."""
    return problem("KTB721", where, found)


def check_source(source: Source) -> Iterator[Problem]:
    """Check that the parts match: halves, layers, experts, ranks, sizes, dtypes."""
    where = str(source.path)
    yield from _check_slots(source, where)
    counts = {block.shape[0] for block in source.experts.values() if block.shape}
    if len(counts) > 1:
        yield problem("KTB204", where, f"numbers of experts differ: {sorted(counts)}")
    sizes: dict[str, int] = {}
    for (layer, projection, half), block in sorted(source.experts.items()):
        place = f"{where}: layer {layer} {projection}_proj.lora_{half}"
        if block.dtype not in BITS:
            yield problem("KTB303", place, f"is {block.dtype}", "BF16, F16 or F32")
        if len(block.shape) != 3 or 0 in block.shape:
            yield problem("KTB302", place, f"has shape {list(block.shape)}")
            continue
        _, rows, columns = block.shape
        rank, size = (rows, columns) if half == "A" else (columns, rows)
        if rank != source.rank:
            yield problem("KTB301", place, f"has rank {rank}", f"rank {source.rank}")
        name = "H" if (projection == "down") == (half == "B") else "I"
        if sizes.setdefault(name, size) != size:
            yield problem("KTB302", place, f"has {name} = {size}", f"{name} = {sizes[name]}")
    for key, block in source.nonexpert.items():
        yield from _check_nonexpert(source, key, block)
    if source.nonexpert and source.nonexpert_alpha <= 0:
        yield problem("KTB103", f"{where}/{CONFIG_FILE}", "has no usable lora_alpha")


def _check_slots(source: Source, where: str) -> Iterator[Problem]:
    for layer in source.layers:
        lacking = [
            f"{projection}_proj.lora_{half}"
            for projection in source.projections
            for half in HALVES
            if (layer, projection, half) not in source.experts
        ]
        if lacking:
            found = f"has no {', '.join(lacking)}"
            yield problem("KTB203", f"{where}: layer {layer}", found, "the other layers' inventory")


def _check_nonexpert(source: Source, key: str, block: Block) -> Iterator[Problem]:
    place = f"{source.path}: {key}"
    if block.dtype not in BITS:
        yield problem("KTB303", place, f"is {block.dtype}", "BF16, F16 or F32")
    half = "A" if ".lora_A." in key else "B"
    other = key.replace(f".lora_{half}.", ".lora_B." if half == "A" else ".lora_A.")
    if other not in source.nonexpert:
        yield problem("KTB202", place, "has no counterpart", "lora_A and lora_B")
    if len(block.shape) != 2:
        yield problem("KTB302", place, f"has shape {list(block.shape)}", "[r, in] or [out, r]")
    elif block.shape[0 if half == "A" else 1] != source.nonexpert_rank:
        found = f"has rank {block.shape[0 if half == 'A' else 1]}"
        yield problem("KTB301", place, found, f"rank {source.nonexpert_rank}")
