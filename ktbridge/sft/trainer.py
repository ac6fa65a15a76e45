"""The training recipe, top to bottom: check, load, attach LoRA, train, save.

transformers loads the model, PEFT attaches the non-expert LoRA, trl's SFTTrainer trains (loss on the
assistant's tokens only); ours are the experts on the CPU kernels with their LoRA, and the raw adapter.
Everything runs on the CPU for now.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)
from transformers.utils import logging as transformers_logging
from trl import SFTConfig

from ktbridge.errors import KtbridgeError
from ktbridge.model import resolve_model
from ktbridge.sft.attach import attach_lora
from ktbridge.sft.checkpoint import save_raw_adapter
from ktbridge.sft.config import TrainConfig, check_output_dir
from ktbridge.sft.curve import plot_loss
from ktbridge.sft.data import load_conversations
from ktbridge.sft.inject import expert_layers
from ktbridge.sft.loading import load_for_kernels, load_tokenizer
from ktbridge.sft.resume import ResumableTrainer, checkpoints_dir, find_checkpoint, identity

LOG_FILE = "trainer_log.jsonl"
PLOT_FILE = "training_loss.png"


@dataclass(frozen=True)
class TrainResult:
    """What a run did. ``seconds`` is the training loop alone; losses are means over ``logging_steps``."""

    output_dir: str
    steps: int
    conversations: int
    """Rows given."""
    dropped: int
    """Rows whose answers lay wholly beyond cutoff_len: nothing to learn was left of them."""
    at_cutoff: int
    """Rows used that are cutoff_len tokens long, so their end was most likely cut off."""
    first_loss: float | None
    last_loss: float | None
    seconds: float
    tokens_per_second: float
    isa: str
    expert_parameters: int
    nonexpert_parameters: int
    files: tuple[str, ...]


def train(
    config: TrainConfig,
    on_progress: Callable[[int, int], None] | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> TrainResult:
    """Run one configuration and leave a raw adapter, a log and a loss plot in ``config.output_dir``.

    ``on_progress(step, steps)`` is called after each optimizer step, ``on_log`` with each log record. The
    directory appears whole when training has finished, or not at all. Raises ``KtbridgeError`` and its
    children for anything a user can mend, and for a loss that is not finite.
    """
    output = Path(config.output_dir)
    check_output_dir(config)
    conversations = load_conversations(config.dataset, config.max_samples)
    base = resolve_model(config.model_name_or_path)
    own = identity(config, base)
    checkpoint = find_checkpoint(config, own)
    set_seed(config.seed)
    tokenizer = _load_tokenizer(base)
    model = attach_lora(
        load_for_kernels(base, torch.bfloat16 if config.bf16 else torch.float32), config
    )

    # The Trainer insists on a directory of its own; ours must not exist before it is finished.
    with tempfile.TemporaryDirectory() as scratch, _Interrupts() as interrupts:
        trainer = ResumableTrainer(
            model=model,
            args=_trainer_arguments(config, scratch),
            train_dataset=Dataset.from_list([{"messages": rows} for rows in conversations]),
            processing_class=tokenizer,
            callbacks=[_Watch(on_progress, on_log, interrupts)],
        )
        trainer.remember(checkpoints_dir(config), own, config.save_total_limit)
        prepared: Any = trainer.train_dataset
        lengths = [len(ids) for ids in prepared["input_ids"]]
        if not lengths:
            raise KtbridgeError(
                f"no conversation has an answer within cutoff_len={config.cutoff_len} tokens.",
                "Raise cutoff_len.",
            )
        trainer.remove_callback(PrinterCallback)
        tokens_before = _tokens_seen(checkpoint)
        if checkpoint is None:  # find_checkpoint has asked, and all that may be refused has been
            shutil.rmtree(checkpoints_dir(config), ignore_errors=True)
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        seconds = time.perf_counter() - started

    if interrupts.caught:
        raise _interrupted(trainer.state.global_step, checkpoints_dir(config))
    _refuse_nan(model)
    log = [record for record in trainer.state.log_history if "loss" in record]
    beside = {LOG_FILE: "".join(json.dumps(record) + "\n" for record in log).encode()}
    if config.plot_loss:
        beside[PLOT_FILE] = plot_loss(log)
    save_raw_adapter(
        model,
        output,
        str(base),
        overwrite=config.overwrite_output_dir,
        extra_files=beside,
    )
    shutil.rmtree(checkpoints_dir(config), ignore_errors=True)  # what they led to is in place
    tokens = trainer.state.num_input_tokens_seen - tokens_before
    return TrainResult(
        output_dir=str(output),
        steps=trainer.state.global_step,
        conversations=len(conversations),
        dropped=len(conversations) - len(lengths),
        at_cutoff=sum(length >= config.cutoff_len for length in lengths),
        first_loss=log[0]["loss"] if log else None,
        last_loss=log[-1]["loss"] if log else None,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        isa=next(iter(expert_layers(model).values())).isa,
        expert_parameters=_count(model, ".kt."),
        nonexpert_parameters=_count(model, ".lora_"),
        files=tuple(sorted(path.name for path in output.iterdir())),
    )


def _refuse_nan(model: nn.Module) -> None:
    """A divergence after the last logged loss would otherwise be saved."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise KtbridgeError(
                f"training diverged: {name} holds NaN or infinity; nothing was saved.",
                "Lower learning_rate, or set warmup_ratio.",
            )


