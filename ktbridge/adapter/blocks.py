"""Tensors that are planned but not yet read, and the few ways in which a value may change.

All formats hold the same numbers in different orders, so a tensor is handled as bit patterns: uint16
for BF16 and F16, uint32 for F32. Moving bits can't round, so every format is exact by construction.
Only ``Block.to`` (rounding) and ``Block.scaled`` change values.

numpy is imported where values are read: a conversion between KT's own layouts only copies bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ktbridge.errors import KtbridgeError
from ktbridge.model import Tensor, TensorRef
from ktbridge.model.tensor import as_float32
from ktbridge.model.tensorfile import DTYPE_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[Any]
Buffer = memoryview | bytes
# numpy's type for the bit patterns of each dtype that an adapter may have.
BITS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}


class Block(NamedTuple):
    """A tensor of known dtype and shape whose bit patterns are read on demand.

    Either ``ref`` is set: the values lie there in this order, and are rounded to ``dtype`` and
    multiplied by ``factor`` on reading; or ``make`` computes them. ``parts`` are the matrices of a
    stack that the input holds as one tensor per expert.
    """

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Bits] | None = None
    ref: TensorRef | None = None
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

        if self.ref is None:
            assert self.make is not None
            return self.make()
        # Not mapped: truncating a mapped file would kill the process (SIGBUS).
        data = converted(self.ref.read(), self.ref, self.ref.start, self.dtype, self.factor)
        return np.frombuffer(data, BITS[self.dtype]).reshape(self.shape)

    def then(self, shape: tuple[int, ...], change: Callable[[Bits], Bits]) -> Block:
        """The same dtype, rearranged into another shape."""
        return Block(self.dtype, shape, lambda: change(self.load()))

    def to(self, dtype: str, where: str = "") -> Block:
        """Values widened to "F32", or rounded to "BF16"; KtbridgeError on loading if one gets infinite."""
        parts = tuple(part.to(dtype, where) for part in self.parts)
        if dtype == self.dtype or self.ref is not None:
            return self._replace(dtype=dtype, parts=parts)
        return self._changed(dtype, 1.0, where)._replace(parts=parts)

    def scaled(self, factor: float, where: str) -> Block:
        """Values times ``factor``, each rounded once in float32; a power of two multiplies any dtype exactly.

        KtbridgeError on loading if a value would round though.
        """
        if factor == 1.0:
            return self
        parts = tuple(part.scaled(factor, where) for part in self.parts)
        exact = math.frexp(factor)[0] == 0.5
        if exact and self.ref is not None:
            return self._replace(factor=self.factor * factor, parts=parts)
        if exact:
            return self._changed(self.dtype, factor, where)._replace(parts=parts)
        assert self.dtype == "F32"

        def make() -> Bits:
            import numpy as np

            values = self.load().view(np.float32) * np.float64(factor)
            return values.astype(np.float32).view(BITS["F32"])

        return Block(self.dtype, self.shape, make, parts=parts)

    def _changed(self, dtype: str, factor: float, where: str) -> Block:
        def make() -> Bits:
            import numpy as np

            data = _changed(bytes_of(self.load()), self.dtype, dtype, factor, where)
            return np.frombuffer(data, BITS[dtype]).reshape(self.shape)

        return Block(dtype, self.shape, make)


def bytes_of(bits: Bits) -> memoryview:
    """The bytes of bit patterns, row by row."""
    import numpy as np

    whole: Any = np.ascontiguousarray(bits)
    return memoryview(whole).cast("B") if whole.size else memoryview(b"")


def padded(block: Block, axis: int, rank: int) -> Block:
    """A block with zeros up to ``rank`` on one axis."""
    if block.shape[axis] == rank:
        return block
    missing = [(0, 0)] * len(block.shape)
    missing[axis] = (0, rank - block.shape[axis])
    shape = (*block.shape[:axis], rank, *block.shape[axis + 1 :])

    def pad(bits: Bits) -> Bits:
        import numpy as np

        return np.pad(bits, missing)

    return block.then(shape, pad)


def scaled_each(block: Block, factors: Sequence[float], where: str) -> Block:
    """A stack in which each expert's matrix is multiplied by its own factor."""
    if len(set(factors)) == 1:
        return block.scaled(factors[0], where)
    if block.parts:
        parts = zip(block.parts, factors, strict=True)
        return block_of_stack(tuple(part.scaled(factor, where) for part, factor in parts), where)

    def slice_of(expert: int) -> Block:
        return block.then(block.shape[1:], lambda bits: bits[expert])

    each = tuple(slice_of(e).scaled(factor, where) for e, factor in enumerate(factors))
    return block_of_stack(each, where)._replace(parts=())


