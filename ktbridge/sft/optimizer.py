"""The optimizer of a run: LoRA+ rates, its learning rate on resume, and updates on the host beside the GPU.

``DeferredAdam`` updates expert LoRA in host memory layer by layer beside the next step. The GPU waits
while the host updates masters: 93 ms of a step of 2 s with 48 layers of 128 experts. A layer
needs its new LoRA when it next computes, and by then the GPU still has the layers before it to do. So the
optimizer's step takes the gradients away, and each layer updates its own masters first when it is called:
the same products in the same order, so the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR

from ktbridge.experts.layer import MoELoRAExperts
from ktbridge.sft.compat import make_adam_states, set_logged_rates

_RATIO = "rate_ratio"
"""In a group of the optimizer, and so in its saved state: its rate as a multiple of learning_rate."""

_OPTIONS = ("lr", "weight_decay", "eps", "maximize")


@dataclass(frozen=True)
class _Update:
    """A step of some parameters [E, ...], with their gradients and the options of their group then."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    options: dict[str, Any]

    @torch.no_grad()
    def make(self) -> None:
        averages, squares, steps = (
            [state[name] for state in self.states] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        adamw(
            self.parameters, self.gradients, averages, squares, [], steps,
            fused=True, amsgrad=False, **self.options,
        )  # fmt: skip


class DeferredAdam:
    """Updates masters on the host when their layer is called next: of ``layers`` that a GPU computes.

    Whoever reads trained weights calls ``finish`` first; a layer's forward, the optimizer's ``step`` and its
    ``state_dict`` do so by themselves. Does nothing with another optimizer than fused AdamW.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layers: Iterable[MoELoRAExperts]) -> None:
        self._pending: dict[MoELoRAExperts, list[_Update]] = {}
        self._layers: dict[torch.Tensor, MoELoRAExperts] = {}
        if type(optimizer) is not torch.optim.AdamW:
            return
        for layer in layers:
            if layer.gpu is None:  # of another rank, it has no parameters here
                continue
            own = [each for each in layer.lora_parameters() if each.device.type == "cpu"]
            if own:
                self._layers |= dict.fromkeys(own, layer)
                layer.register_forward_pre_hook(self._finish_layer)
        if self._layers:
            optimizer.register_step_pre_hook(self._take)
            optimizer.register_state_dict_pre_hook(self._finish_all)

    def finish(self) -> None:
        """Make all updates that are still to be made."""
        for layer in list(self._pending):
            self._finish_layer(layer)

    def _finish_all(self, *_: object) -> None:
        self.finish()

    def _finish_layer(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, MoELoRAExperts)
        for update in self._pending.pop(layer, ()):
            update.make()

    def _take(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.finish()  # of layers that nobody called since
        make_adam_states(optimizer)
        for group in optimizer.param_groups:
            if not group["fused"] or group["amsgrad"]:
                continue
            options = {name: group[name] for name in _OPTIONS}
            options["beta1"], options["beta2"] = group["betas"]
            updates: dict[MoELoRAExperts, _Update] = {}
            for parameter in group["params"]:
                layer = self._layers.get(parameter)
                if layer is None or parameter.grad is None:
                    continue
                update = updates.setdefault(layer, _Update([], [], [], options))
                update.parameters.append(parameter)
                update.gradients.append(parameter.grad)
                update.states.append(optimizer.state[parameter])
                parameter.grad = None
            for layer, update in updates.items():
                self._pending.setdefault(layer, []).append(update)


def separate_b(model: nn.Module, optimizer: Optimizer, ratio: float) -> None:
    """Move each group's B, PEFT's and the experts', to one behind the others, at ``ratio`` times its rate.

    LoRA+ (arXiv:2402.12354). Nothing is moved where the ratio is 1. PEFT's own ``create_loraplus_optimizer``
    groups by its own layers' names, which would leave the experts' B with A.
    """
    own = {value for name, value in model.named_parameters() if _is_b(name)}
    for group in list(optimizer.param_groups) if ratio != 1 else ():
        behind = [each for each in group["params"] if each in own]
        if behind and _RATIO not in group:
            group["params"] = [each for each in group["params"] if each not in own]
            options = {key: value for key, value in group.items() if key != "params"}
            options |= {"lr": ratio * group["lr"], _RATIO: ratio}
            optimizer.add_param_group({**options, "params": behind})


def _is_b(name: str) -> bool:
    return ".lora_B." in name or name.endswith("_lora_b")


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
