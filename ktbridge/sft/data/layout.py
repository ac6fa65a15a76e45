"""Interpret rows of a file: alpaca, sharegpt and OpenAI messages, and preference pairs in each format.

A conversation becomes what the chat template takes: messages, and the tools that may be called in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.sft.data.messages import (
    IMAGE,
    PLACE,
    Conversation,
    Message,
    RowNotes,
    Tags,
    Tool,
    as_turns,
    is_empty,
    is_like_a_switch,
    message,
    read_messages,
    read_tools,
)
from ktbridge.sft.data.pictures import Picture, read_picture


@dataclass(frozen=True)
class Pair:
    """A question with a better and a worse answer; every part is a list of messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Tool] = field(default_factory=list)


def ending_in_answer(messages: list[Message]) -> list[Message]:
    """The messages, when the last one is the assistant's; else raises ValueError."""
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise ValueError(f"the last message is not the assistant's: its role is {role}")
    return messages


COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "images": "images",
    "videos": "videos",
    "audios": "audios",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "kto_tag",
}
"""LLaMA-Factory's column names, and their default keys."""
MEANINGFUL = ("videos", "video", "audios", "audio", "kto_tag", "loss_mask")
"""Fields that change what is learned from a row and that are not trained on: refused, never skipped."""
_IMAGES = ("images", "image")
_OTHER_LOSS = ("kto_tag", "loss_mask")
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
"""What tables write for flags."""
_FOR_ROWS = ("loss_weight", "loss_scale", "train", "training", "trainable")
"""Switches of messages that mean the same beside them; ``weight`` and ``loss`` are names of other numbers."""
NOT_USED = ("id", "_dataset_name")
"""Fields that name a row and mean nothing for training."""


@dataclass(frozen=True)
class Layout:
    """How the rows of one dataset are laid out.

    ``formatting`` None: detected from each row's keys. ``columns``: from LLaMA-Factory's names to the keys
    of the file; a name that is missing is not read.
    """

    formatting: str | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: dict(COLUMNS))
    tags: Tags = field(default_factory=Tags)
    folders: tuple[Path, ...] = ()
    """Where images with relative paths are looked for."""


def read_conversation(row: object, layout: Layout, notes: RowNotes) -> Conversation:
    """One row's messages, the last one the assistant's, and tools; what is to be said is added to ``notes``.

    Raises ValueError with the reason, as a short phrase, when the row can't be trained on.
    """
    return _conversation(_Fields(row, layout), layout, notes)


def read_judged(row: object, layout: Layout, notes: RowNotes) -> Conversation:
    """One row's conversation, whose last answer is judged ``good`` or not; else as ``read_conversation``.

    The judgement is LLaMA-Factory's column ``kto_tag``, or a field ``label`` as in trl's rows: true or false.
    """
    fields = _Fields(row, layout, judged=True)
    given = fields.take("kto_tag")
    if given is None and layout.formatting is None:
        given = fields.take_key("label")
    if given is None:
        raise ValueError("no judgement: stage kto needs kto_tag (or label), true or false")
    good = given if isinstance(given, bool) else _FLAGS.get(str(given).strip().lower())
    if good is None:
        raise ValueError(f"a judgement that is neither true nor false: {given!r}")
    found = _conversation(fields, layout, notes)
    if len(found) < 2 or found[-1].get("weight", 1) == 0:
        raise ValueError("an answer that is not to be learned, or without a prompt")
    if found.pictures:
        raise ValueError("with images: stage kto judges answers of text")
    found.good = good
    return found


def _conversation(fields: _Fields, layout: Layout, notes: RowNotes) -> Conversation:
    if not is_empty(fields.get("chosen")) and not is_empty(fields.get("rejected")):
        raise ValueError("a preference pair: stage dpo trains on it")
    kind = layout.formatting or fields.detect_format()
    if kind == "completion":
        prompt = _trl_prompt(fields.take_key("prompt"), layout, notes, fields.parts)
        messages = _with_system(fields, prompt)
        messages += _answer(fields.take_key("completion"), layout, notes)
    elif kind == "alpaca":
        if not fields.has("prompt") or not fields.has("response"):
            raise fields.of_no_known_form()
        messages = _alpaca_prompt(fields)
        messages.append(message("assistant", fields.take("response")))
    elif kind == "messages":
        found = read_messages(fields.take("messages"), layout.tags, notes, fields.parts)
        messages = _with_system(fields, found)
    else:
        raise fields.of_no_known_form()
    messages = as_turns(messages, notes)
    tools, pictures = fields.tools(), fields.pictures(messages)
    notes.fields |= fields.left()
    return Conversation(ending_in_answer(messages), tools, pictures)


