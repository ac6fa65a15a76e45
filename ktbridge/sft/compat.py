"""Private API of torch, transformers and trl that training uses: each once, with the reason.

The private methods of transformers' Trainer that are overridden are in ``trainer``.
tests/sft/test_compat.py fails where a version of a library does without one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedConfig, Trainer, TrainingArguments
from trl.trainer import utils


class WholeTrainer(Trainer):
    """A Trainer with a model, an optimizer and a schedule, which transformers annotates as optional."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: LambdaLR


def on_one_gpu(arguments: TrainingArguments) -> None:
    """Have Trainer use one GPU: it would spread a process over all that it sees."""
    arguments._n_gpu = 1


def set_logged_rates(scheduler: LRScheduler, rates: Sequence[float]) -> None:
    """Set what ``get_last_lr`` of a scheduler returns before its first step: Trainer logs that."""
    scheduler._last_lr = list(rates)


def leave_out_of_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Have DistributedDataParallel around ``module`` ignore these parameters and buffers.

    Its own function for that is private too, and sets this attribute.
    """
    module._ddp_params_and_buffers_to_ignore = sorted(names)  # type: ignore[assignment]


def trl_metrics(trainer: Any, mode: Literal["train", "eval"]) -> dict[str, list[float]]:
    """Return what a trl trainer has collected for its next log record: it has no way to weight passes."""
    found: dict[str, list[float]] = trainer._metrics[mode]
    return found


def has_balancing_loss(model: nn.Module) -> bool:
    """Return whether the model's class adds a loss on unbalanced routing itself.

    The function for it is in the class's module; trl makes one of any router's logits, whatever they mean.
    """
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


@contextmanager
def without_balancing_loss(trainer: Any) -> Iterator[None]:
    """Context: a trl trainer's loss is without the loss on unbalanced routing, which it adds by a flag."""
    before, trainer.aux_loss_enabled = trainer.aux_loss_enabled, False
    try:
        yield
    finally:
        trainer.aux_loss_enabled = before


def score_labels_only(wanted: bool = True) -> None:
    """Have trl's loss project only positions with a label on CPUs too (False: all, as it does).

    It takes all of them on devices that compile for each number of positions. The loss is the same but for
    its last bits; with one token in three trained on, a step of SmolLM2 takes a third less. Older releases
    have no such choice.
    """
    chooses = getattr(utils, "_use_triton", None)
    if chooses is None:
        return
    theirs = getattr(chooses, "theirs", chooses)

    def compact(device: torch.device) -> bool:
        return device.type == "cpu" or bool(theirs(device))

    compact.theirs = theirs  # type: ignore[attr-defined]
    utils._use_triton = compact if wanted else theirs


@contextmanager
def without_gathering(accelerator: Any) -> Iterator[None]:
    """Context: trl's metrics are of this process's rows, because what it gathers is no more than these.

    It has no switch for that, and accelerate would cut off rows by the training data's last batch.
    """

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    accelerator.gather = accelerator.gather_for_metrics = own
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def set_attention(config: PreTrainedConfig, implementation: str) -> None:
    """Choose the attention of a model made from ``config``: its class's constructor takes no option."""
    config._attn_implementation = implementation


def make_adam_states(optimizer: torch.optim.Optimizer) -> None:
    """Have Adam's states of every parameter now, as its first step would make them.

    So that memory is short before the first step or never: the states are as large as the weights twice.
    torch has no call for it; its own first step makes the same three tensors.
    """
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return
    for group in optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]
        for parameter in group["params"]:
            if optimizer.state[parameter] or not parameter.requires_grad or group["amsgrad"]:
                continue
            place = parameter.device if on_device else torch.device("cpu")
            optimizer.state[parameter].update(
                step=torch.zeros((), dtype=torch.float32, device=place),
                exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
            )
