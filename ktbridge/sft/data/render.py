"""Write conversations with a tokenizer's chat template, given to it as servers give them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ktbridge.errors import KtbridgeError
from ktbridge.sft.data.messages import IMAGE, Message, Tool, in_content, thoughts_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""A character range [start, end) of a text."""
MARK = "\u241e\u241f\u241e"
"""Placeholder of an answer, to find where a template puts it."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for beside its messages: the tools, and thinking on, off or (None) nothing said."""

    tools: Sequence[Tool] = field(default=())
    thinking: bool | None = None


class Renderer:
    """A tokenizer's chat template.

    Thoughts are given to it as ``reasoning_content`` (gpt-oss: ``thinking``) where it reads that, else in
    front of ``content``. Arguments of tool calls are objects, as servers pass them, or where a template joins
    them to text (DeepSeek), their JSON. Raises KtbridgeError for a tokenizer without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, so conversations have no "
                "form to train on.",
                "Put chat_template.jinja into that directory; the model's instruct or chat variant has one.",
            )
        self._special = tokenizer.special_tokens_map
        self.template = tokenizer.get_chat_template()
        self.thoughts_key = ""
        """The message's key that the template reads thoughts from; "": it knows of none."""
        self.thoughts_key = next(filter(self._reads, ("reasoning_content", "thinking")), "")
        self.apart = bool(self.thoughts_key) and not self._reads_content()
        """Whether it reads them nowhere else."""
        user: Message = {"role": "user", "content": "0"}
        on, off = (self._try([user], thinking) for thinking in (True, False))
        self.switched = on != off
        """Whether a server's prompt depends on enable_thinking."""

    def __call__(
        self,
        messages: Sequence[Message],
        asked: Asked = Asked(),
        opened: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        """The text, and if ``marked`` the ranges within {% generation %}.

        ``opened``: up to where the model goes on, as a server sends it. Raises ValueError with the template's
        own message when it refuses the conversation.
        """
        from jinja2 import TemplateError

        given = [self._given(message) for message in messages]
        try:
            try:
                return self._render(given, asked, opened, marked)
            except TypeError:
                if not sum(map(_write_arguments, given)):  # all of them
                    raise
                return self._render(given, asked, opened, marked)
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _render(
        self, given: list[dict[str, Any]], asked: Asked, opened: bool, marked: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = dict(self._special)
        if asked.thinking is not None:  # DeepSeek-V3.1's and Kimi's name of it is "thinking"
            values |= {"enable_thinking": asked.thinking, "thinking": asked.thinking}
        rendered: Any = render_jinja_template(
            conversations=[given],
            tools=list(asked.tools) or None,
            chat_template=self.template,
            add_generation_prompt=opened,
            return_assistant_tokens_mask=marked,
            **values,
        )
        texts, spans = rendered
        return texts[0], spans[0] if marked else []

    def _given(self, message: Message) -> dict[str, Any]:
        plain: dict[str, Any] = {key: value for key, value in message.items() if key != "weight"}
        thoughts, said = thoughts_of(message)
        if thoughts is None:
            if IMAGE in message["content"]:
                plain["content"] = _parts(message["content"])
            return plain
        plain.pop("reasoning_content", None)
        plain["content"] = said if self.thoughts_key else in_content(message)
        if self.thoughts_key and thoughts:
            plain[self.thoughts_key] = thoughts
        return plain

    def _reads(self, key: str) -> bool:
        self.thoughts_key = key
        user: Message = {"role": "user", "content": "0"}
        answer: Message = {"role": "assistant", "content": "0", "reasoning_content": MARK}
        try:
            return MARK in self([user, answer])[0]
        except ValueError:
            return False

    def _reads_content(self) -> bool:
        """Return whether thoughts in front of the content are written as those of their own field."""
        key, texts = self.thoughts_key, []
        user: Message = {"role": "user", "content": "0"}
        answer: Message = {"role": "assistant", "content": "0", "reasoning_content": MARK}
        try:
            for self.thoughts_key in ("", key):
                texts.append(self([user, answer])[0])
        except ValueError:
            self.thoughts_key = key
            return False
        return texts[0] == texts[1]

    def _try(self, messages: Sequence[Message], thinking: bool) -> str:
        try:
            return self(messages, Asked(thinking=thinking), opened=True)[0]
        except ValueError:
            return ""


def _parts(content: str) -> list[dict[str, str]]:
    """Content with images as a list of parts, the form in which templates know them."""
    first, *rest = content.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def check_tools(render: Renderer, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise ValueError where the template leaves out tools, calls or results of these messages."""
    asked = Asked(tools)
    if tools and render(messages, asked) == render(messages):
        raise ValueError(
            "the chat template has no place for tools: a model that is served with it never sees them"
        )
    marked = [cast("Message", dict(message)) for message in messages]
    marks: list[
        str
    ] = []  # of its own for each: gpt-oss repeats a call's name in front of its result
    for message in marked:
        if message["role"] == "tool":
            message["content"] = _further(marks)
        elif "tool_calls" in message:
            message["tool_calls"] = [
                _renamed(call, _further(marks)) for call in message["tool_calls"]
            ]
    if not marks:
        return
    text = render(marked, asked)[0]
    if not all(mark in text for mark in marks):
        raise ValueError("the chat template leaves tool calls, or their results, out")


def _further(marks: list[str]) -> str:
    """One more mark, added to the others."""
    marks.append(f"{MARK}{len(marks)}{MARK}")
    return marks[-1]


def _renamed(call: Tool, name: str) -> Tool:
    function = cast("Tool", call["function"])
    return {**call, "function": {**function, "name": name}}


def _write_arguments(message: dict[str, Any]) -> bool:
    """Make JSON of the arguments of a message's tool calls; whether there are any."""
    if "tool_calls" not in message:
        return False
    message["tool_calls"] = [
        {
            **call,
            "function": {**call["function"], "arguments": _json(call["function"]["arguments"])},
        }
        for call in message["tool_calls"]
    ]
    return True


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common prefix."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
