"""The learning rates of an optimizer's groups: A and B of LoRA may learn at rates of their own (LoRA+)."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ktbridge.sft.compat import set_logged_rates

_RATIO = "rate_ratio"
"""In a group of the optimizer, and so in its saved state: its rate as a multiple of learning_rate."""


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
