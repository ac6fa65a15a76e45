"""Render conversations with the chat template as a server does, and find the tokens to be learned."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, cast

import yaml

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.sft.data.forms import Answer, TrainingText
from ktbridge.sft.data.messages import (
    IMAGE,
    Message,
    Tool,
    in_content,
    thoughts_of,
    without_thoughts,
)
from ktbridge.sft.data.render import MARK, Asked, Renderer, Span, check_tools, shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of a token that the loss ignores."""
DIFFERENT = "the chat template writes the prompt differently when an answer follows"
_LEFT_OUT = "the chat template leaves a part of the answer out"
THOUGHTS_END = "</think>"
AUTO = "auto"
"""Thinking is on for an answer with thoughts and off for one without."""
_EMPTY_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = (("Hi.", "Hello."), ("Who are you?", "A model."))
"""Questions and answers."""
_BEFORE, _BEHIND = 16, 32
"""Characters shown of two texts around the place where they part."""


class ChatTemplate:
    """A tokenizer's chat template as a server uses it, determined by rendering each answer's own prompt.

    If the template has {% generation %} markers, they mark what the model writes; else that is what an
    answer adds to its prompt. Raises KtbridgeError for a tokenizer without a template, or one without
    offset mapping.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, thinking: bool | str | None = None
    ) -> None:
        """``thinking``: what requests say of it, or ``AUTO``; None: nothing."""
        self._render = Renderer(tokenizer)
        if not tokenizer.is_fast:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no places of its tokens in a text, "
                "so the assistant's can't be found.",
                "Use a model directory with a tokenizer.json.",
            )
        self._tokenizer, self._thinking = tokenizer, thinking
        self._emptied = 0
        self._marked = _MARKERS.search(self._render.template) is not None
        self._added = tuple(tokenizer.get_added_vocab())
        self._opening = self._probe_opening()
        self._tail, self._stop = self._probe_stop()

    def text(
        self, messages: Sequence[Message], opened: bool = False, tools: Sequence[Tool] = ()
    ) -> str:
        """The conversation; ``opened``: up to where the model goes on, as a server sends it.

        Raises ValueError with the template's own message when it refuses the conversation.
        """
        messages = self.taken(messages)
        return self._render(messages, self._asked(messages, tools), opened)[0]

    def taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as they are used: without thoughts where thinking is off."""
        if self._thinking is not False:
            return messages
        self._emptied += any(thoughts_of(each)[0] for each in messages)
        return [*map(without_thoughts, messages)]

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise ValueError where the template leaves out tools, calls or results of these messages."""
        check_tools(self._render, messages, tools)

    @property
    def reads_apart(self) -> bool:
        """Return whether the template reads thoughts only from a field of their own."""
        return self._render.apart

    def notes(self) -> Iterator[Problem]:
        """Yield what came of ``thinking``."""
        if self._emptied:
            found = f"false: thoughts were taken out of {self._emptied:,} rows"
            yield problem("KTD020", "enable_thinking", found)
        if self._thinking is not None and not self._render.switched:
            found = f"{str(self._thinking).lower()}, and the chat template's prompt is the same without it"
            yield problem("KTD021", "enable_thinking", found)

    def asked_and_answered(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[str, str]:
        """A server's prompt for the last message, and what the model is to write, without its stop token.

        Raises ValueError as ``sequences`` does.
        """
        messages = self.taken(messages)
        if not messages[:-1]:
            raise ValueError("an answer without a prompt")
        asked, last = self._asked(messages, tools), messages[-1]
        if tools or "tool_calls" in last or any(each["role"] == "tool" for each in messages):
            check_tools(self._render, messages, tools)
        prompt = self._render(messages[:-1], asked, opened=True)[0]
        if "tool_calls" not in last:
            return prompt, in_content(last)
        answer = self._answer(messages, asked)
        return prompt, answer.text[answer.start : answer.body].strip()

    def sequences(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        split: bool = True,
        last_alone: bool = False,
    ) -> list[TrainingText]:
        """The texts in which every answer of a conversation is learned in the form that a server gives it.

        One text serves all answers that it repeats letter by letter. A template may rewrite an answer once
        more follows (drop its thoughts): the earlier answer then gets a text of its own, which ends with
        it. Without ``split`` there is one text, in which rewritten answers are learned as history has them.
        ``last_alone``: earlier answers aren't learned; nor are those of weight 0.
        Raises ValueError with the reason, as a short phrase, when an answer can't be found.
        """
        messages = self.taken(messages)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        places = [i for i in places[-last_alone:] if messages[i].get("weight", 1)]
        if not places:
            raise ValueError("no answer is learned: the weight of each is 0")
        if tools or any("tool_calls" in each or each["role"] == "tool" for each in messages):
            check_tools(self._render, messages[: places[-1] + 1], tools)
        answers = {}
        for place in places:
            upto = messages[: place + 1]
            answers[place] = self._answer(upto, self._asked(upto, tools))
        seen = [*accumulate(each["content"].count(IMAGE) for each in messages)]
        whole, found = answers[places[-1]], list[TrainingText]()
        for place, answer in reversed(answers.items()):
            span, same = (answer.start, answer.end), True
            if found and not found[-1].text.startswith(answer.text[: answer.end]):
                if split:
                    found.append(TrainingText(answer.text, seen[place]))
                else:
                    upto = messages[: places[-1] + 1]
                    span, same = self._in_history(upto, place, whole, answer, tools), False
            elif not found:
                found.append(TrainingText(answer.text, seen[place]))
            found[-1].spans.insert(0, span)
            found[-1].answers.insert(0, answer)
            found[-1].rewritten += not same
            found[-1].thoughts |= same and bool(thoughts_of(messages[place])[0])
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

    def _asked(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Asked:
        """The request for the last message."""
        if isinstance(self._thinking, str):
            return Asked(tools, bool(thoughts_of(messages[-1])[0]))
        return Asked(tools, self._thinking)

    def _answer(self, messages: Sequence[Message], asked: Asked) -> Answer:
        """The last message of ``messages``, which is the assistant's."""
        last = messages[-1]
        words, (thoughts, said) = in_content(last).strip(), thoughts_of(last)
        text, spans = self._render(messages, asked, marked=self._marked)
        unmatched = ""
        if self._marked:
            if len(spans) < sum(message["role"] == "assistant" for message in messages):
                raise ValueError("the chat template does not mark every answer as the assistant's")
            start, end = spans[-1]  # marked by the template's author
            body = self._body_end(text[:end], start)
            if thoughts and thoughts not in text[:end]:
                raise ValueError(_LEFT_OUT)
            self._check_whole(last, text[start:end])
        else:
            text = self._behind_calls(messages, text, asked)
            start, unmatched = self._start(messages, text, asked)
            calls = "tool_calls" in last
            ended = text.rstrip()
            body = len(ended.removesuffix(self._tail)) if calls else self._body_end(text, start)
            lost = thoughts and thoughts not in text[start:body]
            if not self._render.thoughts_key:
                lost = lost or (THOUGHTS_END in words and THOUGHTS_END not in text[start:])
            learned = text[start:body]
            if lost:
                # The template writes it as history, without thoughts; what the model writes has them.
                learned = self._with_thoughts(learned, unmatched, words, said if calls else None)
            if lost or (learned.startswith(THOUGHTS_END) and unmatched.strip() == "<think>"):
                text = text[:start] + unmatched + learned + text[body:]
                start, unmatched = start + len(unmatched), ""
                body = start + len(learned)
            self._check_whole(last, text[start:body])
            stop = self._stop
            if calls and stop:
                stop = self._next_token(messages, text[:body], asked) or stop
            end = len(text.rstrip()) if calls else self._stop_end(text, body)
            if stop and end == body:
                text, end = text[:end] + stop, end + len(stop)
        return Answer(
            text, start, end, body, self._added_to(words, last, text[start:body]), unmatched
        )

    @staticmethod
    def _check_whole(last: Message, written: str) -> None:
        """Raise ValueError where a call's words or thoughts, or words that name tags, aren't all in place."""
        thoughts, said = thoughts_of(last)
        calls = last.get("tool_calls", ())
        if (calls or "think>" in said) and said.strip() not in written:
            raise ValueError(_LEFT_OUT)
        if calls and thoughts:
            name = str(cast("Tool", calls[0]["function"])["name"])
            if thoughts in written and name not in written.partition(thoughts)[2]:
                raise ValueError("the chat template writes thoughts behind the tool call")

    @staticmethod
    def _added_to(words: str, last: Message, learned: str) -> str:
        """Return what of ``learned`` the template puts in front of the answer's own words."""
        if "tool_calls" in last:
            empty = None if thoughts_of(last)[0] else _EMPTY_THOUGHTS.match(learned)
            return empty[0] if empty else ""
        return learned.removesuffix(words) if learned.endswith(words) else ""

    def _behind_calls(self, messages: Sequence[Message], text: str, asked: Asked) -> str:
        """``text`` behind the prompt that a server sends, where calls are rewritten once they are answered.

        gpt-oss's drops the thoughts of calls when the final answer follows.
        """
        prompt = messages[:-1]
        if not prompt or prompt[-1]["role"] != "tool":
            return text
        if text.startswith(self._render(prompt, asked)[0]):
            return text
        header = self._render([*prompt, {"role": "assistant", "content": MARK}], asked)[0]
        end = header.partition(MARK)[0].rfind(self._opening) + len(self._opening)
        opened = self._render(prompt, asked, opened=True)[0]
        known = end >= len(self._opening) and opened.endswith(self._opening)
        return opened + text[end:] if known and text.startswith(header[:end]) else text

    def _start(self, messages: Sequence[Message], text: str, asked: Asked) -> tuple[int, str]:
        """Return where in ``text`` the model begins to write, and what part of a server's prompt it lacks."""
        prompt = messages[:-1]
        if not prompt or not self._opening:  # the template does not open answers
            header = self._render([*prompt, {"role": "assistant", "content": MARK}], asked)[0]
            start = header.find(MARK)
            if start < 0 or not text.startswith(header[:start]):
                raise ValueError(DIFFERENT)
            return start, ""
        opened = self._render(prompt, asked, opened=True)[0]
        start = shared(opened, text)
        # A difference may lie in the opening alone: thoughts that a server opens and this answer lacks.
        if start < len(opened) - len(self._opening) and start < len(self._render(prompt, asked)[0]):
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

    def _with_thoughts(self, visible: str, opener: str, words: str, said: str | None) -> str:
        """The answer ``words`` behind ``opener``, where the template wrote no more of it than ``visible``.

        ``said``: what of the words stands in front of the tool calls that are written in ``visible``, too.
        """
        visible = visible.strip().removeprefix(THOUGHTS_END).strip()
        head, _, rest = words.rpartition(THOUGHTS_END)
        whole = visible.startswith(said.strip()) if said is not None else rest.strip() == visible
        if not opener.strip() or not words.startswith(opener.strip()) or not whole:
            hint = ": with enable_thinking: true it opens thoughts" * self._render.switched
            raise ValueError(f"{_LEFT_OUT}{hint}")
        gap = rest[: len(rest) - len(rest.lstrip())]
        written = head + THOUGHTS_END + gap
        return written.removeprefix(opener.strip()).lstrip("\n") + visible

    def _body_end(self, text: str, start: int) -> int:
        """Return where in ``text``, which ends with an answer, the stop tokens and spaces behind it begin."""
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

    def _next_token(self, messages: Sequence[Message], text: str, asked: Asked) -> str:
        """The added token that begins a tool's result behind ``text``, which ends with the call of it."""
        try:
            longer = self._render([*messages, {"role": "tool", "content": MARK}], asked)[0]
        except ValueError:
            return ""
        behind = longer[len(text) :].lstrip() if longer.startswith(text) else ""
        return next((token for token in self._added if behind.startswith(token)), "")

    def _in_history(
        self,
        messages: Sequence[Message],
        place: int,
        whole: Answer,
        answer: Answer,
        tools: Sequence[Tool],
    ) -> Span:
        """Where in ``whole``, all of the conversation, the answer ``messages[place]`` stands as history."""
        marked = [*messages]
        marked[place] = {**without_thoughts(messages[place]), "content": MARK}
        text = whole.text
        before, mark, behind = self._render(marked, self._asked(messages, tools))[0].partition(MARK)
        if "tool_calls" in messages[place]:
            learned = (
                answer.text[answer.start : answer.end].rpartition(THOUGHTS_END)[2].lstrip("\n")
            )
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
        """What the template adds behind a user's message for the model to go on from; "" if nothing."""
        probe: list[Message] = [{"role": "user", "content": "0"}]
        try:
            before, opened = self._render(probe)[0], self._render(probe, opened=True)[0]
        except ValueError:  # it may require a system message, or reject an empty text
            return MARK
        return opened[shared(before, opened) :]

    def _probe_stop(self) -> tuple[str, str]:
        """Return what ends an answer, or the special token that follows it in a longer conversation.

        GLM's models end an answer with the token that begins the next message.
        """
        user: Message = {"role": "user", "content": MARK}
        answer: Message = {"role": "assistant", "content": MARK}
        try:
            ended, longer = (
                self._render(each)[0] for each in ([user, answer], [user, answer, user])
            )
        except ValueError:
            return "", ""
        tail = ended.rpartition(MARK)[2].strip()
        if tail or not longer.startswith(ended.rstrip()):
            return tail, ""
        behind = longer[len(ended.rstrip()) :]
        return "", next((token for token in self._added if behind.startswith(token)), "")


