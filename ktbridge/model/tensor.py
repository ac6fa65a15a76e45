"""One tensor of an adapter or a checkpoint, as bytes; numpy and torch conversions on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktbridge.errors import KtbridgeError

if TYPE_CHECKING:  # imported by the methods: adapters are read, checked and converted without torch
    import numpy as np
    import torch
    from numpy.typing import NDArray

_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_TORCH = _NUMPY | {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@dataclass(frozen=True)
class Tensor:
    """One tensor as bytes: row-major ``data`` of ``shape`` in safetensors' ``dtype`` ("BF16").

    ``data`` may be a view into a memory map (read-only, valid as long as the tensor is held).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, shape={list(self.shape)})"

    def numpy(self) -> NDArray[Any]:
        """A copy as a numpy array of ``shape``. BF16, which numpy doesn't have, becomes float32, exactly.

        Raises ``KtbridgeError`` for 8-bit floats and narrower ones.
        """
        import numpy as np

        if self.dtype == "BF16":
            return as_float32(self.data, self.dtype).reshape(self.shape)
        if self.dtype not in _NUMPY:
            raise self._has_no("numpy", "tensor.torch() has its FP8 types, tensor.data the bytes.")
        return np.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape).copy()

    def torch(self) -> torch.Tensor:
        """A copy as a torch tensor of ``shape`` on the CPU, in the stored dtype.

        Raises ``KtbridgeError`` for dtypes that torch doesn't have.
        """
        import torch

        if self.dtype not in _TORCH:
            raise self._has_no("torch", "tensor.data has the bytes.")
        dtype = getattr(torch, _TORCH[self.dtype])
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        # A bytearray, because torch warns about read-only buffers.
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)

    def _has_no(self, package: str, step: str) -> KtbridgeError:
        return KtbridgeError(f"{self.name} is {self.dtype}, which {package} doesn't have.", step)


def as_float32(data: memoryview | bytes | bytearray, dtype: str) -> NDArray[np.float32]:
    """The values of a BF16, F16 or F32 buffer as a flat float32 array (exact), a copy."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float16 if dtype == "F16" else np.float32).astype(np.float32)
