"""Gradient checkpointing around CPU experts: what the GPU computed is computed again, the experts are not.

A checkpointed decoder layer drops its activations and runs forward once more in backward. For the experts
that would be the most expensive part of a step, and needless: what their backward needs (``activation``: how
much) is kept by the kernels, on the host, and their output, [T, H] bfloat16 a layer, is kept here and
handed out again. Same results, a forward of the experts saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_here = threading.local()


class _Outputs:
    """The experts' outputs of one checkpointed region, in the order of its calls."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with _mode("record", self.kept.append):
            yield


class _Replay(AbstractContextManager[None]):
    """Hands a region's outputs out again; entered once for each backward through it."""

    def __init__(self, outputs: _Outputs) -> None:
        self._outputs = outputs

    def __enter__(self) -> None:
        self._before = getattr(_here, "mode", None)
        _here.mode = ("replay", iter(self._outputs.kept))

    def __exit__(self, *_: object) -> None:
        _here.mode = self._before


@contextmanager
def _mode(name: str, with_what: Any) -> Iterator[None]:
    before = getattr(_here, "mode", None)
    _here.mode = (name, with_what)
    try:
        yield
    finally:
        _here.mode = before


def aside() -> AbstractContextManager[None]:
    """A block whose experts have nothing to do with the region around it: not recorded, not replayed."""
    return _mode("aside", None)


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint``'s ``context_fn``: around the first forward, around the second."""
    outputs = _Outputs()
    return outputs.recorded(), _Replay(outputs)


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
    """Whether a region's first forward is under way."""
    mode = getattr(_here, "mode", None)
    return mode is not None and mode[0] == "record"


def record(out: Any) -> None:
    """Keep what a call of the experts shall find the second time, if a region is being recorded.

    That is its output [T, H], which nobody else may change, and what else its backward takes.
    """
    if recording():
        _here.mode[1](out)


def replayed() -> Any:
    """What the same call recorded in the first forward; None outside a second one."""
    mode = getattr(_here, "mode", None)
    if mode is None or mode[0] != "replay":
        return None
    return next(mode[1])
