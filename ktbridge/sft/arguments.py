"""Translate a configuration into torch's devices and the arguments of transformers' and trl's trainers."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback
from trl import DPOConfig, KTOConfig, SFTConfig

from ktbridge.errors import UsageError
from ktbridge.sft.compat import on_one_gpu
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.launch import world

CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    else "gradient_checkpointing"
)
"""Name of the trainers' switch: transformers 5.20 renamed it, and warns of the old one."""
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
"""What a reporter needs one of; the others are packages of their own names."""
_MADE_HERE = ("tensorboard", "swanlab")
"""Those whose callbacks ``reporters`` makes."""


def trainer_arguments(
    config: TrainConfig,
    device: torch.device,
    scratch: str,
    packed: bool = False,
    eval_steps: int = 0,
    images: bool = False,
) -> SFTConfig | DPOConfig | KTOConfig:
    """Return the arguments of the stage's trainer; ``scratch`` is the output_dir that it requires.

    ``packed``: a row of the dataset holds several conversations, which must not attend to each other.
    ``eval_steps``: between evaluations of held-out rows; 0: none. ``images``: rows have a column of them.
    """
    arguments: SFTConfig | DPOConfig | KTOConfig
    if config.stage == "dpo":
        losses = pair_losses(config)
        arguments = DPOConfig(
            **_common(config, device, scratch, eval_steps),
            max_length=None,  # rows come cut to cutoff_len
            beta=config.pref_beta,
            loss_type=list(losses),
            loss_weights=list(losses.values()),
            label_smoothing=config.dpo_label_smoothing,
        )
    elif config.stage == "kto":
        arguments = KTOConfig(
            **_common(config, device, scratch, eval_steps),
            max_length=None,  # rows come cut to cutoff_len
            beta=config.pref_beta,
            desirable_weight=config.kto_chosen_weight,
            undesirable_weight=config.kto_rejected_weight,
        )
    else:
        arguments = SFTConfig(
            **_common(config, device, scratch, eval_steps),
            max_length=None,  # rows come cut to cutoff_len
            padding_free=packed,
            remove_unused_columns=not images,
        )
        if packed:
            arguments.include_num_input_tokens_seen = "all"  # there is no padding to exclude
    if device.type == "cuda":
        on_one_gpu(arguments)
    return arguments


def pair_losses(config: TrainConfig) -> dict[str, float]:
    """Return trl's losses on a pair, each with its weight, as the options of ``dpo`` ask for.

    With x = β · (the chosen answer's log-ratio − the rejected one's), A = −log σ(x), B = −log σ(−x) and
    smoothing ε, LLaMA-Factory's loss is (1 − ε) A + ε B. trl's "sigmoid" is A, its "robust" is
    ((1 − ε) A − ε B) / (1 − 2ε); 2 (1 − ε) of the one less (1 − 2ε) of the other is the same.
    """
    smoothing = config.dpo_label_smoothing
    losses = {config.pref_loss: 1.0}
    if smoothing:
        losses = {"sigmoid": 2 * (1 - smoothing), "robust": -(1 - 2 * smoothing)}
    if config.pref_ftx:
        losses["sft"] = config.pref_ftx
    return losses


def check_reporters(config: TrainConfig) -> None:
    """Raise UsageError for a ``report_to`` whose package is not installed, before anything is loaded."""
    absent = [
        name
        for name in config.reporters
        if name != "none" and not any(map(find_spec, _PACKAGES.get(name, (name,))))
    ]
    if absent:
        raise UsageError(
            f"report_to asks for {' and '.join(absent)}, not installed here.",
            f"pip install {' '.join(absent)}, or set report_to: none.",
        )


def events_dir(config: TrainConfig) -> Path:
    """Return where tensorboard's events are written: ``logging_dir``, else beside the output.

    Not in it: events are watched while the run goes, and the output appears when it is finished.
    """
    if config.logging_dir:
        return Path(config.logging_dir)
    output = Path(config.output_dir)
    return output.with_name(output.name + ".runs")


def reporters(config: TrainConfig) -> list[TrainerCallback]:
    """Return the callbacks that Trainer can't make from its arguments.

    tensorboard's, writing to ``events_dir``, and swanlab's own: transformers' fails with swanlab 0.10.
    """
    found: list[TrainerCallback] = []
    if "tensorboard" in config.reporters:
        board = TensorBoardCallback()
        board.logging_dir = str(events_dir(config))
        found.append(board)
    if "swanlab" in config.reporters:
        made = import_module("swanlab.integration.transformers").SwanLabCallback
        own = made(project=os.getenv("SWANLAB_PROJECT"), experiment_name=config.run_name)
        found += [own, _EndSwanlab()]
    return found


class _EndSwanlab(TrainerCallback):
    """Ends swanlab's run with the training: at the end of the process it would write behind the results."""

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        import_module("swanlab").finish()


def _common(
    config: TrainConfig, device: torch.device, scratch: str, eval_steps: int
) -> dict[str, Any]:
    return {
        **_parallel_arguments(),
        "output_dir": scratch,
        "run_name": config.run_name,
        "seed": config.seed,
        # steps
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "num_train_epochs": config.num_train_epochs,
        "max_steps": config.max_steps,
        # optimizer
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.lr_scheduler_type,
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs or {}),
        "warmup_steps": config.warmup,
        "optim": config.optim,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "neftune_noise_alpha": config.neftune_noise_alpha,
        # The load-balancing loss is for a router that learns from the start; as in LLaMA-Factory it is off
        # where it isn't asked for, so that batches of any size add up to the same gradients.
        "router_aux_loss_coef": config.moe_aux_loss_coef or 0.0,
        # data
        "dataloader_num_workers": config.dataloader_num_workers,
        "dataloader_pin_memory": device.type == "cuda",
        # log
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # the filter would log a loss of 0 instead of nan
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [name for name in config.reporters if name not in _MADE_HERE] or "none",
        "disable_tqdm": True,
        # held-out rows: the best step is saved and loaded by Checkpoints, see HeldOutCallback
        "eval_strategy": "steps" if eval_steps else "no",
        "eval_steps": eval_steps or None,
        "metric_for_best_model": config.metric,
        "greater_is_better": config.greater,
        # checkpoints: older ones are deleted when a newer one is complete, see Checkpoints
        "save_strategy": "steps" if config.save_steps else "no",
        "save_steps": config.save_steps or 500,
        "save_total_limit": None,
        "save_only_model": config.save_only_model,
        # device and precision
        "use_cpu": device.type == "cpu",
        "bf16": False,  # the weights are loaded in the dtype asked for; autocast would add a third
        CHECKPOINTING: False,  # Trainer's would run the experts twice: see checkpointing
        "ddp_timeout": config.ddp_timeout,
    }


def _parallel_arguments() -> dict[str, bool | str]:
    """Trainer arguments required with several processes; none for a single one."""
    if world().size == 1:
        return {}
    return {
        "average_tokens_across_devices": True,  # a token weighs the same on every rank
        "log_level_replica": "error",
        "ddp_broadcast_buffers": False,  # buffers here never change
        "ddp_find_unused_parameters": False,  # LoRA is on decoder layers only, which all run
    }
