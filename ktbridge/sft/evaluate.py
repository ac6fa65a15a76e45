"""Evaluate held-out rows, keep the best step, and end a run that gets no better.

Trainer's own evaluation goes batch by batch, and its loss is a mean of the batches' means. Here it is exact:
for sft the sum over all held-out trained tokens divided by their number, for dpo the mean over pairs, for kto
over answers, each by the estimate of KL in its batch.
The loss on unbalanced routing, which depends on the micro-batches, is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerState
from transformers import TrainerControl as Control
from transformers import TrainingArguments as Args
from transformers.trainer import TRAINER_STATE_NAME

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.files.publish import OnProgress
from ktbridge.sft.checkpoint import Checkpoints
from ktbridge.sft.compat import trl_metrics, without_balancing_loss, without_gathering
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.config.schema import METRICS
from ktbridge.sft.distributed import add
from ktbridge.sft.launch import world
from ktbridge.sft.microbatch import CollatedRow, MicroBatchRunner, RowTrainer, TokenLimit

Record = Mapping[str, float]
"""A record of the log."""
_NOTED = 0.01
"""How much worse than the best the published step must be for a warning, in proportion."""


@dataclass(frozen=True)
class HeldOutResult:
    """Evaluations of a run's held-out rows; the best step is one of those after which they were made."""

    rows: int
    """Rows evaluated."""
    evaluations: int
    seconds: float
    """Spent in this call's evaluations."""
    first_loss: float | None
    """Before the first step."""
    last_loss: float | None
    metric: str
    """What makes a step the best one."""
    best: float | None
    """Its value at the best step."""
    best_step: int | None
    best_loss: float | None
    """The loss at the best step."""
    published_step: int
    """The step whose adapter is in output_dir: the best one with load_best_model_at_end, else the last."""
    ended_early: bool
    """True if early_stopping_steps ended the run before its last step."""


@dataclass(frozen=True)
class Chosen:
    """The step that is published: its checkpoint, if there is one, and its notes."""

    checkpoint: Path | None
    training: Mapping[str, float] | None
    """For the manifest."""
    result: HeldOutResult | None = None
    notes: tuple[Problem, ...] = ()


