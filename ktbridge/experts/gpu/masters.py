"""A layer's LoRA between its masters, wherever these are, and the executor: values there, gradients back.

Masters on the executor's device are read and their gradients written where they are. Those on the host are
sent as bfloat16, which is what the products take anyway: rounded in pinned memory once a change. Their
gradients come back in float32, of several processes the mean, and are added before the backward returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ktbridge.experts import compat
from ktbridge.experts.compat import parameter_state
from ktbridge.experts.gpu import operations
from ktbridge.experts.gpu.operations import GradientTargets
from ktbridge.experts.gpu.ring import Processes
from ktbridge.experts.lora import Dropout, LoraUse, accumulates


def is_there(parameter: torch.Tensor, device: torch.device) -> bool:
    """Return whether a master is where the executor computes."""
    return parameter.device == device


class LoraStaging:
    """Tensors of a layer on the host, as bfloat16 in pinned memory for ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat = torch.empty(0, dtype=torch.bfloat16, device="cpu")
        self._state: tuple[int, ...] = ()
        self._used: torch.cuda.Event | None = None

    def values(self, tensors: Sequence[torch.Tensor], state: tuple[int, ...]) -> list[torch.Tensor]:
        """Return ``tensors`` as the current stream may read them until ``used``; ``state`` tells a change.

        Kernels read pinned memory by themselves: a copy would wait for those of the weights before it.
        """
        if state != self._state:
            self.round(tensors)
            self._state = state
        flat = self._flat
        if operations.triton_on(self._device) is None:
            flat = flat.to(self._device, non_blocking=True)
        parts = zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
        return [part.view(tensor.shape) for part, tensor in parts]

    def round(self, tensors: Sequence[torch.Tensor]) -> None:
        """Round ``tensors`` into pinned memory, once it isn't read any more; not beside ``values``."""
        sizes = [tensor.numel() for tensor in tensors]
        if self._used is not None:
            self._used.synchronize()
        if len(self._flat) != sum(sizes):
            pinned = self._device.type == "cuda"
            self._flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cpu", pin_memory=pinned)
        for part, tensor in zip(self._flat.split(sizes), tensors, strict=True):
            part.copy_(tensor.detach().reshape(-1))

    def rounded(self, state: tuple[int, ...]) -> None:
        """Note that what ``round`` was given last has this ``state``."""
        self._state = state

    def used(self) -> None:
        """Note that the current stream has been asked to read them for the last time."""
        if self._device.type == "cuda" and len(self._flat):
            self._used = torch.cuda.current_stream(self._device).record_event()


class Masters:
    """A layer's LoRA in one call: its parameters, how they are used, and what they are now."""

    __slots__ = ("dropout", "parameters", "scale", "state", "use")

    def __init__(self, use: LoraUse, parameters: Sequence[torch.Tensor]) -> None:
        self.use, self.parameters = use, parameters
        self.scale: float = use.scale
        self.dropout: Dropout | None = use.dropout
        self.state = parameter_state(parameters)

    def differ(self, before: Masters) -> bool:
        """Return whether the same parameters have changed since ``before``; steps of others don't count."""
        return self.state[1:] != before.state[1:]

    def on(self, device: torch.device, staging: LoraStaging) -> dict[str, torch.Tensor]:
        """The tensors [E, ...] by name: float32 where they are there already, else out of ``staging``."""
        if all(is_there(each, device) for each in self.parameters):
            there = [each.detach() for each in self.parameters]
        else:
            there = staging.values([each.detach() for each in self.parameters], self.state)
        return dict(zip(self.use.names, there, strict=True))


