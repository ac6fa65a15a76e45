"""Rows of every form: raw rows of a file become ``TrainingRow``.

    form                     stage        keys of the raw row
    messages                 sft, kto     messages or conversations, each with a role and a text
    alpaca                   sft, kto     instruction, input, output; system, history
    prompt and completion    sft, kto     prompt, completion
    preference pair          dpo          chosen, rejected; the prompt in any of the forms above
    raw text                 pt           text

stage kto needs kto_tag (or label) beside the conversation. ``Layout.columns`` renames the keys. A new form is
a branch of ``_read_messages_of`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktbridge.sft.data.images import RowImage, read_image
from ktbridge.sft.data.messages import (
    IMAGE,
    PLACE,
    Message,
    RowNotes,
    Tags,
    Tool,
    is_empty,
    join_turns,
    looks_like_switch,
    make_message,
    read_messages,
    read_tools,
    split_thoughts,
)

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
_MEANINGFUL = ("videos", "video", "audios", "audio", "kto_tag", "loss_mask")
"""Fields that change what is learned from a row and that are not trained on: refused, never skipped."""
_IMAGE_FIELDS = ("images", "image")
_OTHER_LOSS = ("kto_tag", "loss_mask")
_FLAGS = {"true": True, "false": False, "1": True, "0": False}
"""Spellings of flags in tables."""
_ROW_SWITCHES = ("loss_weight", "loss_scale", "train", "training", "trainable")
"""Switches of messages that mean the same beside them; ``weight`` and ``loss`` are names of other numbers."""
_ROW_NAMES = ("id", "_dataset_name")
"""Fields that name a row and mean nothing for training."""


@dataclass(frozen=True)
class Layout:
    """Keys of the rows of one dataset.

    ``formatting`` None: detected from each row's keys. ``columns``: LLaMA-Factory's names to the keys of the
    file; a column without a key is not read.
    """

    formatting: str | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: dict(COLUMNS))
    tags: Tags = field(default_factory=Tags)
    folders: tuple[Path, ...] = ()
    """Folders in which images with relative paths are looked for."""


@dataclass(frozen=True)
class TrainingRow:
    """A row that can be used, of one of four kinds.

    conversation: messages to the assistant's last answer. Judged conversation: ``good`` says whether its last
    answer is. Pair: messages to the chosen answer, and ``rejected``, the other answer. Text: one message of
    the role "text".
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    """Functions that the model may call in it."""
    images: list[RowImage] = field(default_factory=list)
    """Images in the order of their places (``IMAGE``) in the messages' contents."""
    good: bool | None = None
    rejected: Message | None = None
    where: str = ""
    """File and line."""
    dataset: int = 0
    """Number of its dataset in the configuration's order."""

    @property
    def answers(self) -> list[list[Message]]:
        """Messages to each last answer: of a pair to the chosen and to the rejected one."""
        others = [[*self.messages[:-1], self.rejected]] if self.rejected else []
        return [self.messages, *others]

    def as_record(self) -> dict[str, object]:
        """Return the row as it could be read again, but for images that stood in it."""
        record: dict[str, object] = {"messages": self.messages}
        if self.rejected:
            record = {"prompt": self.messages[:-1], "chosen": self.messages[-1:]}
            record["rejected"] = [self.rejected]
        elif self.images:
            texts = [each["content"].replace(IMAGE, PLACE) for each in self.messages]
            pairs = zip(self.messages, texts, strict=True)
            record = {"messages": [{**each, "content": text} for each, text in pairs]}
            record["images"] = [image.name for image in self.images]
        if self.good is not None:
            record["kto_tag"] = self.good
        return record | ({"tools": self.tools} if self.tools else {})


def read_row(
    row: object, layout: Layout, stage: str, notes: RowNotes, identity: Mapping[str, str | None] | None = None
) -> TrainingRow:
    """Read a raw row for ``stage``; remarks on it are added to ``notes``.

    ``identity``: values of {{name}} and {{author}} in texts, as in LLaMA-Factory's identity.json. Raises
    ValueError with the reason, as a short phrase, if the row can't be trained on.
    """
    fields = _Fields(row, layout, judged=stage == "kto")
    readers = {"pt": _read_text_row, "dpo": _read_pair, "kto": _read_judged}
    found = readers.get(stage, _read_conversation)(fields, notes)
    notes.fields |= fields.unread()
    fill_identity([*found.messages, *filter(None, [found.rejected])], identity or {})
    return found


