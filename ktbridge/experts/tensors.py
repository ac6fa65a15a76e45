"""Between an adapter's raw tensors (dtype name, shape, bytes) and torch's."""

from __future__ import annotations

import torch

from ktbridge.adapter import Tensor
from ktbridge.errors import KtbridgeError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A torch copy of an adapter's tensor, in its stored dtype. Raises ``KtbridgeError`` for other dtypes."""
    if tensor.dtype not in DTYPES:
        raise KtbridgeError(
            f"{tensor.name} has dtype {tensor.dtype}; an adapter's tensors are {', '.join(DTYPES)}."
        )
    return tensor.torch()


def from_torch(name: str, value: torch.Tensor) -> Tensor:
    """An adapter's tensor holding a copy of ``value``'s bytes."""
    value = value.detach().cpu().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Tensor(name, NAMES[value.dtype], tuple(value.shape), data)
