"""A tokenizer's chat template: messages to text, as servers write prompts with it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

import yaml

from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem
from ktbridge.sft.data.messages import IMAGE, Message, Tool, content_with_thoughts, split_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CharRange = tuple[int, int]
"""A character range [start, end) of a text."""
MARK = "\u241e\u241f\u241e"
"""Placeholder of an answer, to find where a template puts it."""
_QUESTION: Message = {"role": "user", "content": "0"}
_PROBE = (("Hi.", "Hello."), ("Who are you?", "A model."))
"""Questions and answers by which two templates are compared."""
_BEFORE, _AFTER = 16, 32
"""Characters shown of two texts around the place where they differ."""


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a request beside its messages: the tools, and thinking on, off or (None) not mentioned."""

    tools: Sequence[Tool] = field(default=())
    thinking: bool | None = None


class TemplateRenderer:
    """Writes messages with a tokenizer's chat template.

    Thoughts are given to the template as ``reasoning_content`` (gpt-oss: ``thinking``) if it reads that, else
    in front of ``content``. Arguments of tool calls are objects, as servers pass them, or if a template joins
    them to text (DeepSeek), their JSON. Raises KtbridgeError for a tokenizer without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, so conversations have no "
                "form to train on.",
                "Put chat_template.jinja into that directory; the model's instruct or chat variant has one.",
            )
        self._special_tokens = tokenizer.special_tokens_map
        self.template = tokenizer.get_chat_template()
        self.thoughts_key = ""
        """Key of a message from which the template reads thoughts; "" if it knows of none."""
        keys = ("reasoning_content", "thinking")
        self.thoughts_key = next((key for key in keys if MARK in self._probe_thoughts(key)), "")
        on, off = (self._probe_prompt(thinking) for thinking in (True, False))
        self.has_switch = on != off
        """True if a server's prompt depends on enable_thinking."""

    def __call__(
        self,
        messages: Sequence[Message],
        options: TemplateOptions = TemplateOptions(),
        opened: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[CharRange]]:
        """Return the text, and if ``marked`` the ranges within {% generation %}.

        ``opened``: up to where the model goes on, as a server sends it. Raises ValueError with the template's
        own message if it refuses the conversation.
        """
        from jinja2 import TemplateError

        given = [self._template_message(message) for message in messages]
        try:
            try:
                return self._render(given, options, opened, marked)
            except TypeError:
                if not sum(map(_write_arguments, given)):  # writes those of all messages
                    raise
                return self._render(given, options, opened, marked)
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _render(
        self, given: list[dict[str, Any]], options: TemplateOptions, opened: bool, marked: bool
    ) -> tuple[str, list[CharRange]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = dict(self._special_tokens)
        if options.thinking is not None:  # "thinking" is DeepSeek-V3.1's and Kimi's name
            values |= {"enable_thinking": options.thinking, "thinking": options.thinking}
        rendered: Any = render_jinja_template(
            conversations=[given],
            tools=list(options.tools) or None,
            chat_template=self.template,
            add_generation_prompt=opened,
            return_assistant_tokens_mask=marked,
            **values,
        )
        texts, spans = rendered
        return texts[0], spans[0] if marked else []

    def _template_message(self, message: Message) -> dict[str, Any]:
        """Return the message as the template reads it."""
        plain: dict[str, Any] = {key: value for key, value in message.items() if key != "weight"}
        thoughts, said = split_thoughts(message)
        if thoughts is None:
            if IMAGE in message["content"]:
                plain["content"] = _split_images(message["content"])
            return plain
        plain.pop("reasoning_content", None)
        plain["content"] = said if self.thoughts_key else content_with_thoughts(message)
        if self.thoughts_key and thoughts:
            plain[self.thoughts_key] = thoughts
        return plain

    def _probe_thoughts(self, key: str) -> str:
        """Write an answer with thoughts under ``key``; "" if the template refuses it."""
        answer: Message = {"role": "assistant", "content": "0", "reasoning_content": MARK}
        before, self.thoughts_key = self.thoughts_key, key
        try:
            return self([_QUESTION, answer])[0]
        except ValueError:
            return ""
        finally:
            self.thoughts_key = before

    def _probe_prompt(self, thinking: bool) -> str:
        try:
            return self([_QUESTION], TemplateOptions(thinking=thinking), opened=True)[0]
        except ValueError:
            return ""


def _split_images(content: str) -> list[dict[str, str]]:
    """Return content with images as a list of parts, the form in which templates know them."""
    first, *rest = content.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def _write_arguments(message: dict[str, Any]) -> bool:
    """Write the arguments of a message's tool calls as JSON; return whether there are any."""
    if "tool_calls" not in message:
        return False
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(each["arguments"], ensure_ascii=False) for each in functions]
    message["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]
    return True


def check_tools(render: TemplateRenderer, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise ValueError if the template leaves out tools, calls or results of these messages."""
    options = TemplateOptions(tools)
    if tools and render(messages, options) == render(messages):
        raise ValueError(
            "the chat template has no place for tools: a model that is served with it never sees them"
        )
    marks: list[str] = []  # each its own: gpt-oss repeats a call's name in front of its result

    def add_mark() -> str:
        marks.append(f"{MARK}{len(marks)}{MARK}")
        return marks[-1]

    marked = [cast("Message", dict(message)) for message in messages]
    for message in marked:
        if message["role"] == "tool":
            message["content"] = add_mark()
        elif "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "function": {**cast("Tool", call["function"]), "name": add_mark()}}
                for call in message["tool_calls"]
            ]
    if marks and not all(mark in render(marked, options)[0] for mark in marks):
        raise ValueError("the chat template leaves tool calls, or their results, out")


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def template_notes(name: str | None, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Note if LLaMA-Factory's template ``name`` differs from the tokenizer's, or isn't known here."""
    if name is None:
        return []
    table = yaml.safe_load(files(__package__).joinpath("templates.yaml").read_text("utf-8"))
    known: dict[str, dict[str, str]] = {each: row for row in table for each in row["names"].split()}
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
        ours = TemplateRenderer(tokenizer)(messages)[0].rstrip()
    except ValueError as error:
        return [problem("KTC037", "template", f"{name!r}: not compared, {error}")]
    theirs = _write_probe(known[name], tokenizer).rstrip()
    if ours == theirs:
        return []
    place = common_prefix(ours, theirs)
    here = slice(max(0, place - _BEFORE), place + _AFTER)
    found = f"{name!r} of LLaMA-Factory has {theirs[here]!r}"
    expected = f"{ours[here]!r}, as the chat template has it, which is used"
    return [problem("KTC036", "template", found, expected)]


def _write_probe(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Write the probe as LLaMA-Factory does by a row of templates.yaml."""
    text = row.get("prefix", "")
    for number, (question, answer) in enumerate(_PROBE, 1):
        thought = row.get("thought", "") if number == len(_PROBE) else ""
        text += row["user"].replace("{content}", question)
        text += thought + row["answer"].replace("{content}", answer)
    for place, token in (("{bos}", tokenizer.bos_token), ("{eos}", tokenizer.eos_token)):
        text = text.replace(place, str(token or ""))
    return text
