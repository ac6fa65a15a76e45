"""Callbacks that watch a run: its log, pace and reporters, values that are not finite, the weights' memory.

Ctrl-C and SIGTERM are in ``interrupts``, held-out rows in ``evaluate``.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers import TrainerControl as Control
from transformers import TrainingArguments as Args
from transformers.integrations import TensorBoardCallback

from ktbridge import _kernels
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, UsageError
from ktbridge.experts.autograd import kernel_seconds
from ktbridge.experts.mapped import DiskWaits, explain_faults
from ktbridge.files.publish import OnProgress
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.distributed.dispatch import local

OnLog = Callable[[dict[str, float]], None]
_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX")}
"""What a reporter needs one of; the others are packages of their own names."""
MADE_HERE = ("tensorboard", "swanlab")
"""Those whose callbacks ``reporters`` makes."""


class Diverged(KtbridgeError):
    """A loss, a gradient or a trained tensor is NaN or infinite; nothing of that step is saved."""


class ThroughputLog(TrainerCallback):
    """Seconds of optimizer steps, and how many of them were spent in the experts' kernels.

    Saving and logging between steps are not counted.
    """

    def __init__(self) -> None:
        self.seconds = self.kernels = 0.0
        self.tokens_before = 0
        """Tokens seen by the run that this one continues."""
        self._last_record = (0, 0.0, 0.0)  # tokens, seconds and kernel seconds at the last record
        self._paces: list[float] = []  # tokens a second of each step

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        self.tokens_before = state.num_input_tokens_seen
        self._last_record = (self.tokens_before, 0.0, 0.0)

    def on_step_begin(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        self._began = time.perf_counter(), kernel_seconds()
        self._seen = state.num_input_tokens_seen

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        seconds = time.perf_counter() - self._began[0]
        self.seconds += seconds
        self.kernels += kernel_seconds() - self._began[1]
        self._paces.append((state.num_input_tokens_seen - self._seen) / seconds)

    @property
    def steady(self) -> float | None:
        """Return tokens a second of the median step after the second, by when kernels are compiled."""
        return median(self._paces[2:]) if len(self._paces) > 2 else None

    def record(self, tokens: int) -> dict[str, float]:
        """Return ``tokens_per_second`` and ``expert_share`` (0 to 1) since the last record.

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


class NanGuard:
    """Raises ``Diverged`` for values that are not finite, with the checkpoint that ``last_good`` names."""

    def __init__(self, last_good: Callable[[], str]) -> None:
        self._last_good = last_good

    def check(self, what: str, value: float, step: int) -> None:
        if math.isfinite(value):
            return
        kept = ", and there is no checkpoint to go on from"
        advice = "Lower learning_rate, or set warmup_ratio."
        if place := self._last_good():
            kept = f"; the last good checkpoint is {place}"
            advice = "Go on from it with resume_from_checkpoint=true and a lower learning_rate."
        raise Diverged(f"{what} became {value} at step {step}{kept}.", advice)

    def check_trained(self, model: nn.Module, step: int) -> None:
        """Check all trained tensors of ``model``."""
        for name, parameter in model.named_parameters():
            own = local(parameter)
            if parameter.requires_grad and not bool(torch.isfinite(own).all()):
                self.check(name, math.nan, step)


class Reporter(TrainerCallback):
    """Hands steps and log records to the caller; the last step is always logged."""

    def __init__(self, progress: OnProgress | None, log: OnLog | None) -> None:
        self._progress, self._log = progress, log

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint has the intervals of its own run

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last loss is logged whatever logging_steps is
        if self._progress:
            self._progress(state.global_step, state.max_steps)

    def on_log(
        self,
        args: Args,
        state: TrainerState,
        control: Control,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        if self._log and logs and is_record(logs):
            self._log({"step": state.global_step, "steps": state.max_steps, **logs})


def is_record(logs: Mapping[str, float]) -> bool:
    """Return whether they are of training or of an evaluation, and not Trainer's summary."""
    return "loss" in logs or "eval_loss" in logs


class WeightsWatch(TrainerCallback):
    """Notes KTL020 if the kernels (``isa``) may not use the CPU's AMX, KTL022 if steps wait for the disk.

    For KTL021, which ends the process, it keeps the name of the last checkpoint, which ``last_good`` tells.
    Waits count from the second step on: the first reads the weights for the first time.
    """

    def __init__(self, last_good: Callable[[], str], isa: str, on_note: Callable[[Problem], None]) -> None:
        self._last_good, self._isa, self._on_note = last_good, isa, on_note
        self._reads: DiskWaits | None = None
        self._waited = False

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        explain_faults(self._last_good())
        reason = _kernels.why_no_tiles()
        if reason and "amx" not in self._isa:
            self._on_note(problem("KTL020", "kernels", f"{self._isa} instead of AMX: {reason}"))

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        if self._reads is None:
            self._reads = DiskWaits()
        elif (waits := self._reads.step()) and not self._waited:
            self._waited = True
            where = f"step {state.global_step}"
            self._on_note(problem("KTL022", where, f"{waits:,} reads of memory waited for the disk"))

    def on_save(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        explain_faults(self._last_good())


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
