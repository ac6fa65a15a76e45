"""Group the rows of a step into micro-batches by token count; repeat what memory was too small for.

Reading the expert weights costs the same for a small micro-batch as for a large one, so a few large ones are
faster. Rows are sorted by length and packed into the fewest micro-batches, then with the least padding
(``ktbridge.sft.placement`` has both packings). Loss and gradients equal those of fixed-size batches up to
rounding.

Trainer's batches, step numbers and checkpoints don't change: a step is computed when its last batch arrives.

The maximum is ``tokens_per_pass``: as configured, or on a GPU what ``ktbridge.sft.placement`` ranked best;
``MicroBatchRunner`` lowers it where memory turns out too small. Evaluations (``evaluate``) run by the same
runner.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.compat import WholeTrainer, trl_metrics, without_gathering
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.distributed import add, agree, exchange
from ktbridge.sft.distributed.dispatch import JointExperts
from ktbridge.sft.launch import world
from ktbridge.sft.placement import pack_joined_rows, pack_padded_rows

if TYPE_CHECKING:
    from ktbridge.sft.expert_device import ExpertDevice

OnNote = Callable[[Problem], None]
Batch = dict[str, Any]
"""A collator's result: tensors by name, and numbers; or that of ``as_rows``."""
Example = dict[str, list[int]]
"""A row as the dataset has it."""
ROWS = "rows"
"""The one key of a batch that waits for its step's micro-batches: a list of ``CollatedRow``."""
Count = torch.Tensor | int | None
"""Trainer's number of trained tokens of a step, where it counts them."""
Step = Callable[..., torch.Tensor]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CollatedRow:
    """The unit that is never split: a conversation, or a pair of answers."""

    features: Example
    """Input of the trainer's collator."""
    tokens: int
    """Tokens of its sequences, each padded to the longest of them."""
    trained: int
    """Tokens that the loss counts; of a pair, the chosen answer's."""
    unpadded: int
    """Tokens of its sequences without padding."""
    good: bool = True
    """kto: how the answer was judged."""


Collated = Sequence[CollatedRow]
"""The rows of a micro-batch, or of a step."""


class RowTrainer(WholeTrainer):
    """A Trainer that computes rows in micro-batches: a stage says what its rows are and how they weigh."""

    trained = 0.0
    """Trained tokens of the running step, of several processes the mean; or of all held-out rows."""

    @staticmethod
    def rows(examples: Sequence[Example]) -> list[CollatedRow]:
        """Return the rows of some of the dataset's examples."""
        raise NotImplementedError

    def is_packed(self) -> bool:
        """Return whether the collator makes one sequence of all rows, instead of padding each."""
        return False

    def amount(self, rows: Collated) -> int:
        """Return how much ``rows`` weigh in a mean: their number, or that of their trained tokens."""
        return len(rows)

    def loss_weight(self, rows: Collated, step: Collated) -> float:
        """Return the fraction of a step's loss and metrics that ``rows`` contribute."""
        return self.amount(rows) / max(self.amount(step), 1)

    def metric_weight(self, name: str, rows: Collated, step: Collated) -> float:
        """Return the fraction of one of the stage's ``METRICS`` that ``rows`` contribute."""
        return self.loss_weight(rows, step)

    def scaled_for_microbatch(self, rows: Collated, step: Collated) -> AbstractContextManager[None]:
        """Context: the loss of ``rows`` is their term in the loss of all rows of ``step``."""
        return nullcontext()


@dataclass
class TokenLimit:
    """The maximum of tokens per micro-batch, padding included; None: batches as configured."""

    tokens: int | None
    name: str
    """What a note calls it."""
    on_lower: str
    """The next step of a note; ``{tokens}`` is the new limit."""


def as_rows(
    rows: Callable[[Sequence[Example]], list[CollatedRow]], examples: Sequence[Example]
) -> dict[str, list[CollatedRow]]:
    """Return a dataloader's batch that isn't collated: micro-batches are, once each.

    Rows are objects, because accelerate and torch go through lists number by number.
    """
    return {ROWS: rows(examples)}


def tokens_per_pass(config: TrainConfig, device: torch.device, measured: int | None = None) -> int | None:
    """Return the maximum tokens per micro-batch, padding included; None: batches as configured.

    ``device`` is what attention runs on, ``measured`` how many tokens its memory takes, where that is known.
    """
    if config.tokens_per_pass != "auto":
        return int(config.tokens_per_pass)
    if config.stage == "kto":  # its batches mean something, see KtoTrainer
        return None
    return measured if device.type == "cuda" else None


