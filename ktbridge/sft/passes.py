"""Run an optimizer step in as few passes as memory allows, whatever the batch size and accumulation.

Where weights are read for each pass, what a pass costs hardly depends on its tokens, so few large passes are
much faster than many small ones. ``tokens per pass`` bounds a pass instead of a number of rows: the rows of
a step are sorted by length and cut so that the passes are few and rows of like lengths are padded together.

Trainer still yields batches as configured, so which rows a step has, the number of steps, the
counted tokens and the place where a checkpoint goes on are the same: only the last batch of a step computes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.compat import trl_metrics
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.distributed.group import agree, exchange
from ktbridge.sft.launch import world

if TYPE_CHECKING:
    from ktbridge.sft.run_trainer import RunTrainer

OnNote = Callable[[Problem], None]
Batch = dict[str, Any]
"""What a collator makes: tensors by name, and numbers."""
Count = torch.Tensor | int | None
"""Trainer's number of trained tokens of a step, where it counts them."""
Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Row:
    """The unit that is never split: a conversation, or a pair of answers."""

    features: dict[str, list[int]]
    """What the trainer's collator takes."""
    tokens: int
    """Tokens of its sequences, each padded to the longest of them."""
    trained: int
    """Tokens that the loss counts; of a pair, the chosen answer's."""
    good: bool = True
    """kto: how the answer was judged."""


def tokens_per_pass(
    config: TrainConfig, device: torch.device, measured: int | None = None
) -> int | None:
    """The maximum tokens per pass, padding included; None: batches as configured.

    ``device`` is what attention runs on, ``measured`` how many tokens its memory takes, where that is known.
    """
    if config.tokens_per_pass != "auto":
        return int(config.tokens_per_pass)
    if config.stage == "kto":  # its batches mean something, see KtoTrainer
        return None
    return measured if device.type == "cuda" else None