class HeldOut:
    """Evaluates the held-out rows of ``trainer``; several processes take a share of them each.

    ``runner`` runs them in micro-batches as large as training's, or of ``per_device_eval_batch_size`` rows
    where training's go batch by batch.
    """

    def __init__(self, trainer: RowTrainer, runner: MicroBatchRunner, config: TrainConfig) -> None:
        self._trainer, self._runner, self._config = trainer, runner, config
        self._names = METRICS[config.stage]
        self._at_once = config.per_device_eval_batch_size
        self._rows: list[CollatedRow] = []
        """Without their features, which are read again for each micro-batch."""
        self.limit = TokenLimit(
            None,
            "tokens of a micro-batch",
            "Nothing is lost, the evaluation was made again; a smaller per_device_eval_batch_size or "
            "tokens_per_pass begins with less.",
        )
        self.on_progress: OnProgress | None = None
        """Called after each micro-batch with the number of those done and of all."""
        self.running = False
        self.seconds = 0.0
        """Spent in evaluations."""

    def measure(self) -> dict[str, float]:
        """Return ``eval_loss`` and the stage's other ``METRICS``, with the seconds that it took.

        Training goes on as if nothing had been evaluated: random numbers are put back. The model must be in
        evaluation mode.
        """
        began = time.perf_counter()
        self.running = True
        if not self._rows:
            self._rows = self._measured()
        limits = (self.limit.tokens, self._runner.tokens)
        self.limit.tokens = min(filter(None, limits), default=None)
        device, state = self._trainer.args.device, self._trainer.state
        gpus = [device] if device.type == "cuda" else []
        alone = world().size == 1
        where = f"evaluation after step {state.global_step}"
        with torch.random.fork_rng(devices=gpus), without_balancing_loss(self._trainer):
            sums = self._runner.repeat_until_it_fits(self._sums, self.limit, where, alone)
        took = time.perf_counter() - began
        self.running = False
        self.seconds += took
        values = add(sums)
        found = {f"eval_{name}": value for name, value in zip(self._names, values, strict=True)}
        return {**found, "eval_runtime": took, "eval_samples_per_second": len(self._rows) / took}

    def best_step(self) -> int | None:
        """Return the best step so far."""
        ranked = best_first(self._trainer.state.log_history, self._config)
        return int(ranked[0]["step"]) if ranked else None

    def training(self, step: int) -> dict[str, float] | None:
        """Return what the manifest of the adapter of ``step`` says of it; None if nothing is evaluated."""
        if not self._config.evaluates:
            return None
        names = [f"eval_{name}" for name in self._names]
        log = evaluations(self._trainer.state.log_history)
        found = [record for record in log if record["step"] == step]
        measured = {name: found[-1][name] for name in names} if found else {}
        return {"step": step, "last_step": self._trainer.state.global_step, **measured}

    def choose_step(self, checkpoints: Checkpoints, rows: int, early: bool) -> Chosen:
        """Have the model hold the step that is published: the best, where the configuration asks for it.

        ``rows``: how many are held out; ``early``: True if they ended the run before its last step.
        """
        config, step = self._config, self._trainer.state.global_step
        log = evaluations(self._trainer.state.log_history)
        if not config.evaluates or not log:
            return Chosen(checkpoints.of(step), None)
        ranked, notes = best_first(log, config), []
        if config.load_best_model_at_end and ranked:
            step, wanted = checkpoints.take_best(ranked), int(ranked[0]["step"])
            if step != wanted:
                found = f"the best was step {wanted}, and its checkpoint is missing or damaged"
                notes.append(
                    problem("KTC031", "load_best_model_at_end", f"{found}: step {step} is published")
                )
        notes += _regret(checkpoints, config, log, step)
        best: Record = ranked[0] if ranked else {}
        first = next((record for record in log if not record["step"]), None)
        result = HeldOutResult(
            rows=rows,
            evaluations=len(log),
            seconds=self.seconds,
            first_loss=first["eval_loss"] if first else None,
            last_loss=log[-1]["eval_loss"],
            metric=config.metric,
            best=best.get(f"eval_{config.metric}"),
            best_step=int(best["step"]) if best else None,
            best_loss=best.get("eval_loss"),
            published_step=step,
            ended_early=early,
        )
        return Chosen(checkpoints.of(step), self.training(step), result, tuple(notes))

    def _measured(self) -> list[CollatedRow]:
        """Return the lengths of all held-out rows."""
        data: Any = self._trainer.eval_dataset
        rows = (self._trainer.rows([data[place]]) for place in range(len(data)))
        return [replace(row, features={}) for each in rows for row in each]

    def _sums(self) -> list[float]:
        """Return this process's terms of the means, one for each metric."""
        trainer, sums = self._trainer, [0.0] * len(self._names)
        data: Any = trainer.eval_dataset
        batches, trainer.trained = self._micro_batches(), sum(row.trained for row in self._rows)
        alone = world().size == 1
        collected = trl_metrics(trainer, "eval")
        for number, (places, counts) in enumerate(batches):
            rows = [self._rows[place] for place in places]
            self._runner.current = rows
            try:
                # trl averages over processes, batch by batch; our rows are shared out otherwise.
                whole = nullcontext() if alone else without_gathering(trainer.accelerator)
                with whole, trainer.scaled_for_microbatch(rows, self._rows):
                    batch = trainer.data_collator([data[place] for place in places])
                    loss = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
            finally:
                found = {name: values[-1] for name, values in collected.items() if values}
                collected.clear()
            assert loss[0] is not None
            found["loss"] = float(loss[0])
            for place, name in enumerate(self._names):
                weight = trainer.metric_weight(name, rows, self._rows) if counts else 0.0
                sums[place] += weight * found[name] if weight else 0.0
            if self.on_progress:
                self.on_progress(number + 1, len(batches))
        return sums

    def _micro_batches(self) -> list[tuple[list[int], bool]]:
        """Return the places of this process's rows in each micro-batch, and True if they count.

        All processes have as many micro-batches with as many rows each; where not every one has a row left,
        the others repeat one that doesn't count. Every process knows the lengths of all rows, and packs by
        the longest.
        """
        here = world()
        order = sorted(range(len(self._rows)), key=lambda place: -self._rows[place].tokens)
        even = len(order) // here.size * here.size
        lengths = [self._rows[place].tokens for place in order[: even : here.size]]
        if self.limit.tokens is None:
            steps = range(0, len(lengths), self._at_once)
            groups = [[*range(at, min(at + self._at_once, len(lengths)))] for at in steps]
        else:
            groups = self._runner.pack(lengths, self.limit.tokens)
        found = [([order[n * here.size + here.rank] for n in group], True) for group in groups]
        if left := order[even:]:
            found.append(([left[here.rank % len(left)]], here.rank < len(left)))
        return found


