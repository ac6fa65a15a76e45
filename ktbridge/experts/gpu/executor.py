"""The routed experts of a model computed on the GPU: some layers resident there, the others streamed.

One ``GpuExperts`` serves all layers of a model. A layer's weights are on the GPU only while they are used,
unless it is resident; its LoRA is read from the parameters, wherever these are, and its gradients go there.

A layer that is computed in one part starts its operations without ever waiting for the device. One in several
parts (streamed in groups, or with more rows than are multiplied at once) waits once, in forward, for how many
rows each part has.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch.autograd.function import once_differentiable
from torch.optim import optimizer

from ktbridge.errors import UsageError
from ktbridge.experts import compat, recompute
from ktbridge.experts.gpu import layer_math, operations
from ktbridge.experts.gpu.layer_math import Activations, BorderedMatrices, Routing
from ktbridge.experts.gpu.layout import ALIGNED, Group, Layer, lay_out, unpack_group
from ktbridge.experts.gpu.masters import Gradients, LoraStaging, Masters
from ktbridge.experts.gpu.operations import RowWeights
from ktbridge.experts.gpu.placement import Placement
from ktbridge.experts.gpu.ring import Copier, Processes, Ring
from ktbridge.experts.lora import LoraUse
from ktbridge.experts.recompute import HiddenStates, HostStreams, LayerInputs, SavedOutputs
from ktbridge.experts.weights import Triple

_P = ParamSpec("_P")
_R = TypeVar("_R")
_FLAGS = 256  # of invalid ids, before the host is told


def _exclusive(
    method: Callable[Concatenate[GpuExperts, _P], _R],
) -> Callable[Concatenate[GpuExperts, _P], _R]:
    """Allow one call at a time, on the executor's device: calls share its matrices and its ring.

    A call in another stream than the last one's waits for it there.
    """

    @functools.wraps(method)
    def call(self: GpuExperts, *args: _P.args, **named: _P.kwargs) -> _R:
        with self._lock:
            if self.device.type != "cuda":
                return method(self, *args, **named)
            stream = torch.cuda.current_stream(self.device)
            if stream != self._stream:
                if self._stream is not None:
                    stream.wait_stream(self._stream)
                self._stream = stream
            if torch.cuda.current_device() == self.device.index:
                return method(self, *args, **named)
            with torch.cuda.device(self.device):
                return method(self, *args, **named)

    return call


class InvalidIds:
    """Ids that are no expert's: seen by the device, told to the host when it needs no waiting."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._found: list[torch.Tensor] = []
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def note(self, outside: torch.Tensor, last: bool) -> None:
        """Remember a call's flag [1]; ``last``: of a pass, so that the host is told soon.

        Raises ``IndexError`` where a pass before had such an id.
        """
        if outside.device.type == "cpu":
            self._raise(int(outside))
            return
        if self._coming is not None and self._coming[1].query():
            self.check()
        self._found.append(outside)
        if last or len(self._found) >= _FLAGS:
            self.report()

    def report(self) -> None:
        """Begin to tell the host what was found so far."""
        if not self._found:
            return
        found = torch.cat(self._found).sum(dtype=torch.int32)
        self._found.clear()
        if self._coming is not None:
            self.check()
        host = torch.empty((), dtype=torch.int32, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        self._coming = host, torch.cuda.current_stream(found.device).record_event()

    def check(self) -> None:
        """Raise ``IndexError`` if the last ``report`` found something; waits for what it looked at."""
        if self._coming is None:
            return
        host, there = self._coming
        if not there.query():
            there.synchronize()
        self._coming = None
        self._raise(int(host))

    def _raise(self, found: int) -> None:
        if found:
            raise IndexError(f"topk_ids has an id outside 0 to {self._experts - 1}.")


@dataclass(slots=True)
class ForwardState:
    """State that a forward leaves for its backward."""

    routing: Routing
    kept: list[Activations] | None
    """Of each part that has rows, where it is kept."""


class GpuExperts:
    """Computes the experts of ``layers`` (gate, up and down by layer number) on ``device``.

    Streamed layers, and resident ones, are those of the ``placement``. Outputs of checkpointed layers wait on
    the host for the second forward if it says so; gate and up are kept for backward instead of computed again
    while all layers are resident. At most ``rows_at_once`` rows (0: any number) are multiplied at once, so
    that memory doesn't depend on the router; an expert that alone has more is the exception.

    On the CPU as device it computes the same, in the same order, without streams.
    """

    def __init__(
        self,
        layers: Mapping[int, Triple],
        device: torch.device,
        rank: int,
        placement: Placement,
        copier: Copier,
        *,
        loader: Copier | None = None,
        loaded: Callable[[int], None] | None = None,
        inputs: LayerInputs | None = None,
    ) -> None:
        """``loader`` copies what is resident (default: ``copier``); ``loaded`` gets its layers' numbers.

        ``inputs`` of checkpointed layers wait where their outputs do.
        """
        self.device = torch.empty(0, device=device).device  # with its index
        self.rank = rank
        self.placement = placement
        self.rows_at_once = placement.rows_at_once or None
        self._inputs = inputs
        self._keep_hidden_states(placement)
        self._lock = threading.RLock()
        self._stream: torch.cuda.Stream | None = None
        """That of the last call."""
        self._slot_bytes = -(-placement.slot_bytes // ALIGNED) * ALIGNED
        weights = dict(sorted(layers.items()))
        sizes = {(down.rows, gate.rows, gate.count) for gate, _, down in layers.values()}
        if len(sizes) != 1:
            raise UsageError(f"the layers' experts have different sizes: {sorted(sizes)}.")
        ((self._hidden, self._inner, self._experts),) = sizes
        self._layers = {
            index: lay_out(each, self._slot_bytes, self.device, f"layer {index}")
            for index, each in weights.items()
        }
        self._outside = InvalidIds(self._experts)
        self.staging = {index: LoraStaging(self.device) for index in self._layers}
        self._copier = copier
        self._borders: dict[int, tuple[object, ...]] = {}
        """What the borders of resident layers are made of."""
        self._groups: dict[tuple[int, int], BorderedMatrices] = {}
        """The matrices of each streamed group, which share the same memory."""
        self.ring = Ring([], self._slot_bytes, 0, self.device, copier)
        for index in self._resident(placement):
            self._load(self._layers[index], loader or copier)
            if loaded is not None:
                loaded(index)
        self._arrange(placement.slots, self.streamed)  # in memory that loading has left
        _all.add(self)

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that aren't resident."""
        return tuple(index for index, layer in self._layers.items() if layer.resident is None)

    @_exclusive
    def resize(self, placement: Placement) -> None:
        """Have slots, resident layers and outputs on the host as in ``placement`` from now on.

        Between optimizer steps: nothing may be between a forward and its backward. Memory is given back
        first, then taken. No bit of what is computed changes. Where a layer can't be loaded, what is there
        stays in order, the layer is streamed, and the error is raised.
        """
        self.ring.empty()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        transfers, self.ring = self.ring.transfers, Ring([], 0, 0, self.device, self._copier)
        self._groups.clear()
        self._borders.clear()
        self.placement, resident = placement, self._resident(placement)
        self._keep_hidden_states(placement)
        for index, layer in self._layers.items():
            if index not in resident:
                layer.resident = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            for index, layer in self._layers.items():
                if index in resident and layer.resident is None:
                    self._copier.extend(layer.groups)
                    self._load(layer, self._copier)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the ring needs the layer's memory
            raise
        finally:
            streamed = self.streamed
            for index in streamed:
                self._copier.extend(self._layers[index].groups)
            self._arrange(placement.slots, streamed)
            self.ring.transfers += transfers

    def _keep_hidden_states(self, placement: Placement) -> None:
        streams = None
        if placement.outputs_on_host and self.device.type == "cuda":
            streams = HostStreams(self.device)
        self.outputs = SavedOutputs(streams)
        if self._inputs is not None:
            self._inputs.streams = streams

    def join(self, processes: Processes) -> None:
        """Compute beside other processes from now on."""
        self._copier.processes = processes

    def layout(self) -> int:
        """Digest of each group's bytes in a slot: they are in the order of this process's addresses.

        Processes may share transfers if it is the same, and all their copiers can.
        """
        layout = [
            (group.experts, group.bytes, [*group.places.items()], [(s.offset, s.bytes) for s in group.spans])
            for layer in self._layers.values()
            for group in layer.groups
        ]
        return int.from_bytes(hashlib.sha256(repr(layout).encode()).digest()[:7], "big")

    def watch_link(self) -> None:
        """Begin to time the link for ``link``."""
        self._copier.link.watch()

    def link(self) -> tuple[int, float]:
        """Bytes transferred since ``watch_link``, and seconds that the link was busy with them.

        Nobody waits: transfers under way aren't counted. Nothing is timed from here on.
        """
        return self._copier.link.transferred()

    def check(self) -> None:
        """Raise ``IndexError`` if a router has given an id that is no expert's; waits for the device."""
        self._outside.report()
        self._outside.check()

    def check_seen(self) -> None:
        """Check only what the host is being told already; wait for a forward pass at most."""
        self._outside.check()

    def drop(self) -> None:
        """Give the device's memory back; nothing is computed here any more."""
        self._layers.clear()
        self._groups.clear()
        self.ring = Ring([], 0, 0, self.device, self._copier)

    def __deepcopy__(self, memo: object) -> GpuExperts:
        return self  # as the frozen weights, it is shared by the copies of a layer

    def _resident(self, placement: Placement) -> list[int]:
        """Return the numbers of the layers that stay on the device."""
        numbers = list(self._layers)
        return [numbers[place] for place in sorted(placement.resident)]

    def _arrange(self, slots: int, streamed: Sequence[int]) -> None:
        """Make the ring for the layers ``streamed``, and the matrices that their groups are unpacked into."""
        groups: list[Group] = []
        for index in streamed:
            self._layers[index].first = len(groups)
            groups += self._layers[index].groups
        self.ring = Ring(groups, self._slot_bytes, slots, self.device, self._copier)
        self._groups.clear()
        if not groups:
            return
        work = self._bordered(max(len(group.experts) for group in groups))
        for index in streamed:
            layer = self._layers[index]
            for number, group in enumerate(layer.groups):
                some = slice(*layer.starts[number : number + 2])
                biases = None if layer.biases is None else layer.biases.of(some)
                count = len(group.experts)
                self._groups[index, number] = work.like(layer.weights[0].gating, biases, count)

    def _bordered(self, experts: int) -> BorderedMatrices:
        return BorderedMatrices.empty(experts, self._hidden, self._inner, self.rank, self.device)

    @_exclusive
    def _load(self, layer: Layer, copier: Copier) -> None:
        """Bring a layer's weights to the device, to stay."""
        whole = self._bordered(self._experts).like(layer.weights[0].gating, layer.biases)
        for number, group in enumerate(layer.groups):
            raw = torch.empty(group.bytes, dtype=torch.uint8, device=self.device)
            before = None  # what is queued may still be using this memory
            if self.device.type == "cuda":
                before = torch.cuda.current_stream(self.device).record_event()
            ready = copier.start(group, raw, before)
            ready.wait()
            unpack_group(group, raw, layer.weights, whole.of(*layer.starts[number : number + 2]))
            if self.device.type == "cuda":  # raw goes back to the allocator
                torch.cuda.current_stream(self.device).synchronize()
        layer.resident, layer.first = whole, -1

    def _spread(self, index: int) -> tuple[Layer, tuple[int, ...]]:
        """A layer, and the places where the groups that it is computed in begin."""
        layer = self._layers[index]
        return layer, layer.starts if layer.resident is None else (0, self._experts)

    def _matrices(
        self, index: int, number: int, lora: Masters, forward: bool, turns: bool
    ) -> BorderedMatrices:
        """The matrices of a layer's group with the LoRA in their borders, until the next call."""
        layer = self._layers[index]
        w = layer.resident
        if w is not None:
            made_of = lora.use.names, lora.scale, lora.state
            if self.rank and self._borders.get(index) != made_of:
                self._borders.pop(index, None)  # they may be left half-made
                self._write_borders(index, w, lora, 0)
                self._borders[index] = made_of
            return w
        w, group, at = self._groups[index, number], layer.groups[number], layer.first + number
        raw = self.ring.take(at, forward, turns)
        try:
            unpack_group(group, raw, layer.weights, w)
        finally:
            self.ring.give_back(at, forward, turns)
        if self.rank:
            self._write_borders(index, w, lora, layer.starts[number])
        return w

    def _write_borders(self, index: int, w: BorderedMatrices, lora: Masters, first: int) -> None:
        staging = self.staging[index]
        there = lora.on(self.device, staging)
        operations.write_borders(
            w.gate_up, w.down, there, self.rank, lora.scale, self._layers[index].order, first
        )
        staging.used()

    @_exclusive
    def forward(
        self,
        index: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        lora: Masters,
        turns: bool,
    ) -> tuple[torch.Tensor, ForwardState]:
        """The output [T, H] bfloat16 of layer ``index``, and what its backward takes.

        ``turns``: a backward follows.
        """
        layer, starts = self._spread(index)
        place = None if layer.order is None else layer.place
        routed = operations.route(ids, place, self._experts)
        self._outside.note(routed.outside, last=index == next(reversed(self._layers)))
        routing = Routing(routed)
        left = ForwardState(routing, None)
        if not len(ids):
            return torch.zeros_like(hidden), left
        if not routing.at_once(starts, self.rows_at_once):
            routing.fetch()
        if turns and self.placement.keep_gate_up and not self.ring.groups:
            left.kept = []
        out: torch.Tensor | None = None
        for number in range(len(starts) - 1):
            w = self._matrices(index, number, lora, True, turns)
            for part in routing.parts(starts, self.rows_at_once)[number]:
                if not len(part.tokens):
                    continue
                some = w.of(part.first - starts[number], part.end - starts[number])
                y = layer_math.forward(some, hidden, part, lora.dropout, left.kept)
                if part.where is None:
                    out = y
                    continue
                if out is None:
                    out = hidden.new_empty(routing.bounds[-1], self._hidden)
                out[part.where] = y
        assert out is not None  # some expert has rows
        return operations.combine(out, routing.rows, weights), left

    @_exclusive
    def backward(
        self,
        index: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        left: ForwardState,
        d_out: torch.Tensor,
        lora: Masters,
        gradients: Gradients,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of hidden [T, H] and of the weights [T, K]; the LoRA's go where ``gradients`` says."""
        routing = left.routing
        layer, starts = self._spread(index)
        if not len(hidden):
            gradients.clear()
            return torch.zeros_like(hidden), torch.zeros_like(weights)
        kept = list(left.kept or ())
        flat = weights.reshape(-1)
        d_weights = torch.empty_like(flat)
        d_x: torch.Tensor | None = None
        for number in reversed(range(len(starts) - 1)):
            w = self._matrices(index, number, lora, False, True)
            for part in reversed(routing.parts(starts, self.rows_at_once)[number]):
                if not len(part.tokens):
                    gradients.clear_rows(layer.order, part.first, part.end)
                    continue
                some = layer_math.backward(
                    w.of(part.first - starts[number], part.end - starts[number]),
                    hidden,
                    d_out,
                    RowWeights(flat, part.slots, d_weights),
                    part,
                    kept.pop() if kept else None,
                    lora.dropout,
                    gradients.into(lora.scale, self.rank, layer.order, part.first),
                )
                if part.where is None:
                    d_x = some
                    continue
                if d_x is None:
                    d_x = hidden.new_empty(routing.bounds[-1], self._hidden)
                d_x[part.where] = some
        assert d_x is not None  # some expert has rows
        d_hidden = operations.combine(d_x, routing.rows, None)
        return d_hidden, d_weights.view(weights.shape)


_all: WeakSet[GpuExperts] = WeakSet()


def _check_all(*_: object) -> None:
    for each in list(_all):
        each.check_seen()


optimizer.register_optimizer_step_pre_hook(_check_all)


@dataclass(frozen=True)
class GpuBinding:
    """The executor of a layer, and the layer's number in it."""

    experts: GpuExperts
    index: int

    @property
    def staging(self) -> LoraStaging:
        """The way of the layer's LoRA to the device, if its masters are elsewhere."""
        return self.experts.staging[self.index]


@dataclass(slots=True)
class GpuCall:
    """State that a forward and its backward share besides tensors."""

    experts: GpuExperts
    index: int
    used: LoraUse
    needed: bool
    """Whether a backward will follow."""
    accumulate: bool
    """Whether gradients are added to the parameters' own, see ``MoELoRAExperts.accumulate_grad``.

    In a process group, too: its reducers leave experts on the GPU alone (``ktbridge.sft.distributed``).
    """
    replayed: tuple[HiddenStates, ForwardState] | None
    """What the first forward recorded, where a checkpointed layer runs a second time."""


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
        hidden, masters = hidden.contiguous(), Masters(call.used, lora)
        if call.replayed is not None:
            kept, left = call.replayed
            out = kept.get()
        else:
            out, left = call.experts.forward(call.index, hidden, ids, weights, masters, call.needed)
            if recompute.recording():
                recompute.record((call.experts.outputs.save(call.index, out), left))
        if call.needed:
            ctx.call, ctx.left, ctx.masters = call, left, masters
            ctx.save_for_backward(hidden, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        call: GpuCall = ctx.call
        hidden, weights = ctx.saved_tensors
        left: ForwardState = ctx.left
        before: Masters = ctx.masters
        masters = Masters(call.used, before.parameters)
        if masters.differ(before):  # as autograd refuses what it saves: that costs more
            raise RuntimeError(
                "the expert LoRA has been modified by an inplace operation since this forward."
            )
        call.experts.outputs.fetch_before(call.index)
        last = not compat.graph_is_kept()
        if last:
            ctx.left = None  # a loss that lives on doesn't hold it
        gradients = Gradients(
            call.used.names,
            masters.parameters,
            ctx.needs_input_grad[4:],
            call.accumulate,
            call.experts.device,
            call.experts.ring.copier.processes,
        )
        d_hidden, d_weights = call.experts.backward(
            call.index, hidden, weights, left, d_out.to(torch.bfloat16).contiguous(), masters, gradients
        )
        if last:
            left.kept = None  # what recorded it may live on
        return None, d_hidden, None, d_weights, *gradients.deliver()
