"""The optimizer of a Trainer among several processes, and the arguments that go with it.

What differs from a single process: FSDP2 leaves the experts alone, sharded and whole parameters are never
in one group of the optimizer, the expert LoRA's gradients are averaged here where every rank has it, the
gradients' norm counts it once and is the same on all ranks, and the optimizer's state is saved whole, by the
names of parameters, so that a run goes on with another number of processes.

Not by torch.distributed.checkpoint: its ``.metadata`` is a pickle, which reading would run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import distributed, nn

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.masters import gradients_norm
from ktbridge.experts.layer import expert_layers
from ktbridge.experts.modules import vision_towers
from ktbridge.sft.compat import WholeTrainer
from ktbridge.sft.distributed.dispatch import expert_parameter_names, replicated_lora, whole_tensor
from ktbridge.sft.distributed.group import explain_lost_rank, from_main
from ktbridge.sft.launch import shards_parameters, world

State = dict[str, Any]
"""A ``state_dict`` of torch's."""
_MAIN_STATE = "optimizer.safetensors"
"""Rank 0's file has the name that marks a checkpoint as resumable."""
_NAMES = "optimizer_names.json"
_BETWEEN = "|"
"""Between a parameter's name and a moment's."""


def parallel_arguments() -> dict[str, bool | str]:
    """Trainer arguments required with several processes; none for a single one."""
    if world().size == 1:
        return {}
    return {
        "average_tokens_across_devices": True,  # a token weighs the same on every rank
        "log_level_replica": "error",
        "ddp_broadcast_buffers": False,  # buffers here never change
        "ddp_find_unused_parameters": False,  # LoRA is on decoder layers only, which all run
    }


def shard_on_the_cpu(trainer: WholeTrainer) -> None:
    """FSDP2 among processes without GPUs: torch shards there too, accelerate only knows of accelerators."""
    state = trainer.accelerator.state
    if world().size > 1 and state.distributed_type == "MULTI_CPU" and shards_parameters():
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        trainer.is_fsdp_enabled = True


def leave_experts_whole(trainer: WholeTrainer) -> None:
    """Have FSDP2 leave the experts alone, and a vision tower, which some ranks' rows don't need.

    Before the model is sharded.
    """
    if world().size > 1 and trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        whole = [*expert_layers(trainer.model).values(), *vision_towers(trainer.model)]
        plugin.ignored_modules = whole


def separate_experts(trainer: WholeTrainer, optimizer: torch.optim.Optimizer) -> None:
    """Move the experts' parameters to groups of their own, with their group's options.

    One step over a group takes sharded tensors or whole ones, not both.
    """
    experts = _expert_parameters(trainer) if world().size > 1 else set()
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if parameter in experts]
        if own and len(own) < len(group["params"]):
            group["params"] = [each for each in group["params"] if each not in experts]
            options = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({**options, "params": own})


def average_and_clip(trainer: WholeTrainer, model: nn.Module, largest: float) -> torch.Tensor:
    """Once in each step, before the optimizer's: the norm of all ranks' gradients, as ``clip_gradients``."""
    own = trainer.accelerator.unwrap_model(trainer.model)
    lora = replicated_lora(own)
    if reduces_itself(trainer):
        lora = [parameter for parameter in own.parameters() if parameter.requires_grad]
    average_gradients(lora, trainer.args.device)
    return clip_gradients(model, _expert_parameters(trainer), largest)


def reduces_itself(trainer: WholeTrainer) -> bool:
    """Return whether a step averages all gradients at its end, and no process waits for another before.

    So it is with experts on the GPU, whose LoRA is averaged here anyway, but for FSDP2, which gathers weights
    in each layer. DDP never sees a micro-batch that it should reduce.
    """
    own = trainer.accelerator.unwrap_model(trainer.model)
    return bool(replicated_lora(own)) and not trainer.is_fsdp_enabled


