"""Conversations to texts, and the character ranges of the answers that are learned in them.

``ChatTemplate.render`` writes each answer as a server's model writes it: its prompt is the one that a server
sends, and the answer's range is what the model adds to it, its stop token included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.sft.data.messages import (
    IMAGE,
    Message,
    Tool,
    content_with_thoughts,
    drop_thoughts,
    split_thoughts,
)
from ktbridge.sft.data.template import (
    MARK,
    CharRange,
    TemplateOptions,
    TemplateRenderer,
    check_tools,
    common_prefix,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIFFERENT = "the chat template writes the prompt differently when an answer follows"
_LEFT_OUT = "the chat template leaves a part of the answer out"
_THOUGHTS_END = "</think>"
_EMPTY_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RenderedAnswer:
    """Prompt and answer as one text, as a server's model writes the answer.

    The model writes text[start:end], of which text[body:end] is the stop token and spaces before it.
    """

    text: str
    start: int
    body: int
    end: int
    added: str
    """Text that the template puts in front of the answer's own words (an empty block of thoughts)."""
    unmatched: str
    """End of a server's prompt that this text lacks (an opened block of thoughts)."""


@dataclass(frozen=True)
class RenderedText:
    """The text of one sequence, and the character ranges of it that are learned."""

    text: str
    answer_spans: tuple[CharRange, ...]
    answers: tuple[RenderedAnswer, ...] = ()
    """The answers that the ranges belong to."""
    num_images: int = 0
    rewritten: int = 0
    """Number of answers that are learned as history, in another form than the model writes them."""
    has_thoughts: bool = False
    """True if an answer that is learned has thoughts."""


