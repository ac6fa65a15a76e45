"""Progress callbacks: loss, pace, the experts' share of the time; stops on NaN."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ktbridge.errors import KtbridgeError
from ktbridge.experts.autograd import kernel_seconds
from ktbridge.files.publish import OnProgress
from ktbridge.sft import distributed
from ktbridge.sft.interrupts import Interrupts

OnLog = Callable[[dict[str, float]], None]


class Diverged(KtbridgeError):
    """A loss, a gradient or a trained tensor is NaN or infinite; nothing of that step is saved."""


class Pace(TrainerCallback):
    """Seconds of optimizer steps, and how many of them were spent in the experts' kernels.

    Saving and logging between steps are not counted.
    """

    def __init__(self) -> None:
        self.seconds = self.kernels = 0.0
        self.tokens_before = 0
        """Tokens seen by the run that this one continues."""
        self._last_record = (0, 0.0, 0.0)  # tokens, seconds and kernel seconds at the last record
        self._paces: list[float] = []  # tokens a second of each step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.tokens_before = state.num_input_tokens_seen
        self._last_record = (self.tokens_before, 0.0, 0.0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._began = time.perf_counter(), kernel_seconds()
        self._seen = state.num_input_tokens_seen

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        seconds = time.perf_counter() - self._began[0]
        self.seconds += seconds
        self.kernels += kernel_seconds() - self._began[1]
        self._paces.append((state.num_input_tokens_seen - self._seen) / seconds)

    @property
    def steady(self) -> float | None:
        """Tokens a second of the median step after the second, by when kernels are compiled."""
        return median(self._paces[2:]) if len(self._paces) > 2 else None

    def record(self, tokens: int) -> dict[str, float]:
        """``tokens_per_second`` and ``expert_share`` (0 to 1) since the last record.

        ``tokens`` is how many the run has seen so far.
        """
        before, self._last_record = self._last_record, (tokens, self.seconds, self.kernels)
        seconds = self.seconds - before[1]
        if not seconds:
            return {}
        return {
            "tokens_per_second": (tokens - before[0]) / seconds,
            "expert_share": min((self.kernels - before[2]) / seconds, 1.0),
        }


class Finite:
    """Raises ``Diverged`` for what is not finite; ``last_good`` is where an earlier step is saved, or ""."""

    def __init__(self, last_good: Callable[[], str]) -> None:
        self._last_good = last_good

    def check(self, what: str, value: float, step: int) -> None:
        if math.isfinite(value):
            return
        place = self._last_good()
        if place:
            raise Diverged(
                f"{what} became {value} at step {step}; the last good checkpoint is {place}.",
                "Go on from it with resume_from_checkpoint=true and a lower learning_rate.",
            )
        raise Diverged(
            f"{what} became {value} at step {step}, and there is no checkpoint to go on from.",
            "Lower learning_rate, or set warmup_ratio.",
        )

    def check_trained(self, model: nn.Module, step: int) -> None:
        """The same for all trained tensors of ``model``."""
        if name := not_finite(model):
            self.check(name, math.nan, step)


class Reporter(TrainerCallback):
    """Hands steps and log records to the caller, and ends a run that was interrupted."""

    def __init__(
        self,
        progress: OnProgress | None,
        log: OnLog | None,
        interrupts: Interrupts,
    ) -> None:
        self._progress, self._log, self._interrupts = progress, log, interrupts

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint has the intervals of its own run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss is logged whatever logging_steps is
        elif distributed.agree(self._interrupts.caught):
            args.save_only_model = False  # or nothing could go on from what is saved now
            control.should_save = control.should_training_stop = True
        if self._progress:
            self._progress(state.global_step, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if self._log and logs and is_record(logs):
            self._log({"step": state.global_step, "steps": state.max_steps, **logs})


def is_record(logs: Mapping[str, float]) -> bool:
    """Return whether they are of training or of an evaluation, and not Trainer's summary."""
    return "loss" in logs or "eval_loss" in logs


def not_finite(model: nn.Module) -> str:
    """Name of a trained tensor that holds NaN or infinity; "" if there is none."""
    for name, parameter in model.named_parameters():
        own = distributed.local(parameter)
        if parameter.requires_grad and not bool(torch.isfinite(own).all()):
            return name
    return ""