def save_optimizer(trainer: WholeTrainer, directory: str) -> None:
    """Write the state of optimizer and scheduler into one file, whole tensors by names of parameters.

    All ranks call it: FSDP2's shards are gathered. Rank 0 writes, and has the expert LoRA's.
    """
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state, names = inner.state_dict(), _names(trainer)
    tensors, plain = {}, {}
    for group, own in zip(inner.param_groups, state["param_groups"], strict=True):
        for parameter, place in zip(group["params"], own["params"], strict=True):
            for moment, value in state["state"].get(place, {}).items():
                key = f"{names[parameter]}{_BETWEEN}{moment}"
                if torch.is_tensor(value):
                    tensors[key] = whole_tensor(value.detach()).cpu().contiguous()
                else:
                    plain[key] = value
        own["params"] = [names[parameter] for parameter in group["params"]]
    if world().rank == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
        scheduler = trainer.lr_scheduler.state_dict()
        beside = {"param_groups": state["param_groups"], "plain": plain, "scheduler": scheduler}
        metadata = {key: json.dumps(value, default=float) for key, value in beside.items()}
        save_file(tensors, Path(directory) / _MAIN_STATE, metadata)


def save_names(trainer: WholeTrainer, directory: str) -> None:
    """Write the names of parameters beside the optimizer.pt of a run of one process, in its order."""
    inner, names = getattr(trainer.optimizer, "optimizer", trainer.optimizer), _names(trainer)
    order = [[names[parameter] for parameter in group["params"]] for group in inner.param_groups]
    (Path(directory) / _NAMES).write_text(json.dumps(order))


def load_optimizer(trainer: WholeTrainer, checkpoint: str) -> None:
    """Load the state that ``save_optimizer`` or a run of one process saved, by any number of processes.

    A checkpoint of 0.6.0 has a file for each rank, for as many ranks. Raises KtbridgeError if this rank's is
    missing, or the optimizer.pt of 0.6.0 is to be loaded by several.
    """
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    found = _by_name(Path(checkpoint))
    if found is None:
        path = _state_file(checkpoint)
        if not path.is_file() or (world().size == 1 and path.with_name("rng_state_1.pth").exists()):
            raise KtbridgeError(
                f"{path.parent} has no optimizer state for rank {world().rank} of {world().size}: "
                "0.6.0 saved it for one number of processes.",
                "Go on with as many processes as the checkpoint's run had.",
            )
        state, scheduler = _with_experts(path, len(inner.param_groups))
        inner.load_state_dict(_sharded(state, inner))
    else:
        moments, groups, scheduler = found
        names, own = _names(trainer), inner.state_dict()
        group_of = {name: group for group in groups for name in group["params"]}
        state = {"state": {}, "param_groups": []}
        for group, mine in zip(inner.param_groups, own["param_groups"], strict=True):
            options = group_of[names[group["params"][0]]] if group["params"] else mine
            state["param_groups"].append({**options, "params": mine["params"]})
            for parameter, place in zip(group["params"], mine["params"], strict=True):
                if values := moments.get(names[parameter]):
                    state["state"][place] = {
                        moment: _as_sharded(value, parameter) for moment, value in values.items()
                    }
        inner.load_state_dict(state)
    # What it has for each group is set by ``set_learning_rate``: groups depend on the number of processes.
    single = {key: value for key, value in scheduler.items() if not isinstance(value, list)}
    trainer.lr_scheduler.load_state_dict({**trainer.lr_scheduler.state_dict(), **single})


def _names(trainer: WholeTrainer) -> dict[nn.Parameter, str]:
    own = trainer.accelerator.unwrap_model(trainer.model)
    return {value: name for name, value in own.named_parameters() if value.requires_grad}


def _by_name(checkpoint: Path) -> tuple[dict[str, State], list[State], State] | None:
    """Return moments by parameter, groups with names, and the scheduler's state; None: of 0.6.0."""
    moments: dict[str, State] = {}
    if (names := checkpoint / _NAMES).is_file():
        saved, scheduler = (
            torch.load(checkpoint / name, map_location="cpu", weights_only=True)
            for name in ("optimizer.pt", "scheduler.pt")
        )
        groups: list[State] = []
        for group, order in zip(saved["param_groups"], json.loads(names.read_text()), strict=True):
            groups.append({**group, "params": order})
            for place, name in zip(group["params"], order, strict=True):
                moments[name] = saved["state"].get(place, {})
        return moments, groups, scheduler
    if not (path := checkpoint / _MAIN_STATE).is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if "plain" not in metadata:
            return None
        values = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    for key, value in {**values, **json.loads(metadata["plain"])}.items():
        name, _, moment = key.rpartition(_BETWEEN)
        moments.setdefault(name, {})[moment] = value
    return moments, json.loads(metadata["param_groups"]), json.loads(metadata["scheduler"])