def _read_conversation(fields: _Fields, notes: RowNotes, good: bool | None = None) -> TrainingRow:
    if not is_empty(fields.get("chosen")) and not is_empty(fields.get("rejected")):
        raise ValueError("a preference pair: stage dpo trains on it")
    messages = join_turns(_read_messages_of(fields, notes), notes)
    tools, images = fields.take_tools(), fields.take_images(messages)
    if messages[-1]["role"] != "assistant":
        role = messages[-1]["role"]
        raise ValueError(f"the last message is not the assistant's: its role is {role}")
    return TrainingRow(messages, tools, images, good)


def _read_messages_of(fields: _Fields, notes: RowNotes) -> list[Message]:
    """Read the messages of a conversation in any of its forms."""
    tags, images = fields.layout.tags, fields.image_parts
    form = fields.layout.formatting or fields.detect_format()
    if form == "completion":
        given = fields.take_key("prompt")
        prompt = [] if is_empty(given) else _read_side("user", given, tags, notes, images)
        answer = _read_side("assistant", fields.take_key("completion"), tags, notes)
        return [*_add_system(fields, prompt), *answer]
    if form == "messages":
        return _add_system(fields, read_messages(fields.take("messages"), tags, notes, images))
    if form == "alpaca" and fields.has("prompt") and fields.has("response"):
        return [*_read_alpaca_prompt(fields), make_message("assistant", fields.take("response"))]
    raise fields.unknown_form()


def _read_judged(fields: _Fields, notes: RowNotes) -> TrainingRow:
    """Read a conversation whose last answer is judged: LLaMA-Factory's ``kto_tag``, or trl's ``label``."""
    given = fields.take("kto_tag")
    if given is None and fields.layout.formatting is None:
        given = fields.take_key("label")
    if given is None:
        raise ValueError("no judgement: stage kto needs kto_tag (or label), true or false")
    good = given if isinstance(given, bool) else _FLAGS.get(str(given).strip().lower())
    if good is None:
        raise ValueError(f"a judgement that is neither true nor false: {given!r}")
    found = _read_conversation(fields, notes, good)
    if len(found.messages) < 2 or found.messages[-1].get("weight", 1) == 0:
        raise ValueError("an answer that is not to be learned, or without a prompt")
    if found.images:
        raise ValueError("with images: stage kto judges answers of text")
    return found


def _read_text_row(fields: _Fields, notes: RowNotes) -> TrainingRow:
    """Read raw text: the column ``text``, or the one that an entry of dataset_info.json names ``prompt``."""
    fields.refuse_images("stage pt trains on text")
    if fields.layout.formatting == "alpaca":
        text: object = _read_question(fields) or None
    else:
        text = fields.take("prompt") if fields.layout.formatting else fields.take_key("text")
    if text is None:
        raise ValueError("no text: stage pt trains on a field text, or the column that prompt names")
    return TrainingRow([make_message("text", text)])


