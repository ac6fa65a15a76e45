"""Masters of expert LoRA on the host: updated beside the next step, and one copy for a host's processes.

The GPU waits while the host updates masters: 93 ms of a step of 2 s with 48 layers of 128 experts. A layer
needs its new LoRA when it next computes, and by then the GPU still has the layers before it to do. So the
optimizer's step hands the gradients to a thread, which updates layer by layer, and a layer waits for its own
update when it is called (``DeferredAdam``): the same products in the same order, so the same bits.

With experts on the GPU each of several processes trains all of the expert LoRA. A copy of masters and Adam's
states for each would take as many times the RAM, and updates of the same numbers the bandwidth of memory that
weights cross the link with. So the processes of a host map the same memory (``SharedMasters``): each updates
a part of every layer's experts, and waits until the others have done theirs. The memory is a memfd, because
containers give /dev/shm 64 MB; it goes with the last process that maps it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.optim.adamw import adamw

from ktbridge.experts.compat import parameter_state
from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.machine import make_memory_file, release_memory
from ktbridge.sft.compat import make_adam_states
from ktbridge.sft.distributed import agree, barrier, exchange, explain_lost_rank, wait_limit
from ktbridge.sft.launch import world

_OPTIONS = ("lr", "weight_decay", "eps", "maximize")
_STATES = ("exp_avg", "exp_avg_sq")
_ALIGNED = 64  # bytes: tensors begin at a line of the CPU's caches
_LOOK = 0.1  # seconds of waiting after which it is looked whether the other processes are alive
_PAUSE = 3e-5  # seconds between two looks at what the others have done
_TOKEN = 8  # bytes by which memory is known


@dataclass(frozen=True)
class LocalRanks:
    """Process ids of this host's ranks, in rank order, what they offer, and this one's ``place`` there."""

    processes: tuple[int, ...]
    descriptors: tuple[int, ...]
    tokens: tuple[int, ...]
    place: int

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Wait until ``done()``.

        Raises ``KtbridgeError`` where one of them has ended, or after ``ddp_timeout`` seconds.
        """
        began = time.monotonic()
        look = began + _LOOK
        while not done():
            time.sleep(_PAUSE)
            if time.monotonic() > look:
                look += _LOOK
                with explain_lost_rank():
                    if ended := [*filter(_has_ended, self.processes)]:
                        raise RuntimeError(f"process {ended[0]} has ended before {what}")
                    if time.monotonic() - began > wait_limit():
                        raise RuntimeError(f"nothing came of {what}")


def find_local_ranks(descriptor: int = -1, token: int = 0) -> LocalRanks:
    """Find the ranks that see each other's processes; all ranks call it, each with the memory it offers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        where = boot + os.readlink("/proc/self/ns/pid").encode()
    except OSError:  # then it is alone
        where = secrets.token_bytes(16)
    host = int.from_bytes(hashlib.sha256(where).digest()[:7], "big")
    rows = exchange([host, os.getpid(), descriptor, token])
    here = [row[1:] for row in rows if row[0] == host]
    processes, descriptors, tokens = zip(*here, strict=True)
    return LocalRanks(processes, descriptors, tokens, processes.index(os.getpid()))


class SharedMasters:
    """The masters of some layers, in memory that this host's processes share."""

    def __init__(self, memory: mmap.mmap, ranks: LocalRanks, layers: Sequence[MoELoRAExperts]) -> None:
        self.ranks = ranks
        self.parameters: set[torch.Tensor] = set()
        self._memory, self._end = memory, _ALIGNED
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._done = self.take((len(ranks.processes), len(layers)), torch.int64).numpy()
        """How often each process has updated its part of each layer."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of ``tensor`` [E, ...], a master or like one, that this process updates."""
        count, place = len(self.ranks.processes), self.ranks.place
        return tensor[len(tensor) * place // count : len(tensor) * (place + 1) // count]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the memory, the same one in each process that asks in the same order."""
        count = int(np.prod(shape))
        made = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._end)
        self._end += _padded(count * dtype.itemsize)
        return made.view(*shape)

    def updated(self, layer: MoELoRAExperts) -> None:
        """Tell the others that this process has updated its part of ``layer``."""
        self._done[self.ranks.place, self._numbers[layer]] += 1

    def wait(self, layer: MoELoRAExperts) -> None:
        """Wait, as ``LocalRanks.wait_for``, until all have updated ``layer`` as often as this process."""
        done = self._done[:, self._numbers[layer]]
        wanted = done[self.ranks.place]
        self.ranks.wait_for(lambda: bool(done.min() >= wanted), "its part of an update")


