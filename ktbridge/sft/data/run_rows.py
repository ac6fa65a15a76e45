"""The rows of a run, read and tokenized in one way for `plan`, a dry run and training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ktbridge.files.publish import OnProgress
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.fit import Fitted, fit_rows
from ktbridge.sft.data.kept import Tokenized
from ktbridge.sft.data.rows import Rows, digest, load_rows
from ktbridge.sft.data.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ktbridge.sft.vision import Vision


def open_rows(config: TrainConfig) -> Rows | Stream:
    """Read the rows of ``config``, or open their stream, with the held-out rows beside.

    Raises what ``load_rows`` and ``Stream`` do.
    """
    if not config.streaming:
        return load_rows(config)
    stream = Stream(config)
    if config.eval_dataset and not config.val_size:
        stream.held = load_rows(replace(config, dataset=config.eval_dataset, eval_dataset=()))
        stream.held.name = "eval_dataset"
    return stream


def tokenize_rows(
    rows: Rows | Stream,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_rows: OnProgress | None = None,
    vision: Vision | None = None,
) -> tuple[Fitted, Fitted | None]:
    """Return the rows as tokens, of a stream the first ones; and the held-out rows.

    Held-out rows are evaluated each by itself, whatever packing and mixing are. Raises what ``fit_rows``
    does.
    """
    if isinstance(rows, Stream):
        fitted, held = rows.begin(tokenizer), rows.held
    else:
        fitted, held = fit_rows(rows, tokenizer, config, on_rows, vision), rows.held_out
    if held is None or not config.evaluates:
        return fitted, None
    alone = replace(config, packing=False, neat_packing=False, mix_strategy="concat")
    return fitted, fit_rows(held, tokenizer, alone, on_rows, vision)


def digests(rows: Rows | Tokenized | Stream) -> tuple[str, str | None]:
    """Digests of the rows that are trained on, and of the held-out ones."""
    if isinstance(rows, Tokenized):
        return rows.digest, rows.held_digest
    held = rows.held if isinstance(rows, Stream) else rows.held_out
    own = rows.digest() if isinstance(rows, Stream) else digest(rows)
    return own, digest(held) if held else None
