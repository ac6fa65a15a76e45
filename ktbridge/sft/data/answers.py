"""Answers as tokens: which of a text's are learned, and lists of them in flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from ktbridge.sft.data.chat import IGNORED, ChatTemplate, TrainingText
from ktbridge.sft.data.messages import Message, Tool
from ktbridge.sft.data.render import Span


def labels(ids: list[int], offsets: list[Span], spans: list[Span]) -> list[int]:
    """``ids`` where a token stands for any of the characters in ``spans``, IGNORED elsewhere.

    Both spans and tokens are in the order of the text.
    """
    result = [IGNORED] * len(ids)
    left = iter(spans)
    span = next(left, None)
    for index, (start, end) in enumerate(offsets):
        while span and start >= span[1]:
            span = next(left, None)
        if span is None:
            break
        if end > span[0]:
            result[index] = ids[index]
    return result


def last_answer(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool]
) -> TrainingText:
    """The conversation with its last answer alone to be learned, as a server's model writes it.

    Raises ValueError as ``ChatTemplate.sequences`` does.
    """
    return chat.sequences(messages, tools, last_alone=True)[-1]


def encode_last(chat: ChatTemplate, texts: Sequence[TrainingText]) -> list[tuple[list[int], int]]:
    """Token ids of each text up to the end of its last span, and where that span begins in them."""
    found = []
    encoded = chat.tokens([text.text for text in texts])
    for text, ids, offsets in zip(texts, *encoded, strict=True):
        learned = [
            at for at, each in enumerate(labels(ids, offsets, text.spans)) if each != IGNORED
        ]
        found.append((ids[: learned[-1] + 1], learned[0]) if learned else (ids, len(ids)))
    return found


class Sizes:
    """Of each sequence: the number of its row, its tokens, and those that the loss counts."""

    def __init__(self) -> None:
        self.rows, self._tokens, self._trained = array("q"), array("i"), array("i")

    def append(self, row: int, tokens: int, trained: int) -> None:
        self.rows.append(row)
        self._tokens.append(tokens)
        self._trained.append(trained)

    def of(self, order: Sequence[int]) -> list[int]:
        """The places of the sequences of these rows, in their order."""
        places: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            places.setdefault(row, []).append(place)
        return [place for row in order for place in places[row]]

    def sums(self, places: Sequence[int] | None = None) -> tuple[int, int]:
        """Tokens of these sequences, or of all, and those that the loss counts."""
        if places is None:
            return sum(self._tokens), sum(self._trained)
        return sum(self._tokens[at] for at in places), sum(self._trained[at] for at in places)


class Lists:
    """Lists of token ids in flat arrays: Python's own lists would take nine times the memory."""

    def __init__(self) -> None:
        self._flat, self._ends = array("i"), array("i", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, ids: Sequence[int]) -> None:
        self._flat.extend(ids)
        self._ends.append(len(self._flat))

    def first(self) -> list[int]:
        return self._flat[: self._ends[1]].tolist()

    def column(self) -> Any:
        """As an int32 list column of pyarrow's."""
        import numpy as np
        import pyarrow as pa

        ends, flat = (np.frombuffer(each, np.int32) for each in (self._ends, self._flat))
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))