def block_of(ref: TensorRef) -> Block:
    """A tensor of a safetensors file, without reading it. Its dtype must be a key of BITS."""
    return Block(ref.dtype, ref.shape, ref=ref)


def block_of_stack(parts: tuple[Block, ...], where: str) -> Block:
    """Matrices of one file or several as one tensor, without reading them.

    KtbridgeError on loading if they aren't alike; ``where`` is for its message.
    """
    first, refs = parts[0], [part.ref for part in parts if part.ref is not None]
    alike = all(part[:2] == first[:2] for part in parts)
    shape = (len(parts), *first.shape)
    if (
        alike
        and len(refs) == len(parts)
        and len({part.factor for part in parts}) == 1
        and all(a.file is b.file and a.end == b.start for a, b in pairwise(refs))
    ):
        whole = refs[0].through(refs[-1])
        return Block(first.dtype, shape, ref=whole, factor=first.factor, parts=parts)

    def make() -> Bits:
        import numpy as np

        if not alike:
            raise KtbridgeError(f"{where} has matrices of several shapes or dtypes")
        return np.stack([part.load() for part in parts])

    return Block(first.dtype, shape, make, parts=parts)


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


def converted(data: memoryview, ref: TensorRef, start: int, dtype: str, factor: float) -> Buffer:
    """Values of ``ref`` (``data``, from byte ``start`` on) rounded to ``dtype``, times ``factor``.

    KtbridgeError, which names the tensor, for a value that this would change otherwise.
    """
    if dtype == ref.dtype and factor == 1.0:
        return data
    file = ref.file
    try:
        return _changed(data, ref.dtype, dtype, factor, str(file.path))
    except KtbridgeError:
        for entry in file.entries.values():
            if entry.end > start and entry.start < start + len(data):
                where = f"{file.path}: {entry.name}"
                _changed(file.read(entry.start, entry.end), ref.dtype, dtype, factor, where)
        raise


def _changed(data: memoryview, stored: str, dtype: str, factor: float, where: str) -> Buffer:
    changed: Buffer = data
    if dtype != stored and dtype == "F32":
        changed = as_float32(data, stored).tobytes()
    elif dtype != stored:
        rounded = to_bf16(data, stored)
        if rounded is None:
            raise KtbridgeError(f"{where} has finite values beyond bfloat16's range", "use --dtype keep")
        changed = rounded
    if factor != 1.0:
        scaled = _scaled(changed, dtype, factor)
        if scaled is None:
            raise KtbridgeError(
                f"{where} has values that can't be scaled by {factor:g} in {dtype} without rounding",
                "pass --dtype f32, or choose a format with a scale of its own for either half: kt-split, "
                "peft-fused",
            )
        changed = scaled
    return changed


def to_bf16(data: memoryview, dtype: str) -> bytes | None:
    """F32 or F16 values rounded to the nearest bfloat16, ties to even (IEEE 754).

    None if a finite value would become infinite. NaN stays NaN.
    """
    import numpy as np

    from ktbridge.adapter import floats

    values = as_float32(data, dtype)
    nan, finite = np.isnan(values), np.isfinite(values)
    quiet = (values.view(np.uint32)[nan] >> 16) | 0x40
    rounded = floats.to_bf16(values)
    rounded[nan] = quiet
    if np.any(finite & ((rounded & 0x7FFF) == 0x7F80)):
        return None
    return bytes(rounded.tobytes())


def _scaled(data: Buffer, dtype: str, factor: float) -> bytes | None:
    """``data`` times a power of two in the same dtype; None if a value would round, over- or underflow."""
    import numpy as np

    values = as_float32(data, dtype)
    with np.errstate(all="ignore"):
        product = values * np.float32(factor)
        if dtype == "BF16":
            bits = product.view(np.uint32)
            result = (bits >> 16).astype(np.uint16)
            exact = not (bits & 0xFFFF).any()
        else:
            result = product.astype(np.float16 if dtype == "F16" else np.float32)
            exact = True
        back = as_float32(result.tobytes(), dtype) / np.float32(factor)
    if not exact or not np.array_equal(back, values):
        return None
    return bytes(result.tobytes())
