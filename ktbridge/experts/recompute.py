"""Gradient checkpointing around experts: everything else is computed again, the experts are not.

A checkpointed decoder layer drops its activations and runs forward once more in backward. For the experts
that would be the most expensive part of a step, and needless: what their backward needs (``activation``: how
much) is kept by the kernels, on the host, and their output, [T, H] bfloat16 a layer, is kept here and
handed out again. Same results, a forward of the experts saved.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

_here = threading.local()


class _Mode(AbstractContextManager[None]):
    """Within it, calls of the experts are recorded in ``outputs``, or find those again in their order.

    Entered once for the forward of a checkpointed region, and once for each backward through it.
    """

    def __init__(
        self, name: Literal["record", "replay", "unrecorded"], outputs: list[object]
    ) -> None:
        self.name, self.outputs = name, outputs

    def __enter__(self) -> None:
        self._before = _mode()
        self.remaining = iter(self.outputs)
        _here.mode = self

    def __exit__(self, *_: object) -> None:
        _here.mode = self._before


def _mode() -> _Mode | None:
    found: _Mode | None = getattr(_here, "mode", None)
    return found


def unrecorded() -> AbstractContextManager[None]:
    """Return a context whose experts are neither recorded in the region around it nor replayed."""
    return _Mode("unrecorded", [])


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return ``torch.utils.checkpoint``'s contexts: around the first forward, around the second."""
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
    return next(mode.remaining) if mode is not None and mode.name == "replay" else None


class SavedOutput:
    """One layer's output [T, H], to be had again any number of times."""

    def __init__(
        self, out: torch.Tensor, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None
    ) -> None:
        """``out`` may be changed by its owner afterwards. ``streams``: to the host and back; None: stay."""
        self._streams, self._device = streams, out.device
        self._fetched: tuple[torch.Tensor, torch.cuda.Event] | None = None
        copy = out.clone()  # its owner needn't wait for the transfer
        if streams is None:
            self._saved = copy
            return
        leaving, _ = streams
        self._saved = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=True)
        leaving.wait_stream(torch.cuda.current_stream(out.device))
        with torch.cuda.stream(leaving):
            self._saved.copy_(copy, non_blocking=True)
            copy.record_stream(leaving)
        self._left = leaving.record_event()

    def fetch(self) -> None:
        """Begin to bring it back, if it is on the host."""
        if self._streams is None or self._fetched is not None:
            return
        back = self._streams[1]
        with torch.cuda.stream(back):
            back.wait_event(self._left)
            there = self._saved.to(self._device, non_blocking=True)
            self._fetched = there, back.record_event()

    def get(self) -> torch.Tensor:
        """Return a copy for the current stream, which its taker may change."""
        if self._streams is None:
            return self._saved.clone()
        self.fetch()
        assert self._fetched is not None
        there, ready = self._fetched
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready)
        there.record_stream(stream)
        self._fetched = None
        return there


class SavedOutputs:
    """Layers' outputs between a checkpointed forward and its second one, which wants them once more.

    Over all layers they are as large as the layers' inputs, so where GPU memory is short they wait in pinned
    memory of the host: one transfer each way, on streams of their own.
    """

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if on_host and device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._last: dict[int, weakref.ref[SavedOutput]] = {}

    def save(self, layer: int, out: torch.Tensor) -> SavedOutput:
        """Save the output of a layer for its second forward."""
        saved = SavedOutput(out, self._streams)
        self._last[layer] = weakref.ref(saved)
        return saved

    def fetch_before(self, layer: int) -> None:
        """Begin to bring back the output of the layer before ``layer``, whose second forward comes next."""
        before = [other for other in self._last if other < layer]
        saved = self._last[max(before)]() if before else None
        if saved is not None:
            saved.fetch()
