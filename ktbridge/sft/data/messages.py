"""Messages of a row: texts, thoughts, tool calls and results, in OpenAI's, sharegpt's and other spellings.

They become what a server gives to the chat template: ``tool_calls`` whose arguments are objects, results
with the role "tool", and one message for each turn of the assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import TypedDict, cast

from ktbridge.errors import did_you_mean

Tool = dict[str, object]
"""A function that the model may call, as OpenAI describes it: ``type`` and ``function``."""


class _Plain(TypedDict):
    role: str
    content: str


class Message(_Plain, total=False):
    """A message. ``weight`` 0: an answer that is not learned."""

    reasoning_content: str
    tool_calls: list[Tool]
    tool_call_id: str
    name: str
    weight: int


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
SWITCHES = (
    "weight", "loss", "loss_weight", "loss_scale", "loss_mask", "train", "training", "trainable",
    "train_on_turn",
)  # fmt: skip
"""Names of the switch that says whether a message is learned: OpenAI's ``weight``, ms-swift's ``loss`` and
``loss_scale``, LLaMA-Factory v1's ``loss_weight``, axolotl's ``train`` and ``training``, verl's ``trainable``
and ``loss_mask``."""
_SWITCH_LIKE = re.compile("loss|train|learn|mask|weight|supervis|ignor|exclu|skip", re.IGNORECASE)
_FLAG_WORDS = ("true", "false", "yes", "no", "on", "off", "0", "1", "0.0", "1.0")
_CLOSE = r"(?:(?<![`'\"])</think>|</think>(?![`'\"]))"
_TAG = re.compile(rf"(?<![`'\"])<think>|<think>(?![`'\"])|{_CLOSE}")
"""A tag of thoughts; between quotes or backticks it is a word of the text."""
_BLOCK = re.compile(rf"\s*<think>(.*?){_CLOSE}(.*)", re.DOTALL)
_PARTS = {"reasoning": "thoughts", "thinking": "thoughts", "tool_call": _CALL}
"""Types of content parts that aren't text: LLaMA-Factory v1's, and Anthropic's of thoughts."""
_VALUES = ("text", "value", "thinking", "reasoning")
"""Keys of a content part that its text may stand under."""


@dataclass
class RowNotes:
    """Notes on a row that can be used."""

    fields: set[str] = field(default_factory=set)
    """Fields of the row that are not read."""
    keys: set[str] = field(default_factory=set)
    """Keys of its messages that are not read."""
    joined: bool = False
    """True if neighboring messages of the assistant were joined into one turn."""

    @property
    def unread(self) -> list[str]:
        return sorted({*self.fields, *(f"{key} of a message" for key in self.keys)})


@dataclass(frozen=True)
class Tags:
    """Spelling of a dataset's messages: the keys of role and text, and the names of the roles.

    ``None`` for a key: ``role`` or ``from``, ``content`` or ``value``, whichever the message has.
    """

    role: str | None = None
    content: str | None = None
    roles: Mapping[str, str] | None = None


def is_empty(value: object) -> bool:
    """Return whether a field is empty: exporters write such columns for every row."""
    return value is None or value in ("", "[]", "{}", [], {})


def looks_like_switch(key: object, value: object) -> bool:
    """Return whether a key and its value seem to say whether, or what of a message, is learned."""
    if isinstance(value, int | float):
        likely = 0 <= value <= 1
    else:
        likely = isinstance(value, list | dict) or str(value).strip().lower() in _FLAG_WORDS
    return likely and _SWITCH_LIKE.search(str(key)) is not None


def read_messages(
    values: object, tags: Tags, notes: RowNotes, images: list[object] | None = None
) -> list[Message]:
    """Read a list of messages spelled as ``tags`` say; unread keys are added to ``notes``.

    Images of content parts are added to ``images`` (None: the row's own field has the image), and ``IMAGE``
    is written in their place; without ``images`` such parts are refused.
    Raises ValueError with the reason, as a short phrase, if a message can't be trained on.
    """
    if not isinstance(values, list) or not values:
        raise ValueError("messages is not a list with something in it")
    return [
        _read_message(value, tags, notes, images, f"message {number}")
        for number, value in enumerate(values, 1)
    ]


