"""The routed experts of a model computed on the GPU: some layers resident there, the others streamed.

One ``GpuExperts`` serves all layers of a model. A layer's weights are on the GPU only while they are used,
unless it is resident; its LoRA is read from the parameters, wherever these are, and its gradients go there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ktbridge.errors import UsageError
from ktbridge.experts.expert_call import Lora
from ktbridge.experts.gpu import layer_math, operations
from ktbridge.experts.gpu.layer_math import Bordered, Borders, make_borders
from ktbridge.experts.gpu.layout import ALIGNED, Group, Layer, lay_out
from ktbridge.experts.gpu.ring import Copier, Ring
from ktbridge.experts.gpu.routing import Routing, route
from ktbridge.experts.gpu.streams import Outputs
from ktbridge.experts.gpu.unpack import unpack
from ktbridge.experts.modules import Triple

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """One call at a time, on the executor's device: calls share its matrices and its ring.

    A call in another stream than the last one's waits for it there.
    """

    @functools.wraps(method)
    def call(self: GpuExperts, *args: Any) -> Any:
        with self._lock, contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
                stream = torch.cuda.current_stream(self.device)
                if self._ended is not None:
                    stream.wait_event(self._ended)
                stack.callback(lambda: setattr(self, "_ended", stream.record_event()))
            return method(self, *args)

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class Inputs:
    """What a layer is given: ``hidden`` [T, H] bfloat16, ``weights`` [T, K] float32, and the rows' order."""

    hidden: torch.Tensor
    weights: torch.Tensor
    routing: Routing


