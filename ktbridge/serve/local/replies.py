"""Responses in OpenAI's formats, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ktbridge.serve.local.detokenize import TextOffsets, Tokens
from ktbridge.serve.local.sampling import Finish, TokenLogprob


def token_text(tokens: Tokens, token: int) -> str:
    """A token as text; half a character is written as OpenAI does, ``bytes:\\xe4``."""
    raw = tokens.raw(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass
class Choice:
    """One whole answer."""

    text: str
    entries: list[TokenLogprob]
    finish: Finish


def usage(prompt_tokens: int, ends: Iterable[Finish]) -> dict[str, int]:
    completion_tokens = sum(finish.completion_tokens for finish in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ChatReply:
    """Builds the answer to one chat request: ``n`` choices."""

    def __init__(self, model: str, tokens: Tokens, *, logprobs: bool, n: int = 1) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self._model = model
        self._tokens = tokens
        self._wants_logprobs = logprobs
        self._n = n

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        bodies = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.entries),
                "finish_reason": choice.finish.reason,
            }
            for index, choice in enumerate(choices)
        ]
        ends = [choice.finish for choice in choices]
        return self._body("chat.completion", bodies) | {"usage": usage(prompt_tokens, ends)}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that come before any text."""
        start = {"role": "assistant", "content": ""}
        return [self._chunk(index, start, (), None) for index in range(self._n)]

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._chunk(index, {"content": text}, entries, None)

    def last(self, index: int, finish: Finish) -> dict[str, Any]:
        return self._chunk(index, {}, (), finish.reason)

    def usage_only(self, ends: Sequence[Finish], prompt_tokens: int) -> dict[str, Any]:
        return self._body("chat.completion.chunk", []) | {"usage": usage(prompt_tokens, ends)}

    def _chunk(
        self, index: int, delta: dict[str, str], entries: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
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


@dataclass
class Echo:
    """The prompt echoed at the start of a choice: its text, and how many of its tokens come with logprobs."""

    text: str = ""
    tokens: int = 0


class CompletionReply:
    """Builds the answer to one request of the older completions endpoint, one Echo per choice."""

    def __init__(
        self, model: str, tokens: Tokens, echoes: Sequence[Echo], *, logprobs: bool, tops: bool
    ) -> None:
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self._model = model
        self._tokens = tokens
        self._echoes = echoes
        self._wants_tops = tops
        self._tables = [LogprobTable(tokens, echo) for echo in echoes] if logprobs else None

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        bodies = [
            self._choice(
                index, self._echoes[index].text + choice.text, choice.entries, choice.finish.reason
            )
            for index, choice in enumerate(choices)
        ]
        ends = [choice.finish for choice in choices]
        return self._body(bodies) | {"usage": usage(prompt_tokens, ends)}

    def opening(self) -> list[dict[str, Any]]:
        echoes = enumerate(self._echoes)
        return [self.piece(index, echo.text, ()) for index, echo in echoes if echo.text]

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._body([self._choice(index, text, entries, None)])

    def last(self, index: int, finish: Finish) -> dict[str, Any]:
        return self._body([self._choice(index, "", (), finish.reason)])

    def usage_only(self, ends: Sequence[Finish], prompt_tokens: int) -> dict[str, Any]:
        return self._body([]) | {"usage": usage(prompt_tokens, ends)}

    def _body(self, choices: list[Any]) -> dict[str, Any]:
        return self._head | {"object": "text_completion", "model": self._model, "choices": choices}

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any]:
        table = None if self._tables is None else self._tables[index].add(entries)
        if table is not None and not self._wants_tops:
            table["top_logprobs"] = None
        return {"index": index, "text": text, "logprobs": table, "finish_reason": reason}


class LogprobTable:
    """The older endpoint's logprob columns of one choice, with the text offset of each token."""

    def __init__(self, tokens: Tokens, echo: Echo) -> None:
        self._tokens = tokens
        self._echoed = echo.tokens
        self._prompt_offsets = TextOffsets(tokens, special=True)
        self._offsets = TextOffsets(tokens, start=len(echo.text))

    def add(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The columns of the next ``entries``."""
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
            "tokens": [token_text(self._tokens, entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