def _load_tokenizer(base: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(base)
    if not tokenizer.chat_template:
        raise KtbridgeError(
            f"the tokenizer of {base} has no chat template, so conversations have no form to train on.",
            "Add chat_template.jinja to the model directory (the instruct variant of the model has one).",
        )
    return tokenizer


def _trainer_arguments(config: TrainConfig, scratch: str) -> SFTConfig:
    return SFTConfig(
        output_dir=scratch,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # the filter would show a loss of 0 instead of nan
        seed=config.seed,
        report_to=config.report_to,
        max_length=config.cutoff_len,
        assistant_only_loss=True,
        include_num_input_tokens_seen="non_padding",
        save_strategy="steps" if config.save_steps else "no",
        save_steps=config.save_steps or 500,
        save_total_limit=None,  # older ones go when a newer one is whole: see ResumableTrainer
        use_cpu=True,
        bf16=False,  # the weights are loaded in the dtype asked for; autocast would add a third
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class _Interrupts:
    """Ctrl-C and SIGTERM end a run after its step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.caught = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: Any) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = number


def _interrupted(step: int, root: Path) -> KtbridgeError:
    error = KtbridgeError(
        f"interrupted after step {step}, which is saved in {root}.",
        "Go on with resume_from_checkpoint=true.",
    )
    error.exit_code = 130
    return error


def _tokens_seen(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    seen = json.loads((checkpoint / "trainer_state.json").read_text())["num_input_tokens_seen"]
    return int(seen)


class _Watch(TrainerCallback):
    """Hands steps and log records to the caller, and stops at a loss that is not a number."""

    def __init__(self, progress: Any, log: Any, interrupts: _Interrupts) -> None:
        self._progress, self._log, self._interrupts = progress, log, interrupts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss is told whatever logging_steps is
            control.should_save = False  # the adapter itself follows
        elif self._interrupts.caught:
            control.should_save = control.should_training_stop = True
        if self._progress:
            self._progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise KtbridgeError(
                f"the loss became {loss} at step {state.global_step}; nothing was saved.",
                "Lower learning_rate, or set warmup_ratio.",
            )
        if self._log and loss is not None:
            self._log({"step": state.global_step, "steps": state.max_steps, **logs})


def _count(model: nn.Module, part: str) -> int:
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if part in name and parameter.requires_grad and not (part == ".lora_" and ".kt." in name)
    )


def quiet_libraries() -> None:
    """Silence the libraries' own progress bars and advice: the caller shows ours."""
    import warnings

    import datasets

    # What transformers plans to rename is between it and PEFT; our user can't act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\.")
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
