"""LLaMA-Factory's templates by name, held against the chat template that conversations are written with."""

from __future__ import annotations

import difflib
from importlib.resources import files
from typing import TYPE_CHECKING

import yaml

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.sft.data.chat import ChatTemplate
from ktbridge.sft.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = (("Hi.", "Hello."), ("Who are you?", "A model."))
"""Questions and answers."""
_BEFORE, _BEHIND = 16, 32
"""Characters shown of two texts around the place where they part."""


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