def _read_pair(fields: _Fields, notes: RowNotes) -> TrainingRow:
    fields.refuse_images("stage dpo compares answers of text")
    tags = fields.layout.tags
    given = {name: fields.take(name) for name in ("chosen", "rejected")}
    if any(map(is_empty, given.values())):
        raise ValueError("no pair of answers: stage dpo needs chosen and rejected")
    sides = (_read_side("assistant", value, tags, notes) for value in given.values())
    better, worse = (join_turns(side, notes) for side in sides)
    detected = "" if fields.has_key("prompt") else fields.detect_format()
    form = fields.layout.formatting or detected
    if form == "alpaca":
        prompt = _read_alpaca_prompt(fields)
    elif form == "messages":
        prompt = _add_system(fields, read_messages(fields.take("messages"), tags, notes))
    else:
        question = fields.take_key("prompt")
        prompt = [] if is_empty(question) else _read_side("user", question, tags, notes)
        # trl's and LLaMA-Factory v1's pairs may repeat the prompt in both answers instead of, or beside,
        # giving it.
        most = min(len(better), len(worse)) - 1  # the last of the shorter one is an answer
        shared = next((i for i in range(most) if better[i] != worse[i]), most)
        if shared and (not prompt or prompt == better[:shared][-len(prompt) :]):
            prompt, better, worse = better[:shared], better[shared:], worse[shared:]
        prompt = _add_system(fields, prompt)
    prompt, tools = join_turns(prompt, notes), fields.take_tools()
    for name, answer in (("chosen", better), ("rejected", worse)):
        if [part["role"] for part in answer] != ["assistant"]:
            roles = ", ".join(part["role"] for part in answer)
            raise ValueError(f"{name} is not one assistant message: its roles are {roles}")
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError("a pair whose prompt does not end in a user message or a tool's result")
    if better == worse:
        raise ValueError("chosen and rejected are the same: nothing to prefer")
    return TrainingRow([*prompt, *better], tools, rejected=worse[0])


def fill_identity(messages: list[Message], names: Mapping[str, str | None]) -> None:
    """Fill in {{name}} and {{author}}; words or thoughts with code are left as they are.

    Raises ValueError for a placeholder without a value.
    """

    def fill(text: str, inner: str) -> str:
        for key, value in names.items():
            place = "{{" + key + "}}"
            if place not in text or "`" in inner or "<" in inner:
                continue
            if value is None:
                raise ValueError(f"{place} in a text: identity_{key} in the configuration fills it in")
            text = text.replace(place, value)
        return text

    for each in messages:
        thoughts, words = split_thoughts(each)
        block = each["content"].removesuffix(words)
        each["content"] = fill(block, thoughts or "") + fill(words, words)
        if "reasoning_content" in each:
            each["reasoning_content"] = fill(each["reasoning_content"], each["reasoning_content"])