def share_masters(
    optimizer: torch.optim.Optimizer, layers: Mapping[torch.Tensor, MoELoRAExperts]
) -> SharedMasters | None:
    """Move the masters of ``layers``, by parameter, with Adam's states into memory that the host's share.

    All ranks call it, with the same values, before a first step: states that ``optimizer`` hasn't got yet are
    zeros that take no memory before they are written. None, and nothing is moved, where no host has several
    processes, or memory can't be shared.
    """
    size = sum(_padded(4 * each.numel()) * (1 + len(_STATES)) for each in layers)
    own: dict[MoELoRAExperts, list[torch.Tensor]] = {}
    for parameter, layer in layers.items():
        own.setdefault(layer, []).append(parameter)
    descriptor, token = _offer()
    try:
        ranks = find_local_ranks(descriptor, token)
        count = len(ranks.processes)
        memory = _map(ranks, _ALIGNED + size + _padded(8 * count * len(own)))
        fit = all(len(each) >= count and each.dtype == torch.float32 for each in layers)
        if agree(memory is None or not fit) or agree(count) == 1:
            return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None
    shared = SharedMasters(memory, ranks, [*own])
    for parameters in own.values():
        _move(shared, optimizer, parameters)
        release_memory()
    return shared


def _move(
    shared: SharedMasters, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> None:
    moved = []
    for parameter in parameters:
        state = optimizer.state[parameter]
        for value in (parameter.detach(), *map(state.get, _STATES)):
            moved.append(shared.take(parameter.shape, torch.float32))
            if value is not None:
                shared.part(moved[-1]).copy_(shared.part(value))
    barrier()  # all parts are there
    for parameter in parameters:
        parameter.data = moved.pop(0)
        optimizer.state[parameter].setdefault("step", torch.zeros(()))
        optimizer.state[parameter].update((name, moved.pop(0)) for name in _STATES)
    shared.parameters.update(parameters)


def _offer() -> tuple[int, int]:
    """Make memory for others to map; its descriptor, -1 where the system has none to give, and its token."""
    token = secrets.randbits(62)
    try:
        descriptor = make_memory_file("ktbridge-masters")
        os.write(descriptor, token.to_bytes(_TOKEN, "little"))
    except OSError:
        return -1, token
    return descriptor, token


def _map(ranks: LocalRanks, size: int) -> mmap.mmap | None:
    """Map ``size`` bytes of what the first of them offers; None where that can't be had."""
    path = f"/proc/{ranks.processes[0]}/fd/{ranks.descriptors[0]}"
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(descriptor, _TOKEN, 0) != ranks.tokens[0].to_bytes(_TOKEN, "little"):
            return None  # another process has this number where /proc is from
        os.ftruncate(descriptor, size)
        made = mmap.mmap(descriptor, size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    with suppress(OSError):  # most systems say no: Adam takes 1.1 to 1.3 times as long on pages of 4 KB
        made.madvise(mmap.MADV_HUGEPAGE)
    return made


def _has_ended(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class _Update:
    """A step of some parameters [E, ...], with gradients yet to be scaled, and their group's options."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    options: dict[str, Any]
    scale: float

    @torch.no_grad()
    def make(self, shared: SharedMasters | None) -> None:
        """Make it, of ``shared`` tensors this process's part."""
        averages, squares = ([state[name] for state in self.states] for name in _STATES)
        tensors = [self.parameters, self.gradients, averages, squares]
        if shared:
            tensors = [[*map(shared.part, each)] for each in tensors]
        parameters, gradients, averages, squares = tensors
        for gradient in gradients if self.scale != 1 else ():
            gradient.mul_(self.scale)
        steps = [state["step"] for state in self.states]
        adamw(parameters, gradients, averages, squares, [], steps, fused=True, amsgrad=False, **self.options)


class DeferredAdam:
    """Updates masters on the host beside the next step: of ``layers`` that a GPU computes, by a thread.

    Whoever reads trained weights calls ``finish`` first; a layer's forward, the optimizer's ``step`` and its
    ``state_dict`` do so by themselves. Does nothing with another optimizer than fused AdamW.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: Iterable[MoELoRAExperts]) -> None:
        self.shared: SharedMasters | None = None
        """The masters, if this host's processes share them."""
        fewer = max(1, torch.get_num_threads() // 2)  # more cost Python, which starts the GPU's work, a tenth
        self._thread = ThreadPoolExecutor(1, "masters", torch.set_num_threads, (fewer,))
        self._pending: dict[MoELoRAExperts, Future[None]] = {}
        self._layers: dict[torch.Tensor, MoELoRAExperts] = {}
        self._scale = 1.0
        if type(optimizer) is not torch.optim.AdamW:
            return
        for layer in layers:
            if layer.gpu is None:  # of another rank, it has no parameters here
                continue
            trained = (each for each in layer.lora_parameters() if each.requires_grad)
            own = [each for each in trained if each.device.type == "cpu"]
            if own:
                self._layers |= dict.fromkeys(own, layer)
                layer.register_forward_pre_hook(self._finish_layer)
        if self._layers:
            optimizer.register_step_pre_hook(self._take)
            optimizer.register_state_dict_pre_hook(lambda _: self.finish())

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Have this host's processes share the masters, of several; all ranks call it before a first step."""
        own = [each for each in optimizer.param_groups if not self._layers.keys().isdisjoint(each["params"])]
        fused = all(each["fused"] and not each["amsgrad"] for each in own)
        if own and fused and world().size > 1:
            self.shared = share_masters(optimizer, self._layers)

    def scale(self, factor: float) -> Collection[torch.Tensor]:
        """Scale gradients of the next step within their updates; returns the parameters whose they are."""
        self._scale = factor
        return self._layers.keys()

    def finish(self) -> None:
        """Wait for all updates, other processes' too."""
        for layer in list(self._pending):
            self._finish_layer(layer)

    def _finish_layer(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, MoELoRAExperts)
        if layer.gpu is not None and layer in self._pending:
            self._pending.pop(layer).result()
            layer.gpu.staging.rounded(parameter_state(layer.lora_parameters()))

    def _update(self, layer: MoELoRAExperts, updates: Sequence[_Update]) -> None:
        for update in updates:
            update.make(self.shared)
        if self.shared:
            self.shared.updated(layer)
            self.shared.wait(layer)
        assert layer.gpu is not None
        layer.gpu.staging.round(layer.lora_parameters())

    def _take(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.finish()  # of layers that nobody called since
        make_adam_states(optimizer)
        taken: dict[MoELoRAExperts, list[_Update]] = {}
        for group in optimizer.param_groups:
            options = {name: group[name] for name in _OPTIONS}
            options["beta1"], options["beta2"] = group["betas"]
            updates: dict[MoELoRAExperts, _Update] = {}
            for parameter in group["params"]:
                layer = self._layers.get(parameter)
                if layer is None or parameter.grad is None:
                    continue
                if not group["fused"] or group["amsgrad"]:
                    parameter.grad.mul_(self._scale)
                    continue
                update = updates.setdefault(layer, _Update([], [], [], options, self._scale))
                update.parameters.append(parameter)
                update.gradients.append(parameter.grad)
                update.states.append(optimizer.state[parameter])
                parameter.grad = None
            for layer, update in updates.items():
                taken.setdefault(layer, []).append(update)
        for layer, several in taken.items():
            self._pending[layer] = self._thread.submit(self._update, layer, several)
        self._scale = 1.0
