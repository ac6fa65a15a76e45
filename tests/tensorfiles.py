"""Safetensors files for tests: tensors of any dtype, as bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping

from ktbridge.model import Tensor
from ktbridge.model.tensorfile import DTYPE_BITS, build_header


def write_tensor_file(
    path: str | os.PathLike[str],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a new file, wider types first so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    for tensor in ordered:
        assert math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] == 8 * tensor.nbytes, tensor
    with open(path, "xb") as file:
        file.write(build_header([(t.name, t.dtype, t.shape) for t in ordered], metadata))
        for tensor in ordered:
            file.write(memoryview(tensor.data).cast("B"))