def join_turns(messages: list[Message], notes: RowNotes) -> list[Message]:
    """Join neighboring messages of the assistant into one turn: thoughts, then words, then tool calls.

    Raises ValueError as ``read_messages`` for another order, and for thoughts alone.
    """
    turns: list[Message] = []
    for role, group in groupby(messages, lambda each: each["role"]):
        several = [*group]
        if role != "assistant":
            turns += several
            continue
        if len({each.get("weight", 1) for each in several}) > 1:
            raise ValueError("assistant messages in a row of which only some are learned: they are one turn")
        notes.joined |= len(several) > 1
        turns.append(reduce(_join_two, several))
    for each in turns:
        thoughts, said = split_thoughts(each)
        if each["role"] != "assistant" or said.strip() or "tool_calls" in each:
            continue
        if thoughts is None:
            raise ValueError("an empty assistant message")
        raise ValueError("thoughts without an answer or a tool call behind them")
    return turns


def _join_two(first: Message, second: Message) -> Message:
    (thoughts, said), (more, further) = split_thoughts(first), split_thoughts(second)
    if "tool_calls" in first and (more or further.strip()):
        raise ValueError("an answer behind a tool call whose result is missing")
    if more and said.strip():
        raise ValueError("thoughts behind the words of the same turn: no chat template writes that")
    texts = first["content"], second["content"]
    if thoughts or more:
        texts = said, further
    spoken = [text for text in texts if text.strip()] or [""]
    joined: Message = {**first, **second, "content": spoken[0]}
    for text in spoken[1:]:
        joined["content"] = joined["content"].rstrip("\n") + "\n\n" + text.lstrip("\n")
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    if thoughts or more:
        joined["reasoning_content"] = "\n\n".join(filter(None, (thoughts, more)))
    return joined


def make_message(
    role: str, content: object, empty: bool = False, images: list[object] | None = None
) -> Message:
    """Make a message of text. Raises ValueError for other content, and for an empty text unless ``empty``."""
    content = _read_text(role, content, images)
    if not content.strip() and not empty:
        raise ValueError(f"an empty {role} message")
    _check_surrogates(content, role)
    return {"role": role, "content": _join_thoughts(content) if role == "assistant" else content}


def _join_thoughts(content: str) -> str:
    """Join an answer's thoughts, if it has any, into one block at its head.

    ``</think>`` alone ends thoughts that the prompt opened. Raises ValueError for thoughts that don't end,
    and for tags elsewhere: templates would write such answers with another meaning.
    """
    tags = [found[0] for found in _TAG.finditer(content)]
    if not tags:
        return content
    if not content.lstrip().startswith("<think>"):
        if "</think>" not in tags:
            raise ValueError("thoughts that never end: <think> without </think>")
        if tags[0] == "<think>":
            raise ValueError("words in front of thoughts: <think> begins an answer")
        content = "<think>\n" + content.lstrip("\n")
    thoughts, rest = [], content
    while block := _BLOCK.fullmatch(rest):
        thoughts.append(block[1].strip())
        rest = block[2]
    behind = [found[0] for found in _TAG.finditer(rest)]
    if not thoughts or behind[-1:] == ["<think>"]:
        raise ValueError("thoughts that never end: <think> without </think>")
    if behind:
        raise ValueError(f"{behind[0]} behind an answer's words: thoughts are one block at its head")
    if len(thoughts) > 1:
        inner = "\n\n".join(filter(None, thoughts))
        return f"<think>\n{inner}\n</think>\n\n" + rest.lstrip("\n")
    return content


def read_tools(value: object) -> list[Tool]:
    """Read a row's functions, a list or its JSON, each by itself or as OpenAI's ``{"type": "function"}``.

    Raises ValueError as ``read_messages``.
    """
    found = _parse_json(value, "tools")
    tools: list[Tool] = []
    for tool in found if isinstance(found, list) else [found]:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(inner, dict) or not inner.get("name"):
            raise ValueError("tools that are not a list of functions with a name each")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    _check_surrogates(json.dumps(tools, ensure_ascii=False), "tools")
    return tools


