"""Tokenize rows: what is trained on, what the cutoff removed, and the dataset for trl's trainers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.errors import Problem, ProblemsError
from ktbridge.publish import OnProgress
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.answers import Lists, Sizes, labels
from ktbridge.sft.data.chat import IGNORED, ChatTemplate, TrainingText
from ktbridge.sft.data.forms import Forms, stop_note
from ktbridge.sft.data.messages import Conversation
from ktbridge.sft.data.mixing import CONCAT, Share, mixed
from ktbridge.sft.data.pairs import FittedJudged, FittedPairs, Preview
from ktbridge.sft.data.pictures import NOT_STREAMED, TEXT_ALONE
from ktbridge.sft.data.rows import TOO_MANY, Refused, Rows, reasons, refused_note, unusable

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ktbridge.sft.vision import Vision

PICTURES = "pictures"
"""The dataset's column of images."""
BATCH = 256
"""Rows tokenized at once, and between two calls of ``on_progress``."""


@dataclass
class Fitted:
    """The part of the rows that is trained on, within ``cutoff_len`` tokens each.

    ``dataset`` for sft: ``input_ids`` and ``labels`` (-100 but for the assistant's tokens), int32, and with
    packing ``seq_lengths``, the lengths of the conversations in each row, with images ``PICTURES``, their
    numbers in ``Vision.pictures``; for dpo: ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``; for kto:
    ``prompt_ids``, ``completion_ids`` and ``label``.
    """

    dataset: Dataset
    total: int
    used: int
    cut: list[str] = field(default_factory=list)
    """Where the used rows stand whose end was cut off."""
    refused: list[Refused] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    """What an epoch has of each dataset, where they are mixed."""
    tokens: int = 0
    """An epoch's tokens within the cutoff; dpo: of both answers, each with its prompt."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    judged: tuple[int, int] | None = None
    """kto: good and bad answers among the used rows."""
    with_thoughts: int = 0
    """Used rows in which an answer that is trained on has thoughts."""
    with_images: int = 0
    """Used rows that have an image."""
    image_tokens: int = 0
    """Tokens that stand for images, in ``tokens``."""
    cutoff_len: int = 0
    packed: bool = False
    streamed: bool = False
    """Whether these are the first rows of a stream, or those that were read of one."""
    preview: Preview = field(default_factory=dict)
    """What is trained on first, decoded: "sequence" for sft, "chosen" and "rejected" for dpo,
    "good answer" or "bad answer" for kto."""
    notes: list[Problem] = field(default_factory=list)
    """The rows' warnings, and ours on the chat template."""


def fit_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> Fitted:
    """Tokenize rows by the tokenizer's chat template, and cut them to ``config.cutoff_len`` tokens.

    ``vision`` is the model's image processor; without it rows with images are refused.
    ``on_progress(done, total)`` is called regularly. Rows with no answer left, and those that the
    template refuses, join ``refused``. Raises ProblemsError when nothing is left or, with ``strict_data``,
    for any refused row, and KtbridgeError for a tokenizer that can't be used.
    """
    fit, refused = tokenize(rows, tokenizer, config, on_progress, vision)
    everything = all_refused(rows, refused, config)
    shares: list[Share] = []
    places = None
    if config.mix_strategy != "concat":
        own = [*dict.fromkeys(fit.sizes.rows)]
        order, shares = mixed(own, rows.origins, rows.datasets, config)
        places = None if config.mix_strategy in CONCAT else fit.sizes.of(order)
    tokens, trained = fit.sizes.sums(places)
    return Fitted(
        dataset=fit.dataset(places),
        shares=shares,
        total=rows.total,
        used=fit.used,
        cut=[rows.places[number] for number in fit.cut],
        refused=everything,
        tokens=tokens,
        trained_tokens=trained,
        judged=fit.judged if isinstance(fit, FittedJudged) else None,
        with_thoughts=fit.with_thoughts,
        with_images=fit.with_images,
        image_tokens=fit.image_tokens,
        cutoff_len=config.cutoff_len,
        packed=fit.packed,
        preview=fit.preview(),
        notes=[
            *rows.notes,
            *refused_note(everything, rows.total, rows.name),
            *fit.notes(),
            *stop_note(fit.last_learned, tokenizer),
        ],
    )


