"""Supervised fine-tuning: trl's SFTTrainer on pre-tokenised rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trl import SFTTrainer

from ktbridge.sft.passes import Batch, Row
from ktbridge.sft.run_trainer import RunTrainer


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

    def rows(self, batch: Batch) -> list[Row]:
        """The batch's rows without padding; of packed rows, the conversations in them."""
        ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
        if "attention_mask" in batch:
            counts = batch["attention_mask"].sum(1).tolist()
            spans = [(row, 0, count) for row, count in enumerate(counts)]
        else:
            bounds = batch["cu_seq_lens_q"].tolist()
            spans = [(0, *span) for span in pairwise(bounds)]
        return [_row(ids[row][first:end], labels[row][first:end]) for row, first, end in spans]

    def joins(self) -> bool:
        return bool(self.padding_free)

    def share(self, rows: Sequence[Row], step: Sequence[Row]) -> float:
        return sum(row.trained for row in rows) / max(sum(row.trained for row in step), 1)


def _row(ids: list[int], labels: list[int]) -> Row:
    trained = len(labels) - 1 - labels[1:].count(-100)  # the first token is never predicted
    return Row({"input_ids": ids, "labels": labels}, len(ids), trained)
