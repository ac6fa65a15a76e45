"""Findings about the Hugging Face Hub: what `ktbridge push` uploads."""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

HUB = Subject("Uploading to the Hub", "adapter", (
    Code("KTH001", "error", "the adapter names its base model by a path of this machine",
         "ktbridge push … --base-model org/name, the base model's name on the Hub"),
    Code("KTH002", "warning", "the evaluation for the model card reports an error, which the card repeats",
         "finish the evaluation: run the same `ktbridge eval` command again"),
    Code("KTH003", "info", "the model card is without data and losses: files of training are missing",
         "push the directory that training wrote, or nothing if another tool trained it"),
))  # fmt: skip

SUBJECTS = (HUB,)