def tokenize(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: OnProgress | None = None,
    vision: Vision | None = None,
) -> tuple[_Sequences | FittedPairs | FittedJudged, list[Refused]]:
    """The rows' sequences, and the rows that can't be used; the rest as ``fit_rows``."""
    fit = _fitting(tokenizer, config, vision)
    given: list[Any] = rows.pairs if config.stage == "dpo" else rows.conversations
    refused = []
    for start in range(0, len(given), BATCH):
        batch = list(enumerate(given[start : start + BATCH], start))
        for number, why in fit.add(batch):
            refused.append(Refused(rows.places[number], why, fit.plain(given[number])))
        if on_progress:
            on_progress(start + len(batch), len(given))
    return fit, refused


@dataclass
class Tally:
    """Sums over parts of a stream."""

    total: int = 0
    used: int = 0
    cut: int = 0
    tokens: int = 0
    trained: int = 0
    with_thoughts: int = 0
    judged: tuple[int, int] = (0, 0)

    def add(self, rows: int, made: _Sequences | FittedPairs | FittedJudged) -> None:
        """So many rows, of which ``made`` are used."""
        tokens, trained = made.sizes.sums()
        self.total, self.used, self.cut = (
            self.total + rows,
            self.used + made.used,
            self.cut + len(made.cut),
        )
        self.tokens, self.trained = self.tokens + tokens, self.trained + trained
        self.with_thoughts += made.with_thoughts
        if isinstance(made, FittedJudged):
            good, bad = made.judged
            self.judged = (self.judged[0] + good, self.judged[1] + bad)


def _fitting(
    tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vision: Vision | None
) -> _Sequences | FittedPairs | FittedJudged:
    if config.stage == "pt":
        return _Texts(tokenizer, config)
    chat = ChatTemplate(tokenizer, config.enable_thinking)
    if config.stage == "dpo":
        return FittedPairs(chat, config)
    if config.stage == "kto":
        return FittedJudged(chat, config)
    return _Conversations(chat, config, vision)


def all_refused(rows: Rows, refused: list[Refused], config: TrainConfig) -> list[Refused]:
    """The rows refused when they were read, and ``refused`` of those that could be read.

    Raises ProblemsError when nothing is left, when there are too many of them or, with ``strict_data``, any.
    """
    if len(refused) == len(rows.places):
        raise _nothing_left(refused, len(refused))
    everything = [*rows.refused, *refused]
    if config.strict_data and everything:
        raise unusable(everything, rows.total)
    share = len(everything) / rows.total
    if share > TOO_MANY and not config.allow_refused_rows:
        raise _too_many(everything, rows.total)
    return everything


def data_file(fitted: Fitted, config: TrainConfig) -> bytes:
    """JSON of how many rows of which datasets were used and refused; of files the names alone."""
    summary = {
        "datasets": [Path(name).name if Path(name).is_file() else name for name in config.dataset],
        "stage": config.stage,
        **({"streamed": True} if fitted.streamed else {}),
        "rows": fitted.total,
        "used": fitted.used,
        "cut": len(fitted.cut),
        "refused": len(fitted.refused),
        "reasons": reasons(fitted.refused),
        "cutoff_len": config.cutoff_len,
        **({"mixed": [asdict(each) for each in fitted.shares]} if fitted.shares else {}),
        "tokens": fitted.tokens,
        "trained_tokens": fitted.trained_tokens,
        "with_thoughts": fitted.with_thoughts,
        "with_images": fitted.with_images,
        "image_tokens": fitted.image_tokens,
    }
    return json.dumps(summary, indent=2, ensure_ascii=False).encode() + b"\n"


