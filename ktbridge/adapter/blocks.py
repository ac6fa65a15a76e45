"""Tensors that are planned but not yet read, and the directories to be written from them.

All formats hold the same numbers in different orders, so a tensor is handled as bit patterns: uint16
for BF16 and F16, uint32 for F32. Moving bits can't round, so every format is exact by construction.
Only ``Block.to_bf16`` and ``Block.times`` change values.

numpy is imported where values are read: a conversion between KT's own layouts only copies bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ktbridge.adapter.values import scaled_exactly, to_bf16
from ktbridge.errors import KtbridgeError
from ktbridge.model import Entry, Tensor, TensorFile
from ktbridge.model.tensorfile import DTYPE_BITS, build_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[Any]
# numpy's type for the bit patterns of each dtype that an adapter may have.
BITS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}


class Span(NamedTuple):
    """A range of bytes of an input file, which holds values of ``dtype``."""

    file: TensorFile
    start: int
    end: int
    dtype: str


class Block(NamedTuple):
    """A tensor of known dtype and shape whose bit patterns are read on demand.

    Either ``span`` is set: the values lie there in this order, and are rounded to ``dtype`` and
    multiplied by ``factor`` on reading; or ``make`` computes them. ``parts`` are the matrices of a
    stack that the input holds as one tensor per expert.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Bits] | None = None
    span: Span | None = None
    factor: float = 1.0
    parts: tuple[Block, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def tensors(self) -> int:
        """The number of tensors of the input."""
        return len(self.parts) or 1

    def load(self) -> Bits:
        """The bit patterns, in ``shape``."""
        import numpy as np

        if self.span is None:
            assert self.make is not None
            return self.make()
        file, start, end, _ = self.span
        # Not mapped: truncating a mapped file would kill the process (SIGBUS).
        data = converted(file.read(start, end), self.span, start, self.dtype, self.factor)
        return np.frombuffer(data, BITS[self.dtype]).reshape(self.shape)

    def then(self, shape: tuple[int, ...], change: Callable[[Bits], Bits]) -> Block:
        """The same dtype, rearranged into another shape."""
        return Block(self.dtype, shape, lambda: change(self.load()))

    def times(self, factor: float, where: str) -> Block:
        """Values times a power of two; KtbridgeError on loading if one of them would round."""
        if factor == 1.0:
            return self
        if self.span is not None:
            return self._replace(factor=self.factor * factor)
        return self._changed(self.dtype, factor, where)

    def to_bf16(self, where: str) -> Block:
        """Values rounded to bfloat16; KtbridgeError on loading if one would become infinite."""
        parts = tuple(part.to_bf16(where) for part in self.parts)
        if self.dtype == "BF16":
            return self._replace(parts=parts)
        if self.span is not None:
            return self._replace(dtype="BF16")
        return self._changed("BF16", 1.0, where)._replace(parts=parts)

    def _changed(self, dtype: str, factor: float, where: str) -> Block:
        def make() -> Bits:
            import numpy as np

            data = _changed(bytes_of(self.load()), self.dtype, dtype, factor, where)
            return np.frombuffer(data, BITS[dtype]).reshape(self.shape)

        return Block(dtype, self.shape, make)


class Piece(NamedTuple):
    """Consecutive tensors of an output file, all of one ``shape``: together they are ``block``."""

    keys: Sequence[str]
    shape: tuple[int, ...]
    block: Block


def piece(key: str, block: Block) -> Piece:
    """A block that is written as one tensor."""
    return Piece((key,), block.shape, block)


# (name, dtype, shape) of each tensor of a file, in order
Rows = Iterable[tuple[str, str, tuple[int, ...]]]


def safetensors_header(name: str, rows: Rows) -> bytes:
    """The header of a safetensors file; PEFT's loader requires the format, KT's file has none."""
    return build_header(rows, {"format": "pt"} if name.startswith("adapter_model") else None)


@dataclass
class Output:
    """One directory to write: its configuration, and its tensors by file.

    ``layout``, ``rank`` and ``alpha`` go into the manifest; so does ``experts``, so that our own
    directories are read back unchanged. ``header`` makes the bytes before a file's first tensor from the
    file's name and its rows; each tensor is padded to a multiple of ``alignment`` bytes.
    """

    layout: str
    config: dict[str, Any]
    files: dict[str, list[Piece]]
    rank: int
    alpha: float
    experts: dict[str, Any] = field(default_factory=dict)
    weight_format: str | None = None
    header: Callable[[str, Rows], bytes] = safetensors_header
    alignment: int = 1
    path: Path = Path()

    def rows(self, name: str) -> Rows:
        """The tensors of one file."""
        return (
            (key, piece.block.dtype, piece.shape)
            for piece in self.files[name]
            for key in piece.keys
        )

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.files.values() for piece in pieces]

    @property
    def nbytes(self) -> int:
        return sum(piece.block.nbytes for piece in self.pieces)

    def as_dict(self) -> dict[str, Any]:
        """A summary, for reports. ``target_parameters`` are listed with the modules."""
        parameters = self.config.get("target_parameters", [])
        leaves = {name.removesuffix(".weight").rpartition(".")[2] for name in parameters}
        return {
            "layout": self.layout,
            "path": str(self.path),
            "tensors": sum(len(piece.keys) for piece in self.pieces),
            "bytes": self.nbytes,
            "rank": self.rank,
            "alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "target_modules": self.config["target_modules"] + sorted(leaves),
        }


