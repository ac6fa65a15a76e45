"""One conversation as the chat template takes it: messages of plain text, each by one of three roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES = {**ROLES, "human": "user", "gpt": "assistant"}

TOOL_ROLES = ("tool", "function", "observation", "function_call")
MEANINGFUL_IN_MESSAGE = (
    "tool_calls", "function_call", "tool_call_id", "weight", "prefix", "refusal", "audio", "images",
    "videos", "audios", "reasoning_content", "reasoning", "thinking",
)  # fmt: skip
"""Keys that change what a message means or whether it is learned: refused, never skipped."""


@dataclass(frozen=True)
class Pair:
    """A question with a better and a worse answer; every part is a list of messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


@dataclass(frozen=True)
class Tags:
    """A file's message format: the keys of role and text, and the names of the roles.

    ``None`` for a key: ``role`` or ``from``, ``content`` or ``value``, whichever the message has.
    """

    role: str | None = None
    content: str | None = None
    roles: Mapping[str, str] | None = None
    tools: tuple[str, ...] = TOOL_ROLES


def is_empty(value: Any) -> bool:
    """Whether a field is empty: exporters write such columns for every row."""
    return value is None or value in ("", "[]", "{}", [], {})


def read_messages(values: Any, tags: Tags, unused: set[str]) -> list[Message]:
    """A list of messages in a file's format; unread keys are added to ``unused``.

    Raises ValueError with the reason, as a short phrase, when one of them can't be trained on.
    """
    if not isinstance(values, list) or not values:
        raise ValueError("messages is not a list with something in it")
    return [_read_message(value, tags, unused) for value in values]


def ending_in_answer(messages: list[Message]) -> list[Message]:
    """The messages, when the last one is the assistant's; else raises ValueError."""
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's: nothing to learn")
    return messages


def message(role: str, content: Any) -> Message:
    """One message of plain text. Raises ValueError for anything else, and for a text with nothing in it."""
    content = _text(role, content)
    if not content.strip():
        raise ValueError(f"an empty {role} message")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character (a lone surrogate) in a {role} message") from error
    return {"role": role, "content": content}


def _read_message(value: Any, tags: Tags, unused: set[str]) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"a message that is a {type(value).__name__}, not an object")
    role_key = tags.role or ("role" if "role" in value else "from")
    content_key = tags.content or ("content" if "content" in value else "value")
    role = value.get(role_key)
    roles = tags.roles or SHAREGPT_ROLES
    if isinstance(role, str) and role in tags.tools and role not in roles:
        raise ValueError(f"a {role} message: tool calls are not trained on")
    if not isinstance(role, str) or role not in roles:
        raise ValueError(f"a message whose role is not {', '.join(roles)}")
    for key in value.keys() - {role_key, content_key}:
        if is_empty(value[key]):
            continue
        if key in MEANINGFUL_IN_MESSAGE:
            raise ValueError(f"a message with {key}: that is not trained on")
        unused.add(f"{key} of a message")
    return message(roles[role], value.get(content_key))


def _text(role: str, content: Any) -> str:
    if isinstance(content, list):  # OpenAI's content parts
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"content that is not text ({kind}) in a {role} message")
        return "".join(part["text"] for part in content)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"content that is not text ({type(content).__name__}) in a {role} message")
    return content
