"""A wrapped model in several processes: which rank owns its experts, and gathering sharded tensors."""

from __future__ import annotations

from types import MethodType

import torch
from torch import distributed, nn

from ktbridge.experts.layer import MoELoRAExperts, expert_layers
from ktbridge.experts.modules import experts_modules
from ktbridge.sft.compat import leave_out_of_ddp
from ktbridge.sft.distributed.dispatch import run_experts
from ktbridge.sft.distributed.group import explain_lost_rank, group
from ktbridge.sft.launch import is_main, world


def prepare(model: nn.Module) -> None:
    """Decide which rank owns a wrapped model's experts, before an optimizer sees its parameters.

    Experts on the GPU (``place_experts``, which comes first) are every rank's: each computes its own rows,
    and who trains averages the expert LoRA's gradients (``average_gradients``). Other experts become rank
    0's: layers then dispatch (``run_experts``), and other ranks drop expert weights and expert LoRA. Either
    way DDP is set to ignore the expert LoRA, and FSDP2 will be (``leave_experts_whole``), and what more than
    one rank trains starts from rank 0's values. Does nothing for a process that is alone.
    """
    if world().size == 1:
        return
    experts = expert_names(model)
    everywhere = bool(_on_gpu(model))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (everywhere or name not in experts):
            _broadcast(parameter)
    leave_out_of_ddp(model, experts)
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


def replicated_lora(model: nn.Module) -> list[nn.Parameter]:
    """The trained expert LoRA that each rank has, in the same order on all: that of experts on the GPU."""
    lora = (parameter for layer in _on_gpu(model) for parameter in layer.parameters())
    return [parameter for parameter in lora if parameter.requires_grad]


def _on_gpu(model: nn.Module) -> list[MoELoRAExperts]:
    """The expert layers that were given to the GPU."""
    return [layer for layer in expert_layers(model).values() if layer.gpu is not None]


def expert_names(model: nn.Module) -> set[str]:
    """Names of the parameters that belong to a model's routed experts: their LoRA, and weights if loaded."""
    return {
        f"{name}.{parameter}"
        for name, module in experts_modules(model)
        for parameter, _ in module.named_parameters()
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whole, on every rank: FSDP2's shards are gathered, so all ranks must ask; others stay."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with explain_lost_rank():
        whole: torch.Tensor = gather()
    return whole


def gather_trained(model: nn.Module) -> None:
    """After training: put the whole tensor in the place of each trained one that FSDP2 has sharded.

    On all ranks, in place; what reads the model's parameters then finds them as in a single process. The
    model can't be run any more.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad and hasattr(parameter, "to_local"):
                whole = full(parameter.detach()).cpu()
                module._parameters[name] = nn.Parameter(whole)


def _broadcast(parameter: torch.Tensor) -> None:
    value = parameter.detach().cpu().contiguous()
    with explain_lost_rank():
        distributed.broadcast(value, 0, group())
    with torch.no_grad():
        parameter.copy_(value)


def fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it where FSDP2 has sharded it."""
    if hasattr(parameter, "to_local"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        there = value.to(parameter.to_local().device, parameter.dtype)
        value = distribute_tensor(
            there, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    with torch.no_grad():
        parameter.copy_(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that FSDP2 has sharded; any other is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
