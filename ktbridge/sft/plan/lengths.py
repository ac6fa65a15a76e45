"""Number and lengths of a run's sequences, and the resulting steps."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.errors import KtbridgeError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.conversation import TrainingRow
from ktbridge.sft.data.dataset import TokenizedRows, tokenize_sequences
from ktbridge.sft.data.images import Vision, read_vision
from ktbridge.sft.data.messages import IMAGE, Message, all_text
from ktbridge.sft.data.rows import CONCAT, Rows, collect_refused, mix_rows
from ktbridge.sft.data.stream import open_rows, tokenize_run
from ktbridge.sft.data.tokenize import IMAGE_NUMBERS

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

EVALUATIONS = 10
"""Of the held-out rows in a run, unless the configuration has another number."""
MOST_ROWS = 8192
"""Rows that a plan tokenizes; of more it takes a sample."""
_LONGEST = 256
"""Rows of a sample that are the longest of all, on which memory depends."""
_A_MESSAGE = 6  # role and delimiters in the usual chat templates
_BYTES_A_TOKEN = 3
_AT_ONCE = 1000


@dataclass(frozen=True)
class Lengths:
    """Sequences of a run, cut at cutoff_len: how many, the longest and the mean, in tokens.

    ``counted``: the model's own tokenizer counted them; otherwise bytes were divided by 3.
    ``rows`` are those that are used, ``sequences`` what is trained on: rows or answers (several to a
    sequence if ``packed``), for dpo pairs, by the longer answer. ``each`` are the lengths before packing.
    """

    rows: int
    sequences: int
    longest: int
    mean: float
    counted: bool
    packed: bool = False
    each: tuple[int, ...] = field(default=(), repr=False)
    refused: int = 0
    """Rows that can't be used."""
    tokenized: int | None = None
    """Rows that were tokenized, where the others were taken to be as long as these; None: all."""
    estimated: str = ""
    """The reason why rows were counted by their text, without a chat template."""
    held_out: int = 0
    """Held-out rows that are evaluated, taken to be as long as the others."""
    images: int = 0
    """Images in the rows."""
    image_tokens: int = 0
    """Their tokens, which are among the sequences'."""
    most_image_tokens: int = 0
    """Those of the row with the most."""

    @property
    def even(self) -> bool:
        """Return whether all are about as long, so that hardly any batch has padding."""
        return self.mean > 0.99 * self.longest

    def within(self, cut: int) -> Lengths:
        """The same rows under another cutoff_len, which is no larger."""
        if not self.each:
            return replace(self, longest=min(self.longest, cut), mean=min(self.mean, cut))
        each = tuple(min(cut, tokens) for tokens in self.each)
        found = _packed(each, cut) if self.packed else each
        return replace(
            self,
            sequences=len(found),
            longest=max(found),
            mean=sum(found) / len(found),
            each=each,
            most_image_tokens=min(cut, self.most_image_tokens),  # more are refused
        )


def read_lengths(config: TrainConfig, base: Path) -> Lengths:
    """Return the lengths of the sequences that training makes of the run's rows.

    Rows are read and tokenized as ``ktbridge.sft.prepare`` does, which imports torch; of more than
    ``MOST_ROWS`` a sample. Without a tokenizer or its chat template their text is counted alone. Raises
    what reading and tokenizing rows do.
    """
    rows = open_rows(config)
    tokenizer, why = _tokenizer(config, base)
    if tokenizer is None:
        return _of_texts(rows, config, base, why)
    vision = None
    if isinstance(rows, Rows) and rows.with_images:
        vision = read_vision(base, config)
    if isinstance(rows, Rows) and len(rows.rows) > MOST_ROWS:
        return _of_sample(rows, tokenizer, config, vision)
    found = tokenize_run(rows, tokenizer, config, vision=vision)
    return fitted_lengths(*found, config, vision)