class Gradients:
    """Targets of one backward's LoRA gradients: float32 on the device, for the executor to fill.

    They are written, or where ``add``, added to what is there.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        accumulate: bool,
        device: torch.device,
        processes: Processes,
    ) -> None:
        """``accumulate``: into the ``.grad`` of those parameters that have no hooks; else to be returned."""
        self.targets: dict[str, torch.Tensor] = {}
        self.add = False
        self._device, self._processes = device, processes
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []  # the first of a step
        self._returned: list[str | None] = []
        straight: dict[str, torch.Tensor] = {}
        self._home: dict[str, torch.Tensor] = {}  # of masters that are elsewhere
        for name, parameter, needed in zip(names, parameters, wanted, strict=True):
            into = needed and accumulate and accumulates(parameter, reduced=False)
            self._returned.append(name if needed and not into else None)
            if into:
                (straight if is_there(parameter, device) else self._home)[name] = parameter
        self.add = any(each.grad is not None for each in straight.values())
        for name, parameter in straight.items():
            if parameter.grad is not None:
                self.targets[name] = parameter.grad
                continue
            self.targets[name] = self._fresh(parameter.shape)
            self._given.append((parameter, self.targets[name]))
        sizes = [each.numel() for each in self._home.values()]
        self._flat = self._fresh((sum(sizes),)) if sizes else None
        if self._flat is not None:
            parts = zip(self._home.items(), self._flat.split(sizes), strict=True)
            self.targets |= {name: part.view(each.shape) for (name, each), part in parts}
        for name, parameter in zip(names, parameters, strict=True):
            if name in self._returned:
                self.targets[name] = self._fresh(parameter.shape)
        self._parameters: Mapping[str, torch.Tensor] = dict(zip(names, parameters, strict=True))

    def _fresh(self, shape: Sequence[int]) -> torch.Tensor:
        make = torch.zeros if self.add else torch.empty
        return make(shape, dtype=torch.float32, device=self._device)

    def clear(self) -> None:
        """Fill what is to be written with zeros."""
        if not self.add:
            for target in self.targets.values():
                target.zero_()

    def clear_rows(self, order: torch.Tensor | None, first: int, end: int) -> None:
        """Clear rows of the experts at the places ``first`` to ``end`` of the ``order`` of computing."""
        if not self.add:
            some = slice(first, end) if order is None else order[first:end]
            for target in self.targets.values():
                target[some] = 0

    def into(self, scale: float, rank: int, order: torch.Tensor | None, first: int) -> GradientTargets | None:
        """Return where those of the experts from the place ``first`` on go; None where none are wanted."""
        if not self.targets:
            return None
        return GradientTargets(self.targets, rank, scale, self.add, order, first)

    def deliver(self) -> list[torch.Tensor | None]:
        """Give parameters their gradients, once the targets are filled; returns autograd's, in order."""
        for parameter, gradient in self._given:
            parameter.grad = gradient
        if self._flat is not None:
            self._send_home(self._flat)
        return [
            None if name is None else self.targets[name].to(self._parameters[name].device)
            for name in self._returned
        ]

    def _send_home(self, flat: torch.Tensor) -> None:
        parameters = list(self._home.values())
        cuda = flat.device.type == "cuda"
        pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=cuda)
        sizes, processes = [each.numel() for each in parameters], self._processes
        here, shaped = (
            [part.view(each.shape) for part, each in zip(whole.split(sizes), parameters, strict=True)]
            for whole in (flat, pinned)
        )
        way = _return_stream(flat.device) if cuda else None
        if way is not None:
            way.wait_stream(torch.cuda.current_stream(flat.device))
            flat.record_stream(way)
        with torch.cuda.stream(way):
            processes.average(flat)
            for to, part in [(pinned, flat)] if processes.count == 1 else zip(shaped, here, strict=True):
                processes.part(to).copy_(processes.part(part), non_blocking=True)
            first = all(each.grad is None for each in parameters)  # else the sum's norm is asked for
            norms = [torch.linalg.vector_norm(processes.part(part)) if first else None for part in here]
        arrived = way.record_event() if way is not None else None
        if compat.after_backward("LoRA gradients", _add_coming):
            _coming.clear()  # of a pass that raised half-way
        _coming.append(_Coming(parameters, shaped, norms, arrived, processes))


def gradients_norm(
    gradients: Sequence[torch.Tensor], part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
) -> torch.Tensor:
    """Return the Euclidean norm of all ``gradients`` together, of each its ``part``; a float32 on the host.

    Of those that have come to the host from a GPU it was computed there. Others' on the host by rows: torch
    sums up a whole tensor there by one thread, 142 ms for the LoRA of 48 layers with 128 experts.
    """
    there = [each for each in gradients if each.device.type != "cpu"]
    on_device = [nn.utils.get_total_norm(there)] if there else []
    norms = []
    for each in gradients:
        if each.device.type != "cpu":
            continue
        known, version = vars(each).get(_NORM, (None, None))
        if known is not None and version == each._version:
            on_device.append(known)
        else:
            own = part(each)
            rows = torch.linalg.vector_norm(own.flatten(1), dim=1) if own.ndim > 1 else own
            norms.append(torch.linalg.vector_norm(rows))
    if on_device:
        norms.append(torch.linalg.vector_norm(torch.stack(on_device)).cpu())
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_to_norm(
    parameters: Sequence[nn.Parameter],
    largest: float,
    scale_later: Callable[[float], Collection[torch.Tensor]] = lambda _: (),
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` to a common norm of at most ``largest``; return the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, which multiplies by one where nothing is to be scaled, and scales
    what is on the host by one thread. ``scale_later`` returns the parameters of which it takes care.
    """
    norm = gradients_norm([each.grad for each in parameters if each.grad is not None])
    scale_to_norm(parameters, largest, norm, scale_later)
    return norm


def scale_to_norm(
    parameters: Iterable[nn.Parameter],
    largest: float,
    norm: torch.Tensor,
    scale_later: Callable[[float], Collection[torch.Tensor]],
) -> None:
    """Scale gradients whose common norm is ``norm`` to one of at most ``largest``, see ``clip_to_norm``."""
    if (scale := float(largest / (norm + 1e-6))) < 1:
        later, there = scale_later(scale), []
        for each in parameters:
            if each.grad is None or each in later:
                continue
            if each.device.type == "cpu" or hasattr(each, "to_local"):  # torch doesn't mix shards with others
                each.grad.mul_(scale)
            else:
                there.append(each)
        nn.utils.clip_grads_with_norm_(there, largest, norm)


@functools.cache
def _return_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that gradients leave ``device`` in, beside what is computed."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class _Coming:
    """Gradients of a layer's masters that are on their way to the host."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    norms: list[torch.Tensor | None]
    arrived: torch.cuda.Event | None
    processes: Processes


_coming: list[_Coming] = []
"""Of the running backward pass."""
_NORM = "norm_there"
"""Attribute of a gradient that has arrived: its norm on the device, and its version then."""


def _add_coming() -> None:
    for each in _coming:
        part = each.processes.part
        if each.arrived is not None:
            each.processes.wait(each.arrived)
        for parameter, gradient, norm in zip(each.parameters, each.gradients, each.norms, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
                vars(gradient)[_NORM] = norm, gradient._version
            else:
                part(parameter.grad).add_(part(gradient))
    _coming.clear()
