"""Prompts as tokens, made beside the event loop and beside generation, in bounded time and memory.

A prompt that can't fit is refused before it is tokenized: by its bytes, since no token has more than the
longest one, and then by the tokens of its beginning. So the work is in proportion to the context, not to
what a client sends. Large prompts have a thread of their own, so that small ones never wait for them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from ktbridge.serve.local.detokenize import Tokens
from ktbridge.serve.local.schema import ApiError, Message

SMALL = 1 << 16
"""Characters of a prompt that is tokenized among the small ones: some ten milliseconds."""
_A_MESSAGE = 64  # characters that stand for the work of rendering one
_BEGINNING = 4  # characters of a prompt's beginning for each token of the context, as text has
_SURELY = 1.25  # times the context: that many tokens don't come of where a beginning was cut


class Lane:
    """One thread with a tokenizer of its own, which changes its settings while it encodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._pool = ThreadPoolExecutor(1, f"ktbridge-{name}-prompts")

    async def run(self, work: Callable[[PreTrainedTokenizerBase], list[int]]) -> list[int]:
        """The result of ``work``, which is dropped if it is cancelled before its turn."""
        return await asyncio.wrap_future(self._pool.submit(work, self._tokenizer))


class Prompts:
    """Renders and tokenizes prompts, and checks them against the context length."""

    def __init__(self, tokens: Tokens, vocab_size: int, context: int) -> None:
        self._vocab_size, self._context = vocab_size, context
        self._longest = tokens.longest()
        self._templates = bool(getattr(tokens.tokenizer, "chat_template", None))
        self._small = Lane(tokens.tokenizer, "small")
        self._large = Lane(tokens.tokenizer, "large")

    async def chat(self, messages: Sequence[Message], variables: Mapping[str, object]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Raises ApiError."""
        if not self._templates:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        rows = [message.as_template_input() for message in messages]

        def work(tokenizer: PreTrainedTokenizerBase) -> list[int]:
            try:
                text = tokenizer.apply_chat_template(
                    rows,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,  # type: ignore[arg-type]
                )
            except Exception as error:  # templates may raise any exception, jinja's included
                raise ApiError(
                    400,
                    f"the chat template refuses these messages: {str(error)[:300]}",
                    param="messages",
                ) from error
            # The template wrote the special tokens itself.
            return self._encode(tokenizer, str(text), special=False, param="messages")

        size = sum(len(row["content"]) + _A_MESSAGE for row in rows)
        return await self._lane(size).run(work)

    async def completion(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt given as text or as ids. Raises ApiError."""
        if isinstance(prompt, str):
            given = prompt
            return await self._lane(len(given)).run(
                lambda tokenizer: self._encode(tokenizer, given, special=True, param="prompt")
            )
        if len(prompt) > self._context:
            raise self._too_long(f"has {len(prompt)} tokens", "prompt")
        if any(token >= self._vocab_size for token in prompt):
            raise ApiError(
                400, f"token ids must be below {self._vocab_size}, the vocabulary", param="prompt"
            )
        return prompt

    def room(self, prompt: Sequence[int], limit: int | None, param: str) -> int:
        """Return how many tokens may be generated: ``limit``, or what the context leaves."""
        size, context = len(prompt), self._context
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        left = context - size
        # A prompt that fills the context can still be scored, though not continued.
        if left < 0 or (left == 0 and limit != 0):
            raise self._too_long(f"has {size} tokens", param)
        if limit is None:
            return left
        if limit > left:
            text = (
                f"the prompt has {size} tokens and {limit} more were asked for; this model's context is "
                f"{context}"
            )
            raise ApiError(400, text, param="max_tokens", code="context_length_exceeded")
        return limit

    def fits(self, text: str, tokens: int) -> bool:
        """Return whether ``tokens`` tokens can be this text, by its length."""
        return len(text) <= tokens * self._longest  # a character is a byte or more

    def _lane(self, size: int) -> Lane:
        return self._small if size <= SMALL else self._large

    def _encode(
        self, tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool, param: str
    ) -> list[int]:
        if not self.fits(text, self._context):
            raise self._too_long(
                f"has {len(text):,} characters, at most {self._longest} of which are a token", param
            )
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ApiError(400, "the text holds half of a surrogate pair", param=param) from None
        if size > self._context * self._longest:
            raise self._too_long(
                f"has {size:,} bytes, at most {self._longest} of which are a token", param
            )
        begun = _BEGINNING * self._context
        while begun < len(text):
            found = len(tokenizer.encode(text[:begun], add_special_tokens=False))
            if found > _SURELY * self._context:
                raise self._too_long(f"has more than {self._context} tokens", param)
            begun *= 4
        return tokenizer.encode(text, add_special_tokens=special)

    def _too_long(self, how: str, param: str) -> ApiError:
        text = f"the prompt {how}; this model's context is {self._context}, the answer included"
        return ApiError(400, text, param=param, code="context_length_exceeded")