class _Fields:
    """Fields of a raw row by LLaMA-Factory's names; those that nothing takes are ``unread``."""

    def __init__(self, row: object, layout: Layout, judged: bool) -> None:
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__} instead of an object")
        self._row, self.layout = row, layout
        self._columns, self._taken = dict(layout.columns), set(_ROW_NAMES)
        self.image_parts: list[object] = []
        """Images among the content parts of the messages."""
        if layout.formatting is None:
            for name in ("messages", "chosen", "rejected"):
                key = name if name == "messages" else f"{name}_messages"
                # A table has every column in every row.
                if key in row and (not is_empty(row[key]) or self._columns.get(name) not in row):
                    self._columns[name] = key
        tag = self._columns.get("kto_tag")
        for name in (*_MEANINGFUL, *(self._columns[name] for name in _MEANINGFUL if name in self._columns)):
            if not is_empty(row.get(name)) and not (judged and name in ("kto_tag", tag)):
                kind = name in (*_OTHER_LOSS, tag)
                why = "every answer counts alike" if kind else "only text and images are trained on"
                raise ValueError(f"with {name}: {why}")
        for name in _ROW_SWITCHES:
            if looks_like_switch(name, given := row.get(name)):
                if given != 1:
                    raise ValueError(f"with {name} {given!r}: every row counts alike")
                self._taken.add(name)

    def has(self, name: str) -> bool:
        return self._columns.get(name) in self._row

    def has_key(self, key: str) -> bool:
        return key in self._row

    def get(self, name: str) -> object:
        return self._row.get(self._columns[name]) if name in self._columns else None

    def take(self, name: str) -> object:
        self._taken.update([self._columns[name]] if name in self._columns else ())
        return self.get(name)

    def take_key(self, key: str) -> object:
        self._taken.add(key)
        return self._row.get(key)

    def take_tools(self) -> list[Tool]:
        """Take OpenAI's ``tools`` or their older name, or the column that the layout names."""
        given = [self.take("tools"), self.take_key("functions")]
        return next((read_tools(value) for value in given if not is_empty(value)), [])

    def refuse_images(self, why: str) -> None:
        if any(not is_empty(self._row.get(name)) for name in self._image_names()):
            raise ValueError(f"with images: {why}")

    def take_images(self, messages: list[Message]) -> list[RowImage]:
        """Take the images for the places that ``messages`` have for them.

        ``PLACE`` in a text is one if the row has a field of images, even an empty one; else it is text.
        """
        names = self._image_names()
        self._taken.update(names)
        lists = [self._row[name] for name in names if isinstance(self._row.get(name), list)]
        given = next((self._row[name] for name in names if not is_empty(self._row.get(name))), None)
        if given is None and lists and not self.image_parts:
            given = lists[0]
        values: list[object] = [*self.image_parts]
        if given is not None:
            if any(part is not None for part in values):
                raise ValueError("with images twice: as a field and in the messages")
            values = given if isinstance(given, list) else [given]
            for each in messages:
                each["content"] = each["content"].replace(PLACE, IMAGE)
        places = sum(each["content"].count(IMAGE) for each in messages)
        if places != len(values):
            raise ValueError(f"images without a place of their own: {len(values)} for {places} times {PLACE}")
        if any(IMAGE in each["content"] for each in messages if each["role"] == "assistant"):
            raise ValueError("an image in an answer: only text is learned")
        return [read_image(value, self.layout.folders) for value in values]

    def _image_names(self) -> list[str]:
        """Return the column that is named for images, and the usual names."""
        return [*dict.fromkeys([*filter(None, [self._columns.get("images")]), *_IMAGE_FIELDS])]

    def unread(self) -> set[str]:
        """Return the keys with a value that nothing has taken."""
        given = {str(key) or "(no name)" for key, value in self._row.items() if not is_empty(value)}
        return given - {*map(str, self._taken)}

    def detect_format(self) -> str:
        """Return the form whose fields have something, else the one whose fields are there; "" for none."""
        both = (self._row.get("prompt"), self._row.get("completion"))
        completion = next((each for each in both if not is_empty(each)), None)
        forms = {
            "messages": (self.has("messages"), self.get("messages")),
            "completion": (self._row.keys() >= {"prompt", "completion"}, completion),
            "alpaca": (self.has("prompt"), self.get("prompt")),
        }
        filled = (form for form, (there, value) in forms.items() if there and not is_empty(value))
        return next(filled, next((form for form, (there, _) in forms.items() if there), ""))

    def unknown_form(self) -> ValueError:
        keys = ", ".join(sorted(map(str, self._row))) or "(none)"
        forms = "messages, conversations, instruction and output, or prompt and completion"
        if self.layout.formatting is not None:
            forms = " and ".join(self._columns.get(name, name) for name in ("prompt", "response"))
        return ValueError(f"no known form: keys {keys}, not {forms}")


def _read_alpaca_prompt(fields: _Fields) -> list[Message]:
    """Read LLaMA-Factory's prompt: system, then history's pairs, then instruction and input on two lines."""
    question, history = _read_question(fields), fields.take("history")
    history = [] if is_empty(history) else history  # a table has the column in every row
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("history that is not a list of [question, answer]")
    messages = []
    for earlier, answer in history:
        messages += [make_message("user", earlier), make_message("assistant", answer)]
    messages.append(make_message("user", question))
    return _add_system(fields, messages)


def _read_question(fields: _Fields) -> str:
    question, more = fields.take("prompt") or "", fields.take("query") or ""
    if not isinstance(question, str) or not isinstance(more, str):
        raise ValueError("instruction or input that is not text")
    return "\n".join(filter(None, (question, more)))


def _add_system(fields: _Fields, messages: list[Message]) -> list[Message]:
    system = fields.take("system")
    if is_empty(system):
        return messages
    if messages and messages[0]["role"] == "system":
        raise ValueError("two system messages, one as a field and one among the messages")
    return [make_message("system", system), *messages]


def _read_side(
    role: str, value: object, tags: Tags, notes: RowNotes, images: list[object] | None = None
) -> list[Message]:
    """Read a prompt or answers: a text of ``role``, a message, or a list of messages."""
    if isinstance(value, str):
        return [make_message(role, value)]
    return read_messages([value] if isinstance(value, dict) else value, tags, notes, images)
