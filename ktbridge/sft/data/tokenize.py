"""A row to tokens and labels, within ``cutoff_len`` tokens a sequence.

Each stage has a ``RowTokenizer``, which makes sequences of a row or says why it can't.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING

from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.conversation import TrainingRow
from ktbridge.sft.data.images import IGNORED, NOT_STREAMED, TEXT_ALONE, Vision
from ktbridge.sft.data.render import AnswerForms, ChatTemplate, RenderedText
from ktbridge.sft.data.template import CharRange, common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE_NUMBERS = "image_numbers"
"""Column of the dataset: numbers of a sequence's images in ``Vision.images``."""
Preview = dict[str, list[tuple[str, bool]]]
"""Texts by name, each as pieces in order: the text, and True if the loss counts it."""
_ANSWERS = {"dpo": ("chosen", "rejected"), "kto": ("completion",)}
"""Names of a row's answers in the columns that trl's trainers take."""


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and their labels: ``IGNORED`` for a token that is not learned."""

    input_ids: Sequence[int]
    labels: Sequence[int]
    images: Sequence[int] = ()
    """Numbers of its images."""

    @property
    def num_trained(self) -> int:
        """Number of tokens that the loss counts. The first is never predicted: nothing is before it."""
        return len(self.labels) - 1 - self.labels[1:].count(IGNORED)

    def cut(self, length: int) -> TokenSequence:
        return TokenSequence(self.input_ids[:length], self.labels[:length], self.images)

    def learned(self) -> list[int]:
        """Return the places of tokens with a label."""
        return [place for place, label in enumerate(self.labels) if label != IGNORED]


@dataclass(frozen=True)
class TokenizedRow:
    """Sequences of a row, as values of the dataset's columns."""

    sequences: list[dict[str, Sequence[int]]]
    sizes: list[tuple[int, int]]
    """Tokens of each sequence, and those that the loss counts."""
    is_cut: bool = False
    last_learned: int | None = None
    """Last token of an answer that was not cut off."""
    has_thoughts: bool = False
    image_tokens: int = 0


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> tuple[list[list[int]], list[list[CharRange]]]:
    """Return token ids of texts rendered by the chat template, and the character range of each token."""
    encoded = tokenizer(
        texts,
        add_special_tokens=False,  # the template has written them
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,  # longer than the model can take: cutoff_len is what counts
    )
    return encoded["input_ids"], encoded["offset_mapping"]


def label_answer_tokens(
    ids: Sequence[int], offsets: Sequence[CharRange], answer_spans: Sequence[CharRange]
) -> list[int]:
    """Return ``ids`` of tokens for any of the characters in ``answer_spans``, ``IGNORED`` for other tokens.

    Spans and tokens are in the order of the text: tokens 5, 6, 7 at (0, 2), (2, 4), (4, 6) with the span
    (3, 6) have the labels -100, 6, 7.
    """
    labels = [IGNORED] * len(ids)
    left = iter(answer_spans)
    span = next(left, None)
    for index, (start, end) in enumerate(offsets):
        while span and start >= span[1]:
            span = next(left, None)
        if span is None:
            break
        if end > span[0]:
            labels[index] = ids[index]
    return labels


def text_to_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[RenderedText]) -> list[TokenSequence]:
    """Tokenize rendered texts, each answer behind the tokens that a server has of its prompt.

    A token that would hold the end of a prompt and the beginning of its answer is no model's to write:
    Qwen3.5's prompt ends in <think> and a line break, and an answer without thoughts begins with another.
    """
    encoded = encode_texts(tokenizer, [text.text for text in texts])
    found = []
    for text, ids, offsets in zip(texts, *encoded, strict=True):
        begins = {start for start, _ in text.answer_spans}
        within = {at for start, end in offsets for at in range(start + 1, end) if at in begins}
        if within:
            ids, offsets = _split_at(tokenizer, text.text, sorted(within), ids, offsets)
        found.append(TokenSequence(ids, label_answer_tokens(ids, offsets, text.answer_spans)))
    return found


def _split_at(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    places: Sequence[int],
    ids: list[int],
    offsets: list[CharRange],
) -> tuple[list[int], list[CharRange]]:
    """Tokenize the parts of ``text`` between ``places``; where that adds a space, ``ids`` and ``offsets``."""
    pieces = list(pairwise([0, *places, len(text)]))
    parts, ranges = encode_texts(tokenizer, [text[start:end] for start, end in pieces])
    apart = [token for part in parts for token in part]
    if tokenizer.decode(apart) != tokenizer.decode(ids):
        return ids, offsets
    found = zip(pieces, ranges, strict=True)
    return apart, [(at + start, at + end) for (at, _), part in found for start, end in part]


