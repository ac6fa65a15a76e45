"""Run an optimizer step in as few passes as memory allows, whatever the batch size and accumulation.

Where weights are read for each pass, what a pass costs hardly depends on its tokens, so few large passes are
much faster than many small ones. ``tokens per pass`` bounds a pass instead of a number of rows: the rows of
a step are sorted by length and cut so that the passes are few and rows of like lengths are padded together.

Trainer still yields batches as configured, so which rows a step has, the number of steps, the
counted tokens and the place where a checkpoint goes on are the same: only the last batch of a step computes.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.compat import trl_metrics, without_gathering
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.distributed.group import add, agree, exchange
from ktbridge.sft.distributed.optimizer import reduces_itself
from ktbridge.sft.launch import world
from ktbridge.sft.placement import pack_joined_rows, pack_padded_rows

if TYPE_CHECKING:
    from ktbridge.sft.expert_device import ExpertDevice
    from ktbridge.sft.run_trainer import RunTrainer

OnNote = Callable[[Problem], None]
Batch = dict[str, Any]
"""What a collator makes: tensors by name, and numbers; or what ``as_rows`` does."""
Example = dict[str, list[int]]
"""A row as the dataset has it."""
ROWS = "rows"
"""The one key of a batch that waits for its step's micro-batches: a list of ``Row``."""
Count = torch.Tensor | int | None
"""Trainer's number of trained tokens of a step, where it counts them."""
Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Row:
    """The unit that is never split: a conversation, or a pair of answers."""

    features: Example
    """What the trainer's collator takes."""
    tokens: int
    """Tokens of its sequences, each padded to the longest of them."""
    trained: int
    """Tokens that the loss counts; of a pair, the chosen answer's."""
    unpadded: int
    """Tokens of its sequences without padding."""
    good: bool = True
    """kto: how the answer was judged."""


def as_rows(
    rows: Callable[[Sequence[Example]], list[Row]], examples: Sequence[Example]
) -> dict[str, list[Row]]:
    """A batch of a dataloader, not collated: that is done once, of the rows of a micro-batch.

    Rows are objects, because accelerate and torch go through lists number by number.
    """
    return {ROWS: rows(examples)}


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


