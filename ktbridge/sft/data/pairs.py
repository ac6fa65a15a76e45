"""Rows of the stages that compare answers with the base's: pairs for dpo, judged answers for kto.

They are tokenized here, each answer as a server's model writes it behind its prompt, because trl's own way
with texts knows neither tool calls nor thoughts as a server has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.answers import Lists, Sizes, encode_last, last_answer
from ktbridge.sft.data.chat import ChatTemplate, TrainingText
from ktbridge.sft.data.forms import Forms
from ktbridge.sft.data.layout import Pair
from ktbridge.sft.data.messages import Conversation
from ktbridge.sft.data.render import shared

if TYPE_CHECKING:
    from datasets import Dataset

Preview = dict[str, list[tuple[str, bool]]]
"""Texts by name, each as pieces in order: the text, and whether the loss counts it."""
Encoded = tuple[list[int], int]
"""The token ids of prompt and answer, and where the answer begins."""


class _Compared(ABC):
    """Rows whose answers are compared with the base's."""

    packed = False
    sides: tuple[str, ...]
    """Names of a row's answers."""

    def __init__(self, chat: ChatTemplate, config: TrainConfig) -> None:
        self._chat, self._cutoff = chat, config.cutoff_len
        self._columns = {name: Lists() for name in ("prompt", *self.sides)}
        self._forms = Forms()
        self.sizes = Sizes()
        self.used = self.with_thoughts = self.with_images = self.image_tokens = 0
        self.cut: list[int] = []
        self.last_learned: int | None = None

    def add(self, batch: list[tuple[int, Any]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""
        written: list[tuple[int, Any, list[TrainingText]]] = []
        for number, row in batch:
            try:
                written.append((number, row, self._texts(row)))
            except ValueError as error:
                yield number, str(error)
        if not written:
            return
        encoded = iter(encode_last(self._chat, [text for *_, texts in written for text in texts]))
        for number, row, texts in written:
            why = self._take(number, row, [next(encoded) for _ in texts])
            if why:
                yield number, why
                continue
            self.with_thoughts += any(text.thoughts for text in texts)
            for text in texts:
                self._forms.count([text])

    @abstractmethod
    def _texts(self, row: Any) -> list[TrainingText]:
        """Each of its answers behind the prompt."""

    def _take(self, number: int, row: Any, encoded: list[Encoded]) -> str:
        """Take a row in, or why not."""
        first = encoded[0][0]
        start = min(start for _, start in encoded)
        for ids, _ in encoded[1:]:  # thoughts that a template opens for one answer alone
            start = min(start, shared(first[:start], ids))
        answers = [ids[: self._cutoff] for ids, _ in encoded]
        if any(len(answer) <= start for answer in answers):
            return f"no answer within cutoff_len={self._cutoff} tokens"
        if len(answers) > 1 and answers[0] == answers[1]:
            return f"chosen and rejected are the same within cutoff_len={self._cutoff} tokens"
        self._columns["prompt"].append(first[:start])
        for side, answer in zip(self.sides, answers, strict=True):
            self._columns[side].append(answer[start:])
        self.used += 1
        tokens = sum(map(len, answers))
        self.sizes.append(number, tokens, tokens - start * len(answers))
        if any(len(ids) > self._cutoff for ids, _ in encoded):
            self.cut.append(number)
        elif self.last_learned is None:
            self.last_learned = first[-1]
        return ""

    def notes(self) -> Iterator[Problem]:
        yield from self._forms.notes(split=True)
        yield from self._chat.notes()

    def preview(self) -> Preview:
        """The answers of the first row, each behind the prompt."""
        prompt = [(token, False) for token in self._columns["prompt"].first()]
        return {
            side: self._chat.pieces(
                [*prompt, *((token, True) for token in self._columns[side].first())]
            )
            for side in self.sides
        }

    def dataset(self, places: Sequence[int] | None) -> Dataset:
        """The sequences, or those at ``places``, as the collators of trl's trainers take them.

        Columns ``prompt_ids`` and ``SIDE_ids``, int32.
        """
        import pyarrow as pa
        from datasets import Dataset

        columns = {f"{name}_ids": lists.column() for name, lists in self._columns.items()}
        whole = Dataset(pa.table({**columns, **self._others()}))
        return whole if places is None else whole.select(places)

    def _others(self) -> Mapping[str, object]:
        return {}


class FittedPairs(_Compared):
    """Pairs for dpo."""

    sides = ("chosen", "rejected")

    def _texts(self, row: Pair) -> list[TrainingText]:
        return [
            last_answer(self._chat, [*row.prompt, *answer], row.tools)
            for answer in (row.chosen, row.rejected)
        ]

    @staticmethod
    def plain(row: Pair) -> dict[str, object]:
        found = {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}
        return {**found, "tools": row.tools} if row.tools else {**found}


class FittedJudged(_Compared):
    """Conversations for kto, whose last answer was judged good or bad."""

    sides = ("completion",)

    def __init__(self, chat: ChatTemplate, config: TrainConfig) -> None:
        super().__init__(chat, config)
        self._good: list[bool] = []

    def _texts(self, row: Conversation) -> list[TrainingText]:
        return [last_answer(self._chat, row, row.tools)]

    def _take(self, number: int, row: Conversation, encoded: list[Encoded]) -> str:
        why = super()._take(number, row, encoded)
        if not why:
            self._good.append(bool(row.good))
        return why

    @staticmethod
    def plain(row: Conversation) -> dict[str, object]:
        found: dict[str, object] = {"messages": [*row], "kto_tag": row.good}
        return {**found, "tools": row.tools} if row.tools else found

    def preview(self) -> Preview:
        (pieces,) = super().preview().values()
        return {"good answer" if self._good[0] else "bad answer": pieces}

    def _others(self) -> Mapping[str, object]:
        return {"label": self._good}

    def notes(self) -> Iterator[Problem]:
        yield from super().notes()
        if not all(self.judged):
            good, bad = self.judged
            yield problem("KTD060", "dataset", f"{good:,} good answers and {bad:,} bad")

    @property
    def judged(self) -> tuple[int, int]:
        """Return how many answers are good, and how many bad."""
        return sum(self._good), len(self._good) - sum(self._good)