class ChatTemplate:
    """A tokenizer's chat template as a server uses it, determined by rendering each answer's own prompt.

    If the template has {% generation %} markers, they mark what the model writes; else that is what an
    answer adds to its prompt. Raises KtbridgeError for a tokenizer without a template, or one without
    offset mapping.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | str | None = None) -> None:
        """``thinking``: whether requests ask for it, None if they don't mention it.

        "auto": on for an answer with thoughts, off for an answer without.
        """
        self._render = TemplateRenderer(tokenizer)
        if not tokenizer.is_fast:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no places of its tokens in a text, "
                "so the assistant's can't be found.",
                "Use a model directory with a tokenizer.json.",
            )
        self._thinking = thinking
        self._emptied = 0
        self._marked = _MARKERS.search(self._render.template) is not None
        self._added = tuple(tokenizer.get_added_vocab())
        self._opening = self._probe_opening()
        header = re.split("\n|<think>", self._opening.strip())[0]
        self._header = header if any(token in header for token in self._added) else ""
        self._tail, self._stop = self._probe_stop()

    def _check_texts(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, without thoughts if thinking is off. Raises ValueError for written markup."""
        texts = (each["content"] for each in messages if each["role"] != "tool")
        if self._header and any(self._header in text for text in texts):
            raise ValueError(f"text with {self._header}: the chat template would write that twice")
        if self._thinking is not False:
            return messages
        self._emptied += any(split_thoughts(each)[0] for each in messages)
        return [*map(drop_thoughts, messages)]

    def notes(self) -> Iterator[Problem]:
        """Yield notes on the effect of ``thinking``."""
        if self._emptied:
            found = f"false: thoughts were taken out of {self._emptied:,} rows"
            yield problem("KTD020", "enable_thinking", found)
        if self._thinking is not None and not self._render.has_switch:
            found = f"{str(self._thinking).lower()}, and the chat template's prompt is the same without it"
            yield problem("KTD021", "enable_thinking", found)

    def write_prompt_and_answer(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[str, str]:
        """Return a server's prompt for the last message, and that message without its stop token.

        Raises ValueError as ``render``.
        """
        messages = self._check_texts(messages)
        if not messages[:-1]:
            raise ValueError("an answer without a prompt")
        options, last = self._options(messages, tools), messages[-1]
        check_tools(self._render, messages, tools)
        prompt = self._render(messages[:-1], options, opened=True)[0]
        if "tool_calls" not in last:
            return prompt, content_with_thoughts(last)
        answer = self._answer(messages, options)
        return prompt, answer.text[answer.start : answer.body].strip()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        split: bool = True,
        last_alone: bool = False,
    ) -> list[RenderedText]:
        """Return the texts in which every answer of a conversation is learned as a server's model writes it.

        One text serves all answers that it repeats letter by letter. A template may rewrite an answer once
        more follows (drop its thoughts): the earlier answer then gets a text of its own, which ends with
        it. Without ``split`` there is one text, in which rewritten answers are learned as history has them.
        ``last_alone``: earlier answers aren't learned. Answers of weight 0 never are.
        Raises ValueError with the reason, as a short phrase, if an answer can't be found.
        """
        messages = self._check_texts(messages)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        places = [i for i in places[-last_alone:] if messages[i].get("weight", 1)]
        if not places:
            raise ValueError("no answer is learned: the weight of each is 0")
        check_tools(self._render, messages[: places[-1] + 1], tools)
        answers = {}
        for place in places:
            upto = messages[: place + 1]
            answers[place] = self._answer(upto, self._options(upto, tools))
        # From the last answer to the first: an answer joins the text before it if that repeats it.
        last, upto = places[-1], messages[: places[-1] + 1]
        groups: list[list[tuple[int, CharRange, bool]]] = []  # of a text: place, span, rewritten
        for place, answer in reversed(answers.items()):
            span, later = (answer.start, answer.end), answers[groups[-1][0][0]] if groups else None
            if later is None or (split and not later.text.startswith(answer.text[: answer.end])):
                groups.append([(place, span, False)])
            elif later.text.startswith(answer.text[: answer.end]):
                groups[-1].append((place, span, False))
            else:
                span = self._find_in_history(upto, place, answers[last], answer, tools)
                groups[-1].append((place, span, True))
        seen = [*accumulate(each["content"].count(IMAGE) for each in messages)]
        return [
            RenderedText(
                text=answers[group[0][0]].text,
                answer_spans=tuple(span for _, span, _ in reversed(group)),
                answers=tuple(answers[place] for place, *_ in reversed(group)),
                num_images=seen[group[0][0]],
                rewritten=sum(rewritten for *_, rewritten in group),
                has_thoughts=any(
                    not rewritten and split_thoughts(messages[place])[0] for place, _, rewritten in group
                ),
            )
            for group in reversed(groups)
        ]

    def render_last(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> RenderedText:
        """Return the text in which the last answer alone is learned. Raises ValueError as ``render``."""
        return self.render(messages, tools, last_alone=True)[-1]

    def _options(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TemplateOptions:
        """Return the options of the request for the last message."""
        if isinstance(self._thinking, str):
            return TemplateOptions(tools, bool(split_thoughts(messages[-1])[0]))
        return TemplateOptions(tools, self._thinking)

    def _answer(self, messages: Sequence[Message], options: TemplateOptions) -> RenderedAnswer:
        """Render the last message of ``messages``, which is the assistant's."""
        last = messages[-1]
        words, (thoughts, said) = content_with_thoughts(last).strip(), split_thoughts(last)
        text, spans = self._render(messages, options, marked=self._marked)
        unmatched = ""
        if self._marked:
            if len(spans) < sum(message["role"] == "assistant" for message in messages):
                raise ValueError("the chat template does not mark every answer as the assistant's")
            start, end = spans[-1]  # marked by the template's author
            body = self._body_end(text[:end], start, said)
            if thoughts and thoughts not in text[:end]:
                raise ValueError(_LEFT_OUT)
            self._check_complete(last, text[start:end])
        else:
            text = self._restore_prompt(messages, text, options)
            start, unmatched = self._find_start(messages, text, options)
            calls = "tool_calls" in last
            ended = text.rstrip()
            body = len(ended.removesuffix(self._tail)) if calls else self._body_end(text, start, said)
            lost = thoughts and thoughts not in text[start:body]
            if not self._render.thoughts_key:
                lost = lost or (_THOUGHTS_END in words and _THOUGHTS_END not in text[start:])
            learned = text[start:body]
            if lost:
                # The template writes it as history, without thoughts; what the model writes has them.
                learned = self._restore_thoughts(learned, unmatched, words, said if calls else None)
            if lost or (learned.startswith(_THOUGHTS_END) and unmatched.strip() == "<think>"):
                text = text[:start] + unmatched + learned + text[body:]
                start, unmatched = start + len(unmatched), ""
                body = start + len(learned)
            self._check_complete(last, text[start:body])
            stop = self._stop
            if calls and stop:
                stop = self._token_after(messages, text[:body], options) or stop
            end = len(text.rstrip()) if calls else self._stop_end(text, body)
            if stop and end == body:
                text, end = text[:end] + stop, end + len(stop)
        added = self._find_added(words, last, text[start:body])
        return RenderedAnswer(text, start, body, end, added, unmatched)

    @staticmethod
    def _check_complete(last: Message, written: str) -> None:
        """Raise ValueError if a call's words or thoughts, or words that name tags, aren't all in place."""
        thoughts, said = split_thoughts(last)
        calls = last.get("tool_calls", ())
        if (calls or "think>" in said) and said.strip() not in written:
            raise ValueError(_LEFT_OUT)
        if calls and thoughts:
            name = str(cast("Tool", calls[0]["function"])["name"])
            if thoughts in written and name not in written.partition(thoughts)[2]:
                raise ValueError("the chat template writes thoughts behind the tool call")

    @staticmethod
    def _find_added(words: str, last: Message, learned: str) -> str:
        """Return the part of ``learned`` that the template puts in front of the answer's own words."""
        if "tool_calls" in last:
            empty = None if split_thoughts(last)[0] else _EMPTY_THOUGHTS.match(learned)
            return empty[0] if empty else ""
        return learned.removesuffix(words) if learned.endswith(words) else ""

    def _restore_prompt(self, messages: Sequence[Message], text: str, options: TemplateOptions) -> str:
        """Return ``text`` behind a server's prompt, if calls are rewritten once they are answered.

        gpt-oss's template drops the thoughts of calls when the final answer follows.
        """
        prompt = messages[:-1]
        if not prompt or prompt[-1]["role"] != "tool":
            return text
        if text.startswith(self._render(prompt, options)[0]):
            return text
        header = self._render([*prompt, {"role": "assistant", "content": MARK}], options)[0]
        end = header.partition(MARK)[0].rfind(self._opening) + len(self._opening)
        opened = self._render(prompt, options, opened=True)[0]
        known = end >= len(self._opening) and opened.endswith(self._opening)
        return opened + text[end:] if known and text.startswith(header[:end]) else text

    def _find_start(
        self, messages: Sequence[Message], text: str, options: TemplateOptions
    ) -> tuple[int, str]:
        """Return the place in ``text`` where the model begins, and the end of a prompt that it lacks."""
        prompt = messages[:-1]
        if not prompt or not self._opening:  # the template does not open answers
            header = self._render([*prompt, {"role": "assistant", "content": MARK}], options)[0]
            start = header.find(MARK)
            if start < 0 or not text.startswith(header[:start]):
                raise ValueError(DIFFERENT)
            return start, ""
        opened = self._render(prompt, options, opened=True)[0]
        start = common_prefix(opened, text)
        # A difference may lie in the opening alone: thoughts that a server opens and this answer lacks.
        if start < len(opened) - len(self._opening) and start < len(self._render(prompt, options)[0]):
            raise ValueError(DIFFERENT)
        if start < len(opened):  # "<think>" and "</think>" share a letter, and no token
            start = min(
                (
                    at
                    for token in self._added
                    if (at := text.rfind(token, 0, start + len(token) - 1)) >= 0
                    and at < start < at + len(token)
                ),
                default=start,
            )
        return start, opened[start:]

    def _restore_thoughts(self, visible: str, opener: str, words: str, said: str | None) -> str:
        """Return the answer ``words`` behind ``opener``, of which the template wrote only ``visible``.

        ``said``: words in front of the tool calls that ``visible`` has, too.
        """
        visible = visible.strip().removeprefix(_THOUGHTS_END).strip()
        head, _, rest = words.rpartition(_THOUGHTS_END)
        whole = visible.startswith(said.strip()) if said is not None else rest.strip() == visible
        if not opener.strip() or not words.startswith(opener.strip()) or not whole:
            hint = ": with enable_thinking: true it opens thoughts" * self._render.has_switch
            raise ValueError(f"{_LEFT_OUT}{hint}")
        gap = rest[: len(rest) - len(rest.lstrip())]
        written = head + _THOUGHTS_END + gap
        return written.removeprefix(opener.strip()).lstrip("\n") + visible

    def _body_end(self, text: str, start: int, said: str) -> int:
        """Return the place in ``text``, which ends with an answer, where the stop tokens behind it begin.

        A token with which the words ``said`` end is the answer's own.
        """
        end, said = len(text), said.strip()
        while True:
            body = text[start:end].rstrip()
            token = next((token for token in self._added if body.endswith(token)), "")
            if not token or (said.endswith(token) and body.endswith(said)):
                return start + len(body)
            end = start + len(body) - len(token)

    def _stop_end(self, text: str, body: int) -> int:
        """Return the place behind the stop token that follows an answer's end, or ``body`` if there is none.

        Several tokens without a space between them are one stop; a server's model writes nothing further.
        """
        end = body + len(text[body:]) - len(text[body:].lstrip())
        behind = end
        while token := next((t for t in self._added if text.startswith(t, behind)), ""):
            behind += len(token)
        return behind if behind > end else body

    def _token_after(self, messages: Sequence[Message], text: str, options: TemplateOptions) -> str:
        """Return the added token that begins a tool's result behind ``text``, which ends with its call."""
        try:
            longer = self._render([*messages, {"role": "tool", "content": MARK}], options)[0]
        except ValueError:
            return ""
        behind = longer[len(text) :].lstrip() if longer.startswith(text) else ""
        return next((token for token in self._added if behind.startswith(token)), "")

    def _find_in_history(
        self,
        messages: Sequence[Message],
        place: int,
        whole: RenderedAnswer,
        answer: RenderedAnswer,
        tools: Sequence[Tool],
    ) -> CharRange:
        """Return the range in ``whole``, the conversation, of the answer ``messages[place]`` as history."""
        marked = [*messages]
        marked[place] = {**drop_thoughts(messages[place]), "content": MARK}
        text = whole.text
        before, mark, behind = self._render(marked, self._options(messages, tools))[0].partition(MARK)
        if "tool_calls" in messages[place]:
            learned = answer.text[answer.start : answer.end].rpartition(_THOUGHTS_END)[2].lstrip("\n")
            if mark and text.startswith(before + learned):
                return len(before), len(before) + len(learned)
        elif mark and text.startswith(before):
            ended = text.rstrip()
            if not ended.endswith(behind.rstrip()):  # the stop that the template left out
                ended = ended.removesuffix(self._stop).rstrip()
            if ended.endswith(behind.rstrip()):
                return len(before), self._stop_end(text, len(ended) - len(behind.rstrip()))
        raise ValueError("the chat template leaves an earlier answer out of the history")

    def _probe_opening(self) -> str:
        """Return the text that opens an answer behind a user's message; "" if there is none."""
        probe: list[Message] = [{"role": "user", "content": "0"}]
        try:
            before, opened = self._render(probe)[0], self._render(probe, opened=True)[0]
        except ValueError:  # it may require a system message, or reject an empty text
            return MARK
        return opened[common_prefix(before, opened) :]

    def _probe_stop(self) -> tuple[str, str]:
        """Return the end of an answer, or the special token that follows it in a longer conversation.

        GLM's models end an answer with the token that begins the next message.
        """
        user: Message = {"role": "user", "content": MARK}
        answer: Message = {"role": "assistant", "content": MARK}
        try:
            ended, longer = (self._render(each)[0] for each in ([user, answer], [user, answer, user]))
        except ValueError:
            return "", ""
        tail = ended.rpartition(MARK)[2].strip()
        if tail or not longer.startswith(ended.rstrip()):
            return tail, ""
        behind = longer[len(ended.rstrip()) :]
        return "", next((token for token in self._added if behind.startswith(token)), "")


class AnswerForms:
    """Counts of the forms in which the chat template writes the answers used."""

    def __init__(self) -> None:
        self._rows = self._answers = self._texts = 0
        self._rewritten = 0  # conversations of several texts, or with answers in another form
        self._added: Counter[str] = Counter()
        self._unmatched: Counter[str] = Counter()

    def count(self, texts: Sequence[RenderedText]) -> None:
        """Count the texts of a conversation."""
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
