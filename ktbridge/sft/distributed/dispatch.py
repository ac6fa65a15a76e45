"""The experts of a model in several processes: which rank owns them, and one call of them by all.

``assign_experts`` decides. If rank 0 owns them, a call sends it tokens, and outputs back; in backward alike.
All ranks make the same calls in the same order. Each call starts with a row of whole numbers from every
rank, so ranks out of step stop with an error before tokens of different layers are mixed. Gradient
checkpointing repeats nothing here: outputs are kept and handed out again (``experts.recompute``).

Scale: DDP and FSDP2 average gradients over W ranks, and the trainers scale losses for that. The expert
LoRA's gradient is a sum over all tokens, so rank 0 runs backward on d_out / W, and multiplies what goes
back to the ranks by W. Both are exact where W is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ktbridge.errors import KtbridgeError
from ktbridge.experts import autograd, recompute
from ktbridge.experts.compat import graph_is_kept
from ktbridge.experts.gpu.executor import GpuExperts
from ktbridge.experts.gpu.masters import is_there
from ktbridge.experts.gpu.ring import Processes
from ktbridge.experts.gpu.timing import median_seconds
from ktbridge.experts.layer import MoELoRAExperts, expert_layers
from ktbridge.experts.modules import experts_modules, vision_towers
from ktbridge.sft.compat import WholeTrainer, leave_out_of_ddp
from ktbridge.sft.distributed import (
    agree,
    distribute,
    exchange,
    explain_lost_rank,
    gather_on_main,
    group,
    put_mean,
    weights_group,
)
from ktbridge.sft.host_masters import SharedMasters, find_local_ranks
from ktbridge.sft.launch import is_main, shards_parameters, world

_FORWARD, _BACKWARD = 0, 1
_GATHERED = 256 << 20  # bytes: some 2 ms over NVLink
_Meeting = tuple[int, bool, bool] | None


class _Calls:
    number = 0


@dataclass
class _Call:
    """State that a call's forward and backward share."""

    layer: MoELoRAExperts
    ids: torch.Tensor
    replayed: torch.Tensor | None
    number: int = 0
    counts: Sequence[int] = ()
    training: bool = False
    inner: tuple[torch.Tensor, ...] = ()
    """Rank 0's hidden [ΣT, H], weights [ΣT, K] and output [ΣT, H], with their graph."""
    like: tuple[torch.Tensor, ...] = field(default=())
    """Tensors without memory in the shapes and dtypes of this rank's hidden and weights."""


