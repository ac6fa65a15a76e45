"""Direct preference optimisation (arXiv:2305.18290) whose reference is the base model itself.

Policy and reference are one model: with its LoRA, and without. No second copy of any weight is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl import DPOTrainer

from ktbridge.sft.passes import Batch, Row
from ktbridge.sft.run_trainer import RunTrainer


@contextmanager
def as_base(model: Any) -> Iterator[None]:
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

    def rows(self, batch: Batch) -> list[Row]:
        """The batch's pairs without padding: of 2B sequences the first B are the chosen answers."""
        ids, counts = batch["input_ids"].tolist(), batch["attention_mask"].sum(1).tolist()
        answers = batch["completion_mask"].sum(1).tolist()
        whole = [
            (row[: count - answer], row[count - answer : count])
            for row, count, answer in zip(ids, counts, answers, strict=True)
        ]
        pairs = zip(whole[: len(whole) // 2], whole[len(whole) // 2 :], strict=True)
        return [_row(chosen, rejected) for chosen, rejected in pairs]

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


def _row(chosen: tuple[list[int], list[int]], rejected: tuple[list[int], list[int]]) -> Row:
    """A pair of (prompt, answer), whose prompts are the same."""
    prompt, answer = chosen
    features = {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": rejected[1]}
    longest = max(len(answer), len(rejected[1]))
    # The first token of all is never predicted, though an answer without a prompt may begin with it.
    return Row(features, 2 * (len(prompt) + longest), len(answer) - (not prompt))