def template_notes(name: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """A note where LLaMA-Factory's template ``name`` isn't what the tokenizer's writes, or isn't compared."""
    if name is None:
        return []
    known = {each: row for row in _table() for each in row["names"].split()}
    if name not in known:
        near = difflib.get_close_matches(name, known, cutoff=0.6)
        found = f"{name!r}: not compared, and the tokenizer's own chat template is used"
        return [problem("KTC037", "template", found, ", ".join(near))]
    messages: list[Message] = [
        {"role": role, "content": text}
        for turn in _PROBE
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    try:
        ours = ChatTemplate(tokenizer).text(messages).rstrip()
    except ValueError as error:
        return [problem("KTC037", "template", f"{name!r}: not compared, {error}")]
    theirs = _written(known[name], tokenizer).rstrip()
    if ours == theirs:
        return []
    pairs = enumerate(zip(ours, theirs, strict=False))
    part = next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    here = slice(max(0, part - _BEFORE), part + _BEHIND)
    found = f"{name!r} of LLaMA-Factory has {theirs[here]!r}"
    expected = f"{ours[here]!r}, as the chat template has it, which is used"
    return [problem("KTC036", "template", found, expected)]


def _written(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> str:
    """The probe as LLaMA-Factory writes it."""
    text = row.get("prefix", "")
    for number, (question, answer) in enumerate(_PROBE, 1):
        thought = row.get("thought", "") if number == len(_PROBE) else ""
        text += row["user"].replace("{content}", question)
        text += thought + row["answer"].replace("{content}", answer)
    for place, token in (("{bos}", tokenizer.bos_token), ("{eos}", tokenizer.eos_token)):
        text = text.replace(place, str(token or ""))
    return text


def _table() -> list[dict[str, str]]:
    found = yaml.safe_load(files(__package__).joinpath("templates.yaml").read_text("utf-8"))
    assert isinstance(found, list)
    return found