class Copy(NamedTuple):
    """One step of a conversion: bytes that are read or computed once, and appended to outputs.

    They become values of ``dtype``; output ``targets[i]`` gets them times ``factors[i]``, followed
    by ``padding`` zero bytes.
    """

    source: Span | Block
    dtype: str
    targets: tuple[int, ...]
    factors: tuple[float, ...]
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are read or computed."""
        source = self.source
        return source.end - source.start if isinstance(source, Span) else source.nbytes


def plan_copies(outputs: Sequence[Output], files: Sequence[TensorFile] = ()) -> list[Copy]:
    """The steps that write all ``outputs``; their targets number the outputs' files in order.

    It also sorts the pieces of each file: wider types come first, so that every tensor is aligned;
    then the order is the outputs', or that of the input if ``files`` lists its files. Bytes that two
    outputs need at the same time are read once, and neighbouring ranges are joined.
    """
    number = {id(file): place for place, file in enumerate(files)}

    def place(piece: Piece) -> tuple[int, ...]:
        bits, span = -DTYPE_BITS[piece.block.dtype], piece.block.span
        return (bits,) if span is None or not files else (bits, number[id(span.file)], span.start)

    steps: list[tuple[int, Piece, int]] = []
    target = 0
    for output in outputs:
        for pieces in output.files.values():
            if output.alignment == 1:
                pieces.sort(key=place)
            steps += [(target, piece, output.alignment) for piece in pieces]
            target += 1
    if files:
        steps.sort(key=lambda step: place(step[1]))
    copies: list[Copy] = []
    for target, (_, _, block), alignment in steps:
        source = block.span or block
        last = copies[-1] if copies else None
        if last and last[:2] == (source, block.dtype) and target not in last.targets:
            targets, factors = (*last.targets, target), (*last.factors, block.factor)
            copies[-1] = last._replace(targets=targets, factors=factors)
        else:
            padding = -block.nbytes % alignment if alignment > 1 else 0
            copies.append(Copy(source, block.dtype, (target,), (block.factor,), padding))
    return _joined(copies)


def _joined(copies: list[Copy]) -> list[Copy]:
    joined: list[Copy] = []
    for copy in copies:
        last, source = joined[-1] if joined else None, copy.source
        if (
            last is not None
            and isinstance(source, Span)
            and isinstance(last.source, Span)
            and last.source.file is source.file
            and (last.source.end, last.source.dtype) == (source.start, source.dtype)
            and last[1:] == (*copy[1:4], 0)
        ):
            span = last.source._replace(end=source.end)
            joined[-1] = copy._replace(source=span)
        else:
            joined.append(copy)
    return joined


def count_dtypes(blocks: Sequence[Block]) -> Counter[str]:
    """The number of the input's tensors of each dtype."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts[block.dtype] += block.tensors
    return counts


def bytes_of(bits: Bits) -> memoryview:
    """The bytes of bit patterns, row by row."""
    import numpy as np

    whole: Any = np.ascontiguousarray(bits)
    return memoryview(whole).cast("B") if whole.size else memoryview(b"")


def block_of(file: TensorFile, entry: Entry) -> Block:
    """A tensor of a safetensors file, without reading it. Its dtype must be a key of BITS."""
    _, dtype, shape, start, end = entry
    return Block(dtype, shape, None, Span(file, start, end, dtype))


def block_of_tensor(dtype: str, shape: tuple[int, ...], tensor: Callable[[], Tensor]) -> Block:
    """A tensor loaded by a callback."""

    def make() -> Bits:
        import numpy as np

        return np.frombuffer(tensor().data, BITS[dtype]).reshape(shape)

    return Block(dtype, shape, make)


def block_in_memory(tensor: Tensor) -> Block:
    """A tensor that is there, of any dtype that safetensors have."""

    def make() -> Bits:
        import numpy as np

        return np.frombuffer(tensor.data, np.uint8)

    if math.prod(tensor.shape) * DTYPE_BITS.get(tensor.dtype, 0) != 8 * tensor.nbytes:
        raise KtbridgeError(
            f"tensor {tensor.name!r} has {tensor.nbytes} bytes, "
            f"not {tensor.dtype} of shape {list(tensor.shape)}"
        )
    return Block(tensor.dtype, tensor.shape, make)


def converted(
    data: memoryview, span: Span, start: int, dtype: str, factor: float
) -> memoryview | bytes:
    """Values of ``span`` (``data``, from byte ``start`` on) rounded to ``dtype``, times ``factor``.

    KtbridgeError, which names the tensor, for a value that this would change otherwise.
    """
    if dtype == span.dtype and factor == 1.0:
        return data
    file = span.file
    try:
        return _changed(data, span.dtype, dtype, factor, str(file.path))
    except KtbridgeError:
        for entry in file.entries.values():
            if entry.end > start and entry.start < start + len(data):
                where = f"{file.path}: {entry.name}"
                _changed(file.read(entry.start, entry.end), span.dtype, dtype, factor, where)
        raise


def _changed(
    data: memoryview, stored: str, dtype: str, factor: float, where: str
) -> memoryview | bytes:
    changed: memoryview | bytes = data
    if dtype != stored:
        rounded = to_bf16(data, stored)
        if rounded is None:
            raise KtbridgeError(
                f"{where} has finite values beyond bfloat16's range", "use --dtype keep"
            )
        changed = rounded
    if factor != 1.0:
        scaled = scaled_exactly(memoryview(changed), dtype, factor)
        if scaled is None:
            raise KtbridgeError(
                f"{where} has values that can't be scaled by {factor:g} in {dtype} "
                "without rounding",
                "choose a format with a scale of its own for either half: kt-split, peft-fused",
            )
        changed = scaled
    return changed
