"""Interpret messages: texts, thoughts, tool calls and their results, in OpenAI's and sharegpt's spellings.

They become what a server hands to the chat template: ``tool_calls`` whose arguments are objects, results
with the role "tool".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypedDict, cast

from ktbridge.sft.data.pictures import Picture

Tool = dict[str, object]
"""A function that the model may call, as OpenAI describes it: ``type`` and ``function``."""


class _Plain(TypedDict):
    role: str
    content: str


class Message(_Plain, total=False):
    """One message. ``weight`` 0: an answer that is not learned."""

    reasoning_content: str
    tool_calls: list[Tool]
    tool_call_id: str
    name: str
    weight: int


class Conversation(list[Message]):
    """Messages in order; ``tools`` are those that the model may call in it.

    ``good``: how the last answer was judged, for stage kto. ``pictures`` are its images, in the order of the
    places (``IMAGE``) that the messages' contents have for them.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        tools: Iterable[Tool] = (),
        pictures: Iterable[Picture] = (),
        good: bool | None = None,
    ) -> None:
        super().__init__(messages)
        self.tools, self.pictures, self.good = list(tools), list(pictures), good

    def as_row(self) -> dict[str, object]:
        """As a row to be read again, but for images that stood in it."""
        row: dict[str, object] = {"messages": self}
        if self.pictures:
            shown = ({**each, "content": each["content"].replace(IMAGE, PLACE)} for each in self)
            row = {"messages": [*shown], "images": [picture.name for picture in self.pictures]}
        return row | ({"tools": self.tools} if self.tools else {})


IMAGE = "\u241e\U0001f5bc\u241e"
"""The place of an image in a message's content."""
PLACE = "<image>"
"""The same in LLaMA-Factory's rows."""
_IMAGE_PARTS = ("image", "image_url", "input_image")


_CALL = "function_call"
ROLES = {
    "system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
    "function_call": _CALL, "tool_call": _CALL,
}  # fmt: skip
"""The names of roles in OpenAI's and sharegpt's rows; a function_call's text is the call as JSON."""
_REFUSED = ("prefix", "refusal", "audio", "images", "videos", "audios")
"""Keys that change what a message means: refused, never skipped."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "loss")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


@dataclass(frozen=True)
class Tags:
    """A file's message format: the keys of role and text, and the names of the roles.

    ``None`` for a key: ``role`` or ``from``, ``content`` or ``value``, whichever the message has.
    """

    role: str | None = None
    content: str | None = None
    roles: Mapping[str, str] | None = None


def is_empty(value: object) -> bool:
    """Whether a field is empty: exporters write such columns for every row."""
    return value is None or value in ("", "[]", "{}", [], {})


def read_messages(
    values: object, tags: Tags, unused: set[str], images: list[object] | None = None
) -> list[Message]:
    """A list of messages in a file's format; unread keys are added to ``unused``.

    What stands for an image in content parts is added to ``images`` (None: the row's own field has it), and
    ``IMAGE`` stands in its place; without ``images`` such parts are refused.
    Raises ValueError with the reason, as a short phrase, when one of them can't be trained on.
    """
    if not isinstance(values, list) or not values:
        raise ValueError("messages is not a list with something in it")
    return [_read_message(value, tags, unused, images) for value in values]


def message(
    role: str, content: object, empty: bool = False, images: list[object] | None = None
) -> Message:
    """One message of text. Raises ValueError for anything else, and unless ``empty`` for an empty text."""
    content = _text(role, content, images)
    if not content.strip() and not empty:
        raise ValueError(f"an empty {role} message")
    _check_characters(content, role)
    return {"role": role, "content": content}


def read_tools(value: object) -> list[Tool]:
    """The functions of a row, a list or its JSON, each by itself or as OpenAI's ``{"type": "function"}``.

    Raises ValueError as ``read_messages`` does.
    """
    found = _parsed(value, "tools")
    tools: list[Tool] = []
    for tool in found if isinstance(found, list) else [found]:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(inner, dict) or not inner.get("name"):
            raise ValueError("tools that are not a list of functions with a name each")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    _check_characters(json.dumps(tools, ensure_ascii=False), "tools")
    return tools


def thoughts_of(each: Message) -> tuple[str | None, str]:
    """An answer's thoughts (``reasoning_content``, or a block that ``content`` begins with) and what it says.

    None: there is no block; "": an empty one.
    """
    if each["role"] != "assistant":
        return None, each["content"]
    if "reasoning_content" in each:
        return each["reasoning_content"], each["content"]
    found = _BLOCK.fullmatch(each["content"])
    return (found[1].strip(), found[2].lstrip("\n")) if found else (None, each["content"])


def in_content(each: Message) -> str:
    """The answer with its thoughts in front, as models write them that were trained on DeepSeek-R1's form."""
    if "reasoning_content" not in each:
        return each["content"]
    return f"<think>\n{each['reasoning_content']}\n</think>\n\n{each['content']}"


def without_thoughts(each: Message) -> Message:
    """The message without its thoughts."""
    kept = {key: value for key, value in each.items() if key != "reasoning_content"}
    return cast("Message", {**kept, "content": thoughts_of(each)[1]})


def all_text(each: Message) -> str:
    """Everything a message says, to be measured or compared."""
    calls = json.dumps(each["tool_calls"], ensure_ascii=False) if "tool_calls" in each else ""
    return in_content(each) + calls


def _read_message(
    value: object, tags: Tags, unused: set[str], images: list[object] | None
) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"a message that is a {type(value).__name__}, not an object")
    role_key = tags.role or ("role" if "role" in value else "from")
    content_key = tags.content or ("content" if "content" in value else "value")
    role, content = value.get(role_key), value.get(content_key)
    roles = tags.roles or ROLES
    if not isinstance(role, str) or role not in roles:
        raise ValueError(f"a message whose role is not {', '.join(roles)}")
    role = roles[role]
    extra = {key: found for key, found in value.items() if not is_empty(found)}
    extra.pop(role_key, None), extra.pop(content_key, None)
    if role == _CALL:
        read = _call_message(content)
    elif role == "assistant":
        read = _answer(content, extra)
    else:
        read = message(role, content, role == "tool", images)
    _weigh(read, extra)
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(found := extra.pop(key, None), str):
                read[key] = found  # type: ignore[literal-required]  # one of its keys
    for key in extra:
        if key in (*_REFUSED, "tool_calls", "function_call"):
            raise ValueError(f"a {role} message with {key}: that is not trained on")
        unused.add(f"{key} of a message")
    return read


