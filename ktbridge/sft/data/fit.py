"""Rows as tokens: what is trained on, what the cutoff took, and the dataset for trl's trainers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktbridge.errors import Problem, ProblemsError
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.data.chat import IGNORED, ChatTemplate, labels, shared
from ktbridge.sft.data.messages import Message, Pair
from ktbridge.sft.data.rows import Refused, Rows, unusable

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

BATCH = 256
"""Rows tokenized at once, and between two calls of ``on_progress``."""
REASONS = 3
"""Reasons told one by one in the summary."""
Progress = Callable[[int, int], None]


@dataclass
class Fitted:
    """What of the rows is trained on, within ``cutoff_len`` tokens each.

    ``dataset`` for sft: ``input_ids`` and ``labels`` (-100 but for the assistant's tokens), int32, and with
    packing ``seq_lengths``, the lengths of the conversations in each row; for dpo: ``prompt``, ``chosen``
    and ``rejected`` as messages, which trl tokenizes and cuts in the same way.
    """

    dataset: Dataset
    total: int
    used: int
    cut: list[str] = field(default_factory=list)
    """Where the used rows stand whose end was cut off."""
    refused: list[Refused] = field(default_factory=list)
    tokens: int = 0
    """Tokens of the used rows within the cutoff; dpo: of both answers, each with its prompt."""
    trained_tokens: int = 0
    """Tokens that the loss counts."""
    cutoff_len: int = 0
    packed: bool = False
    notes: list[Problem] = field(default_factory=list)
    """The rows' warnings, and ours on the chat template."""


def fit_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    on_progress: Progress | None = None,
) -> Fitted:
    """Tokenize rows by the tokenizer's chat template, and cut them to ``config.cutoff_len`` tokens.

    ``on_progress(done, total)`` is called now and then. Rows with no answer left, and those that the
    template refuses, join ``refused``. Raises ProblemsError when nothing is left or, with ``strict_data``,
    for any refused row, and KtbridgeError for a tokenizer that can't be used.
    """
    chat = ChatTemplate(tokenizer)
    fit = _Pairs(chat, config) if config.stage == "dpo" else _Conversations(chat, config)
    given: list[Any] = rows.pairs if config.stage == "dpo" else rows.conversations
    refused = []
    for start in range(0, len(given), BATCH):
        batch = list(enumerate(given[start : start + BATCH], start))
        for number, why in fit.add(batch):
            refused.append(Refused(rows.places[number], why, fit.plain(given[number])))
        if on_progress:
            on_progress(start + len(batch), len(given))
    if not fit.used:
        raise _nothing_left(refused, len(given))
    everything = [*rows.refused, *refused]
    if config.strict_data and everything:
        raise unusable(everything, rows.total)
    return Fitted(
        dataset=fit.dataset(),
        total=rows.total,
        used=fit.used,
        cut=[rows.places[number] for number in fit.cut],
        refused=everything,
        tokens=fit.tokens,
        trained_tokens=fit.trained,
        cutoff_len=config.cutoff_len,
        packed=fit.packed,
        notes=[*rows.notes, *_stop_note(fit.last_learned, tokenizer)],
    )


def describe(fitted: Fitted) -> str:
    """One line: how many rows are used, cut and refused, and why."""
    told = []
    if fitted.cut:
        told.append(f"{len(fitted.cut):,} cut at {fitted.cutoff_len} tokens")
    if fitted.refused:
        reasons = Counter(item.why.partition(":")[0] for item in fitted.refused).most_common()
        parts = [f"{count:,} {why}" for why, count in reasons[:REASONS]]
        others = sum(count for _, count in reasons[REASONS:])
        parts += [f"{others:,} for other reasons"] if others else []
        told.append(f"{len(fitted.refused):,} refused: {', '.join(parts)}")
    line = f"used {fitted.used:,} of {fitted.total:,} rows"
    line += f" ({', '.join(told)})" if told else ""
    line += f", packed into {len(fitted.dataset):,}" if fitted.packed else ""
    return f"{line}; {fitted.trained_tokens:,} of {fitted.tokens:,} tokens are trained on"