class Passes:
    """Runs the steps of ``trainer`` in micro-batches of at most ``tokens`` tokens; None: as configured.

    After ``torch.OutOfMemoryError`` the step is made again from its first micro-batch: ``placed`` gives back
    memory first, and once it has none to give, micro-batches are made smaller by whole rows, for the rest of
    the run. Each has a note. For a single row the error is raised, and where several processes wait for each
    other within a micro-batch (experts on the CPU, FSDP2).
    """

    def __init__(
        self, trainer: RunTrainer, tokens: int | None, on_note: OnNote | None = None
    ) -> None:
        """``on_note`` gets each of ``notes`` when it comes."""
        self._trainer, self._on_note = trainer, on_note
        # Ranks may have measured different numbers, or none: the smallest is for all.
        self.tokens = -agree(-(tokens or 0)) or None
        """The current maximum of tokens per micro-batch; None: batches as configured."""
        self.placed: ExpertDevice | None = None
        self.notes: tuple[Problem, ...] = ()
        """A warning (KTC023) for each time that memory was too small."""
        self.batches: Sequence[Batch] = ()
        """The batches of the step that is running."""
        self._too_much: Sequence[Row] = ()
        """The last micro-batch that this rank's memory was too small for."""

    def run(self, one_pass: Step, model: nn.Module, inputs: Batch, items: Count) -> torch.Tensor:
        """The loss of ``inputs``, one of ``batches``, by Trainer's own training step ``one_pass``."""
        if self.tokens is None:
            return one_pass(model, inputs, items)
        if self.batches and inputs is not self.batches[-1]:
            # Its rows wait for the step's last batch.
            return torch.zeros((), device=self._trainer.args.device)
        step, lengths = _on_all_ranks(
            [row for batch in self.batches or [inputs] for row in batch[ROWS]]
        )
        given, back, too_many = self.tokens, [], 0
        while True:
            loss, short = self._attempt(one_pass, model, step, lengths, items)
            if loss is not None:
                break
            # Only here the exception, and the tensors its frames kept alive, are freed.
            self._start_again(model)
            too_many = agree(self.tokens_of(self._too_much) if self._too_much else 0)
            back.append(self._make_smaller(short))
        if back:
            self._report(too_many, [what for what in back if what], self.tokens < given)
        return loss

    def _attempt(
        self,
        one_pass: Step,
        model: nn.Module,
        step: Sequence[Row],
        lengths: Sequence[int],
        items: Count,
    ) -> tuple[torch.Tensor | None, int]:
        """The step's loss, its gradients computed; or None and the bytes that a rank hadn't."""
        assert self.tokens is not None
        trainer, short, losses = self._trainer, 0, []
        alone = world().size == 1
        apart = not alone and reduces_itself(trainer)
        places = (pack_joined_rows if trainer.joins() else pack_padded_rows)(lengths, self.tokens)
        passes = [[step[place] for place in each] for each in places]
        self._too_much = ()
        own = without_gathering(trainer.accelerator) if apart else nullcontext()
        try:
            with own, self._metrics_as_one([trainer.share(rows, step) for rows in passes]):
                for rows in passes:
                    batch = trainer.data_collator([row.features for row in rows])
                    last = rows is passes[-1]
                    waits = last and not apart
                    context = nullcontext() if waits else trainer.accelerator.no_sync(model)
                    with context, trainer.as_part(rows, step):
                        losses.append(one_pass(model, batch, items))
        except torch.OutOfMemoryError as error:
            if not (alone or apart):
                raise
            short, self._too_much = bytes_asked_for(error), rows
        if apart:  # nobody waited for another yet
            short = agree(short)
            if not short:
                self._average_metrics(step)
        return (None, short) if short else (torch.stack(losses).sum(), 0)

    def tokens_of(self, rows: Sequence[Row]) -> int:
        """Tokens of a micro-batch of ``rows``, padding included."""
        lengths = [row.tokens for row in rows]
        return sum(lengths) if self._trainer.joins() else max(lengths) * len(lengths)

    def _start_again(self, model: nn.Module) -> None:
        """Drop what the step has computed."""
        if self._trainer.args.device.type == "cuda":
            torch.cuda.synchronize()  # the experts' kernels may still be adding to gradients
        model.zero_grad(set_to_none=True)
        free_memory(self._trainer.args.device)

    def _make_smaller(self, short: int) -> str:
        """Have some ``short`` more bytes free in the next attempt; what was given back, in words.

        All ranks do alike. Raises ``torch.OutOfMemoryError`` where a single row is too large.
        """
        assert self.tokens is not None
        if self.placed and (what := self.placed.shrink(short)):
            return what
        fewer, least = self._too_much[: len(self._too_much) * 7 // 8], self.tokens
        if self._too_much:  # this rank's
            least = self.tokens_of(fewer) if fewer else 0
        self.tokens = -agree(-least)
        if not self.tokens:
            size = f"{short:,} bytes" if short > 1 else "memory"
            raise torch.OutOfMemoryError(f"CUDA out of memory: {size} short for a row alone")
        return ""

    def _report(self, too_many: int, back: Sequence[str], smaller: bool) -> None:
        what = [f"given back: {', '.join(back)}"] if back else []
        what += [f"from here on it is {self.tokens:,}"] if smaller else []
        begins = f"; tokens_per_pass: {self.tokens} begins with that" if smaller else ""
        note = problem(
            "KTC023",
            f"step {self._trainer.state.global_step + 1}: tokens_per_pass",
            f"the GPU ran out of memory in a micro-batch of {too_many:,} tokens; {'; '.join(what)}",
            next_step=f"Nothing is lost, the step was made again{begins}.",
        )
        self.notes = (*self.notes, note)
        if self._on_note:
            self._on_note(note)

    def _average_metrics(self, step: Sequence[Row]) -> None:
        """Make this rank's metrics of the step those of all, weighted by the tokens that count."""
        metrics = trl_metrics(self._trainer, "train")
        names = sorted(name for name, values in metrics.items() if values and name != "num_tokens")
        weight = sum(row.trained for row in step)
        whole, *sums = add([weight, *(weight * metrics[name][-1] for name in names)])
        for name, value in zip(names, sums, strict=True):
            metrics[name][-1] = value / max(whole, 1)

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


def bytes_asked_for(error: torch.OutOfMemoryError) -> int:
    """Bytes that torch's message says could not be had; 1 where it doesn't say."""
    found = re.search(r"Tried to allocate ([\d.]+) (MiB|GiB|KiB)", str(error))
    if found is None:
        return 1
    return max(
        1, round(float(found[1]) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[found[2]])
    )


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
    return replace(row, features={**row.features, "labels": labels}, trained=0)