class MicroBatchRunner:
    """Runs the steps and evaluations of ``trainer`` in micro-batches of at most ``tokens`` tokens.

    After ``torch.OutOfMemoryError`` the work is repeated from its first micro-batch: ``placed`` gives back
    memory first (steps only), and once it has none to give, micro-batches get fewer whole rows, for the rest
    of the run. One note tells of it. For a single row the error is raised, and where several processes wait
    for each other within a micro-batch (experts on the CPU, FSDP2, evaluations).
    """

    def __init__(self, trainer: RowTrainer, tokens: int | None, on_note: OnNote) -> None:
        """``on_note`` gets a warning each time that memory was too small; ``tokens`` as in ``TokenLimit``."""
        self._trainer, self._on_note = trainer, on_note
        self.limit = TokenLimit(
            # Ranks may have measured different numbers, or none: the smallest is for all.
            -agree(-(tokens or 0)) or None,
            "tokens_per_pass",
            "Nothing is lost, the step was made again; tokens_per_pass: {tokens} begins with that.",
        )
        self.placed: ExpertDevice | None = None
        self.joint: JointExperts | None = None
        """Experts of several processes."""
        self.batches: Sequence[Batch] = ()
        """The batches of the running step."""
        self.current: Collated = ()
        """The rows of the running micro-batch: those that memory is too small for, if it is."""

    @property
    def tokens(self) -> int | None:
        """Return the current maximum of tokens per micro-batch of a step; None: batches as configured."""
        return self.limit.tokens

    def run_step(self, one_pass: Step, model: nn.Module, inputs: Batch, items: Count) -> torch.Tensor:
        """Return the loss of ``inputs``, one of ``batches``, by Trainer's own training step ``one_pass``."""
        trainer = self._trainer
        if self.tokens is None:
            return one_pass(model, inputs, items)
        if self.batches and inputs is not self.batches[-1]:
            # Its rows wait for the step's last batch.
            return torch.zeros((), device=trainer.args.device)
        step, lengths = _on_all_ranks([row for batch in self.batches or [inputs] for row in batch[ROWS]])
        apart = self.joint is not None and self.joint.reduces_itself

        def accumulate() -> torch.Tensor:
            return self._accumulate(one_pass, model, step, lengths, items, apart)

        where = f"step {trainer.state.global_step + 1}"
        give_back = self.placed.shrink if self.placed else None
        may_repeat = world().size == 1 or apart
        loss = self.repeat_until_it_fits(accumulate, self.limit, where, may_repeat, give_back, self.joint)
        if apart:
            self._average_metrics(step)
        return loss

    def repeat_until_it_fits(
        self,
        attempt: Callable[[], _Result],
        limit: TokenLimit,
        where: str,
        may_repeat: bool,
        give_back: Callable[[int], str] | None = None,
        joint: JointExperts | None = None,
    ) -> _Result:
        """Return what ``attempt`` does, called again with less to do while a rank runs out of memory.

        ``attempt`` keeps ``current`` up to date, and micro-batches within ``limit``, which is lowered here.
        ``may_repeat``: no process waits for another within an attempt, but in ``joint``, where one that has
        failed takes part to the end. ``give_back(bytes)`` frees GPU memory
        and says what, or "". Raises ``torch.OutOfMemoryError`` where a single row is too large, or the
        attempt may not be repeated.
        """
        before, freed, largest = limit.tokens, [], 0
        while True:
            short, self.current = 0, ()
            failed: Collated = ()
            try:
                result = attempt()
            except torch.OutOfMemoryError as error:
                if not may_repeat:
                    raise
                short, failed = bytes_asked_for(error), self.current
            if short and joint:
                self._discard()
                joint.give_up()
            if may_repeat:
                short = agree(short)
            if joint:
                joint.end(not short)
            if not short:
                break
            # Only here the exception is gone, and with it the tensors that its frames kept alive.
            self._discard()
            largest = agree(self.tokens_of(failed) if failed else 0)
            if give_back and (what := give_back(short)):
                freed.append(what)
            else:
                limit.tokens = self._fewer_tokens(failed, limit.tokens, short)
        if freed or limit.tokens != before:
            self._report(limit, where, largest, freed, limit.tokens != before)
        return result

    def pack(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
        """Return the places of the rows of each micro-batch of at most ``tokens`` tokens."""
        return (pack_joined_rows if self._trainer.is_packed() else pack_padded_rows)(lengths, tokens)

    def tokens_of(self, rows: Collated) -> int:
        """Return the tokens of a micro-batch of ``rows``, padding included."""
        lengths = [row.tokens for row in rows]
        return sum(lengths) if self._trainer.is_packed() else max(lengths) * len(lengths)

    def _accumulate(
        self,
        one_pass: Step,
        model: nn.Module,
        step: Collated,
        lengths: Sequence[int],
        items: Count,
        apart: bool,
    ) -> torch.Tensor:
        """Return the step's loss; its gradients are added up. ``apart``: DDP has nothing to do."""
        assert self.tokens is not None
        trainer, losses = self._trainer, []
        batches = [[step[place] for place in each] for each in self.pack(lengths, self.tokens)]
        if self.joint:
            self.joint.begin(len(batches))
        own = without_gathering(trainer.accelerator) if apart else nullcontext()
        # trl's metrics are of all processes' rows in a micro-batch, unless each computes by itself.
        amounts: Sequence[float] = [trainer.amount(rows) for rows in batches]
        amounts = amounts if apart else add(amounts)
        weights = [each / max(sum(amounts), 1) for each in amounts]
        with own, self._metrics_as_one(weights):
            for rows in batches:
                self.current = rows
                batch = trainer.data_collator([row.features for row in rows])
                reduces = rows is batches[-1] and not apart
                context = nullcontext() if reduces else trainer.accelerator.no_sync(model)
                with context, trainer.scaled_for_microbatch(rows, step):
                    losses.append(one_pass(model, batch, items))
        return torch.stack(losses).sum()

    def _discard(self) -> None:
        """Drop the gradients of a failed attempt, and the memory that it leaves."""
        device, model = self._trainer.args.device, self._trainer.model
        if device.type == "cuda":
            torch.cuda.synchronize()  # the experts' kernels may still be adding to gradients
        model.zero_grad(set_to_none=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _fewer_tokens(self, failed: Collated, tokens: int | None, short: int) -> int:
        """Return a limit with which the ``failed`` rows of any rank lose an eighth, one row at least."""
        fewer, least = failed[: len(failed) * 7 // 8], tokens or 0
        if failed:  # this rank's
            least = self.tokens_of(fewer) if fewer else 0
        least = -agree(-least)
        if not least:
            size = f"{short:,} bytes" if short > 1 else "memory"
            raise torch.OutOfMemoryError(f"CUDA out of memory: {size} short for a row alone")
        return least

    def _report(self, limit: TokenLimit, where: str, largest: int, freed: Sequence[str], lower: bool) -> None:
        what = [f"given back: {', '.join(freed)}"] if freed else []
        what += [f"from here on it is {limit.tokens:,}"] if lower else []
        step = limit.on_lower.format(tokens=limit.tokens)
        self._on_note(
            problem(
                "KTC023",
                f"{where}: {limit.name}",
                f"the GPU ran out of memory in a micro-batch of {largest:,} tokens; {'; '.join(what)}",
                next_step=step if lower else step.partition(";")[0] + ".",
            )
        )

    def _average_metrics(self, step: Collated) -> None:
        """Make this rank's metrics of the step those of all, weighted by what counts of its rows."""
        metrics = trl_metrics(self._trainer, "train")
        names = sorted(name for name, values in metrics.items() if values and name != "num_tokens")
        weight = self._trainer.amount(step)
        whole, *sums = add([weight, *(weight * metrics[name][-1] for name in names)])
        for name, value in zip(names, sums, strict=True):
            metrics[name][-1] = value / max(whole, 1)

    @contextmanager
    def _metrics_as_one(self, weights: Sequence[float]) -> Iterator[None]:
        """Context: trl's metrics, collected once per micro-batch, are averaged with ``weights``.

        Metrics of failed micro-batches are dropped.
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
                    terms = (w * value for w, value in zip(weights, values, strict=True))
                    metrics[name] = [*before.get(name, ()), sum(terms)]


def bytes_asked_for(error: torch.OutOfMemoryError) -> int:
    """Return the bytes that torch's message says could not be had; 1 where it doesn't say."""
    found = re.search(r"Tried to allocate ([\d.]+) (MiB|GiB|KiB)", str(error))
    if found is None:
        return 1
    unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[found[2]]
    return max(1, round(float(found[1]) * unit))


def _on_all_ranks(rows: list[CollatedRow]) -> tuple[list[CollatedRow], list[int]]:
    """Return this rank's rows, the longest first, and lengths that every rank packs in the same way.

    The experts and trl's metrics need as many micro-batches on each rank, with as many rows in each of them.
    """
    rows = sorted(rows, key=lambda row: -row.tokens)
    lengths = [row.tokens for row in rows]
    if world().size == 1:
        return rows, lengths
    missing = agree(len(rows)) - len(rows)
    if missing:  # of packed rows only, which hold more or fewer conversations
        labels = [-100] * len(rows[-1].features["labels"])  # so loss and gradients are 0
        untrained = replace(rows[-1], features={**rows[-1].features, "labels": labels}, trained=0)
        rows += [untrained] * missing
    lengths = [max(each) for each in zip(*exchange([row.tokens for row in rows]), strict=True)]
    return rows, lengths
