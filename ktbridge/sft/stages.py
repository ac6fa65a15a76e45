"""The stages: trl's SFTTrainer and DPOTrainer as ``RunTrainer`` changes them.

A stage defines what a row of its batches is, and what share of a step's loss a pass of rows has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from trl import DPOTrainer, SFTTrainer

from ktbridge.sft.data.fit import PICTURES
from ktbridge.sft.passes import Batch, Row
from ktbridge.sft.run_trainer import RunTrainer
from ktbridge.sft.vision import Vision


class SftTrainer(RunTrainer, SFTTrainer):
    """Rows have ``input_ids`` and ``labels``, lists of token ids; labels are −100 where nothing is learned.

    The loss is summed over an optimizer step's trained tokens and divided by their number, so rows of unequal
    lengths weigh the same however they are spread over batches and accumulation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Trainer counts a step's tokens only for models whose own loss would take the number; trl's loss,
        # which is used here, takes it for every model.
        self.model_accepts_loss_kwargs = True
        self._vision: Vision | None = None

    def see(self, vision: Vision) -> None:
        """Rows have images, by their numbers in the column ``PICTURES``; a pass reads its own."""
        self._vision = vision
        self.data_collator = partial(_with_numbers, self.data_collator)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        if self._vision is None:
            return super()._prepare_inputs(inputs)
        given = {key: value for key, value in inputs.items() if key != PICTURES}
        numbers = [number for row in inputs[PICTURES] for number in row]
        shown = [self._vision.pictures[number] for number in numbers]
        return super()._prepare_inputs(given | self._vision.inputs(inputs["input_ids"], shown))

    def rows(self, batch: Batch) -> list[Row]:
        """The batch's rows without padding; of packed rows, the conversations in them."""
        ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
        pictures = batch.get(PICTURES, [None] * len(ids))
        if "attention_mask" in batch:
            counts = batch["attention_mask"].sum(1).tolist()
            spans = [(row, 0, count) for row, count in enumerate(counts)]
        else:
            bounds = batch["cu_seq_lens_q"].tolist()
            spans = [(0, *span) for span in pairwise(bounds)]
        return [
            _conversation(ids[row][first:end], labels[row][first:end], pictures[row])
            for row, first, end in spans
        ]

    def joins(self) -> bool:
        return bool(self.padding_free)

    def share(self, rows: Sequence[Row], step: Sequence[Row]) -> float:
        return sum(row.trained for row in rows) / max(sum(row.trained for row in step), 1)

    @contextmanager
    def as_part(self, rows: Sequence[Row], step: Sequence[Row]) -> Iterator[None]:
        """trl's loss is its term of the step already, but for the routers' loss, a mean over a pass's tokens.

        That one is divided by the number of a step's batches, for which the inverse of the share stands in.
        """
        trainer: Any = self
        before, share = self.current_gradient_accumulation_steps, self.share(rows, step)
        trainer.current_gradient_accumulation_steps = 1 / share if share else float("inf")
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = before


def _with_numbers(collate: Callable[..., Batch], examples: list[dict[str, Any]]) -> Batch:
    """A batch beside the numbers of its rows' images."""
    return {**collate(examples), PICTURES: [each.get(PICTURES, []) for each in examples]}


def _conversation(ids: list[int], labels: list[int], pictures: list[int] | None) -> Row:
    trained = len(labels) - 1 - labels[1:].count(-100)  # the first token is never predicted
    beside = {} if pictures is None else {PICTURES: pictures}
    return Row({"input_ids": ids, "labels": labels, **beside}, len(ids), trained)


@contextmanager
def as_base(model: PeftModel) -> Iterator[None]:
    """Context: a wrapped PeftModel acts as the base alone: neither LoRA, no dropout, no noise."""
    training = model.training
    model.eval()
    try:
        with model.disable_adapter():  # the experts' LoRA, too
            yield
    finally:
        model.train(training)


class DpoTrainer(RunTrainer, DPOTrainer):
    """trl's DPOTrainer with ``as_base`` for its reference.

    Rows have ``prompt``, ``chosen`` and ``rejected``, lists of messages.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model: Any = self.model
        if "ref" in model.peft_config:  # trl's frozen copy of PEFT's LoRA, which lacks the experts'
            model.delete_adapter("ref")
        # With it trl takes the reference from the batch, where compute_loss puts it.
        self.precompute_ref_logps = True

    def compute_loss(
        self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        chosen, rejected = self.reference_logps(model, inputs)
        filled = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return super().compute_loss(model, filled, *args, **kwargs)

    @torch.no_grad()
    def reference_logps(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's log-probabilities of the B chosen and the B rejected answers, each [B]."""
        ids, answer = inputs["input_ids"], inputs["completion_mask"]
        with as_base(self.accelerator.unwrap_model(model)):
            out = model(
                input_ids=ids,
                attention_mask=inputs["attention_mask"],
                labels=ids.masked_fill(answer == 0, -100),
                use_cache=False,
                fused_lm_head=True,  # trl's: log_probs [2B, T - 1], 0 outside the answers
            )
        chosen, rejected = out.log_probs.sum(dim=1).chunk(2)
        return chosen, rejected

    def rows(self, batch: Batch) -> list[Row]:
        """The batch's pairs without padding: of 2B sequences the first B are the chosen answers."""
        ids, counts = batch["input_ids"].tolist(), batch["attention_mask"].sum(1).tolist()
        answers = batch["completion_mask"].sum(1).tolist()
        whole = [
            (row[: count - answer], row[count - answer : count])
            for row, count, answer in zip(ids, counts, answers, strict=True)
        ]
        pairs = zip(whole[: len(whole) // 2], whole[len(whole) // 2 :], strict=True)
        return [_pair(chosen, rejected) for chosen, rejected in pairs]

    def share(self, rows: Sequence[Row], step: Sequence[Row]) -> float:
        return len(rows) / len(step)

    @contextmanager
    def as_part(self, rows: Sequence[Row], step: Sequence[Row]) -> Iterator[None]:
        """trl's loss is a mean over pairs, and for ``pref_ftx`` one over the chosen answers' tokens."""
        share = self.share(rows, step)
        tokens = sum(row.trained for row in rows) / sum(row.trained for row in step)
        trainer: Any = self
        before = self.current_gradient_accumulation_steps, self.loss_weights
        trainer.current_gradient_accumulation_steps = 1 / share  # what the loss is divided by
        self.loss_weights = [
            weight * tokens / share if kind == "sft" else weight
            for kind, weight in zip(self.loss_types, self.loss_weights, strict=True)
        ]
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps, self.loss_weights = before


def _pair(chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]) -> Row:
    """A pair of (prompt, answer), whose prompts are the same."""
    prompt, answer = chosen
    features = {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": rejected[1]}
    longest = max(len(answer), len(rejected[1]))
    # The first token of all is never predicted, though an answer without a prompt may begin with it.
    return Row(features, 2 * (len(prompt) + longest), len(answer) - (not prompt))


STAGES: dict[str, type[RunTrainer]] = {"sft": SftTrainer, "pt": SftTrainer, "dpo": DpoTrainer}
LOSSES = {
    "sft": "loss per assistant token (nats)",
    "pt": "loss per token (nats)",
    "dpo": "loss per pair (nats)",
}
