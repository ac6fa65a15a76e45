"""How the chat template writes the answers used, and what to say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity
from ktbridge.sft.data.render import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """One answer as a server's model writes it: ``text`` is the prompt and the answer.

    ``start`` and ``end`` enclose what the model writes, its stop token included, which begins at ``body`` or
    later. ``added`` is what of that the template puts in front of the answer's own words (an empty block of
    thoughts), ``unmatched`` the end of the prompt that a server sends and that this text lacks (an opened
    block of thoughts).
    """

    text: str
    start: int
    end: int
    body: int
    added: str
    unmatched: str


@dataclass
class TrainingText:
    """One sequence to train on. ``spans`` are what is learned, ``answers`` the answers these belong to.

    ``rewritten`` counts answers that stand here as history, in another form than the model writes them.
    """

    text: str
    images: int = 0
    """Images in the messages that it consists of."""
    spans: list[Span] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    rewritten: int = 0
    thoughts: bool = False
    """Whether an answer learned here has thoughts."""


class Forms:
    """Counts of how the chat template writes the answers used."""

    def __init__(self) -> None:
        self._rows = self._answers = self._texts = 0
        self._rewritten = 0  # conversations of several texts, or with answers in another form
        self._added: Counter[str] = Counter()
        self._unmatched: Counter[str] = Counter()

    def count(self, texts: list[TrainingText]) -> None:
        """One conversation's texts."""
        self._rows += 1
        self._texts += len(texts)
        self._rewritten += len(texts) > 1 or texts[0].rewritten > 0
        for answer in (answer for text in texts for answer in text.answers):
            self._answers += 1
            self._added[answer.added] += bool(answer.added.strip())
            self._unmatched[answer.unmatched] += bool(answer.unmatched.strip())

    def notes(self, split: bool) -> Iterator[Problem]:
        if self._rewritten and split:
            yield _template_note(
                "KTD005",
                f"writes earlier answers differently once the conversation goes on: {self._rewritten:,} of "
                f"{self._rows:,} conversations are trained as several sequences ({self._texts:,} in all), so "
                "that each answer is trained as it is served",
            )
        elif self._rewritten:
            yield _template_note(
                "KTD005",
                "writes earlier answers differently once the conversation goes on, and split_turns is false: "
                f"in {self._rewritten:,} of {self._rows:,} conversations earlier answers are trained in "
                "another form than the model writes them when it is served",
                "Leave split_turns out to train each answer as it is served.",
                "warning",
            )
        for text, count in self._added.most_common(1):
            if count:
                yield _template_note(
                    "KTD006",
                    f"puts {text!r} in front of {count:,} of {self._answers:,} answers, and the model learns "
                    "to write it",
                )
        for text, count in self._unmatched.most_common(1):
            if count:
                yield _template_note(
                    "KTD007",
                    f"has a server end its prompt in {text!r}, which {count:,} of {self._answers:,} answers "
                    "don't go on from: they are trained without it",
                )


def _template_note(
    code: str, found: str, next_step: str | None = None, severity: Severity | None = None
) -> Problem:
    return problem(code, "chat template", found, "", next_step, severity)


def stop_note(last: int | None, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    """Answers that don't end in a token of the tokenizer's own make teach the model never to stop."""
    if last is None or last in {tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()}:
        return
    word = str(tokenizer.decode([last]))
    if not word.strip():
        return
    yield problem(
        "KTD004",
        "chat template",
        f"answers end in {word!r}, so that the model does not learn to stop",
        "an end-of-turn token within the assistant's part",
    )
