"""Render conversations with the chat template as a server does, and find the tokens to be learned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.sft.data.layout import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""A character range [start, end) of a text."""
IGNORED = -100
"""The label of a token that the loss ignores."""
MARK = "\u241e\u241f\u241e"
"""Placeholder of an answer, to find where a template puts it."""
DIFFERENT = "the chat template writes the prompt differently when an answer follows"
THOUGHTS_END = "</think>"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Answer:
    """One answer as a server's model writes it: ``text`` is the prompt and the answer.

    ``start`` and ``end`` enclose what the model writes, its stop token included. ``added`` is what of that
    the template puts in front of the answer's own words (an empty block of thoughts), ``unmatched`` the end
    of the prompt that a server sends and that this text lacks (an opened block of thoughts).
    """

    text: str
    start: int
    end: int
    added: str
    unmatched: str


@dataclass
class TrainingText:
    """One sequence to train on. ``spans`` are what is learned, ``answers`` the answers these belong to.

    ``rewritten`` counts answers that stand here as history, in another form than the model writes them.
    """

    text: str
    spans: list[Span] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    rewritten: int = 0


class ChatTemplate:
    """A tokenizer's chat template as a server uses it, determined by rendering each answer's own prompt.

    If the template has {% generation %} markers, they mark what the model writes; else that is what an
    answer adds to its prompt. Raises KtbridgeError for a tokenizer without a template, or one without
    offset mapping.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, so conversations have no "
                "form to train on.",
                "Put chat_template.jinja into that directory; the model's instruct or chat variant has one.",
            )
        if not tokenizer.is_fast:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no places of its tokens in a text, "
                "so the assistant's can't be found.",
                "Use a model directory with a tokenizer.json.",
            )
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        self._marked = _MARKERS.search(self._template) is not None
        self._added = tuple(tokenizer.get_added_vocab())
        self._opening = self._probe_opening()
        self._stop = self._probe_stop()

    def text(self, messages: Sequence[Message], opened: bool = False) -> str:
        """The conversation; ``opened``: up to where the model goes on, as a server sends it.

        Raises ValueError with the template's own message when it refuses the conversation.
        """
        return self._rendered(messages, opened)[0]

    def sequences(self, messages: Sequence[Message], split: bool = True) -> list[TrainingText]:
        """The texts in which every answer of a conversation is learned in the form that a server gives it.

        One text serves all answers that it repeats letter by letter. A template may rewrite an answer once
        more follows (drop its thoughts): the earlier answer then gets a text of its own, which ends with
        it. Without ``split`` there is one text, in which rewritten answers are learned as history has them.
        Raises ValueError with the reason, as a short phrase, when an answer can't be found.
        """
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = {place: self._answer(messages[: place + 1]) for place in places}
        whole = answers[places[-1]].text
        found: list[TrainingText] = []
        for place, answer in reversed(answers.items()):
            span, same = (answer.start, answer.end), True
            if found and not found[-1].text.startswith(answer.text[: answer.end]):
                if split:
                    found.append(TrainingText(answer.text))
                else:
                    span, same = self._in_history(messages, place, whole), False
            elif not found:
                found.append(TrainingText(answer.text))
            found[-1].spans.insert(0, span)
            found[-1].answers.insert(0, answer)
            found[-1].rewritten += not same
        return found[::-1]

    def tokens(self, texts: list[str]) -> tuple[list[list[int]], list[list[Span]]]:
        """Token ids of texts rendered by the template, and the character range of each token."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,  # the template has written them
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,  # longer than the model can take: cutoff_len is what counts
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def pieces(self, tokens: Sequence[tuple[int, bool]]) -> list[tuple[str, bool]]:
        """(token id, learned) pairs decoded, neighbours of one kind together."""
        return [
            (str(self._tokenizer.decode([token for token, _ in group])), learned)
            for learned, group in groupby(tokens, key=itemgetter(1))
        ]

    def _rendered(
        self, messages: Sequence[Message], opened: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        special: dict[str, Any] = self._tokenizer.special_tokens_map
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self._template,
                add_generation_prompt=opened,
                return_assistant_tokens_mask=marked,
                **special,
            )
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if marked else []

    def _answer(self, messages: Sequence[Message]) -> Answer:
        """The last message of ``messages``, which is the assistant's."""
        words = messages[-1]["content"].strip()
        text, spans = self._rendered(messages, marked=self._marked)
        unmatched = ""
        if self._marked:
            if len(spans) < sum(message["role"] == "assistant" for message in messages):
                raise ValueError("the chat template does not mark every answer as the assistant's")
            start, end = spans[-1]  # marked by the template's author
            body = self._body_end(text[:end], start)
        else:
            start, unmatched = self._start(messages, text)
            body = self._body_end(text, start)
            if THOUGHTS_END in words and THOUGHTS_END not in text[start:]:
                # The template writes it as history, without thoughts; what the model writes has them.
                learned = self._with_thoughts(text[start:body], unmatched, words)
                text = text[:start] + unmatched + learned + text[body:]
                start, unmatched = start + len(unmatched), ""
                body = start + len(learned)
            end = self._stop_end(text, body)
            if self._stop and end == body:
                text, end = text[:end] + self._stop, end + len(self._stop)
        learned = text[start:body]
        added = learned.removesuffix(words) if learned.endswith(words) else ""
        return Answer(text, start, end, added, unmatched)

    def _start(self, messages: Sequence[Message], text: str) -> tuple[int, str]:
        """Where in ``text`` the model begins to write, and what part of a server's prompt it lacks."""
        prompt = messages[:-1]
        if not prompt or not self._opening:  # the template does not open answers
            header = self.text([*prompt, {"role": "assistant", "content": MARK}])
            start = header.find(MARK)
            if start < 0 or not text.startswith(header[:start]):
                raise ValueError(DIFFERENT)
            return start, ""
        opened = self.text(prompt, opened=True)
        start = shared(opened, text)
        # A difference may lie in the opening alone: thoughts that a server opens and this answer lacks.
        if start < len(opened) - len(self._opening) and start < len(self.text(prompt)):
            raise ValueError(DIFFERENT)
        return start, opened[start:]

    @staticmethod
    def _with_thoughts(visible: str, opener: str, words: str) -> str:
        """The answer ``words`` behind ``opener``, where the template wrote no more of it than ``visible``."""
        if not opener.strip() or not words.startswith(opener.strip()):
            raise ValueError("the chat template leaves a part of the answer out")
        if words.rpartition(THOUGHTS_END)[2].strip() != visible.strip():
            raise ValueError("the chat template leaves a part of the answer out")
        return words.removeprefix(opener.strip()).lstrip("\n")

    def _body_end(self, text: str, start: int) -> int:
        """Where in ``text``, which ends with an answer, the stop tokens and spaces behind it begin."""
        end = len(text)
        while True:
            body = text[start:end].rstrip()
            token = next((token for token in self._added if body.endswith(token)), "")
            end = start + len(body) - len(token)
            if not token:
                return end

    def _stop_end(self, text: str, body: int) -> int:
        """Behind the stop token that follows an answer's end, or ``body`` where there is none.

        Several tokens without a space between them are one stop; a server's model writes nothing further.
        """
        end = body + len(text[body:]) - len(text[body:].lstrip())
        behind = end
        while token := next((t for t in self._added if text.startswith(t, behind)), ""):
            behind += len(token)
        return behind if behind > end else body

    def _in_history(self, messages: Sequence[Message], place: int, whole: str) -> Span:
        """Where in ``whole``, all of the conversation, the answer ``messages[place]`` stands as history."""
        marked = [*messages]
        marked[place] = {**messages[place], "content": MARK}
        before, mark, behind = self.text(marked).partition(MARK)
        if not (mark and whole.startswith(before) and whole.rstrip().endswith(behind.rstrip())):
            raise ValueError("the chat template leaves an earlier answer out of the history")
        return len(before), self._stop_end(whole, len(whole.rstrip()) - len(behind.rstrip()))

    def _probe_opening(self) -> str:
        """What the template adds behind a user's message for the model to go on from; "" if nothing."""
        probe = [{"role": "user", "content": "0"}]
        try:
            before, opened = self.text(probe), self.text(probe, opened=True)
        except ValueError:  # it may require a system message, or reject an empty text
            return MARK
        return opened[shared(before, opened) :]

    def _probe_stop(self) -> str:
        """The special token that follows an answer in a longer conversation, where none ends the answer.

        GLM's models end an answer with the token that begins the next message.
        """
        user, answer = {"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}
        try:
            ended, longer = self.text([user, answer]), self.text([user, answer, user])
        except ValueError:
            return ""
        if ended.rpartition(MARK)[2].strip() or not longer.startswith(ended.rstrip()):
            return ""
        behind = longer[len(ended.rstrip()) :]
        return next((token for token in self._added if behind.startswith(token)), "")


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


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common prefix."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


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
