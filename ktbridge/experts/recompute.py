"""Gradient checkpointing around experts: everything else is computed again, the experts are not.

A checkpointed decoder layer drops its activations and runs forward once more in backward. For the experts
that would be the most expensive part of a step, and needless: what their backward needs (``activation``: how
much) is kept by the kernels, on the host, and their output, [T, H] bfloat16 a layer, is kept here and
handed out again. Same results, a forward of the experts saved.

Over all layers, inputs and those outputs are what a long step takes of the GPU. With ``outputs_on_host`` both
wait in pinned memory of the host: a transfer each way, on streams of their own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from ktbridge.experts.gpu.placement import ON_WAY

_CHECKPOINT = "_gradient_checkpointing_func"
_here = threading.local()


class _Mode(AbstractContextManager[None]):
    """Within it, calls of the experts are recorded in ``outputs``, or find those again in their order.

    Entered once for the forward of a checkpointed region, and once for each backward through it.
    """

    def __init__(self, name: Literal["record", "replay", "unrecorded"], outputs: list[object]) -> None:
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
    # The check compares what both forwards saved, tensor by tensor: 4 % of the seconds that Python takes.
    options = {"use_reentrant": False, "context_fn": contexts, "determinism_check": "none"}
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 5.20 and later
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # Only reentrant checkpoints need inputs with gradients; without, the first layer's are not computed.
    model.disable_input_require_grads()
    model.config.use_cache = False
    inputs = LayerInputs()
    for module in model.modules():
        # Private: transformers' own offloading (5.21 and later) copies on the stream that computes.
        # tests/experts/test_recompute.py holds that each layer's input comes this way.
        if hasattr(module, _CHECKPOINT):
            setattr(module, _CHECKPOINT, inputs.around(getattr(module, _CHECKPOINT)))


def layer_inputs(model: torch.nn.Module) -> LayerInputs | None:
    """Return the inputs of a model's checkpointed layers; None where ``enable`` wasn't called."""
    for module in model.modules():
        around = getattr(module, _CHECKPOINT, None)
        if isinstance(around, partial) and isinstance(around.args[0], LayerInputs):
            found: LayerInputs = around.args[0]
            return found
    return None


def recording() -> bool:
    """Return whether a region's first forward is under way."""
    mode = _mode()
    return mode is not None and mode.name == "record"


def record(out: object) -> None:
    """Keep what a call of the experts shall find the second time, if a region is being recorded.

    That is its output [T, H], which nobody else may change, and what else its backward takes.
    """
    if recording():
        _here.mode.outputs.append(out)


def replayed() -> Any:
    """Return what the same call recorded in the first forward; None outside a second one."""
    mode = _mode()
    return next(mode.remaining) if mode is not None and mode.name == "replay" else None


class HostStreams:
    """Streams between a GPU and pinned memory of the host, one each way."""

    def __init__(self, device: torch.device) -> None:
        self.leaving, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._events: deque[torch.cuda.Event] = deque()

    def copy_away(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a copy on the host, which is there after the event.

        At most ``ON_WAY`` layers' are under way. Python waits for the one before: else it would run far
        ahead of the GPU, and allocate for each layer.
        """
        if len(self._events) == 2 * ON_WAY:  # an input and an output of each
            self._events.popleft().synchronize()
        away = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self.leaving.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.leaving):
            away.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.leaving)
        self._events.append(self.leaving.record_event())
        return away, self._events[-1]


class HiddenStates:
    """Hidden states between a layer's forward and its backward, to be had again any number of times."""

    def __init__(self, states: torch.Tensor, streams: HostStreams | None) -> None:
        """Without ``streams`` they stay where they are. Their owner may change ``states`` afterwards."""
        self._streams, self._device = streams, states.device
        self._fetched: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._saved = states.detach().clone()  # its owner needn't wait for the transfer
        if streams is not None:
            self._saved, self._left = streams.copy_away(self._saved)

    def fetch(self) -> None:
        """Begin to bring them back, if they are on the host."""
        if self._streams is None or self._fetched is not None:
            return
        back = self._streams.back
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
    """Layers' outputs between a checkpointed forward and its second one, which wants them once more."""

    def __init__(self, streams: HostStreams | None) -> None:
        self._streams = streams
        self._last: dict[int, weakref.ref[HiddenStates]] = {}

    def save(self, layer: int, out: torch.Tensor) -> HiddenStates:
        """Save the output of a layer for its second forward."""
        saved = HiddenStates(out, self._streams)
        self._last[layer] = weakref.ref(saved)
        return saved

    def fetch_before(self, layer: int) -> None:
        """Begin to bring back the output of the layer before ``layer``, whose second forward comes next."""
        before = [other for other in self._last if other < layer]
        saved = self._last[max(before)]() if before else None
        if saved is not None:
            saved.fetch()


class LayerInputs:
    """Inputs of a model's checkpointed layers, on the host between forward and backward if that is wished."""

    def __init__(self) -> None:
        self.streams: HostStreams | None = None
        """None: they stay on the GPU."""
        self._last: weakref.ref[SavedInput] | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``checkpoint`` with its inputs saved here: what is saved within it has hooks of its own."""
        return partial(_checkpoint, self, checkpoint)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedInput:
        """Send hidden states [B, T, H] to the host; anything else stays."""
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return tensor
        saved = SavedInput(HiddenStates(tensor, self.streams), self._last)
        self._last = weakref.ref(saved)
        return saved


@dataclass(frozen=True)
class SavedInput:
    """A layer's input on the host, and that of the layer before, which backward wants next."""

    states: HiddenStates
    before: weakref.ref[SavedInput] | None


def _unpack(packed: torch.Tensor | SavedInput) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    found = packed.states.get()
    before = packed.before and packed.before()
    if before:
        before.states.fetch()
    return found


def _checkpoint(inputs: LayerInputs, checkpoint: Callable[..., Any], *given: Any) -> Any:
    if inputs.streams is None:
        return checkpoint(*given)
    with saved_tensors_hooks(inputs.pack, _unpack):
        return checkpoint(*given)