def _answer(content: object, extra: dict[str, object]) -> Message:
    """The assistant's message; what is read of ``extra`` is taken out of it."""
    calls = extra.pop("tool_calls", None) or extra.pop("function_call", None)
    read = message("assistant", content, empty=calls is not None)
    if calls is not None:
        read["tool_calls"] = _calls(calls)
    thoughts = [extra.pop(key) for key in _THOUGHTS if key in extra]
    if not thoughts:
        return read
    if not isinstance(thoughts[0], str) or any(other != thoughts[0] for other in thoughts):
        raise ValueError("thoughts that are not one text")
    if thoughts_of(read)[0]:
        raise ValueError("thoughts twice, as a field and in the content")
    _check_characters(thoughts[0], "assistant")
    if thoughts[0].strip():
        read["content"] = thoughts_of(read)[1]
        read["reasoning_content"] = thoughts[0].strip()
    return read


def _call_message(content: object) -> Message:
    """sharegpt's: one call or a list of them as JSON, which a block of thoughts may precede."""
    read: Message = {"role": "assistant", "content": content if isinstance(content, str) else ""}
    thoughts, text = thoughts_of(read)
    read["content"] = ""
    read["tool_calls"] = _calls(text if isinstance(content, str) else content)
    if thoughts:
        read["reasoning_content"] = thoughts
    return read


def _calls(value: object) -> list[Tool]:
    found = _parsed(value, "tool calls")
    calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
    if not calls:
        raise ValueError("tool calls without a call")
    _check_characters(json.dumps(calls, ensure_ascii=False), "assistant")
    return calls


def _call(value: object) -> Tool:
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(inner, dict):
        raise ValueError("a tool call that is not an object")
    name, given = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without the function's name")
    arguments = {} if is_empty(given) else _parsed(given, "a tool call's arguments")
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments that are not a JSON object")
    call: Tool = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _weigh(read: Message, extra: dict[str, object]) -> None:
    for key in _WEIGHTS:
        value = extra.pop(key, None)
        if value not in (None, 0, 1):
            raise ValueError(f"a message with {key} {value!r}: an answer is learned (1) or not (0)")
        if value and key == "loss" and read["role"] != "assistant":
            raise ValueError(f"a {read['role']} message with {key}: only answers are learned")
        if value is not None and not value and read["role"] == "assistant":
            read["weight"] = 0


def _parsed(value: object, what: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} that are not JSON: {error}") from error


def _check_characters(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = where if where == "tools" else f"a {where} message"
        raise ValueError(f"half a character (a lone surrogate) in {what}") from error


def _text(role: str, content: object, images: list[object] | None = None) -> str:
    """``images``: where content parts may be images, too."""
    if isinstance(content, list):  # OpenAI's content parts
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind in _IMAGE_PARTS and images is not None:
                images.append(next((part[key] for key in _IMAGE_PARTS if part.get(key)), None))
                texts.append(IMAGE)
            elif kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise ValueError(f"content that is not text ({kind}) in a {role} message")
        return "".join(texts)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"content that is not text ({type(content).__name__}) in a {role} message")
    return content