def read_document(row: object, layout: Layout, notes: RowNotes) -> Conversation:
    """A row of raw text, as one message of the role "text"; as ``read_conversation`` otherwise.

    The text is the column ``text`` or, where an entry of dataset_info.json names another, ``prompt``.
    """
    fields = _Fields(row, layout)
    fields.without_images("stage pt trains on text")
    text = fields.take("prompt") if layout.formatting else fields.take_key("text")
    if text is None:
        raise ValueError(
            "no text: stage pt trains on a field text, or the column that prompt names"
        )
    found = message("text", text)
    notes.fields |= fields.left()
    return Conversation([found])


def read_pair(row: object, layout: Layout, notes: RowNotes) -> Pair:
    """The preference pair of one row; as ``read_conversation`` otherwise."""
    fields = _Fields(row, layout)
    fields.without_images("stage dpo compares answers of text")
    chosen, rejected = fields.take("chosen"), fields.take("rejected")
    if is_empty(chosen) or is_empty(rejected):
        raise ValueError("no pair of answers: stage dpo needs chosen and rejected")
    better, worse = (as_turns(_answer(value, layout, notes), notes) for value in (chosen, rejected))
    kind = layout.formatting or ("" if fields.has_key("prompt") else fields.detect_format())
    if kind == "alpaca":
        prompt = _alpaca_prompt(fields)
    elif kind == "messages":
        prompt = _with_system(fields, read_messages(fields.take("messages"), layout.tags, notes))
    else:
        prompt = _trl_prompt(fields.take_key("prompt"), layout, notes)
        shared = _shared(better, worse) if len(better) > 1 and len(worse) > 1 else 0
        # trl's and LLaMA-Factory v1's pairs may repeat the prompt in both answers instead of, or beside,
        # giving it.
        if shared and (not prompt or prompt == better[:shared][-len(prompt) :]):
            prompt, better, worse = better[:shared], better[shared:], worse[shared:]
        prompt = _with_system(fields, prompt)
    prompt, tools = as_turns(prompt, notes), fields.tools()
    notes.fields |= fields.left()
    return _checked(Pair(prompt, better, worse, tools))


def fill_identity(messages: list[Message], names: Mapping[str, str | None]) -> None:
    """Fill {{name}} and {{author}} of LLaMA-Factory's identity.json in; text with code is left as it is.

    Raises ValueError for one without a value.
    """
    for each in messages:
        text = each["content"]
        for key, value in names.items():
            place = "{{" + key + "}}"
            if place not in text or "`" in text or "<" in text:
                continue
            if value is None:
                raise ValueError(
                    f"{place} in a text: identity_{key} in the configuration fills it in"
                )
            each["content"] = each["content"].replace(place, value)