def split_thoughts(each: Message) -> tuple[str | None, str]:
    """Split an answer into thoughts (``reasoning_content``, or a block at the head of ``content``) and words.

    Thoughts are None without a block, "" for an empty one.
    """
    if each["role"] != "assistant":
        return None, each["content"]
    if "reasoning_content" in each:
        return each["reasoning_content"], each["content"]
    found = _BLOCK.fullmatch(each["content"])
    return (found[1].strip(), found[2].lstrip("\n")) if found else (None, each["content"])


def content_with_thoughts(each: Message) -> str:
    """Return the content with thoughts in front, as models trained on DeepSeek-R1's form write them."""
    if "reasoning_content" not in each:
        return each["content"]
    return f"<think>\n{each['reasoning_content']}\n</think>\n\n{each['content']}"


def drop_thoughts(each: Message) -> Message:
    """Return the message without its thoughts."""
    kept = {key: value for key, value in each.items() if key != "reasoning_content"}
    return cast("Message", {**kept, "content": split_thoughts(each)[1]})


def all_text(each: Message) -> str:
    """Return thoughts, words and tool calls of a message, to be measured or compared."""
    calls = json.dumps(each["tool_calls"], ensure_ascii=False) if "tool_calls" in each else ""
    return content_with_thoughts(each) + calls


def _read_message(
    value: object, tags: Tags, notes: RowNotes, images: list[object] | None, where: str
) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"a message that is a {type(value).__name__}, not an object")
    role_key = tags.role or ("role" if "role" in value else "from")
    content_key = tags.content or ("content" if "content" in value else "value")
    role, content = value.get(role_key), value.get(content_key)
    roles = tags.roles or ROLES
    if role_key not in value:
        keys = ", ".join(map(str, value)) or "none"
        raise ValueError(f"a message without the key {role_key}: {where} has the keys {keys}")
    if not isinstance(role, str) or role not in roles:
        near = did_you_mean(str(role), roles)
        known = f"{where}; known are {', '.join(roles)}" + f". {near}" * bool(near)
        raise ValueError(f"a message with the unknown role {role!r}: {known}")
    role = roles[role]
    extra = {key: found for key, found in value.items() if not is_empty(found)}
    extra.pop(role_key, None), extra.pop(content_key, None)
    if role == _CALL:
        read = _read_call_message(content)
    elif role == "assistant":
        read = _read_answer(content, extra)
    else:
        read = make_message(role, content, role == "tool", images)
    _read_switches(read, extra)
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(found := extra.pop(key, None), str):
                read[key] = found  # type: ignore[literal-required]  # one of its keys
    for key, found in extra.items():
        if key == "prefix" and found is False:
            continue
        if key in (*_REFUSED, "tool_calls", "function_call"):
            raise ValueError(f"a {role} message with {key}: that is not trained on")
        if looks_like_switch(key, found):
            raise ValueError(
                f"a message with {key}: it may say what is learned, which {', '.join(SWITCHES)} say here"
            )
        notes.keys.add(key)
    return read


def _read_answer(content: object, extra: dict[str, object]) -> Message:
    """Read the assistant's message; keys that are read are removed from ``extra``."""
    calls = extra.pop("tool_calls", None) or extra.pop("function_call", None)
    fields = [extra.pop(key) for key in _THOUGHTS if key in extra]
    thoughts = fields[0] if fields else ""
    if not isinstance(thoughts, str) or any(other != thoughts for other in fields):
        raise ValueError("thoughts that are not one text")
    empty = calls is not None or bool(thoughts.strip())
    pieces = _split_parts(content) if isinstance(content, list) else []
    read = reduce(_join_two, pieces) if pieces else make_message("assistant", content, empty)
    if calls is not None:
        read["tool_calls"] = [*read.get("tool_calls", ()), *_read_calls(calls)]
    if not fields:
        return read
    said = split_thoughts(read)
    if said[0] and said[0] != thoughts.strip():
        raise ValueError("thoughts twice, as a field and in the content")
    _check_surrogates(thoughts, "assistant")
    if thoughts.strip():
        read["content"], read["reasoning_content"] = said[1], thoughts.strip()
    return read