def _as_sharded(value: Any, parameter: nn.Parameter) -> Any:
    """Return a whole moment as FSDP2 has sharded its parameter; others stay."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or not value.dim():
        return value
    here = value.to(parameter.to_local().device)
    return distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _expert_parameters(trainer: WholeTrainer) -> set[nn.Parameter]:
    own = trainer.accelerator.unwrap_model(trainer.model)
    names = expert_parameter_names(own)
    return {value for name, value in own.named_parameters() if name in names}


def clip_gradients(model: nn.Module, experts: set[nn.Parameter], largest: float) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most ``largest``; returns the norm before, float32.

    ``experts`` are rank 0's own parameters (none elsewhere), or the same on all ranks, averaged already; all
    others are sharded by FSDP2, or averaged by DDP. Every rank gets the same norm. As
    ``torch.nn.utils.clip_grad_norm_``, which does not take sharded and whole tensors together.
    """
    shared: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            (own if parameter in experts else shared).append(parameter.grad)
    squares = from_main(float(gradients_norm(own)) ** 2)
    if shared:
        with explain_lost_rank():
            squares += float(whole_tensor(nn.utils.get_total_norm(shared))) ** 2
    norm = squares**0.5
    if largest < float("inf"):
        scale = min(1.0, largest / (norm + 1e-6))
        if scale < 1:
            with torch.no_grad():
                for grad in (*shared, *own):
                    grad.mul_(scale)
    return torch.tensor(norm)


def _state_file(directory: str) -> Path:
    rank = world().rank
    return Path(directory) / (f"optimizer_{rank}.safetensors" if rank else _MAIN_STATE)


def _read_state(path: Path) -> tuple[State, State]:
    """Return the optimizer's and the scheduler's state in a rank's file of 0.6.0."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118  not a mapping
            place, _, name = key.partition(".")
            state.setdefault(int(place), {})[name] = file.get_tensor(key)
        plain = {key: json.loads(value) for key, value in file.metadata().items()}
    return {"state": state, "param_groups": plain["param_groups"]}, plain["scheduler"]


def _with_experts(path: Path, groups: int) -> tuple[State, State]:
    """The states in a rank's file for ``groups`` groups, of which the last are the expert LoRA's.

    These are in rank 0's file alone, under the same places, for each rank that has any now: where experts are
    computed may have changed since.
    """
    state, scheduler = _read_state(path)
    own = state["param_groups"]
    if len(own) < groups:
        theirs, scheduler = _read_state(path.with_name(_MAIN_STATE))
        own += theirs["param_groups"][len(own) :]
        state["state"] = {**theirs["state"], **state["state"]}
    lists = {key: value[:groups] for key, value in scheduler.items() if isinstance(value, list)}
    return state, {**scheduler, **lists}


def _sharded(state: State, optimizer: torch.optim.Optimizer) -> State:
    """An optimizer's saved state whose shards are sharded tensors again, like their parameters."""
    from torch.distributed.tensor import DTensor

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        if not isinstance(parameter, DTensor):
            continue
        moments = state["state"].get(place, {})
        for name, value in moments.items():
            if torch.is_tensor(value) and value.dim():
                moments[name] = DTensor.from_local(
                    value.to(parameter.to_local().device),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
    return state


_BUCKET = 64 << 20  # bytes: a link reaches full bandwidth with fewer, and a GPU has room for this


def average_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Put the mean over all ranks in the place of each float32 ``.grad``, as DDP and FSDP2 do of theirs.

    All ranks give the same parameters in the same order; a missing gradient counts as 0. They meet on
    ``device``, wherever they are themselves: NCCL on a GPU, gloo on the CPU. Between a whole backward pass
    and clipping. Does nothing for a process that is alone. Raises ``KtbridgeError`` when a rank is lost.
    """
    if world().size == 1:
        return
    for bucket in _buckets(parameters):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [each.grad for each in bucket if each.grad is not None]
        flat = torch.empty(sum(map(torch.numel, gradients)), dtype=torch.float32, device=device)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.flatten(), non_blocking=True)
        with explain_lost_rank():
            distributed.all_reduce(flat)
        flat /= world().size
        for part, gradient in zip(parts, gradients, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """``parameters`` in their order, in runs of at most ``_BUCKET`` bytes of float32, or of one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + 4 * parameter.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += 4 * parameter.numel()
    if bucket:
        yield bucket