class _Fields:
    """The fields of one row, and which of them have been read."""

    def __init__(self, row: object, layout: Layout, judged: bool = False) -> None:
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__} instead of an object")
        self._columns, self._formatting = dict(layout.columns), layout.formatting
        if layout.formatting is None:
            own = {
                "messages": "messages",
                "chosen": "chosen_messages",
                "rejected": "rejected_messages",
            }
            self._columns |= {name: key for name, key in own.items() if key in row}
        self._row, self._read, self._folders = row, set(NOT_USED), layout.folders
        self.parts: list[object] = []
        """What stands for images in the messages themselves."""
        tag = self._columns.get("kto_tag")
        for name in (*MEANINGFUL, *(self._columns.get(name, "") for name in MEANINGFUL)):
            if not is_empty(row.get(name)) and not (judged and name in ("kto_tag", tag)):
                kind = name in (*_OTHER_LOSS, tag)
                why = "every answer counts alike" if kind else "only text and images are trained on"
                raise ValueError(f"with {name}: {why}")
        for name in _FOR_ROWS:
            if is_like_a_switch(name, given := row.get(name)):
                if given != 1:
                    raise ValueError(f"with {name} {given!r}: every row counts alike")
                self._read.add(name)

    def has(self, name: str) -> bool:
        return self._columns.get(name) in self._row

    def has_key(self, key: str) -> bool:
        return key in self._row

    def get(self, name: str) -> object:
        return self._row.get(self._columns[name]) if name in self._columns else None

    def take(self, name: str) -> object:
        self._read.add(self._columns.get(name, ""))
        return self.get(name)

    def take_key(self, key: str) -> object:
        self._read.add(key)
        return self._row.get(key)

    def tools(self) -> list[Tool]:
        """OpenAI's ``tools`` or their older name, or the column that the layout names."""
        given = [self.take("tools"), self.take_key("functions")]
        return next((read_tools(value) for value in given if not is_empty(value)), [])

    def without_images(self, why: str) -> None:
        """Raise ValueError for a row with images, because of ``why``."""
        if any(not is_empty(self._row.get(name)) for name in self._image_fields()):
            raise ValueError(f"with images: {why}")

    def pictures(self, messages: list[Message]) -> list[Picture]:
        """The images for the places that ``messages`` have for them.

        ``PLACE`` in a text is one where the row has a field of images, even an empty one; else it is text.
        """
        names = self._image_fields()
        self._read.update(names)
        lists = [self._row[name] for name in names if isinstance(self._row.get(name), list)]
        given = next((self._row[name] for name in names if not is_empty(self._row.get(name))), None)
        if given is None and lists and not self.parts:
            given = lists[0]
        values: list[object] = [*self.parts]
        if given is not None:
            if any(part is not None for part in values):
                raise ValueError("with images twice: as a field and in the messages")
            values = given if isinstance(given, list) else [given]
            for each in messages:
                each["content"] = each["content"].replace(PLACE, IMAGE)
        places = sum(each["content"].count(IMAGE) for each in messages)
        if places != len(values):
            raise ValueError(
                f"images without a place of their own: {len(values)} for {places} times {PLACE}"
            )
        if any(IMAGE in each["content"] for each in messages if each["role"] == "assistant"):
            raise ValueError("an image in an answer: only text is learned")
        return [read_picture(value, self._folders) for value in values]

    def _image_fields(self) -> list[str]:
        """The column that is named for them, and the usual names."""
        return [*dict.fromkeys([*filter(None, [self._columns.get("images")]), *_IMAGES])]

    def left(self) -> set[str]:
        return {
            str(key)
            for key, value in self._row.items()
            if key not in self._read and not is_empty(value)
        }

    def detect_format(self) -> str:
        if self.has("messages"):
            return "messages"
        if self.has_key("prompt") and self.has_key("completion"):
            return "completion"
        return "alpaca" if self.has("prompt") else ""

    def of_no_known_form(self) -> ValueError:
        keys = ", ".join(sorted(map(str, self._row))) or "(none)"
        forms = "messages, conversations, instruction and output, or prompt and completion"
        if self._formatting is not None:
            forms = " and ".join(self._columns.get(name, name) for name in ("prompt", "response"))
        return ValueError(f"no known form: keys {keys}, not {forms}")


def _alpaca_prompt(fields: _Fields) -> list[Message]:
    """LLaMA-Factory's reading: system, then history's pairs, then instruction and input on two lines."""
    question, more = fields.take("prompt") or "", fields.take("query") or ""
    history = fields.take("history") or []
    if not isinstance(question, str) or not isinstance(more, str):
        raise ValueError("instruction or input that is not text")
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("history that is not a list of [question, answer]")
    messages = []
    for earlier, answer in history:
        messages.append(message("user", earlier))
        messages.append(message("assistant", answer))
    messages.append(message("user", "\n".join(filter(None, (question, more)))))
    return _with_system(fields, messages)


def _with_system(fields: _Fields, messages: list[Message]) -> list[Message]:
    system = fields.take("system")
    if is_empty(system):
        return messages
    if messages and messages[0]["role"] == "system":
        raise ValueError("two system messages, one as a field and one among the messages")
    return [message("system", system), *messages]


def _answer(value: object, layout: Layout, notes: RowNotes) -> list[Message]:
    if isinstance(value, str):
        return [message("assistant", value)]
    return read_messages([value] if isinstance(value, dict) else value, layout.tags, notes)


def _trl_prompt(
    value: object, layout: Layout, notes: RowNotes, images: list[object] | None = None
) -> list[Message]:
    if is_empty(value):
        return []
    if isinstance(value, str):
        return [message("user", value)]
    return read_messages(value, layout.tags, notes, images)


def _shared(first: list[Message], second: list[Message]) -> int:
    """Number of leading messages in common, at most all but the last of the shorter."""
    most = min(len(first), len(second)) - 1
    return next((i for i in range(most) if first[i] != second[i]), most)


def _checked(pair: Pair) -> Pair:
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if [part["role"] for part in answer] != ["assistant"]:
            roles = ", ".join(part["role"] for part in answer)
            raise ValueError(f"{name} is not one assistant message: its roles are {roles}")
    if not pair.prompt or pair.prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError("a pair whose prompt does not end in a user message or a tool's result")
    if pair.chosen == pair.rejected:
        raise ValueError("chosen and rejected are the same: nothing to prefer")
    return pair