def cut(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Places of the rows of each pass, where a pass is padded to its longest row; the longest come first.

    A pass has at most ``most`` tokens, padding included, unless it is one row. No other cut has fewer passes,
    and none with as few has less padding.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    # Of the first rows in that order, for each number of them: passes, tokens, where the last pass begins.
    best = [(0, 0, 0)]
    for end in range(1, len(order) + 1):
        found = []
        for begin in reversed(range(end)):
            tokens = lengths[order[begin]] * (end - begin)
            if tokens > most and end - begin > 1:
                break  # and so has every pass that begins earlier
            found.append((best[begin][0] + 1, best[begin][1] + tokens, begin))
        best.append(min(found))
    passes, end = [], len(order)
    while end:
        begin = best[end][2]
        passes.append(order[begin:end])
        end = begin
    return passes[::-1]


def fill(lengths: Sequence[int], most: int) -> list[list[int]]:
    """``cut`` where a pass is one sequence of all its rows, without padding: first fit, the longest first."""
    passes: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = next((n for n, left in enumerate(room) if left >= lengths[row]), len(passes))
        if place == len(passes):
            passes.append([])
            room.append(most)
        passes[place].append(row)
        room[place] -= lengths[row]
    return passes


class Passes:
    """Runs the steps of ``trainer``, a ``RunTrainer``, in passes of ``tokens`` tokens; None: as configured.

    ``torch.OutOfMemoryError`` in a pass of several rows halves the tokens per pass for the rest of the run,
    with a note, and the step is made again from its first pass. With several processes, which wait for each
    other in the middle of a pass, and for a single row it is raised.
    """

    def __init__(
        self, trainer: RunTrainer, tokens: int | None, on_note: OnNote | None = None
    ) -> None:
        """``on_note`` gets each of ``notes`` when it comes."""
        self._trainer, self._on_note = trainer, on_note
        # Ranks may have measured different numbers, or none: the smallest is for all.
        self.tokens = -agree(-(tokens or 0)) or None
        """The current maximum of tokens per pass; None: batches as configured."""
        self.notes: tuple[Problem, ...] = ()
        """A warning (KTC023) for each step in which memory was too small."""
        self.batches: Sequence[Batch] = ()
        """The batches of the step that is running."""
        self._running: Sequence[Row] = ()
        self._too_many = 0
        """Tokens of the last pass that memory was too small for."""

    def run(self, one_pass: Step, model: nn.Module, inputs: Batch, items: Count) -> torch.Tensor:
        """The loss of ``inputs``, one of ``batches``, by Trainer's own training step ``one_pass``."""
        if self.tokens is None:
            return one_pass(model, inputs, items)
        if self.batches and inputs is not self.batches[-1]:
            # Its rows wait for the step's last batch.
            return torch.zeros((), device=self._trainer.args.device)
        step, lengths = _on_all_ranks(
            [row for batch in self.batches or [inputs] for row in self._trainer.rows(batch)]
        )
        given = self.tokens
        while True:
            loss = self._attempt(one_pass, model, step, lengths, items)
            if loss is not None:
                break
            # Only here the exception, and the tensors its frames kept alive, are freed.
            self._start_again(model)
        if self.tokens < given:
            self._report()
        return loss

    def _attempt(
        self,
        one_pass: Step,
        model: nn.Module,
        step: Sequence[Row],
        lengths: Sequence[int],
        items: Count,
    ) -> torch.Tensor | None:
        """The step's loss, its gradients computed; None where memory was too small, the tokens halved."""
        assert self.tokens is not None
        trainer = self._trainer
        places = (fill if trainer.joins() else cut)(lengths, self.tokens)
        passes = [[step[place] for place in each] for each in places]
        try:
            with self._metrics_as_one([trainer.share(rows, step) for rows in passes]):
                losses = []
                for rows in passes:
                    self._running = rows
                    batch = trainer.data_collator([row.features for row in rows])
                    last = rows is passes[-1]
                    alone = nullcontext() if last else trainer.accelerator.no_sync(model)
                    with alone, trainer.as_part(rows, step):
                        losses.append(one_pass(model, batch, items))
        except torch.OutOfMemoryError:
            if len(self._running) == 1 or world().size > 1:
                raise
            self._too_many = self.tokens_of(self._running)
            self.tokens = self._too_many // 2
            return None
        return torch.stack(losses).sum()

    def tokens_of(self, rows: Sequence[Row]) -> int:
        """Tokens of a pass of ``rows``, padding included."""
        lengths = [row.tokens for row in rows]
        return sum(lengths) if self._trainer.joins() else max(lengths) * len(lengths)

    def _start_again(self, model: nn.Module) -> None:
        """Drop what the step has computed."""
        if self._trainer.args.device.type == "cuda":
            torch.cuda.synchronize()  # the experts' kernels may still be adding to gradients
        model.zero_grad(set_to_none=True)
        free_memory(self._trainer.args.device)

    def _report(self) -> None:
        now = self.tokens
        note = problem(
            "KTC023",
            f"step {self._trainer.state.global_step + 1}: tokens_per_pass",
            f"the GPU ran out of memory in a pass of {self._too_many:,} tokens; from here on it is {now:,}",
            next_step=f"Nothing is lost, the step was made again; tokens_per_pass: {now} begins with that.",
        )
        self.notes = (*self.notes, note)
        if self._on_note:
            self._on_note(note)

    @contextmanager
    def _metrics_as_one(self, shares: Sequence[float]) -> Iterator[None]:
        """Context: trl's metrics, collected once per pass, are averaged with weights ``shares``.

        Metrics of failed passes are dropped.
        """
        metrics = trl_metrics(self._trainer, "train")
        before, fresh = dict(metrics), {}
        metrics.clear()
        try:
            yield
            fresh = dict(metrics)
        finally:
            metrics.clear()
            metrics.update(before)
            for name, values in fresh.items():
                if name == "num_tokens":  # a count of the whole run
                    metrics[name] = values
                else:
                    weighed = zip(shares, values, strict=True)
                    metrics[name] = [
                        *before.get(name, ()),
                        sum(share * value for share, value in weighed),
                    ]


def free_memory(device: torch.device) -> None:
    """After an OutOfMemoryError, once the exception is gone: drop what its frames kept on ``device``."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _on_all_ranks(rows: list[Row]) -> tuple[list[Row], list[int]]:
    """This rank's rows, the longest first, and lengths that every rank cuts in the same way.

    The experts and trl's metrics need as many passes on each rank, and as many rows in each of them.
    """
    rows = sorted(rows, key=lambda row: -row.tokens)
    lengths = [row.tokens for row in rows]
    if world().size == 1:
        return rows, lengths
    missing = agree(len(rows)) - len(rows)
    if missing:  # of packed rows only, which hold more or fewer conversations
        rows += [_untrained(rows[-1])] * missing
    lengths = [max(each) for each in zip(*exchange([row.tokens for row in rows]), strict=True)]
    return rows, lengths


def _untrained(row: Row) -> Row:
    """The same conversation with all labels ignored: its loss and gradients are 0."""
    labels = [-100] * len(row.features["labels"])
    return Row({**row.features, "labels": labels}, row.tokens, 0)