def describe(fitted: Fitted, purpose: str = "trained on") -> str:
    """One line: how many rows are used, cut and refused, and why; ``purpose``: what their tokens are."""
    parts = []
    if fitted.cut:
        parts.append(f"{len(fitted.cut):,} cut at {fitted.cutoff_len} tokens")
    if fitted.refused:
        parts.append(f"{len(fitted.refused):,} refused: {reasons(fitted.refused)}")
    of = "the first " if fitted.streamed else ""
    line = f"used {fitted.used:,} of {of}{fitted.total:,} rows"
    line += f" ({', '.join(parts)})" if parts else ""
    if fitted.shares:
        line += f", an epoch has {', '.join(map(str, fitted.shares))}"
    if fitted.packed:
        line += f", packed into {len(fitted.dataset):,}"
    elif len(fitted.dataset) > fitted.used:
        line += f", in {len(fitted.dataset):,} sequences"
    if fitted.judged:
        line += f", {fitted.judged[0]:,} good answers and {fitted.judged[1]:,} bad"
    if fitted.with_thoughts:
        line += f", {fitted.with_thoughts:,} with thoughts and {fitted.used - fitted.with_thoughts:,} without"
    if fitted.with_images:
        line += f", {fitted.with_images:,} with images of {fitted.image_tokens:,} tokens"
    return f"{line}; {fitted.trained_tokens:,} of {fitted.tokens:,} tokens are {purpose}"


