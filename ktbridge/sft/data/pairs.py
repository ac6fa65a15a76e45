"""Pairs for stage dpo: counted as trl's DPOTrainer tokenizes and cuts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ktbridge.errors import Problem
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.chat import ChatTemplate
from ktbridge.sft.data.layout import Pair
from ktbridge.sft.data.messages import Message, in_content, thoughts_of
from ktbridge.sft.data.render import shared

if TYPE_CHECKING:
    from datasets import Dataset

Preview = dict[str, list[tuple[str, bool]]]
"""Texts by name, each as pieces in order: the text, and whether the loss counts it."""


class FittedPairs:
    """Pairs, counted as trl's DPOTrainer tokenizes and cuts them: each answer behind the prompt."""

    packed = False

    def __init__(self, chat: ChatTemplate, config: TrainConfig) -> None:
        self._chat, self._cutoff, self._thinking = chat, config.cutoff_len, config.enable_thinking
        self._pairs: list[Pair] = []
        self.used = self.tokens = self.trained = self.with_thoughts = 0
        self.with_images = self.image_tokens = 0
        self.cut: list[int] = []
        self.last_learned: int | None = None

    def add(self, batch: list[tuple[int, Pair]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""
        written = []
        for number, pair in batch:
            try:
                pair = self._as_trl_takes(pair)
                written.append((number, pair, self._texts(pair)))
            except ValueError as error:
                yield number, str(error)
        if not written:
            return
        ids = iter(self._chat.tokens([text for *_, texts in written for text in texts])[0])
        for number, pair, _ in written:
            why = self._take(number, pair, next(ids), next(ids), next(ids))
            if why:
                yield number, why

    def _take(
        self, number: int, pair: Pair, prompt: list[int], chosen: list[int], rejected: list[int]
    ) -> str:
        start = min(shared(prompt, chosen), shared(prompt, rejected))
        answers = (chosen[: self._cutoff], rejected[: self._cutoff])
        if any(len(answer) <= start for answer in answers):
            return f"no answer within cutoff_len={self._cutoff} tokens"
        if answers[0] == answers[1]:
            return f"chosen and rejected are the same within cutoff_len={self._cutoff} tokens"
        self._pairs.append(pair)
        self.used += 1
        self.with_thoughts += any(thoughts_of(each)[0] for each in (*pair.chosen, *pair.rejected))
        self.tokens += sum(map(len, answers))
        self.trained += sum(len(answer) - start for answer in answers)
        if max(len(chosen), len(rejected)) > self._cutoff:
            self.cut.append(number)
        elif self.last_learned is None:
            self.last_learned = chosen[-1]
        return ""

    def notes(self) -> Iterator[Problem]:
        return self._chat.notes()

    def preview(self) -> Preview:
        """Both answers of the first pair, each behind the prompt."""
        shown = {}
        prompt, *answers = self._texts(self._pairs[0])
        for side, text in zip(("chosen", "rejected"), answers, strict=True):
            (asked, ids), _ = self._chat.tokens([prompt, text])
            start = shared(asked, ids)
            shown[side] = self._chat.pieces(
                [(token, place >= start) for place, token in enumerate(ids[: self._cutoff])]
            )
        return shown

    def dataset(self) -> Dataset:
        """As trl reads it: tools as JSON, and what the chat template is told beside them."""
        from datasets import Dataset

        rows: list[dict[str, object]] = [
            self.plain(replace(pair, tools=[])) for pair in self._pairs
        ]
        if any(pair.tools for pair in self._pairs):
            for row, pair in zip(rows, self._pairs, strict=True):
                row["tools"] = json.dumps(pair.tools) if pair.tools else None
        if self._thinking is not None:
            told = {"enable_thinking": self._thinking, "thinking": self._thinking}
            rows = [{**row, "chat_template_kwargs": told} for row in rows]
        return Dataset.from_list(rows)

    @staticmethod
    def plain(pair: Pair) -> dict[str, object]:
        row = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
        return {**row, "tools": pair.tools} if pair.tools else {**row}

    def _texts(self, pair: Pair) -> tuple[str, str, str]:
        """A server's prompt, and it with the chosen and the rejected answer."""
        chat, tools = self._chat, pair.tools
        return (
            chat.text(pair.prompt, opened=True, tools=tools),
            chat.text([*pair.prompt, *pair.chosen], tools=tools),
            chat.text([*pair.prompt, *pair.rejected], tools=tools),
        )

    def _as_trl_takes(self, pair: Pair) -> Pair:
        """The pair as texts by role, in which thoughts stand in front of the content.

        Raises ValueError where the chat template doesn't read them there, or has no place for tools.
        """
        whole = [*pair.prompt, *pair.chosen, *pair.rejected]
        *prompt, first, second = map(_plain_message, self._chat.taken(whole))
        chosen, rejected = [first], [second]  # one message each
        taken = Pair(prompt, chosen, rejected, pair.tools)
        if pair.tools:
            self._chat.check_tools([*prompt, *chosen], pair.tools)
        for answer in (chosen, rejected):
            thoughts = thoughts_of(answer[-1])[0]
            if thoughts and self._chat.reads_apart:
                raise ValueError("thoughts that the chat template doesn't read from the content")
        return taken


def _plain_message(each: Message) -> Message:
    return {"role": each["role"], "content": in_content(each)}