def run_experts(
    layer: MoELoRAExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return ``layer(hidden, ids, weights)`` of experts that rank 0 owns: the same values and gradients.

    hidden [T, H] bfloat16, ids [T, K] int64, weights [T, K] float32 -> [T, H] bfloat16; T is each rank's
    own and may be 0. Raises ``KtbridgeError`` when the ranks are not at the same call, or one is lost.
    """
    call = _Call(layer, ids, recompute.replayed())
    if call.replayed is not None:
        call.training = True
        if is_main():
            layer.draw_lora_use()  # as the first time, for what comes after it
    else:
        _Calls.number += 1
        call.number = _Calls.number
        call.counts, call.training = _agreed(layer, hidden, ids, weights, call.number)
    # Something that requires a gradient on every rank, so that all of them come to backward.
    anchor = torch.zeros((), requires_grad=call.training)
    return _Dispatched.apply(call, anchor, hidden, weights)


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: _Call, anchor: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.device = call, hidden.device
        crosses = hidden.device.type != "cpu"
        if call.replayed is not None:
            out = call.replayed if crosses else call.replayed.clone()
        else:
            out = _forward(call, *autograd.to_host(hidden, call.ids, weights))
            # What stays on the CPU is the caller's, who may change it in place.
            recompute.record(out if crosses else out.clone())
        return autograd.to_device(out, hidden.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (d_out,) = autograd.to_host(d_out.to(torch.bfloat16))
        d_hidden, d_weights = (autograd.to_device(d, ctx.device) for d in _backward(ctx.call, d_out))
        return None, None, d_hidden, d_weights


def _agreed(
    layer: MoELoRAExperts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, number: int
) -> tuple[list[int], bool]:
    """Return how many tokens each rank brings, and whether any of them wants gradients."""
    wants = torch.is_grad_enabled() and (
        hidden.requires_grad or weights.requires_grad or (layer.lora_enabled and layer.lora_rank > 0)
    )
    row = [_FORWARD, number, hidden.shape[1], ids.shape[1], int(torch.is_grad_enabled())]
    rows = _in_step([*row, len(hidden), int(wants)])
    return [each[-2] for each in rows], any(each[-1] for each in rows)


def _in_step(row: Sequence[int]) -> list[list[int]]:
    """Return every rank's row, of which all but the last two numbers must be the same everywhere.

    Rows are equally long in forward and backward: gloo ends a process that is sent more than it expects.
    """
    rows = exchange(row)
    for rank, other in enumerate(rows):
        if other[:-2] != rows[0][:-2]:
            first, second = (
                f"{'backward' if each[0] else 'forward'} of call {each[1]}" for each in (rows[0], other)
            )
            raise KtbridgeError(
                f"the processes lost step: rank 0 is in the {first} of the experts, rank {rank} in the "
                f"{second} ({rows[0][2:-2]}, {other[2:-2]}).",
                "Give every process the same configuration and the same number of batches.",
            )
    return rows


def _forward(call: _Call, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return this rank's outputs [T, H] on the host."""
    call.like = (hidden.to("meta"), weights.to("meta"))
    whole = gather_on_main([hidden, ids, weights], call.counts)
    outputs = []
    if is_main():
        # A graph of its own: the one outside holds this rank's tokens only. What it saves must not be seen by
        # a checkpointed layer around it, which would count it and find nothing of it the second time.
        with (
            torch.set_grad_enabled(call.training),
            recompute.unrecorded(),
            saved_tensors_hooks(_as_it_is, _as_it_is),
        ):
            inputs = [whole[0].requires_grad_(call.training), whole[1]]
            inputs.append(whole[2].requires_grad_(call.training))
            out = type(call.layer).forward(call.layer, *inputs)  # layer() would dispatch again
        outputs.append(out.detach())
        if call.training:
            call.inner = (inputs[0], inputs[2], out)
    (own,) = distribute(outputs, [hidden], call.counts)
    return own


def _backward(call: _Call, d_out: torch.Tensor) -> list[torch.Tensor]:
    """Return this rank's d_hidden [T, H] and d_weights [T, K]; the expert LoRA's goes to ``.grad``."""
    _in_step([_BACKWARD, call.number, 0, 0, 0, 0, 0])
    whole, gradients = gather_on_main([d_out], call.counts), []
    if is_main():
        hidden, weights, out = call.inner
        share = 1 / world().size
        torch.autograd.backward(out, whole[0].mul_(share), retain_graph=graph_is_kept())
        for tensor in (hidden, weights):
            assert tensor.grad is not None
            gradients.append(tensor.grad.mul_(world().size))
            tensor.grad = None
    like = [torch.empty_like(tensor, device="cpu") for tensor in call.like]
    own = distribute(gradients, like, call.counts)
    if not graph_is_kept():
        call.inner = ()
    return own


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def assign_experts(model: nn.Module) -> None:
    """Decide which rank owns a wrapped model's experts, before an optimizer sees its parameters.

    Experts on the GPU (``place_experts``, which comes first) are every rank's: each computes its own rows,
    and who trains averages the expert LoRA's gradients (``average_gradients``). Other experts become rank
    0's: layers then dispatch (``run_experts``), and other ranks drop expert weights and expert LoRA. Either
    way DDP is set to ignore the expert LoRA, and FSDP2 will be (``leave_experts_whole``), and what more than
    one rank trains starts from rank 0's values. DDP ignores what isn't trained, too: it would send copies of
    the base, which all ranks have read, through GPU memory that the experts have. Does nothing for a process
    that is alone.
    """
    if world().size == 1:
        return
    experts = expert_parameter_names(model)
    everywhere = bool(on_gpu(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (everywhere or name not in experts):
            _broadcast(parameter)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    leave_out_of_ddp(model, experts | frozen | {name for name, _ in model.named_buffers()})
    if not everywhere:
        _give_to_main(model)


def _give_to_main(model: nn.Module) -> None:
    """Make rank 0 the one owner of the experts."""
    layers = expert_layers(model).values()
    for layer in layers:
        layer.forward = MethodType(run_experts, layer)  # type: ignore[method-assign]
    if is_main():
        return
    for layer in layers:
        layer._parameters.clear()
        layer.weights = ()  # type: ignore[assignment]  # from now on its kernels must not run
    for _, module in experts_modules(model):
        module.mapped_experts = ()  # type: ignore[assignment]
        for name in list(module._parameters):
            del module._parameters[name]


class JointExperts(Processes):
    """Several ranks' model in a step, and their experts on GPUs: same layers, each rank its own rows.

    Two things meet in a micro-batch, beside what the GPUs compute: gradients of expert LoRA whose masters
    are on the host, for their mean, and where ``share``, the weights of streamed layers. Each rank transfers
    a part of a group over its own link and gets the others' parts from them.

    A rank that runs out of memory takes part in what is left of a step (``give_up``), for the others wait.
    So the order of groups must be known: a step in which it isn't yet shares nothing.

    Where not all ranks are of one host nothing meets before a step's end.
    """

    def __init__(self, trainer: WholeTrainer, shared: SharedMasters | None, share: bool) -> None:
        """All ranks call this, once their models are prepared for training. Experts may be rank 0's, too."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.place, self.count = world().rank, world().size
        self.trained = [each for each in model.parameters() if each.requires_grad]
        layers, self._ranks = on_gpu(model), find_local_ranks()
        lora = {each for layer in layers for each in layer.parameters()}
        self.reduces_itself = bool(layers) and not trainer.is_fsdp_enabled
        """True where ranks meet here and at a step's end alone: DDP never sees what it should reduce."""
        self._shared, self._share = shared, share
        self._passes, self._layers, self._size = 0, 0, 0
        self._experts: GpuExperts | None = None
        self._pass: list[_Meeting] | None = None
        """What meets in a micro-batch: groups as ``Ring.take`` wants them, None for a mean."""
        self._met: list[_Meeting] = []
        self._apart = False
        """True where a group was transferred outside a step, which other ranks need not have done."""
        coming: set[torch.Tensor] = set()
        for layer in layers if len(self._ranks.processes) == self.count else ():
            assert layer.gpu is not None
            self._experts = layer.gpu.experts
            self._experts.join(self)
            trained = [each for each in layer.lora_parameters() if each.requires_grad]
            if own := [each for each in trained if not is_there(each, self._experts.device)]:
                coming.update(own)
                self._layers += 1
                self._size = sum(each.numel() for each in own)  # an executor's layers are alike
        self.averaged = [p for p in self.trained if (self.reduces_itself or p in lora) and p not in coming]
        """Those of which no gradient is a mean yet when a step has been computed."""
        self.parts = [each for each in self.trained if shared and each in coming]
        """Those of which each rank has a part of the mean."""
        experts, others = expert_parameters(model), {*self.trained}.difference(self.averaged, self.parts)
        self.own = [each for each in self.trained if each in others and each in experts]
        """Those of rank 0 alone, or with the same gradients on all ranks."""
        self.elsewhere = [each for each in self.trained if each in others and each not in experts]
        """Those that DDP averages, or FSDP2 shards."""
        self._group = weights_group(self._experts.device) if share and self._experts else None

    def begin(self, passes: int) -> None:
        """Begin a step of so many micro-batches."""
        self._met, self._passes = [], passes
        if self._share and self._experts is not None:
            can_share = self._experts.ring.copier.can_share
            apart, refused = map(any, zip(*exchange([self._apart, not can_share]), strict=True))
            if apart:
                self._experts.ring.forget()
            self._apart, self._share = False, not refused
            self.sharing = self._share and self._pass is not None

    def end(self, made: bool) -> None:
        """End a step, or one that some rank has not ``made``."""
        self.sharing, self._apart = False, not made
        if made and self._met.count(None) != self._passes * self._layers:
            raise RuntimeError(
                "gradients of the expert LoRA were not averaged: do its parameters have hooks?"
            )
        self._pass = self._met[: len(self._met) // self._passes] if made else None
        self._passes = 0

    def give_up(self) -> None:
        """Take part in what is left of the step, without rows."""
        experts, seen = self._experts, len(self._met)
        assert experts is not None
        means: list[_Meeting] = [None] * (self._passes * self._layers - self._met.count(None))
        program = self._pass if self.sharing else None
        for meeting in means if program is None else (program * self._passes)[seen:]:
            if meeting is None:
                self.average(torch.zeros(self._size, device=experts.device))
            else:
                experts.ring.take(*meeting)
                experts.ring.give_back(*meeting)

    def took(self, index: int, forward: bool, turns: bool) -> None:
        if self._passes:
            self._met.append((index, forward, turns))
        else:
            self._apart = True

    def gather(self, parts: torch.Tensor) -> None:
        own = parts.view(self.count, -1)[self.place]
        with explain_lost_rank():
            distributed.all_gather_into_tensor(parts, own, self._group)

    def wait(self, event: torch.cuda.Event) -> None:
        self._ranks.wait_for(event.query, "the end of a backward pass")

    def average(self, gradient: torch.Tensor) -> None:
        if self._passes:
            self._met.append(None)
        put_mean(gradient)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._shared.part(tensor) if self._shared else tensor


def gather_speed(device: torch.device) -> float:
    """Return the bytes a second of what ranks give each other on ``device``, of the slowest; all call it."""
    whole = torch.zeros(_GATHERED // world().size * world().size, dtype=torch.uint8, device=device)
    own, ranks = whole.chunk(world().size)[world().rank], weights_group(device)
    distributed.all_gather_into_tensor(whole, own, ranks)  # makes NCCL's buffers
    seconds = median_seconds(lambda: distributed.all_gather_into_tensor(whole, own, ranks), device)
    return _GATHERED / (agree(round(1e9 * seconds)) / 1e9)


def leave_experts_whole(trainer: WholeTrainer) -> None:
    """Have FSDP2 leave the experts alone, and a vision tower, which some ranks' rows don't need.

    Before the model is sharded.
    """
    if world().size > 1 and trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        whole = [*expert_layers(trainer.model).values(), *vision_towers(trainer.model)]
        plugin.ignored_modules = whole


def shard_on_the_cpu(trainer: WholeTrainer) -> None:
    """FSDP2 among processes without GPUs: torch shards there too, accelerate only knows of accelerators."""
    state = trainer.accelerator.state
    if world().size > 1 and state.distributed_type == "MULTI_CPU" and shards_parameters():
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        trainer.is_fsdp_enabled = True


def on_gpu(model: nn.Module) -> list[MoELoRAExperts]:
    """Return the expert layers that were given to the GPU."""
    return [layer for layer in expert_layers(model).values() if layer.gpu is not None]


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Return the names of the routed experts' parameters: their LoRA, and weights if loaded."""
    return {
        f"{name}.{parameter}"
        for name, module in experts_modules(model)
        for parameter, _ in module.named_parameters()
    }


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``expert_parameter_names``."""
    names = expert_parameter_names(model)
    return {value for name, value in model.named_parameters() if name in names}


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole, on every rank: all ranks must ask for one that FSDP2 has sharded."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with explain_lost_rank():
        whole: torch.Tensor = gather()
    return whole


def gather_trained(model: nn.Module) -> None:
    """Replace each trained tensor that FSDP2 has sharded by the whole one, after training.

    On all ranks, in place; what reads the model's parameters then finds them as in a single process. The
    model can't be run any more.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad and hasattr(parameter, "to_local"):
                whole = whole_tensor(parameter.detach()).cpu()
                module._parameters[name] = nn.Parameter(whole)


def _broadcast(parameter: torch.Tensor) -> None:
    value = parameter.detach().cpu().contiguous()
    with explain_lost_rank():
        distributed.broadcast(value, 0, group())
    with torch.no_grad():
        parameter.copy_(value)


def copy_into(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it where FSDP2 has sharded it."""
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        there = value.to(parameter.to_local().device, parameter.dtype)
        value = distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)
    with torch.no_grad():
        parameter.copy_(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that FSDP2 has sharded; any other is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
