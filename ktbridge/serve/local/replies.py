"""Answers in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ktbridge.serve.local.decode import Finish, TokenLogprob
from ktbridge.serve.local.text import TextOffsets, Tokens


def token_text(tokens: Tokens, token: int) -> str:
    """A token as text; half a character is spelled as OpenAI does, ``bytes:\\xe4``."""
    raw = tokens.raw(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage(prompt_tokens: int, finish: Finish) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": prompt_tokens + finish.completion_tokens,
    }


class ChatReply:
    """Builds one chat answer."""

    def __init__(self, model: str, tokens: Tokens, *, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self._model = model
        self._tokens = tokens
        self._wants_logprobs = logprobs

    def whole(
        self, text: str, entries: Sequence[TokenLogprob], finish: Finish, prompt_tokens: int
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(entries),
            "finish_reason": finish.reason,
        }
        return self._body("chat.completion", [choice]) | {"usage": usage(prompt_tokens, finish)}

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, (), None)

    def piece(self, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._chunk({"content": text}, entries, None)

    def last(self, finish: Finish) -> dict[str, Any]:
        return self._chunk({}, (), finish.reason)

    def usage_only(self, finish: Finish, prompt_tokens: int) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage(prompt_tokens, finish)}

    def _chunk(
        self, delta: dict[str, str], entries: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": reason,
        }
        return self._body("chat.completion.chunk", [choice])

    def _body(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": kind, "model": self._model, "choices": choices}

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(token, value) for token, value in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": token_text(self._tokens, token),
            "logprob": logprob,
            "bytes": list(self._tokens.raw(token)),
        }


class CompletionReply:
    """Builds one answer of the older completions endpoint.

    ``echo`` is the prompt's text where the answer begins with it, ``echoed`` how many of its tokens
    come first among the entries.
    """

    def __init__(
        self,
        model: str,
        tokens: Tokens,
        *,
        logprobs: bool,
        tops: bool,
        echo: str = "",
        echoed: int = 0,
    ) -> None:
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self._model = model
        self._tokens = tokens
        self._wants_logprobs = logprobs
        self._wants_tops = tops
        self._echoed = echoed
        self._prompt_offsets = TextOffsets(tokens, special=True)
        self._offsets = TextOffsets(tokens, start=len(echo))

    def whole(
        self, text: str, entries: Sequence[TokenLogprob], finish: Finish, prompt_tokens: int
    ) -> dict[str, Any]:
        body = self._body(text, entries, finish.reason)
        return body | {"usage": usage(prompt_tokens, finish)}

    def piece(self, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._body(text, entries, None)

    def last(self, finish: Finish) -> dict[str, Any]:
        return self._body("", (), finish.reason)

    def usage_only(self, finish: Finish, prompt_tokens: int) -> dict[str, Any]:
        head = self._head | {"object": "text_completion", "model": self._model, "choices": []}
        return head | {"usage": usage(prompt_tokens, finish)}

    def _body(
        self, text: str, entries: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(entries),
            "finish_reason": reason,
        }
        return self._head | {
            "object": "text_completion",
            "model": self._model,
            "choices": [choice],
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        texts = [token_text(self._tokens, entry.token) for entry in entries]
        offsets = []
        for entry in entries:
            source = self._prompt_offsets if self._echoed > 0 else self._offsets
            offsets.append(source.feed(entry.token))
            self._echoed -= 1
        tops = [
            {token_text(self._tokens, token): value for token, value in entry.top}
            if entry.logprob is not None
            else None
            for entry in entries
        ]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops if self._wants_tops else None,
            "text_offset": offsets,
        }
