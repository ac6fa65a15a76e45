"""All rows as a dataset for trl's trainers: mixed, packed, with counts and notes."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.files.publish import OnProgress
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.conversation import TrainingRow
from ktbridge.sft.data.images import Vision
from ktbridge.sft.data.rows import (
    CONCAT,
    MixShare,
    RefusedRow,
    Rows,
    collect_refused,
    mix_rows,
    refused_note,
    summarize_reasons,
)
from ktbridge.sft.data.tokenize import IMAGE_NUMBERS, Preview, RowTokenizer, TokenizedRow, row_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 256
"""Rows tokenized at once, and between two calls of ``on_progress``."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Numbers of rows and tokens."""

    total: int = 0
    """Rows read, used or not."""
    used: int = 0
    cut: int = 0
    """Used rows whose end was cut off."""
    tokens: int = 0
    """An epoch's tokens within the cutoff; for dpo of both answers, each with its prompt."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    with_thoughts: int = 0
    """Used rows in which an answer that is learned has thoughts."""
    judged: tuple[int, int] = (0, 0)
    """Good and bad answers among the used rows of stage kto."""
    with_images: int = 0
    image_tokens: int = 0
    """Tokens that stand for images, of the used rows."""

    def counts(self) -> dict[str, Any]:
        """Return the counts alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(RowCounts)}

    def plus(self, other: RowCounts) -> RowCounts:
        """Return the sums."""
        good, bad = (self.judged[at] + other.judged[at] for at in (0, 1))
        sums = {name: value + getattr(other, name) for name, value in self.counts().items()}
        return RowCounts(**{**sums, "judged": (good, bad)})


@dataclass(frozen=True, kw_only=True)
class TokenizedRows(RowCounts):
    """Rows of a run as sequences of at most ``cutoff_len`` tokens, with counts of them.

    Columns of ``dataset`` for sft and pt: ``input_ids`` and ``labels`` (-100 but for the assistant's tokens),
    int32; with packing ``seq_lengths``, the lengths of the conversations in each row; with images
    ``IMAGE_NUMBERS``. For dpo: ``prompt_ids``, ``chosen_ids``, ``rejected_ids``; for kto: ``prompt_ids``,
    ``completion_ids``, ``label``.
    """

    dataset: Dataset
    refused: list[RefusedRow] = field(default_factory=list)
    shares: list[MixShare] = field(default_factory=list)
    """Share of each dataset in an epoch, if datasets are mixed."""
    cutoff_len: int = 0
    packed: bool = False
    streamed: bool = False
    """True if the rows were read from a stream: its first ones, or all that were read."""
    preview: Preview = field(default_factory=dict)
    """The first sequence, decoded: "sequence" for sft, "chosen" and "rejected" for dpo, "good answer" or
    "bad answer" for kto."""
    notes: list[Problem] = field(default_factory=list)
    """Warnings on the rows and the chat template."""


class TokenLists:
    """Lists of token ids in a flat array, which takes a ninth of the memory of Python's own lists."""

    def __init__(self) -> None:
        self._flat, self._ends = array("i"), array("i", [0])

    def append(self, ids: Sequence[int]) -> None:
        self._flat.extend(ids)
        self._ends.append(len(self._flat))

    def first(self) -> list[int]:
        return self._flat[: self._ends[1]].tolist()

    def to_arrow(self) -> Any:
        """Return an int32 list array of pyarrow's."""
        import numpy as np
        import pyarrow as pa

        ends, flat = (np.frombuffer(each, np.int32) for each in (self._ends, self._flat))
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))


