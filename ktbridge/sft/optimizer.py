"""The optimizer of a run: its groups, gradients of several processes, and its saved state.

Among several processes sharded and whole parameters are never in one group, the expert LoRA's gradients are
averaged here where every rank has it, the gradients' norm counts it once and is the same on all ranks, and
the state is saved whole, by the names of parameters, so that a run goes on with another number of processes.
Not by torch.distributed.checkpoint: its ``.metadata`` is a pickle, which reading would run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu.masters import gradients_norm, scale_to_norm
from ktbridge.sft.compat import WholeTrainer, set_logged_rates
from ktbridge.sft.distributed import add, explain_lost_rank, put_mean
from ktbridge.sft.distributed.dispatch import JointExperts, expert_parameters, whole_tensor
from ktbridge.sft.host_masters import DeferredAdam
from ktbridge.sft.launch import is_main, world

State = dict[str, Any]
"""A ``state_dict`` of torch's."""
_RATIO = "rate_ratio"
"""In a group of the optimizer, and so in its saved state: its rate as a multiple of learning_rate."""
_MAIN_STATE = "optimizer.safetensors"
"""Rank 0's file has the name that marks a checkpoint as resumable."""
_NAMES = "optimizer_names.json"
_BETWEEN = "|"
"""Between a parameter's name and a moment's."""
_BUCKET = 64 << 20  # bytes: a link reaches full bandwidth with fewer, and a GPU has room for this


# Groups


def find_b(model: nn.Module) -> list[nn.Parameter]:
    """Find the B of a model's LoRA, PEFT's and the experts'."""
    named = model.named_parameters()
    return [value for name, value in named if ".lora_B." in name or name.endswith("_lora_b")]


def separate_b(model: nn.Module, optimizer: Optimizer, ratio: float) -> None:
    """Move each group's B, PEFT's and the experts', to one behind the others, at ``ratio`` times its rate.

    LoRA+ (arXiv:2402.12354). Nothing is moved where the ratio is 1. PEFT's own ``create_loraplus_optimizer``
    groups by its own layers' names, which would leave the experts' B with A.
    """
    own = set(find_b(model))
    for group in list(optimizer.param_groups) if ratio != 1 else ():
        behind = [each for each in group["params"] if each in own]
        if behind and _RATIO not in group:
            group["params"] = [each for each in group["params"] if each not in own]
            options = {key: value for key, value in group.items() if key != "params"}
            options |= {"lr": ratio * group["lr"], _RATIO: ratio}
            optimizer.add_param_group({**options, "params": behind})


def separate_experts(trainer: WholeTrainer, optimizer: torch.optim.Optimizer) -> None:
    """Move the experts' parameters to groups of their own, with their group's options.

    One step over a group takes sharded tensors or whole ones, not both.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    experts = expert_parameters(model) if world().size > 1 else set()
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if parameter in experts]
        if own and len(own) < len(group["params"]):
            group["params"] = [each for each in group["params"] if each not in experts]
            options = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({**options, "params": own})


def set_learning_rate(scheduler: LambdaLR, highest: float) -> None:
    """Have a loaded LambdaLR and its optimizer go on with ``highest`` as the schedule's rate.

    Their states hold the learning rates of the run that wrote them; ``highest`` may have been changed since.
    """
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [highest * group.get(_RATIO, 1.0) for group in groups]
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [float(base * factor) for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    set_logged_rates(scheduler, rates)
    for group, base, rate in zip(groups, scheduler.base_lrs, rates, strict=True):
        group["initial_lr"], group["lr"] = base, rate


# Gradients of several processes


def average_and_clip(
    joint: JointExperts, device: torch.device, largest: float, deferred: DeferredAdam
) -> torch.Tensor:
    """Once in each step, before the optimizer's: scale all gradients to a norm of at most ``largest``.

    Returns the norm before, float32, on every rank the same. As ``torch.nn.utils.clip_grad_norm_``, which
    does not take sharded and whole tensors together.
    """
    averaged = average_gradients(joint.averaged, device) ** 2
    mine = float(gradients_norm(_gradients(joint.own))) ** 2 + averaged if is_main() else 0.0
    (squares,) = add([mine + float(gradients_norm(_gradients(joint.parts), joint.part)) ** 2])
    if elsewhere := _gradients(joint.elsewhere):
        with explain_lost_rank():
            squares += float(whole_tensor(nn.utils.get_total_norm(elsewhere))) ** 2
    norm = torch.tensor(squares**0.5)
    scale_to_norm(joint.trained, largest, norm, deferred.scale)
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def average_gradients(parameters: Sequence[nn.Parameter], device: torch.device) -> float:
    """Put the mean over all ranks in the place of each float32 ``.grad``; return the means' common norm.

    As DDP and FSDP2 do of theirs. All ranks give the same parameters in the same order; a missing gradient
    counts as 0. They meet on ``device``, wherever they are themselves: NCCL on a GPU, gloo on the CPU.
    Between a whole backward pass and clipping. Does nothing for a process that is alone. Raises
    ``KtbridgeError`` when a rank is lost.
    """
    if world().size == 1:
        return 0.0
    norms = [torch.zeros((), device=device)]
    for bucket in _buckets(parameters):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = _gradients(bucket)
        flat = torch.empty(sum(map(torch.numel, gradients)), dtype=torch.float32, device=device)
        parts = flat.split([gradient.numel() for gradient in gradients])
        means = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
        for mean, gradient in zip(means, gradients, strict=True):
            mean.copy_(gradient, non_blocking=True)
        put_mean(flat)
        norms.append(torch.linalg.vector_norm(flat))
        for mean, gradient in zip(means, gradients, strict=True):
            gradient.copy_(mean)
    return float(torch.linalg.vector_norm(torch.stack(norms)))


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


# Saved state


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

    Raises KtbridgeError for one that 0.6.0 saved: for as many, or for one.
    """
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    found = _by_name(Path(checkpoint))
    if found is None:
        alone = (Path(checkpoint) / "optimizer.pt").is_file()
        step = "Go on with one process" if alone else "Finish the run with 0.6.0"
        raise KtbridgeError(
            f"{checkpoint} has an optimizer state of 0.6.0, for its own number of processes.",
            f"{step}, or start anew with resume_from_checkpoint=false.",
        )
    moments, groups, scheduler = found
    names, own = _names(trainer), inner.state_dict()
    group_of = {name: group for group in groups for name in group["params"]}
    state: State = {"state": {}, "param_groups": []}
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
