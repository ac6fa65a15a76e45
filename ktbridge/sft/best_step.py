"""Which step's adapter a run publishes, and what was measured of held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig

if TYPE_CHECKING:
    from ktbridge.sft.run_trainer import RunTrainer

Record = Mapping[str, float]
"""A record of the log."""
_NOTED = 0.01
"""How much worse than the best the published step must be for a warning, in proportion."""


@dataclass(frozen=True)
class HeldOutResult:
    """What was measured of a run's held-out rows; the best step is one of those after which they were."""

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
    """Whether early_stopping_steps ended the run before its last step."""


@dataclass(frozen=True)
class Chosen:
    """The step that is published: its checkpoint, if there is one, and its notes."""

    checkpoint: Path | None
    training: Mapping[str, float] | None
    """For the manifest."""
    result: HeldOutResult | None = None
    notes: tuple[Problem, ...] = ()


def evaluations(log: Sequence[Record]) -> list[Record]:
    """The records of evaluations."""
    return [record for record in log if "eval_loss" in record]


def best_first(log: Sequence[Record], config: TrainConfig) -> list[Record]:
    """The evaluations after a step, the best by ``config.metric`` first, of equals the earlier."""
    found = [record for record in evaluations(log) if record["step"]]
    return sorted(found, key=lambda record: _cost(record, config))


def choose_step(trainer: RunTrainer, config: TrainConfig, rows: int, early: bool) -> Chosen:
    """Have the model hold the step that is published: the best, where ``config`` asks for it.

    ``rows``: how many are held out; ``early``: whether the run ended before its last step because of them.
    """
    saved, step = trainer.checkpoints, trainer.state.global_step
    log = evaluations(trainer.state.log_history)
    if not config.evaluates or not log:
        return Chosen(saved.of(step), None)
    ranked, notes = best_first(log, config), []
    if config.load_best_model_at_end and ranked:
        step, wanted = saved.take_best(ranked), int(ranked[0]["step"])
        if step != wanted:
            found = f"the best was step {wanted}, and its checkpoint is missing or damaged"
            notes.append(
                problem("KTC031", "load_best_model_at_end", f"{found}: step {step} is published")
            )
    notes += _regret(trainer, config, log, step)
    best: Record = ranked[0] if ranked else {}
    first = next((record for record in log if not record["step"]), None)
    result = HeldOutResult(
        rows=rows,
        evaluations=len(log),
        seconds=trainer.held_out.seconds,
        first_loss=first["eval_loss"] if first else None,
        last_loss=log[-1]["eval_loss"],
        metric=config.metric,
        best=best.get(f"eval_{config.metric}"),
        best_step=int(best["step"]) if best else None,
        best_loss=best.get("eval_loss"),
        published_step=step,
        ended_early=early,
    )
    return Chosen(saved.of(step), trainer.held_out.training(step), result, tuple(notes))


def _regret(
    trainer: RunTrainer, config: TrainConfig, log: Sequence[Record], step: int
) -> Iterator[Problem]:
    """A warning where an earlier step, or the base, did better than ``step``."""
    key = f"eval_{config.metric}"
    published = next((record for record in reversed(log) if record["step"] == step), None)
    best = min(log, key=lambda record: _cost(record, config))
    if published is None or abs(best[key] - published[key]) <= _NOTED * abs(best[key]):
        return
    if not best["step"]:
        where, advice = (
            "before training",
            "Lower learning_rate, or train on more rows of this kind.",
        )
    else:
        where, advice = f"at step {best['step']}", None
        if place := trainer.checkpoints.of(int(best["step"])):
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