class SequenceStore:
    """All sequences of a run's rows, the numbers of their rows, and counts."""

    def __init__(self, tokenizer: RowTokenizer, config: TrainConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._columns = {name: TokenLists() for name in tokenizer.columns}
        self.row_numbers = array("q")
        self._tokens, self._trained = array("i"), array("i")
        self._good: list[bool] = []
        self._first: TrainingRow | None = None
        self._counts: Counter[str] = Counter()
        self.refused: list[RefusedRow] = []
        self.last_learned: int | None = None
        """Last token of the first answer that was not cut off."""
        self.packed = tokenizer.can_pack and (config.packing or config.neat_packing)

    def add(self, number: int, row: TrainingRow, made: TokenizedRow) -> None:
        for sequence, (tokens, trained) in zip(made.sequences, made.sizes, strict=True):
            self.row_numbers.append(number)
            self._tokens.append(tokens)
            self._trained.append(trained)
            for name, lists in self._columns.items():
                lists.append(sequence[name])
        self._good += [] if row.good is None else [row.good]
        self._first = self._first or row
        if self.last_learned is None:
            self.last_learned = made.last_learned
        self._counts.update(
            used=1,
            cut=made.is_cut,
            with_thoughts=made.has_thoughts,
            with_images=bool(row.images),
            image_tokens=made.image_tokens,
        )

    def counts(self, total: int, places: Sequence[int] | None = None) -> RowCounts:
        """Return counts of ``total`` rows; tokens are those of the sequences at ``places``, or of all."""
        chosen = range(len(self.row_numbers)) if places is None else places
        return RowCounts(
            total=total,
            **self._counts,
            tokens=sum(self._tokens[at] for at in chosen),
            trained_tokens=sum(self._trained[at] for at in chosen),
            judged=(sum(self._good), len(self._good) - sum(self._good)),
        )

    def places_of(self, rows: Sequence[int]) -> list[int]:
        """Return the places of the sequences of these rows, in their order."""
        places: dict[int, list[int]] = {}
        for place, row in enumerate(self.row_numbers):
            places.setdefault(row, []).append(place)
        return [place for row in rows for place in places[row]]

    def preview(self) -> Preview:
        """Decode the first sequence."""
        assert self._first is not None
        first = {name: lists.first() for name, lists in self._columns.items()}
        return self._tokenizer.preview(first, self._first)

    def notes(self) -> Iterator[Problem]:
        """Yield notes on the chat template, and on judgements that are all alike."""
        yield from self._tokenizer.notes()
        good, bad = self.counts(0).judged
        if good + bad and not (good and bad):
            yield problem("KTD060", "dataset", f"{good:,} good answers and {bad:,} bad")

    def to_dataset(self, places: Sequence[int] | None = None) -> Dataset:
        """Return the sequences, or those at ``places``, as the collators of trl's trainers take them.

        Values are int32. With packing several sequences are joined to rows of at most ``cutoff_len`` tokens.
        """
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset

        columns = {name: lists.to_arrow() for name, lists in self._columns.items()}
        if not self._counts["with_images"]:
            columns.pop(IMAGE_NUMBERS, None)
        if self._good:
            columns["label"] = self._good
        dataset = Dataset(pa.table(columns))
        dataset = dataset if places is None else dataset.select(places)
        if not self.packed:
            return dataset
        # Else in a file in the temporary directory, of which a stream would leave one for each part.
        in_memory = {"keep_in_memory": True} if self._config.streaming else {}
        return pack_dataset(dataset, self._config.cutoff_len, "bfd", map_kwargs=in_memory)


def tokenize_sequences(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> SequenceStore:
    """Tokenize rows as they are, neither mixed nor packed; arguments as for ``tokenize_rows``."""
    own = row_tokenizer(tokenizer, config, vision)
    store = SequenceStore(own, config)
    for start in range(0, len(rows.rows), ROWS_AT_ONCE):
        batch = rows.rows[start : start + ROWS_AT_ONCE]
        for number, (row, made) in enumerate(zip(batch, own.tokenize(batch), strict=True), start):
            if isinstance(made, str):
                store.refused.append(RefusedRow(row.where, made, row.as_record()))
            else:
                store.add(number, row, made)
        if on_progress:
            on_progress(start + len(batch), len(rows.rows))
    return store


def tokenize_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> TokenizedRows:
    """Tokenize rows by the tokenizer's chat template, cut them to ``config.cutoff_len`` tokens, and mix them.

    ``vision`` is the model's image processor; without it rows with images are refused.
    ``on_progress(done, total)`` is called regularly. Rows with no answer left, and those that the
    template refuses, join ``refused``. Raises ProblemsError if nothing is left or, with ``strict_data``,
    for any refused row, and KtbridgeError for a tokenizer that can't be used.
    """
    store = tokenize_sequences(rows, tokenizer, config, on_progress, vision)
    refused = collect_refused(rows, store.refused, config)
    shares: list[MixShare] = []
    places = None
    if config.mix_strategy != "concat":
        usable = [*dict.fromkeys(store.row_numbers)]
        order, shares = mix_rows(usable, rows, config, summarize_reasons(store.refused))
        places = None if config.mix_strategy in CONCAT else store.places_of(order)
    notes = [
        *rows.notes,
        *refused_note(refused, rows.total, rows.name),
        *store.notes(),
        *_stop_note(store.last_learned, tokenizer),
    ]
    return TokenizedRows(
        **store.counts(rows.total, places).counts(),
        dataset=store.to_dataset(places),
        refused=refused,
        shares=shares,
        cutoff_len=config.cutoff_len,
        packed=store.packed,
        preview=store.preview(),
        notes=notes,
    )


def _stop_note(last: int | None, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    """Yield a warning if answers don't end in a special token: the model would never learn to stop."""
    if last is None or last in {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}:
        return
    word = str(tokenizer.decode([last]))
    if word.strip():
        yield problem(
            "KTD004",
            "chat template",
            f"answers end in {word!r}, so that the model does not learn to stop",
            "an end-of-turn token within the assistant's part",
        )


def describe_rows(rows: TokenizedRows, purpose: str = "trained on") -> str:
    """Say in one line how many rows are used, cut and refused, and why; ``purpose``: that of their tokens."""
    parts = []
    if rows.cut:
        parts.append(f"{rows.cut:,} cut at {rows.cutoff_len} tokens")
    if rows.refused:
        parts.append(f"{len(rows.refused):,} refused: {summarize_reasons(rows.refused)}")
    of = "the first " if rows.streamed else ""
    line = f"used {rows.used:,} of {of}{rows.total:,} rows"
    line += f" ({', '.join(parts)})" if parts else ""
    if rows.shares:
        line += f", an epoch has {', '.join(map(str, rows.shares))}"
    if rows.packed:
        line += f", packed into {len(rows.dataset):,}"
    elif len(rows.dataset) > rows.used:
        line += f", in {len(rows.dataset):,} sequences"
    if any(rows.judged):
        line += f", {rows.judged[0]:,} good answers and {rows.judged[1]:,} bad"
    if rows.with_thoughts:
        line += f", {rows.with_thoughts:,} with thoughts and {rows.used - rows.with_thoughts:,} without"
    if rows.with_images:
        line += f", {rows.with_images:,} with images of {rows.image_tokens:,} tokens"
    return f"{line}; {rows.trained_tokens:,} of {rows.tokens:,} tokens are {purpose}"


def summarize_rows(rows: TokenizedRows, config: TrainConfig) -> bytes:
    """Return JSON of the datasets and the numbers of rows used and refused; of files the names alone."""
    summary = {
        "datasets": [Path(name).name if Path(name).is_file() else name for name in config.dataset],
        "stage": config.stage,
        **({"streamed": True} if rows.streamed else {}),
        "rows": rows.total,
        "used": rows.used,
        "cut": rows.cut,
        "refused": len(rows.refused),
        "reasons": summarize_reasons(rows.refused),
        "cutoff_len": config.cutoff_len,
        **({"mixed": [asdict(each) for each in rows.shares]} if rows.shares else {}),
        "tokens": rows.tokens,
        "trained_tokens": rows.trained_tokens,
        "with_thoughts": rows.with_thoughts,
        "with_images": rows.with_images,
        "image_tokens": rows.image_tokens,
    }
    return json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n"