def fitted_lengths(
    fitted: TokenizedRows, held: TokenizedRows | None, config: TrainConfig, vision: Vision | None = None
) -> Lengths:
    """Return the lengths of tokenized rows; ``held`` are the held-out ones."""
    dataset = fitted.dataset
    found = [*_of_dataset(dataset)]
    each = [part for row in _column(dataset, "seq_lengths") for part in row]
    shown: list[list[int]] = []
    if fitted.with_images and vision:
        numbers = dataset[IMAGE_NUMBERS]
        shown = [vision.count_tokens([vision.images[at] for at in row]) for row in numbers]
    return Lengths(
        rows=fitted.used,
        sequences=len(found),
        longest=max(found),
        mean=sum(found) / len(found),
        counted=True,
        packed=fitted.packed,
        each=tuple(each or found),
        refused=len(fitted.refused),
        held_out=held.used if held else 0,
        images=sum(map(len, shown)),
        image_tokens=fitted.image_tokens,
        most_image_tokens=max(map(sum, shown), default=0),
    )


def _tokenizer(config: TrainConfig, base: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Return the model's tokenizer if training can use it, else the reason why not."""
    try:
        from ktbridge.experts.load_model import load_tokenizer
    except ImportError as error:
        return None, f"{error.name} is not installed"
    try:
        tokenizer = load_tokenizer(base)
    except KtbridgeError:
        return None, f"{base} has no tokenizer that transformers can load"
    if config.stage != "pt" and not tokenizer.chat_template:
        return None, f"the tokenizer in {base} has no chat template"
    return tokenizer, ""


def _of_dataset(dataset: Dataset) -> Iterator[int]:
    """Yield the tokens of each sequence, in bounded memory; of a pair the longer answer's with its prompt."""
    import pyarrow.compute as pc

    names = [name for name in dataset.column_names if name.endswith("_ids")]
    for table in dataset.select_columns(names).with_format("arrow").iter(_AT_ONCE):
        sizes = {name: pc.list_value_length(table[name]).to_pylist() for name in names}
        first = sizes.pop("prompt_ids", None)
        longer = map(max, zip(*sizes.values(), strict=True))
        yield from longer if first is None else map(sum, zip(first, longer, strict=True))


def _column(dataset: Dataset, name: str) -> Iterator[list[int]]:
    if name in dataset.column_names:
        for table in dataset.select_columns([name]).with_format("arrow").iter(_AT_ONCE):
            yield from table[name].to_pylist()


def _of_sample(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vision: Vision | None
) -> Lengths:
    """Return lengths of many rows: the longest by their text and a sample are tokenized.

    Each other one is taken to make the sequences of the one nearest in size.
    """
    texts = [len(_longest_text(row)[1]) for row in rows.rows]
    by_size = sorted(range(len(texts)), key=texts.__getitem__)
    step = math.ceil((len(by_size) - _LONGEST) / (MOST_ROWS - _LONGEST))
    sample = by_size[:-_LONGEST:step]
    chosen = sample + by_size[-_LONGEST:]
    part = replace(rows, rows=[rows.rows[row] for row in chosen], total=len(chosen) + len(rows.refused))
    alone = replace(config, packing=False, neat_packing=False)
    store = tokenize_sequences(part, tokenizer, alone, vision=vision)
    collect_refused(part, store.refused, config)
    made: dict[int, list[int]] = {row: [] for row in chosen}
    for place, tokens in zip(store.row_numbers, _of_dataset(store.to_dataset()), strict=True):
        made[chosen[place]].append(tokens)
    nearest = [sample[min(at // step, len(sample) - 1)] for at in range(len(by_size))]
    each = {row: made.get(row, made[near]) for row, near in zip(by_size, nearest, strict=True)}
    images = [vision.count_tokens(row.images) if vision else [] for row in rows.rows]
    return replace(
        _mixed(each, rows, config, counted=True),
        tokenized=len(chosen),
        images=sum(map(len, images)),
        image_tokens=sum(map(sum, images)),
        most_image_tokens=min(config.cutoff_len, max(map(sum, images), default=0)),
    )


def _of_texts(rows: object, config: TrainConfig, base: Path, why: str) -> Lengths:
    """Return lengths by the text alone, where there is no chat template to write rows with."""
    if not isinstance(rows, Rows):  # its first rows stand for all
        rows = open_rows(
            replace(config, streaming=False, max_samples=min(config.max_samples or 256, 256), val_size=0.0)
        )
    assert isinstance(rows, Rows)
    if rows.with_images:
        raise KtbridgeError(
            f"the rows have images, and {why}: they can't be counted.",
            "Put the tokenizer's files and preprocessor_config.json beside config.json.",
        )
    count, counted = _counter(base)
    texts = [*map(_longest_text, rows.rows)]
    by_size = sorted(range(len(texts)), key=lambda row: len(texts[row][1]))
    step = max(1, len(by_size) // MOST_ROWS)
    known = {row: count(texts[row][1]) for row in (*by_size[::step], *by_size[-_LONGEST:])}
    cut, each = config.cutoff_len, dict[int, list[int]]()
    for at, row in enumerate(by_size):
        size = known.get(row, known[by_size[at // step * step]]) + _A_MESSAGE * texts[row][0]
        each[row] = [min(cut, size)]
        if config.stage == "pt":  # longer texts make several pieces
            each[row] = [min(cut, size - start) for start in range(0, size, cut)]
    return replace(_mixed(each, rows, config, counted), estimated=why)


def _mixed(each: Mapping[int, Sequence[int]], rows: Rows, config: TrainConfig, counted: bool) -> Lengths:
    """Return lengths of rows that make sequences of ``each`` tokens; a row without any is refused."""
    order: Sequence[int] = [row for row in range(len(rows.rows)) if each[row]]
    used = len(order)
    if config.mix_strategy not in CONCAT:
        order, _ = mix_rows(order, rows, config)
    own = tuple(tokens for row in order for tokens in each[row])
    packed = config.packing or config.neat_packing
    found = _packed(own, config.cutoff_len) if packed else own
    mean, refused = sum(found) / len(found), len(rows.refused) + len(rows.rows) - used
    held = len(rows.held_out.rows) if rows.held_out and config.evaluates else 0
    return Lengths(used, len(found), max(found), mean, counted, packed, own, refused, held_out=held)


def _packed(lengths: Sequence[int], cut: int) -> Sequence[int]:
    """Return lengths of the sequences that rows are packed into: longest first, each where it fits best."""
    free: list[int] = []  # ascending
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(free, length)
        left = free.pop(place) if place < len(free) else cut
        bisect.insort(free, left - length)
    return [cut - left for left in free]


def optimizer_steps(config: TrainConfig, sequences: int, processes: int = 1) -> int:
    """Return the steps as transformers counts: an epoch's last batch and its last step may be smaller."""
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * _epoch_steps(config, sequences, processes))


def _epoch_steps(config: TrainConfig, sequences: int, processes: int) -> int:
    batches = math.ceil(sequences / (config.per_device_train_batch_size * processes))
    return max(1, math.ceil(batches / config.gradient_accumulation_steps))


def evaluation_steps(config: TrainConfig, sequences: int, processes: int = 1) -> int:
    """Return the steps between evaluations of held-out rows, beside that after the last one; 0: no such."""
    steps, every = optimizer_steps(config, sequences, processes), config.eval_steps
    if not config.evaluates:
        return 0
    if config.eval_strategy == "no":
        return steps
    if config.eval_strategy == "epoch":
        return _epoch_steps(config, sequences, processes)
    if every:
        return math.ceil(steps * every) if every < 1 else int(every)
    return config.logging_steps if config.eval_strategy else math.ceil(steps / EVALUATIONS)


def count_evaluations(config: TrainConfig, sequences: int) -> int:
    """Return how often the held-out rows are evaluated in a run that isn't ended early."""
    every = evaluation_steps(config, sequences)
    steps = optimizer_steps(config, sequences)
    return config.evaluates_first + math.ceil(steps / every) if every else 0


def _counter(base: Path) -> tuple[Callable[[str], int], bool]:
    """Return a counter of a text's tokens, by the model's tokenizer.json where it can be read."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    except Exception:  # not installed, missing or unsupported: estimate from bytes
        return lambda text: -(-len(text.encode()) // _BYTES_A_TOKEN), False
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), True


def _longest_text(row: TrainingRow) -> tuple[int, str]:
    """Return number and text of a row's messages, of a pair with the longer answer."""

    def size(messages: Sequence[Message]) -> int:
        return sum(map(len, map(all_text, messages)))

    messages = max(row.answers, key=size)
    texts = [json.dumps(row.tools), *map(all_text, messages)]
    return len(messages), "\n".join(texts).replace(IMAGE, "")
