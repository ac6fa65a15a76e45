"""Conversations as the tokenizer's chat template writes them, and which of the tokens are the assistant's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ktbridge.errors import KtbridgeError
from ktbridge.sft.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters of a text, from the first to behind the last."""
IGNORED = -100
"""The label of a token that isn't learned."""
MARK = "\u241e\u241f\u241e"
"""Stands for an answer, to find where a template puts it."""
DIFFERENT = "the chat template writes the conversation differently when more of it follows"


class ChatTemplate:
    """A tokenizer's chat template, in one of three forms (``way``).

    ``markers``: the template says itself where the assistant speaks ({% generation %}); ``patched``: trl has
    the same template with such markers; ``prefixes``: what a message adds to the conversation before it is
    taken for that message, where the template writes both alike. Raises KtbridgeError for a tokenizer
    without a template, or that can't tell where in a text its tokens stand.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        if not tokenizer.chat_template:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template, so conversations have no "
                "form to train on.",
                "Put chat_template.jinja into that directory; the model's instruct or chat variant has one.",
            )
        if not tokenizer.is_fast:
            raise KtbridgeError(
                f"the tokenizer in {tokenizer.name_or_path} can't say where in a text its tokens stand, "
                "so the assistant's can't be told.",
                "Use a model directory with a tokenizer.json.",
            )
        self._tokenizer = tokenizer
        self._own = self._marked = tokenizer.get_chat_template()
        self._added = tuple(tokenizer.get_added_vocab())
        self._unlearned = ""
        if has_generation_markers(self._own):
            self.way = "markers"
            return
        try:
            patched = get_training_chat_template(tokenizer)
        except ValueError:
            patched = None
        self.way = "patched" if patched else "prefixes"
        self._marked = patched or self._own
        self._unlearned = self._opening() if patched else ""

    def text(self, messages: Sequence[Message], opened: bool = False) -> str:
        """The conversation in the tokenizer's own template; ``opened``: up to where the assistant answers.

        Raises ValueError with what the template says when it refuses the conversation.
        """
        return self._rendered(self._own, messages, opened)[0]

    def spoken(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The conversation in the template's words and what of it is the assistant's, stop tokens included.

        Raises ValueError with the reason, as a short phrase, when that can't be told.
        """
        if self.way == "prefixes":
            return self._grown(messages)
        text, spans = self._rendered(self._marked, messages)
        if len(spans) < sum(message["role"] == "assistant" for message in messages):
            raise ValueError("the chat template does not mark every answer as the assistant's")
        if self.way == "markers":  # its author's word
            return text, spans
        skipped = len(self._unlearned)
        return text, [
            (
                start + skipped if text.startswith(self._unlearned, start) else start,
                self._stopped(text, end),
            )
            for start, end in spans
        ]

    def tokens(self, texts: list[str]) -> tuple[list[list[int]], list[list[Span]]]:
        """Token ids of texts the template has written, and the characters each token stands for."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,  # the template has written them
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,  # longer than the model can take: cutoff_len is what counts
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def _rendered(
        self, template: str, messages: Sequence[Message], opened: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = template is self._marked and self.way != "prefixes"
        special: dict[str, Any] = self._tokenizer.special_tokens_map
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                chat_template=template,
                add_generation_prompt=opened,
                return_assistant_tokens_mask=marked,
                **special,
            )
        except (TemplateError, TypeError, LookupError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        texts, spans = rendered
        return texts[0], spans[0] if marked else []

    def _grown(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        whole = self.text(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:index]) if index else ""
            opened = self.text(messages[:index], opened=True) if index else ""
            closed = self.text(messages[: index + 1])
            words = message["content"].strip()
            # An opening may end in what this answer does not begin with (an empty block of thoughts).
            start = shared(opened, whole)
            if opened == before:
                start = self._header(messages[:index], whole)
            if not whole.startswith(before) or start < len(before):
                raise ValueError(DIFFERENT)
            spans.append((start, self._end(whole, closed, words, start)))
        return whole, spans

    def _header(self, before: Sequence[Message], whole: str) -> int:
        """Where an answer's own words start, under a template that does not open it; -1: not to be told."""
        text = self.text([*before, {"role": "assistant", "content": MARK}])
        start = text.find(MARK)
        return start if whole.startswith(text[: max(start, 0)]) else -1

    def _end(self, whole: str, closed: str, words: str, start: int) -> int:
        """Where the answer that ``closed`` ends in, and that starts at ``start`` of ``whole``, ends there."""
        end = len(closed)
        if not whole.startswith(closed):
            # Templates may leave out of earlier answers what they write into the last (thoughts).
            at, last = whole.find(words, start), closed.rfind(words)
            closing = closed[last + len(words) :]
            end = at + len(words) + len(closing)
            if at < 0 or last < 0 or not whole.startswith(closing, at + len(words)):
                raise ValueError(DIFFERENT)
        return self._stopped(whole, end)

    def _stopped(self, text: str, end: int) -> int:
        """Behind the stop token, when nothing but space follows it: the model need not learn that."""
        ended = len(text[:end].rstrip())
        return ended if text.endswith(self._added, 0, ended) else end

    def _opening(self) -> str:
        """What trl's templates count as the assistant's though inference gives it to the model."""
        probe = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
        try:
            text, spans = self._rendered(self._marked, probe)
            opened = self._rendered(self._marked, probe[:1], opened=True)[0]
        except ValueError:
            return ""
        return text[spans[0][0] : shared(opened, text)] if spans else ""


def labels(ids: list[int], offsets: list[Span], spans: list[Span]) -> list[int]:
    """``ids`` where a token stands for any of the characters in ``spans``, IGNORED elsewhere.

    Both spans and tokens are in the order of the text.
    """
    result = [IGNORED] * len(ids)
    left = iter(spans)
    span = next(left, None)
    for index, (start, end) in enumerate(offsets):
        while span and start >= span[1]:
            span = next(left, None)
        if span is None:
            break
        if end > span[0]:
            result[index] = ids[index]
    return result


def shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