class HeldOutCallback(EarlyStoppingCallback):
    """Evaluates after the last step, saves each new best step, and stops early."""

    def __init__(self, config: TrainConfig, forget: bool) -> None:
        """``forget`` the evaluations of a checkpoint, because they were of other rows."""
        super().__init__(config.early_stopping_steps or sys.maxsize)
        self._config, self._forget = config, forget

    def on_train_begin(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        callbacks: Any = state.stateful_callbacks  # annotated as what it is made from
        if self._forget:
            forget_evaluations(state)
            callbacks.pop(type(self).__name__, None)
        # Trainer restores callbacks only together with its own control, which may say "stop".
        kept = callbacks.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = _evaluations_without_best(kept)

    def on_step_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(
        self, args: Args, state: TrainerState, control: Control, metrics: Any = None, **_: object
    ) -> None:
        super().on_evaluate(args, state, control, metrics)
        if not state.global_step:
            return
        best = best_first(state.log_history, self._config)[0]["step"] == state.global_step
        if (best and self._config.load_best_model_at_end) or (self.ended and self._config.save_steps):
            control.should_save = True

    def on_epoch_end(self, args: Args, state: TrainerState, control: Control, **_: object) -> None:
        if self.ended:
            control.should_log = True  # the losses since the last record, if there are any

    @property
    def ended(self) -> bool:
        """Return whether it ended the run."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience


def evaluations(log: Sequence[Record]) -> list[Record]:
    """Return the records of evaluations."""
    return [record for record in log if "eval_loss" in record]


def best_first(log: Sequence[Record], config: TrainConfig) -> list[Record]:
    """Return the evaluations after a step, the best by ``config.metric`` first, of equals the earlier."""
    found = [record for record in evaluations(log) if record["step"]]
    return sorted(found, key=lambda record: _cost(record, config))


def forget_evaluations(state: TrainerState) -> None:
    """Leave out of ``state`` the evaluations of other held-out rows."""
    state.log_history = [record for record in state.log_history if "eval_loss" not in record]
    state.best_metric = state.best_global_step = None


def ended_early(checkpoint: Path, config: TrainConfig) -> bool:
    """Return whether the run of ``checkpoint`` ended there by ``config``'s ``early_stopping_steps``."""
    if not (config.evaluates and config.early_stopping_steps):
        return False
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    callbacks: Any = state.stateful_callbacks
    kept = callbacks.get(HeldOutCallback.__name__)
    return bool(kept) and _evaluations_without_best(kept) >= config.early_stopping_steps


def _evaluations_without_best(kept: Any) -> int:
    """Return the count of evaluations without a new best in a callback's saved state."""
    return int(kept["attributes"]["early_stopping_patience_counter"])


def _regret(
    checkpoints: Checkpoints, config: TrainConfig, log: Sequence[Record], step: int
) -> Iterator[Problem]:
    """Warn if an earlier step, or the base, did better than ``step``."""
    key = f"eval_{config.metric}"
    published = next((record for record in reversed(log) if record["step"] == step), None)
    best = min(log, key=lambda record: _cost(record, config))
    if published is None or abs(best[key] - published[key]) <= _NOTED * abs(best[key]):
        return
    where, advice = f"at step {best['step']}", None
    if not best["step"]:
        where = "before training"
        advice = "Lower learning_rate, or train on more rows of this kind."
    elif place := checkpoints.of(int(best["step"])):
        advice = f"{place} has that step's adapter; load_best_model_at_end: true publishes it."
    yield problem(
        "KTC030",
        f"step {step}: {key}",
        f"{published[key]:.4g}, after {best[key]:.4g} {where}",
        next_step=advice,
    )


def _cost(record: Record, config: TrainConfig) -> float:
    value = record[f"eval_{config.metric}"]
    return -value if config.greater else value