class _Conversations:
    """Conversations into flat arrays of tokens: Python's own lists would take nine times the memory."""

    def __init__(self, chat: ChatTemplate, config: TrainConfig) -> None:
        self._chat, self._cutoff = chat, config.cutoff_len
        self.packed = config.packing or config.neat_packing
        self._ids, self._labels, self._ends = array("i"), array("i"), array("i", [0])
        self.used = self.tokens = self.trained = 0
        self.cut: list[int] = []
        self.last_learned: int | None = None
        """The last token of an answer that was not cut off."""

    def add(self, batch: list[tuple[int, list[Message]]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""
        written = []
        for number, messages in batch:
            try:
                written.append((number, *self._chat.spoken(messages)))
            except ValueError as error:
                yield number, str(error)
        if not written:
            return
        encoded = self._chat.tokens([text for _, text, _ in written])
        for (number, _, spans), ids, offsets in zip(written, *encoded, strict=True):
            learned = labels(ids[: self._cutoff], offsets[: self._cutoff], spans)
            # The first token is never predicted: there is nothing before it.
            trained = len(learned) - 1 - learned[1:].count(IGNORED)
            if not trained:
                yield number, f"no answer within cutoff_len={self._cutoff} tokens"
                continue
            self._ids.extend(ids[: self._cutoff])
            self._labels.extend(learned)
            self._ends.append(len(self._ids))
            self.used += 1
            self.tokens += len(learned)
            self.trained += trained
            if len(ids) > self._cutoff:
                self.cut.append(number)
            elif self.last_learned is None:
                self.last_learned = next(label for label in reversed(learned) if label != IGNORED)

    def dataset(self) -> Dataset:
        import numpy as np
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset

        ends = pa.array(np.frombuffer(self._ends, np.int32))
        columns = {"input_ids": self._ids, "labels": self._labels}
        dataset = Dataset(
            pa.table(
                {
                    name: pa.ListArray.from_arrays(ends, pa.array(np.frombuffer(flat, np.int32)))
                    for name, flat in columns.items()
                }
            )
        )
        return pack_dataset(dataset, self._cutoff, "bfd") if self.packed else dataset

    @staticmethod
    def plain(messages: list[Message]) -> dict[str, Any]:
        return {"messages": messages}


class _Pairs:
    """Pairs, counted as trl's DPOTrainer tokenizes and cuts them: each answer behind the prompt."""

    packed = False

    def __init__(self, chat: ChatTemplate, config: TrainConfig) -> None:
        self._chat, self._cutoff = chat, config.cutoff_len
        self._pairs: list[Pair] = []
        self.used = self.tokens = self.trained = 0
        self.cut: list[int] = []
        self.last_learned: int | None = None

    def add(self, batch: list[tuple[int, Pair]]) -> Iterator[tuple[int, str]]:
        """Take the numbered rows in; yields number and reason of those that can't be used."""
        written = []
        for number, pair in batch:
            try:
                prompt = self._chat.text(pair.prompt, opened=True)
                chosen = self._chat.text([*pair.prompt, *pair.chosen])
                rejected = self._chat.text([*pair.prompt, *pair.rejected])
            except ValueError as error:
                yield number, str(error)
            else:
                written.append((number, pair, (prompt, chosen, rejected)))
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
        self.tokens += sum(map(len, answers))
        self.trained += sum(len(answer) - start for answer in answers)
        if max(len(chosen), len(rejected)) > self._cutoff:
            self.cut.append(number)
        elif self.last_learned is None:
            self.last_learned = chosen[-1]
        return ""

    def dataset(self) -> Dataset:
        from datasets import Dataset

        return Dataset.from_list([self.plain(pair) for pair in self._pairs])

    @staticmethod
    def plain(pair: Pair) -> dict[str, Any]:
        return {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}


def _nothing_left(refused: list[Refused], total: int) -> ProblemsError:
    error = unusable(refused, total)
    if any("within cutoff_len" in item.why for item in refused):
        error.next_step = "Raise cutoff_len, or mend these rows; nothing was started."
    return error


def _stop_note(last: int | None, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    """Answers that don't end in a token of the tokenizer's own make teach the model never to stop."""
    if last is None or last in {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}:
        return
    word = str(tokenizer.decode([last]))
    if not word.strip():
        return
    yield Problem(
        "KTD004",
        "warning",
        "chat template",
        f"answers end in {word!r}, so that the model does not learn to stop",
        "an end-of-turn token within the assistant's part",
        "Move the end-of-turn token before {% endgeneration %} in chat_template.jinja.",
    )
