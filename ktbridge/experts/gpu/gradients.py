"""LoRA gradients from the GPU to where the masters are, added to ``.grad`` before backward returns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

_coming: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]]] = {}
"""By autograd's number of a backward pass: masters on the host, their gradients, the event of arrival."""


def add_gradients(found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add float32 gradients to the ``.grad`` of their parameters, called within a backward pass.

    The first takes the place of a gradient that isn't there yet. Where a parameter is on the host and its
    gradient is not, it crosses through pinned memory and is added before that backward pass returns.
    """
    for parameter, gradient in found:
        if parameter.device == gradient.device:
            _add(parameter, gradient)
            continue
        pinned = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu", pin_memory=True)
        pinned.copy_(gradient, non_blocking=True)
        arrived = torch.cuda.current_stream(gradient.device).record_event()
        number = torch._C._current_graph_task_id()
        if number not in _coming:
            _coming.clear()  # of a pass that raised half-way
            _coming[number] = []
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(_finish, number))  # type: ignore[attr-defined]
        _coming[number].append((parameter, pinned, arrived))


def _finish(number: int) -> None:
    for parameter, gradient, arrived in _coming.pop(number, ()):
        arrived.synchronize()
        _add(parameter, gradient)


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
