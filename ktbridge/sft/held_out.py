"""Held-out rows: evaluated forward only, in few large passes; the best step; when a run ends early.

Trainer's own evaluation goes batch by batch, and its loss is a mean of the batches' means. Here it is exact:
for sft the sum over all held-out trained tokens divided by their number, for dpo the mean over pairs, for kto
over answers, each by the estimate of KL in its batch.
The loss on unbalanced routing, which depends on how rows are cut into passes, is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.files.publish import OnProgress
from ktbridge.sft import distributed
from ktbridge.sft.best_step import best_first, evaluations
from ktbridge.sft.compat import trl_metrics, without_balancing_loss, without_gathering
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.schema import METRICS
from ktbridge.sft.passes import OnNote, Row, free_memory
from ktbridge.sft.placement import pack_joined_rows, pack_padded_rows

if TYPE_CHECKING:
    from ktbridge.sft.run_trainer import RunTrainer


class HeldOut:
    """Evaluates the held-out rows of ``trainer``; several processes take a share of them each.

    They go through the model in as few passes as training's rows, or where these go batch by batch,
    ``per_device_eval_batch_size`` at once. ``torch.OutOfMemoryError`` in a pass of several rows halves the
    tokens of a pass from then on, with a note; with several processes it is raised.
    """

    def __init__(
        self, trainer: RunTrainer, config: TrainConfig, on_note: OnNote | None = None
    ) -> None:
        self._trainer, self._config, self._on_note = trainer, config, on_note
        self._names = METRICS[config.stage]
        self._at_once = config.per_device_eval_batch_size
        self._rows: list[Row] = []
        """Without their features, which are read again for each pass."""
        self._tokens: int | None = None
        self.notes: tuple[Problem, ...] = ()
        """A warning (KTC023) for each time that memory was too small."""
        self.on_progress: OnProgress | None = None
        """Called after each pass with the number of passes done and of all."""
        self.running = False
        self.seconds = 0.0
        """Spent in evaluations."""

    def measure(self) -> dict[str, float]:
        """``eval_loss`` and the stage's other ``METRICS``, with the seconds that it took.

        Training goes on as if nothing had been evaluated: random numbers are put back. The model must be in
        evaluation mode.
        """
        began = time.perf_counter()
        self.running = True
        if not self._rows:
            self._rows = self._measured()
        most = self._trainer.passes.tokens
        self._tokens = min(filter(None, (self._tokens, most)), default=None)
        device = self._trainer.args.device
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus), without_balancing_loss(self._trainer):
            sums = self._attempt()
            while sums is None:
                free_memory(device)  # only here the exception is gone
                sums = self._attempt()
        took = time.perf_counter() - began
        self.running = False
        self.seconds += took
        values = distributed.add(sums)
        found = {f"eval_{name}": value for name, value in zip(self._names, values, strict=True)}
        return {**found, "eval_runtime": took, "eval_samples_per_second": len(self._rows) / took}

    def best_step(self) -> int | None:
        """The best step so far."""
        ranked = best_first(self._trainer.state.log_history, self._config)
        return int(ranked[0]["step"]) if ranked else None

    def training(self, step: int) -> dict[str, float] | None:
        """For the manifest of the adapter of ``step``: what was measured after it; None: nothing ever."""
        if not self._config.evaluates:
            return None
        names = [f"eval_{name}" for name in self._names]
        log = evaluations(self._trainer.state.log_history)
        found = [record for record in log if record["step"] == step]
        measured = {name: found[-1][name] for name in names} if found else {}
        return {"step": step, "last_step": self._trainer.state.global_step, **measured}

    def _measured(self) -> list[Row]:
        """The lengths of all held-out rows."""
        examples = (self._dataset[place] for place in range(len(self._dataset)))
        return [
            replace(row, features={}) for each in examples for row in self._trainer.rows([each])
        ]

    @property
    def _dataset(self) -> Any:
        return self._trainer.eval_dataset

    def _collated(self, places: Sequence[int]) -> dict[str, Any]:
        return self._trainer.data_collator([self._dataset[place] for place in places])

    def _attempt(self) -> list[float] | None:
        """This process's terms of the means; None where memory was too small, the tokens halved."""
        trainer, sums = self._trainer, [0.0] * len(self._names)
        passes = self._passes()
        alone = distributed.world().size == 1
        collected = trl_metrics(trainer, "eval")
        for number, (places, counts) in enumerate(passes):
            rows = [self._rows[place] for place in places]
            try:
                # trl averages over processes, batch by batch; our rows are shared out otherwise.
                whole = nullcontext() if alone else without_gathering(trainer.accelerator)
                with whole, trainer.as_part(rows, self._rows):
                    batch = self._collated(places)
                    loss = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
            except torch.OutOfMemoryError:
                if len(places) == 1 or not alone:
                    raise
                self._halve(rows)
                return None
            finally:
                found = {name: values[-1] for name, values in collected.items() if values}
                collected.clear()
            assert loss[0] is not None
            found["loss"] = float(loss[0])
            for place, name in enumerate(self._names):
                share = trainer.share_of(name, rows, self._rows) if counts else 0.0
                sums[place] += share * found[name] if share else 0.0
            if self.on_progress:
                self.on_progress(number + 1, len(passes))
        return sums

    def _passes(self) -> list[tuple[list[int], bool]]:
        """Places of this process's rows in each pass, and whether they count.

        All processes have as many passes with as many rows each; where not every one has a row left, the
        others repeat one that doesn't count. Every process knows the lengths of all rows, and cuts by the
        longest.
        """
        here = distributed.world()
        order = sorted(range(len(self._rows)), key=lambda place: -self._rows[place].tokens)
        even = len(order) // here.size * here.size
        lengths = [self._rows[place].tokens for place in order[: even : here.size]]
        if self._tokens is None:
            steps = range(0, len(lengths), self._at_once)
            cuts = [[*range(at, min(at + self._at_once, len(lengths)))] for at in steps]
        else:
            cuts = (pack_joined_rows if self._trainer.joins() else pack_padded_rows)(
                lengths, self._tokens
            )
        passes = [([order[group * here.size + here.rank] for group in each], True) for each in cuts]
        if left := order[even:]:
            passes.append(([left[here.rank % len(left)]], here.rank < len(left)))
        return passes

    def _halve(self, rows: Sequence[Row]) -> None:
        trainer = self._trainer
        before = trainer.passes.tokens_of(rows)
        self._tokens = before // 2
        note = problem(
            "KTC023",
            f"evaluation after step {trainer.state.global_step}: tokens of a pass",
            f"the GPU ran out of memory in a pass of {before:,} tokens; from here on held-out rows go in "
            f"passes of {self._tokens:,}",
            next_step="Nothing is lost, the evaluation was made again; a smaller "
            "per_device_eval_batch_size or tokens_per_pass begins with less.",
        )
        self.notes = (*self.notes, note)
        if self._on_note:
            self._on_note(note)


