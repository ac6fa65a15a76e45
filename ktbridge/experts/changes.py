"""Tell whether parameters have changed since something was made of them.

``Tensor._version`` alone doesn't: torch's fused optimizers (2.13) and changes by way of ``.data`` leave it as
it is. So optimizer steps count, too, whoever's optimizer it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import optimizer

_steps = 0


def _count(*_: object) -> None:
    global _steps
    _steps += 1


optimizer.register_optimizer_step_post_hook(_count)


def state_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return what is another tuple once one of ``tensors`` has been changed, replaced or moved."""
    return _steps, *(n for tensor in tensors for n in (tensor.data_ptr(), tensor._version))
