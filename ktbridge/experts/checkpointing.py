"""Gradient checkpointing around CPU experts: what the GPU computed is computed again, the experts are not.

A checkpointed decoder layer drops its activations and runs forward once more in backward. For the experts
that would be the most expensive part of a step, and needless: what their backward needs (``activation``: how
much) is kept by the kernels, on the host, and their output, [T, H] bfloat16 a layer, is kept here and
handed out again. Same results, a forward of the experts saved.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Literal

_here = threading.local()


class _Mode(AbstractContextManager[None]):
    """Within it, calls of the experts are recorded in ``outputs``, or find those again in their order.

    Entered once for the forward of a checkpointed region, and once for each backward through it.
    """

    def __init__(self, name: Literal["record", "replay", "aside"], outputs: list[object]) -> None:
        self.name, self.outputs = name, outputs

    def __enter__(self) -> None:
        self._before = _mode()
        self.coming = iter(self.outputs)
        _here.mode = self

    def __exit__(self, *_: object) -> None:
        _here.mode = self._before


def _mode() -> _Mode | None:
    found: _Mode | None = getattr(_here, "mode", None)
    return found


def aside() -> AbstractContextManager[None]:
    """A block whose experts have nothing to do with the region around it: not recorded, not replayed."""
    return _Mode("aside", [])


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``'s ``context_fn``: around the first forward, around the second."""
    outputs: list[object] = []
    return _Mode("record", outputs), _Mode("replay", outputs)


def enable(model: Any) -> None:
    """Switch a transformers model (or a PeftModel around one) to gradient checkpointing.

    Takes effect in training mode. The model's cache is switched off, as transformers asks.
    """
    options = {"use_reentrant": False, "context_fn": contexts}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.20 and later
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # Only reentrant checkpoints need inputs with gradients; without, the first layer's are not computed.
    model.disable_input_require_grads()
    model.config.use_cache = False


def recording() -> bool:
    """Return whether a region's first forward is under way."""
    mode = _mode()
    return mode is not None and mode.name == "record"


def record(out: object) -> None:
    """Keep what a call of the experts shall find the second time, if a region is being recorded.

    That is its output [T, H], which nobody else may change, and what else its backward takes.
    """
    mode = _mode()
    if mode is not None and mode.name == "record":
        mode.outputs.append(out)


def replayed() -> Any:
    """Return what the same call recorded in the first forward; None outside a second one."""
    mode = _mode()
    return next(mode.coming) if mode is not None and mode.name == "replay" else None