def forget_evaluations(state: TrainerState) -> None:
    """Leave out of ``state`` what was measured of other held-out rows."""
    state.log_history = [record for record in state.log_history if "eval_loss" not in record]
    state.best_metric = state.best_global_step = None


class WatchHeldOut(EarlyStoppingCallback):
    """Has the last step evaluated, each best step saved, and the run ended when there is no new best."""

    def __init__(self, config: TrainConfig, forget: bool) -> None:
        """``forget`` the evaluations of a checkpoint, because they were of other rows."""
        super().__init__(config.early_stopping_steps or sys.maxsize)
        self._config, self._forget = config, forget

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        name = type(self).__name__
        callbacks: Any = state.stateful_callbacks  # annotated as what it is made from
        if self._forget:
            forget_evaluations(state)
            callbacks.pop(name, None)
        # Trainer restores callbacks only together with its own control, which may say "stop".
        kept = callbacks.setdefault(name, self.state())
        self.early_stopping_patience_counter = _counted(kept)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **_: object,
    ) -> None:
        super().on_evaluate(args, state, control, metrics)
        if not state.global_step:
            return
        best = best_first(state.log_history, self._config)[0]["step"] == state.global_step
        if (best and self._config.load_best_model_at_end) or (
            self.ended and self._config.save_steps
        ):
            control.should_save = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if self.ended:
            control.should_log = True  # the losses since the last record, if there are any

    @property
    def ended(self) -> bool:
        """Return whether it ended the run."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience


def ended_early(checkpoint: Path, config: TrainConfig) -> bool:
    """Return whether the run of ``checkpoint`` ended there by ``config``'s ``early_stopping_steps``."""
    if not (config.evaluates and config.early_stopping_steps):
        return False
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    callbacks: Any = state.stateful_callbacks
    kept = callbacks.get(WatchHeldOut.__name__)
    return bool(kept) and _counted(kept) >= config.early_stopping_steps


def _counted(kept: Any) -> int:
    """Evaluations without a new best, of a callback's state in a checkpoint."""
    return int(kept["attributes"]["early_stopping_patience_counter"])
