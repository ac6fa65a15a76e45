"""Direct preference optimisation (arXiv:2305.18290) whose reference is the base model itself.

Policy and reference are one model: with its LoRA, and without. No second copy of any weight is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import DPOTrainer

from ktbridge.sft.distributed import DistributedTrainer
from ktbridge.sft.resumable import Resumable
from ktbridge.sft.watch import Watched


@contextmanager
def as_base(model: Any) -> Iterator[None]:
    """A wrapped PeftModel as the base model alone: neither LoRA, no dropout, no noise; restored after."""
    training = model.training
    model.eval()
    try:
        with model.disable_adapter():  # the experts' LoRA, too
            yield
    finally:
        model.train(training)


class DpoTrainer(Watched, Resumable, DistributedTrainer, DPOTrainer):
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

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        chosen, rejected = self.reference_logps(model, inputs)
        filled = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return super().compute_loss(model, filled, *args, **kwargs)

    @torch.no_grad()
    def reference_logps(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
