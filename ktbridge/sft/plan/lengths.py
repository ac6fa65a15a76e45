"""How many rows a run has and how long they are, and the steps that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data import load_rows

_SAMPLE = 256
_LONGEST = 32
_A_MESSAGE = 6  # role and delimiters in the usual chat templates
_BYTES_A_TOKEN = 3


@dataclass(frozen=True)
class Lengths:
    """Sequences of a run, cut at cutoff_len: how many, the longest and the mean, in tokens.

    ``counted`` tells whether the model's own tokenizer counted a sample, or bytes were divided by 3.
    ``sequences`` are rows for sft (whole rows of cutoff_len under packing) and pairs for dpo.
    """

    rows: int
    sequences: int
    longest: int
    mean: float
    counted: bool

    @property
    def even(self) -> bool:
        """Whether all are about as long, so that hardly any batch has padding."""
        return self.mean > 0.99 * self.longest


def read_lengths(config: TrainConfig, base: Path) -> Lengths:
    """Lengths of the run's rows. Raises what ``ktbridge.sft.data.load_rows`` does."""
    rows = load_rows(config)
    if config.stage == "dpo":
        texts = [
            _text([*pair.prompt, *longer])
            for pair in rows.pairs
            for longer in (max(pair.chosen, pair.rejected, key=_size),)
        ]
    else:
        texts = [_text(conversation) for conversation in rows.conversations]
    return measure(texts, config, base)


def measure(texts: Sequence[tuple[int, str]], config: TrainConfig, base: Path) -> Lengths:
    """``Lengths`` of (messages, text) pairs: the longest by bytes are counted, and a sample of the rest."""
    count, counted = _counter(base)
    by_size = sorted(texts, key=lambda item: len(item[1]))
    step = max(1, len(by_size) // _SAMPLE)
    cut = config.cutoff_len
    sample = [min(cut, count(text) + _A_MESSAGE * n) for n, text in by_size[::step]]
    longest = max(min(cut, count(text) + _A_MESSAGE * n) for n, text in by_size[-_LONGEST:])
    mean = sum(sample) / len(sample)
    sequences = len(texts)
    if config.packing or config.neat_packing:
        sequences = max(1, math.ceil(mean * len(texts) / cut))
        longest, mean = cut, float(cut)
    return Lengths(len(texts), sequences, max(longest, *sample), mean, counted)


def optimizer_steps(config: TrainConfig, sequences: int) -> int:
    """As transformers counts: an epoch's last batches make a step of their own."""
    if config.max_steps > 0:
        return config.max_steps
    batches = math.ceil(sequences / config.per_device_train_batch_size)
    an_epoch = max(1, math.ceil(batches / config.gradient_accumulation_steps))
    return math.ceil(config.num_train_epochs * an_epoch)


def _counter(base: Path) -> tuple[Any, bool]:
    """Text -> tokens, by the model's tokenizer.json where it can be read."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    except Exception:  # not installed, not there or not to its liking: then bytes must do
        return lambda text: -(-len(text.encode()) // _BYTES_A_TOKEN), False
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), True


def _text(messages: Sequence[Any]) -> tuple[int, str]:
    return len(messages), "\n".join(message["content"] for message in messages)


def _size(messages: Sequence[Any]) -> int:
    return sum(len(message["content"]) for message in messages)
