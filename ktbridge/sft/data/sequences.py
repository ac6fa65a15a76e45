"""Rows of stages sft and pt as sequences of tokens with their labels, within ``cutoff_len`` tokens each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.answers import Lists, Sizes, labels
from ktbridge.sft.data.chat import IGNORED, ChatTemplate, TrainingText
from ktbridge.sft.data.forms import Forms
from ktbridge.sft.data.messages import Conversation
from ktbridge.sft.data.pairs import Preview
from ktbridge.sft.data.pictures import NOT_STREAMED, TEXT_ALONE

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from ktbridge.sft.vision import Vision

PICTURES = "pictures"
"""The dataset's column of images."""


class Sequences(ABC):
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


class Texts(Sequences):
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


class Conversations(Sequences):
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
        whole, made = set(used), []
        for (number, text), ids, offsets in zip(written, *encoded, strict=True):
            learned = ids if self._everything else labels(ids, offsets, text.spans)
            shown = rows[number].pictures[: text.images]
            if self._vision:
                try:
                    ids, learned = self._vision.widened(ids, learned, shown, self._cutoff)
                except ValueError as error:
                    whys[number] = str(error)
                    whole.discard(number)  # all its answers: what is left out must be told
            made.append((number, ids, learned, shown))
        for number, ids, learned, shown in made:
            if number not in whole:
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
