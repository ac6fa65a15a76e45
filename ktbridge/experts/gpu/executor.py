"""The routed experts of a model computed on the GPU: some layers resident there, the others streamed.

One ``GpuExperts`` serves all layers of a model. A layer's weights are on the GPU only while they are used,
unless it is resident; its LoRA is read from the parameters, wherever these are, and its gradients go there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ktbridge.errors import UsageError
from ktbridge.experts import checkpointing
from ktbridge.experts.expert_call import accumulates, graph_is_kept
from ktbridge.experts.gpu import elementwise, layer_math
from ktbridge.experts.gpu.gradients import add_gradients
from ktbridge.experts.gpu.layer_math import Bordered
from ktbridge.experts.gpu.layout import ALIGNED, Group, layer_groups
from ktbridge.experts.gpu.outputs import Kept
from ktbridge.experts.gpu.ring import Copier, Ring
from ktbridge.experts.gpu.routing import Routing, route
from ktbridge.experts.gpu.share import borders
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


@dataclass(eq=False)
class _Layer:
    """What the executor knows of one layer."""

    weights: Triple
    groups: tuple[Group, ...]
    first: int
    """Number of its first group in the ring; −1 where it is resident."""
    place: torch.Tensor
    """[E] int64 on the device: each expert's place in the order of computing."""
    orders: tuple[torch.Tensor, ...]
    """The experts of each group, int64 on the device."""
    resident: tuple[Bordered, ...] = ()


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
        outputs_on_host: bool = False,
    ) -> None:
        """``outputs_on_host``: outputs of checkpointed layers wait there for the second forward."""
        self.device = torch.empty(0, device=device).device  # with its index
        self.rank = rank
        self._streams: tuple[Any, Any] | None = None
        if outputs_on_host and self.device.type == "cuda":
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._kept: dict[int, weakref.ref[Kept]] = {}
        """The last output that each layer has kept."""
        self._lock = threading.RLock()
        self._ended: Any = None
        """The event of the last call's end."""
        slot_bytes = -(-slot_bytes // ALIGNED) * ALIGNED
        self._layers: dict[int, _Layer] = {}
        streamed: list[Group] = []
        for index in sorted(layers):
            groups = layer_groups(layers[index], slot_bytes, f"layer {index}")
            order = [expert for group in groups for expert in group.experts]
            place = torch.empty(len(order), dtype=torch.int64)
            place[torch.tensor(order)] = torch.arange(len(order))
            self._layers[index] = _Layer(
                layers[index],
                groups,
                -1 if index in resident else len(streamed),
                place.to(device),
                tuple(torch.tensor(group.experts, device=device) for group in groups),
            )
            if index not in resident:
                streamed += groups
        largest = max((len(group.experts) for group in streamed), default=0)
        sizes = {(down.rows, gate.rows) for gate, _, down in layers.values()}
        if len(sizes) != 1:
            raise UsageError(f"the layers' experts have different sizes: {sorted(sizes)}.")
        ((self._hidden, self._inner),) = sizes
        self.ring = Ring(streamed, slot_bytes, slots, self.device, copier)
        self._work = self._bordered(largest) if streamed else None
        self._copier = copier
        for index in resident:
            self._settle(self._layers[index])

    def keep(self, index: int, out: torch.Tensor) -> Kept:
        """A layer's output, for its second forward."""
        kept = Kept(out, self._streams)
        self._kept[index] = weakref.ref(kept)
        return kept

    def fetch_before(self, index: int) -> None:
        """Begin to bring back the output of the layer before ``index``, whose second forward comes next."""
        before = [other for other in self._kept if other < index]
        kept = self._kept[max(before)]() if before else None
        if kept is not None:
            kept.fetch()

    def drop(self) -> None:
        """Give the device's memory back; nothing is computed here any more."""
        self._layers.clear()
        self.ring = Ring([], 0, 0, self.device, self._copier)
        self._work = None

    def _bordered(self, experts: int) -> Bordered:
        """Matrices for so many experts, with their borders 0."""
        more, less = borders(self.rank)
        hidden, inner = self._hidden, self._inner
        made = Bordered(
            torch.empty(
                experts, 2 * inner + more, hidden + more, dtype=torch.bfloat16, device=self.device
            ),
            torch.empty(
                experts, hidden + less, inner + less, dtype=torch.bfloat16, device=self.device
            ),
            hidden,
            inner,
            self.rank,
            0.0,
        )
        made.clear()
        return made

    @_alone
    def _settle(self, layer: _Layer) -> None:
        """Bring a resident layer's weights to the device."""
        made = []
        for group in layer.groups:
            raw = torch.empty(group.bytes, dtype=torch.uint8, device=self.device)
            before = None  # what is queued may still be using this memory
            if self.device.type == "cuda":
                before = torch.cuda.current_stream(self.device).record_event()
            ready = self._copier.start(group, raw, before)
            if ready is not None:
                ready.wait()
            matrices = self._bordered(len(group.experts))
            unpack(group, raw, layer.weights, matrices)
            if self.device.type == "cuda":
                torch.cuda.current_stream(
                    self.device
                ).synchronize()  # raw goes back to the allocator
            made.append(matrices)
        layer.resident = tuple(made)

    def _matrices(
        self, layer: _Layer, number: int, lora: Lora, forward: bool, turns: bool
    ) -> Bordered:
        """The matrices of a layer's group with the LoRA in their borders, until the next call."""
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
        if not self.rank:
            return kept
        made = replace(kept, scale=lora.scale)
        if lora.tensors:
            made.set_lora({name: t[layer.orders[number]] for name, t in lora.tensors.items()})
        else:
            made.clear()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuExperts:
        return self  # as the frozen weights, it is shared by the copies of a layer

    @_alone
    def forward(
        self,
        index: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing,
        lora: Lora,
        turns: bool,
    ) -> torch.Tensor:
        """[T, H] of ``hidden`` [T, H] bfloat16 for layer ``index``; ``turns``: backward will follow."""
        layer = self._layers[index]
        out = hidden.new_empty(routing.bounds[-1], self._hidden)
        for number in range(len(layer.groups)):
            rows, where = self._rows(layer, number, routing)
            w = self._matrices(layer, number, lora, True, turns)
            if where.stop > where.start:
                out[where] = layer_math.forward(w, hidden, rows)
        return elementwise.combine(out, routing.rows, weights)

    @_alone
    def backward(
        self,
        index: int,
        hidden: torch.Tensor,
        d_out: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing,
        lora: Lora,
        wanted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of hidden [T, H], of the weights [T, K], and the LoRA's [E, ...] float32 by name."""
        layer = self._layers[index]
        by_row = routing.row_weights(weights)
        d_x = hidden.new_empty(routing.bounds[-1], self._hidden)
        d_weights = torch.empty_like(by_row)
        gradients = {
            name: torch.zeros(tensor.shape, device=self.device)
            for name, tensor in (lora.tensors if wanted else {}).items()
        }
        for number in reversed(range(len(layer.groups))):
            rows, where = self._rows(layer, number, routing)
            w = self._matrices(layer, number, lora, False, True)
            if where.stop == where.start:
                continue
            d_x[where], d_weights[where], found = layer_math.backward(
                w, hidden, d_out, by_row[where], rows, bool(gradients)
            )
            for name, total in gradients.items():
                total.index_copy_(0, layer.orders[number], found[name].float())
        return (
            elementwise.combine(d_x, routing.rows, None),
            d_weights[routing.rows],
            gradients,
        )

    @_alone
    def route(self, index: int, ids: torch.Tensor) -> Routing:
        return route(ids, self._layers[index].place)

    def _rows(self, layer: _Layer, number: int, routing: Routing) -> tuple[layer_math.Rows, slice]:
        """A group's rows, and where they are among all."""
        before = sum(len(group.experts) for group in layer.groups[:number])
        behind = before + len(layer.groups[number].experts)
        start = routing.bounds[before]
        bounds = tuple(bound - start for bound in routing.bounds[before : behind + 1])
        ends = routing.ends[before:behind] - start
        where = slice(start, routing.bounds[behind])
        return layer_math.Rows(routing.tokens[where], ends, bounds), where


@dataclass(frozen=True)
class Lora:
    """A layer's LoRA as a call uses it: tensors [E, ...] on the device by name, and α / r."""

    tensors: dict[str, torch.Tensor]
    scale: float


@dataclass(frozen=True)
class OnGpu:
    """Where a layer is computed: by ``experts``, under its number."""

    experts: GpuExperts
    index: int


@dataclass
class GpuCall:
    """What a forward and its backward share besides tensors."""

    experts: GpuExperts
    index: int
    names: tuple[str, ...]
    scale: float
    needed: bool
    """Whether a backward will follow."""
    accumulate: bool
    """Whether gradients are added to the parameters' own, as ``MoELoRAExperts.accumulate_grad`` says.

    In a process group, too: its reducers leave experts on the GPU alone (``ktbridge.sft.distributed``).
    """
    replayed: tuple[Kept, Routing] | None
    """Output and routing of this call, where a checkpointed layer runs a second time."""


class GpuFunction(torch.autograd.Function):
    """Binds ``GpuExperts`` to autograd."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: GpuCall,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *lora: torch.Tensor,
    ) -> torch.Tensor:
        hidden = hidden.contiguous()
        if call.replayed is not None:
            kept, routing = call.replayed
            out = kept.get()
        else:
            routing = call.experts.route(call.index, ids)
            used = _on_device(call, lora)
            out = call.experts.forward(call.index, hidden, weights, routing, used, call.needed)
            if checkpointing.recording():
                checkpointing.record((call.experts.keep(call.index, out), routing))
        if call.needed:
            ctx.call, ctx.routing, ctx.parameters = call, routing, lora
            ctx.save_for_backward(hidden, weights, *lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: GpuCall = ctx.call
        # The LoRA is saved so that autograd refuses one that was changed since.
        hidden, weights, *lora = ctx.saved_tensors
        routing = ctx.routing
        call.experts.fetch_before(call.index)
        if not graph_is_kept():
            ctx.routing = None  # a loss that lives on doesn't hold it
        needed = ctx.needs_input_grad[4:]
        d_hidden, d_weights, gradients = call.experts.backward(
            call.index,
            hidden,
            d_out.to(torch.bfloat16).contiguous(),
            weights,
            routing,
            _on_device(call, lora),
            any(needed),
        )
        told: list[torch.Tensor | None] = []
        later = []
        for name, parameter, wanted in zip(call.names, ctx.parameters, needed, strict=True):
            if not wanted:
                told.append(None)
            elif not (call.accumulate and accumulates(parameter, reduced=False)):
                told.append(gradients[name].to(parameter.device))
            else:
                told.append(None)
                later.append((parameter, gradients[name]))
        add_gradients(later)
        return None, d_hidden, None, d_weights, *told


def _on_device(call: GpuCall, parameters: Sequence[torch.Tensor]) -> Lora:
    tensors = {
        name: parameter.detach().to(call.experts.device, non_blocking=True)
        for name, parameter in zip(call.names, parameters, strict=True)
    }
    return Lora(tensors, call.scale)