# A row's sequences, by stage


class RowTokenizer(ABC):
    """Makes sequences of a stage's rows."""

    columns: tuple[str, ...] = ("input_ids", "labels")
    can_pack = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
        self._tokenizer, self._config, self._cutoff = tokenizer, config, config.cutoff_len
        self._no_answer = f"no answer within cutoff_len={self._cutoff} tokens"

    @abstractmethod
    def tokenize(self, rows: Sequence[TrainingRow]) -> Iterator[TokenizedRow | str]:
        """Yield the sequences of each row, or the reason why there are none."""

    @abstractmethod
    def preview(self, first: Mapping[str, list[int]], row: TrainingRow) -> Preview:
        """Decode the first sequence."""

    def notes(self) -> Iterator[Problem]:
        return iter(())

    def _decode(self, tokens: Iterable[tuple[int, bool]]) -> list[tuple[str, bool]]:
        """Decode (token id, learned) pairs, neighbors of one kind together."""
        return [
            (str(self._tokenizer.decode([token for token, _ in group])), learned)
            for learned, group in groupby(tokens, key=itemgetter(1))
        ]


class TextTokenizer(RowTokenizer):
    """Stage pt: texts, each ended by the tokenizer's end of text; a long one makes several pieces.

    A piece begins with the last token of the piece before, so that every token but a text's first is learned.
    """

    def tokenize(self, rows: Sequence[TrainingRow]) -> Iterator[TokenizedRow | str]:
        texts = [row.messages[0]["content"] for row in rows]
        encoded = self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        end, step = self._tokenizer.eos_token_id, max(1, self._cutoff - 1)
        for ids in encoded:
            if end is not None and ids[-1:] != [end]:
                ids.append(end)
            starts = range(0, len(ids) - 1, step)
            pieces = [ids[start : start + self._cutoff] for start in starts]
            pieces = [piece for piece in pieces if len(piece) > 1]
            made = [{"input_ids": piece, "labels": piece} for piece in pieces]
            sizes = [(len(piece), len(piece) - 1) for piece in pieces]
            yield TokenizedRow(made, sizes) if made else self._no_answer

    def preview(self, first: Mapping[str, list[int]], row: TrainingRow) -> Preview:
        return {"sequence": [(str(self._tokenizer.decode(first["input_ids"])), True)]}


class _TemplateTokenizer(RowTokenizer):
    """Rows that the chat template writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
        super().__init__(tokenizer, config)
        self._chat = ChatTemplate(tokenizer, config.enable_thinking)
        self._forms = AnswerForms()

    def tokenize(self, rows: Sequence[TrainingRow]) -> Iterator[TokenizedRow | str]:
        rendered: list[list[RenderedText] | str] = []
        for row in rows:
            try:
                rendered.append(self._render(row))
            except ValueError as error:
                rendered.append(str(error))
        texts = [text for found in rendered if not isinstance(found, str) for text in found]
        sequences = iter(text_to_tokens(self._tokenizer, texts) if texts else ())
        for row, found in zip(rows, rendered, strict=True):
            if isinstance(found, str):
                yield found
                continue
            own = [next(sequences) for _ in found]
            try:
                yield self._fit(row, found, own)
            except ValueError as error:
                yield str(error)

    @abstractmethod
    def _render(self, row: TrainingRow) -> list[RenderedText]:
        """Return the texts of a row. Raises ValueError with the reason why it has none."""

    @abstractmethod
    def _fit(
        self, row: TrainingRow, texts: list[RenderedText], sequences: list[TokenSequence]
    ) -> TokenizedRow:
        """Cut the sequences of a row's texts. Raises ValueError with the reason why none is left."""

    def notes(self) -> Iterator[Problem]:
        yield from self._forms.notes(self._config.split_turns or self._config.stage in _ANSWERS)
        yield from self._chat.notes()


