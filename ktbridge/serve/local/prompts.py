"""From requests to token ids, checked against the context length."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

from ktbridge.serve.local.errors import ApiError
from ktbridge.serve.local.schema import Message


class PromptBuilder:
    """Renders and tokenises prompts, in any thread.

    It has its own tokenizer: encoding may change a tokenizer's settings temporarily, which must
    not happen during the worker's decoding.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, context_length: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._vocab_size = vocab_size
        self.context_length = context_length

    def chat(self, messages: Sequence[Message], variables: dict[str, Any]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    [message.as_template_input() for message in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
            except Exception as error:  # templates may raise any exception, jinja's included
                raise ApiError(
                    400, f"the chat template refuses these messages: {error}", param="messages"
                ) from error
            # The template wrote the special tokens itself.
            return self._encode(text, add_special_tokens=False, param="messages")

    def completion(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt given as text or as ids."""
        if isinstance(prompt, str):
            with self._lock:
                return self._encode(prompt, add_special_tokens=True, param="prompt")
        if any(token >= self._vocab_size for token in prompt):
            raise ApiError(
                400, f"token ids must be below {self._vocab_size}, the vocabulary", param="prompt"
            )
        return list(prompt)

    def room(self, prompt: Sequence[int], limit: int | None, param: str) -> int:
        """How many tokens may be generated: ``limit``, or what the context leaves."""
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        left = self.context_length - len(prompt)
        # A prompt that fills the context can still be scored, though not continued.
        if left < 0 or (left == 0 and limit != 0):
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens; this model's context is "
                f"{self.context_length}, the answer included",
                param=param,
                code="context_length_exceeded",
            )
        if limit is None:
            return left
        if limit > left:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and {limit} more were asked for; this "
                f"model's context is {self.context_length}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return limit

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ApiError(400, "the text holds half of a surrogate pair", param=param) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
