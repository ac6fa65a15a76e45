"""Supervised fine-tuning: trl's SFTTrainer on pre-tokenised rows."""

from __future__ import annotations

from typing import Any

from trl import SFTTrainer

from ktbridge.sft.distributed import DistributedTrainer
from ktbridge.sft.resumable import Resumable
from ktbridge.sft.watch import Watched


class SftTrainer(Watched, Resumable, DistributedTrainer, SFTTrainer):
    """Rows have ``input_ids`` and ``labels``, lists of token ids; labels are −100 where nothing is learned.

    The loss is summed over an optimizer step's trained tokens and divided by their number, so rows of unequal
    lengths weigh the same however they are spread over batches and accumulation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Trainer counts a step's tokens only for models whose own loss would take the number; trl's loss,
        # which is used here, takes it for every model.
        self.model_accepts_loss_kwargs = True