def _split_parts(parts: list[object]) -> list[Message]:
    """Split the content parts of an answer into messages, one for each run of parts of a kind."""
    pieces: list[Message] = []
    for kind, group in groupby(parts, lambda part: _PARTS.get(_part_type(part), "text")):
        several = [*group]
        if kind == "text":
            pieces.append(make_message("assistant", several, empty=len(several) < len(parts)))
        elif kind == _CALL:
            calls = [call for part in several for call in _read_calls(_part_text(part))]
            pieces.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            texts = [_part_text(part) for part in several]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("thoughts that are not one text")
            inner = "\n\n".join(str(text).strip() for text in texts)
            _check_surrogates(inner, "assistant")
            piece: Message = {"role": "assistant", "content": ""}
            if inner.strip():
                piece["reasoning_content"] = inner
            pieces.append(piece)
    return pieces


def _read_call_message(content: object) -> Message:
    """Read sharegpt's message of calls: one or a list of them as JSON, perhaps behind a block of thoughts."""
    read: Message = {"role": "assistant", "content": ""}
    thoughts, text = None, content
    if isinstance(content, str) and content.lstrip()[:1] not in ("{", "["):  # there tags are values
        thoughts, text = split_thoughts(make_message("assistant", content))
    read["tool_calls"] = _read_calls(text)
    if thoughts:
        read["reasoning_content"] = thoughts
    return read


def _read_calls(value: object) -> list[Tool]:
    found = _parse_json(value, "tool calls")
    calls = [_read_call(each) for each in (found if isinstance(found, list) else [found])]
    if not calls:
        raise ValueError("tool calls without a call")
    _check_surrogates(json.dumps(calls, ensure_ascii=False), "assistant")
    return calls


def _read_call(value: object) -> Tool:
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(inner, dict):
        raise ValueError("a tool call that is not an object")
    name, given = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool call without the function's name")
    arguments = {} if is_empty(given) else _parse_json(given, "a tool call's arguments")
    if not isinstance(arguments, dict):
        raise ValueError("a tool call's arguments that are not a JSON object")
    call: Tool = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _read_switches(read: Message, extra: dict[str, object]) -> None:
    """Remove the message's switches from ``extra``; set ``read``'s weight to 0 if it isn't learned."""
    found: dict[str, bool] = {}
    for key in [key for key in SWITCHES if key in extra]:
        value = extra.pop(key)
        given = value if isinstance(value, list) else [value]  # one for each token
        if any(each not in (0, 1) for each in given) or len({*map(bool, given)}) != 1:
            raise ValueError(f"a message with {key} {value!r}: an answer is learned (1) or not (0)")
        found[key] = bool(given[0])
        if found[key] and key != "weight" and read["role"] != "assistant":
            raise ValueError(f"a {read['role']} message with {key}: only answers are learned")
    if len({*found.values()}) > 1:
        raise ValueError(f"switches that contradict each other: {' and '.join(found)} of a message")
    if read["role"] == "assistant" and False in found.values():
        read["weight"] = 0


def _parse_json(value: object, what: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} that are not JSON: {error}") from error


def _check_surrogates(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = where if where == "tools" else f"a {where} message"
        raise ValueError(f"half a character (a lone surrogate) in {what}") from error


def _part_type(part: object) -> str:
    return str(part.get("type")) if isinstance(part, dict) else type(part).__name__


def _part_text(part: object) -> object:
    """Return a content part's text: OpenAI's ``text``, or LLaMA-Factory v1's ``value``."""
    keys = (key for key in _VALUES if isinstance(part, dict) and part.get(key) is not None)
    key = next(keys, None)
    return part[key] if isinstance(part, dict) and key else None


def _read_text(role: str, content: object, images: list[object] | None = None) -> str:
    """Return content as one text; images among its parts are added to ``images``, None refuses them."""
    if isinstance(content, list):
        texts = []
        for part in content:
            kind, value = _part_type(part), _part_text(part)
            if isinstance(part, dict) and kind in _IMAGE_PARTS and images is not None:
                given = (part[key] for key in (*_IMAGE_PARTS, "value") if part.get(key))
                images.append(next(given, None))
                texts.append(IMAGE)
            elif kind == "text" and isinstance(value, str):
                texts.append(value)
            elif kind == "text":
                keys = ", ".join(map(str, part)) if isinstance(part, dict) else "none"
                raise ValueError(f"a text part ({role} message) without text: its keys are {keys}")
            else:
                raise ValueError(f"content that is not text ({kind}) in a {role} message")
        return "".join(texts)
    if content is None:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"content that is not text ({type(content).__name__}) in a {role} message")
    return content