class _Sequences(ABC):
    """Sequences of tokens with their labels."""

    def __init__(self, config: TrainConfig) -> None:
        self._cutoff, self._streaming = config.cutoff_len, config.streaming
        self.packed = config.packing or config.neat_packing
        self._ids, self._labels, self._pictures = Lists(), Lists(), Lists()
        self.sizes = Sizes()
        self.used = self.with_thoughts = self.with_images = self.image_tokens = 0
        self.cut: list[int] = []
        self.last_learned: int | None = None
        """The last token of an answer that was not cut off."""

    @abstractmethod
    def add(self, batch: list[tuple[int, Conversation]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""

    def notes(self) -> Iterator[Problem]:
        return iter(())

    @abstractmethod
    def preview(self) -> Preview:
        """The first sequence."""

    def _first(self) -> list[tuple[int, bool]]:
        pairs = zip(self._ids.first(), self._labels.first(), strict=True)
        return [(token, label != IGNORED) for token, label in pairs]

    def _append(
        self, row: int, ids: list[int], learned: list[int], numbers: Sequence[int] = ()
    ) -> int:
        """Add a sequence of a row if something of it is learned; how many of its tokens are."""
        # The first token is never predicted: there is nothing before it.
        trained = len(learned) - 1 - learned[1:].count(IGNORED)
        if trained > 0:
            self._ids.append(ids)
            self._labels.append(learned)
            self._pictures.append(numbers)
            self.sizes.append(row, len(learned), trained)
        return trained

    def dataset(self, places: Sequence[int] | None) -> Dataset:
        """The sequences, or those at ``places``."""
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset

        columns = {"input_ids": self._ids.column(), "labels": self._labels.column()}
        if self.with_images:
            columns[PICTURES] = self._pictures.column()
        dataset = Dataset(pa.table(columns))
        if places is not None:
            dataset = dataset.select(places)
        if not self.packed:
            return dataset
        # Else in a file in the temporary directory, of which a stream would leave one for each part.
        kept = {"keep_in_memory": True} if self._streaming else {}
        return pack_dataset(dataset, self._cutoff, "bfd", map_kwargs=kept)

    @staticmethod
    def plain(messages: Conversation) -> dict[str, object]:
        return messages.as_row()


class _Texts(_Sequences):
    """Texts, each ended by the tokenizer's end of text; a long one makes several pieces.

    A piece begins with the last token of the one before, so that every token but a text's first is learned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
        super().__init__(config)
        self._tokenizer = tokenizer

    def add(self, batch: list[tuple[int, Conversation]]) -> Iterator[tuple[int, str]]:
        texts = [messages[0]["content"] for _, messages in batch]
        end = self._tokenizer.eos_token_id
        encoded = self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        for (number, _), ids in zip(batch, encoded, strict=True):
            if end is not None and ids[-1:] != [end]:
                ids.append(end)
            step = max(1, self._cutoff - 1)
            pieces = [ids[at : at + self._cutoff] for at in range(0, len(ids) - 1, step)]
            if not sum([self._append(number, piece, piece) for piece in pieces]):
                yield number, f"no answer within cutoff_len={self._cutoff} tokens"
                continue
            self.used += 1

    def preview(self) -> Preview:
        text = str(self._tokenizer.decode([token for token, _ in self._first()]))
        return {"sequence": [(text, True)]}


class _Conversations(_Sequences):
    """Conversations by the chat template."""

    def __init__(
        self, chat: ChatTemplate, config: TrainConfig, vision: Vision | None = None
    ) -> None:
        super().__init__(config)
        self._vision = vision
        self._chat, self._split = chat, config.split_turns
        self._everything, self._last_alone = config.train_on_prompt, config.mask_history
        self._forms = Forms()

    def add(self, batch: list[tuple[int, Conversation]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""
        written: list[tuple[int, TrainingText]] = []
        thoughtful: set[int] = set()
        for number, messages in batch:
            try:
                if messages.pictures and self._vision is None:
                    raise ValueError(NOT_STREAMED if self._streaming else TEXT_ALONE)
                texts = self._chat.sequences(
                    messages, messages.tools, self._split, self._last_alone
                )
            except ValueError as error:
                yield number, str(error)
            else:
                written += [(number, text) for text in texts]
                self._forms.count(texts)
                thoughtful |= {number} if any(text.thoughts for text in texts) else set()
        if not written:
            return
        used = dict.fromkeys((number for number, _ in written), False)
        whys = dict.fromkeys(used, f"no answer within cutoff_len={self._cutoff} tokens")
        rows = dict(batch)
        encoded = self._chat.tokens([text.text for _, text in written])
        for (number, text), ids, offsets in zip(written, *encoded, strict=True):
            learned = ids if self._everything else labels(ids, offsets, text.spans)
            shown = rows[number].pictures[: text.images]
            if self._vision:
                try:
                    ids, learned = self._vision.widened(ids, learned, shown, self._cutoff)
                except ValueError as error:
                    whys[number] = str(error)
                    continue
            if len(ids) > self._cutoff and number not in self.cut[-1:]:
                self.cut.append(number)
            numbers = self._vision.numbered(shown) if self._vision else ()
            if self._append(number, ids[: self._cutoff], learned[: self._cutoff], numbers) <= 0:
                continue
            self.image_tokens += ids.count(self._vision.token) if self._vision else 0
            used[number] = True
            if len(ids) <= self._cutoff and self.last_learned is None:
                self.last_learned = next(label for label in reversed(learned) if label != IGNORED)
        for number, taken in used.items():
            if taken:
                self.used += 1
                self.with_thoughts += number in thoughtful
                self.with_images += bool(rows[number].pictures)
                continue
            self.cut = [cut for cut in self.cut if cut != number]
            yield number, whys[number]

    def notes(self) -> Iterator[Problem]:
        yield from self._forms.notes(self._split)
        yield from self._chat.notes()

    def preview(self) -> Preview:
        image = self._vision.token if self._vision else None
        runs = groupby(self._first())  # of an image's tokens the first is enough
        shown = [pair for each, run in runs for pair in ([each] if each[0] == image else run)]
        return {"sequence": self._chat.pieces(shown)}


def _too_many(refused: list[Refused], total: int) -> ProblemsError:
    error = unusable(refused, total)
    step = "Correct these rows, or set allow_refused_rows: true to train on the others"
    error.next_step = f"{step}; nothing was started."
    return error


def _nothing_left(refused: list[Refused], total: int) -> ProblemsError:
    error = unusable(refused, total)
    if any("within cutoff_len" in item.why for item in refused):
        error.next_step = "Raise cutoff_len, or mend these rows; nothing was started."
    return error