class GpuExperts:
    """Computes the experts of ``layers`` (gate, up and down by layer number) on ``device``.

    ``slots`` slots of ``slot_bytes`` hold what is streamed; the layers in ``resident`` stay on the device.
    On the CPU as device it computes the same, in the same order, without streams.
    """

    def __init__(
        self,
        layers: Mapping[int, Triple],
        device: torch.device,
        rank: int,
        *,
        slot_bytes: int,
        slots: int,
        copier: Copier,
        resident: Sequence[int] = (),
        loader: Copier | None = None,
        loaded: Callable[[int], None] | None = None,
        outputs_on_host: bool = False,
    ) -> None:
        """``loader`` copies what is resident (default: ``copier``); ``loaded`` gets each such layer's number.

        ``outputs_on_host``: outputs of checkpointed layers wait there for the second forward.
        """
        self.device = torch.empty(0, device=device).device  # with its index
        self.rank = rank
        self.outputs = Outputs(self.device, outputs_on_host)
        self._lock = threading.RLock()
        self._ended: torch.cuda.Event | None = None
        """The event of the last call's end."""
        self._slot_bytes = -(-slot_bytes // ALIGNED) * ALIGNED
        self._weights = dict(sorted(layers.items()))
        sizes = {(down.rows, gate.rows) for gate, _, down in layers.values()}
        if len(sizes) != 1:
            raise UsageError(f"the layers' experts have different sizes: {sorted(sizes)}.")
        ((self._hidden, self._inner),) = sizes
        self._layers = {
            index: lay_out(weights, self._slot_bytes, self.device, f"layer {index}")
            for index, weights in self._weights.items()
        }
        streamed = self._number([index for index in self._layers if index not in resident])
        self.ring = Ring(streamed, self._slot_bytes, slots, self.device, copier)
        self._work: Bordered | None = None
        self._make_work()
        self._copier = copier
        for index in resident:
            self._load(self._layers[index], loader or copier)
            if loaded is not None:
                loaded(index)

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that aren't resident."""
        return tuple(index for index, layer in self._layers.items() if not layer.resident)

    def _number(self, streamed: Sequence[int]) -> list[Group]:
        """Number the groups of the layers in ``streamed``; all of these, in order."""
        groups: list[Group] = []
        for index in streamed:
            self._layers[index].first = len(groups)
            groups += self._layers[index].groups
        return groups

    def _make_work(self) -> None:
        """The matrices that a streamed group is unpacked into, for the largest."""
        largest = max((len(group.experts) for group in self.ring.groups), default=0)
        if largest > (len(self._work.down) if self._work else 0):
            self._work = None  # its memory first
            self._work = self._bordered(largest)

    def drop(self) -> None:
        """Give the device's memory back; nothing is computed here any more."""
        self._layers.clear()
        self.ring = Ring([], 0, 0, self.device, self._copier)
        self._work = None

    def _bordered(self, experts: int) -> Bordered:
        return Bordered.empty(experts, self._hidden, self._inner, self.rank, self.device)

    @_alone
    def _load(self, layer: Layer, copier: Copier) -> None:
        """Bring a resident layer's weights to the device."""
        made = []
        for group in layer.groups:
            raw = torch.empty(group.bytes, dtype=torch.uint8, device=self.device)
            before = None  # what is queued may still be using this memory
            if self.device.type == "cuda":
                before = torch.cuda.current_stream(self.device).record_event()
            ready = copier.start(group, raw, before)
            ready.wait()
            matrices = self._bordered(len(group.experts))
            unpack(group, raw, layer.weights, matrices)
            if self.device.type == "cuda":  # raw goes back to the allocator
                torch.cuda.current_stream(self.device).synchronize()
            made.append(matrices)
        layer.resident = tuple(made)

    def _matrices(
        self,
        layer: Layer,
        number: int,
        given: Borders | None,
        scale: float,
        forward: bool,
        turns: bool,
    ) -> Bordered:
        """The matrices of a layer's group with the LoRA ``given`` in their borders, until the next call."""
        group = layer.groups[number]
        if layer.resident:
            kept = layer.resident[number]
        else:
            raw = self.ring.take(layer.first + number, forward, turns)
            assert self._work is not None  # there is one where anything is streamed
            count = len(group.experts)
            kept = replace(
                self._work, gate_up=self._work.gate_up[:count], down=self._work.down[:count]
            )
            try:
                unpack(group, raw, layer.weights, kept)
            finally:
                self.ring.give_back(layer.first + number, forward, turns)
        kept = layer.with_biases(kept, number)
        if given is None:
            return kept
        kept.set_borders(given, layer.starts[number])
        return replace(kept, scale=scale)

    def _borders(self, layer: Layer, lora: Lora) -> Borders | None:
        """The LoRA of the experts that the GPU computes, in their order; None without a rank."""
        if not self.rank or not layer.groups:
            return None
        like = self._work or layer.resident[0]
        return make_borders(lora.tensors, lora.scale, layer.order, len(layer.experts), like)

    def __deepcopy__(self, memo: object) -> GpuExperts:
        return self  # as the frozen weights, it is shared by the copies of a layer

    @_alone
    def forward(self, index: int, inputs: Inputs, lora: Lora, turns: bool) -> torch.Tensor:
        """The output [T, H] bfloat16 of layer ``index``; ``turns``: a backward follows."""
        hidden, weights, routing = inputs.hidden, inputs.weights, inputs.routing
        layer = self._layers[index]
        out = hidden.new_empty(routing.bounds[-1], self._hidden)
        given = self._borders(layer, lora)
        for number in range(len(layer.groups)):
            rows, where = routing.of_experts(*layer.starts[number : number + 2])
            w = self._matrices(layer, number, given, lora.scale, True, turns)
            if where.stop > where.start:
                out[where] = layer_math.forward(w, hidden, rows, lora.dropout)
        return operations.combine(out, routing.rows, weights)

    @_alone
    def backward(
        self,
        index: int,
        inputs: Inputs,
        d_out: torch.Tensor,
        lora: Lora,
        wanted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of hidden [T, H], of the weights [T, K], and the LoRA's [E, ...] float32 by name."""
        hidden, routing = inputs.hidden, inputs.routing
        layer = self._layers[index]
        by_row = routing.row_weights(inputs.weights)
        d_x = hidden.new_empty(routing.bounds[-1], self._hidden)
        d_weights = torch.empty_like(by_row)
        names = tuple(lora.tensors) if wanted else ()
        parts: list[dict[str, torch.Tensor]] = []  # of the groups, the last first
        given = self._borders(layer, lora)
        for number in reversed(range(len(layer.groups))):
            rows, where = routing.of_experts(*layer.starts[number : number + 2])
            w = self._matrices(layer, number, given, lora.scale, False, True)
            if where.stop == where.start:
                count = len(layer.groups[number].experts)
                parts.append(
                    {name: by_row.new_zeros(count, *lora.tensors[name].shape[1:]) for name in names}
                )
                continue
            d_x[where], d_weights[where], found = layer_math.backward(
                w, hidden, d_out, by_row[where], rows, bool(names), lora.dropout
            )
            parts.append(found)
        parts.reverse()
        gradients = {}
        for name in names:
            whole = torch.cat([part.pop(name) for part in parts]).float()
            gradients[name] = whole if layer.order is None else whole[layer.place]
        d_hidden = operations.combine(d_x, routing.rows, None)
        return d_hidden, d_weights[routing.rows], gradients

    @_alone
    def route(self, index: int, ids: torch.Tensor) -> Routing:
        """The rows of ``ids`` [T, K]."""
        return route(ids, self._layers[index].place)