class ConversationTokenizer(_TemplateTokenizer):
    """Stage sft: conversations, with labels on the assistant's answers."""

    columns = ("input_ids", "labels", IMAGE_NUMBERS)

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vision: Vision | None
    ) -> None:
        super().__init__(tokenizer, config)
        self._vision = vision

    def _render(self, row: TrainingRow) -> list[RenderedText]:
        if row.images and self._vision is None:
            raise ValueError(NOT_STREAMED if self._config.streaming else TEXT_ALONE)
        split, last_alone = self._config.split_turns, self._config.mask_history
        found = self._chat.render(row.messages, row.tools, split, last_alone)
        self._forms.count(found)
        return found

    def _fit(
        self, row: TrainingRow, texts: list[RenderedText], sequences: list[TokenSequence]
    ) -> TokenizedRow:
        whole = [*map(self._complete, repeat(row), texts, sequences)]
        used = [each for each in whole if each.cut(self._cutoff).num_trained > 0]
        if not used:
            raise ValueError(self._no_answer)
        complete = [each for each in used if len(each.input_ids) <= self._cutoff]
        image = self._vision.token if self._vision else None
        cut = [each.cut(self._cutoff) for each in used]
        return TokenizedRow(
            [dict(zip(self.columns, vars(each).values(), strict=True)) for each in cut],
            [(len(each.input_ids), each.num_trained) for each in cut],
            is_cut=any(len(each.input_ids) > self._cutoff for each in whole),
            last_learned=complete[0].labels[complete[0].learned()[-1]] if complete else None,
            has_thoughts=any(text.has_thoughts for text in texts),
            image_tokens=sum(each.input_ids.count(image) for each in used) if image else 0,
        )

    def _complete(self, row: TrainingRow, text: RenderedText, sequence: TokenSequence) -> TokenSequence:
        """Add the tokens of images, and labels of the prompt if it is learned."""
        ids, images = sequence.input_ids, row.images[: text.num_images]
        labels = ids if self._config.train_on_prompt else sequence.labels
        if self._vision is None:
            return TokenSequence(ids, labels)
        ids, labels = self._vision.expand(ids, labels, images, self._cutoff)
        return TokenSequence(ids, labels, self._vision.add_images(images))

    def preview(self, first: Mapping[str, list[int]], row: TrainingRow) -> Preview:
        image = self._vision.token if self._vision else None
        pairs = zip(first["input_ids"], first["labels"], strict=True)
        runs = groupby((token, label != IGNORED) for token, label in pairs)
        # Of an image's tokens the first is enough.
        shown = [pair for each, run in runs for pair in ([each] if each[0] == image else run)]
        return {"sequence": self._decode(shown)}


class AnswerTokenizer(_TemplateTokenizer):
    """Stages dpo and kto: the prompt, and each answer as a server's model writes it behind the prompt.

    Rows are tokenized here because trl's own way with texts knows neither tool calls nor thoughts as a
    server has them.
    """

    can_pack = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TrainConfig) -> None:
        super().__init__(tokenizer, config)
        self._answers = _ANSWERS[config.stage]
        self.columns = tuple(f"{name}_ids" for name in ("prompt", *self._answers))

    def _render(self, row: TrainingRow) -> list[RenderedText]:
        return [self._chat.render_last(messages, row.tools) for messages in row.answers]

    def _fit(
        self, row: TrainingRow, texts: list[RenderedText], sequences: list[TokenSequence]
    ) -> TokenizedRow:
        places = [each.learned() or [len(each.input_ids)] for each in sequences]
        pairs = zip(sequences, places, strict=True)
        whole = [[*each.input_ids[: own[-1] + 1]] for each, own in pairs]
        # The prompt ends where the answers begin to differ: a template may open thoughts for one alone.
        start = min(own[0] for own in places)
        for ids in whole[1:]:
            start = min(start, common_prefix(whole[0][:start], ids))
        answers = [ids[: self._cutoff] for ids in whole]
        if any(len(answer) <= start for answer in answers):
            raise ValueError(self._no_answer)
        if len(answers) > 1 and answers[0] == answers[1]:
            raise ValueError(f"chosen and rejected are the same within cutoff_len={self._cutoff} tokens")
        for text in texts:
            self._forms.count([text])
        tokens = sum(map(len, answers))
        is_cut = any(len(ids) > self._cutoff for ids in whole)
        columns = [whole[0][:start], *(answer[start:] for answer in answers)]
        return TokenizedRow(
            [dict(zip(self.columns, columns, strict=True))],
            [(tokens, tokens - start * len(answers))],
            is_cut=is_cut,
            last_learned=None if is_cut else whole[0][-1],
            has_thoughts=any(text.has_thoughts for text in texts),
        )

    def preview(self, first: Mapping[str, list[int]], row: TrainingRow) -> Preview:
        prompt = [(token, False) for token in first["prompt_ids"]]
        pieces = [
            self._decode([*prompt, *((token, True) for token in first[f"{name}_ids"])])
            for name in self._answers
        ]
        names = self._answers if row.good is None else (f"{'good' if row.good else 'bad'} answer",)
        return dict(zip(names, pieces, strict=True))


def row_tokenizer(
    tokenizer: PreTrainedTokenizerBase, config: TrainConfig, vision: Vision | None
) -> RowTokenizer:
    """Return the tokenizer of the configuration's stage."""
    if config.stage == "pt":
        return TextTokenizer(tokenizer, config)
    if config.stage in _ANSWERS:
        return AnswerTokenizer(tokenizer, config)
    return ConversationTokenizer(tokenizer, config, vision)
