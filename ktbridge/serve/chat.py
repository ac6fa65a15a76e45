"""Talking to an OpenAI-compatible server: a conversation, and the arms that one server offers.

Standard library only, so that a chat needs nothing that the server side needs.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.serve.hosts import is_loopback

Message = dict[str, str]
BASE = "base"


def arms_of(model: str, listed: Sequence[str]) -> dict[str, str]:
    """The arms that go with ``model``: "base", "expert" and "full" -> the name to ask for.

    The embedded engine lists S (base + expert LoRA), S:NAME (the whole adapter) and S:base; SGLang-KT
    lists S and NAME for what is asked as S:NAME. Where there is one name to ask for only, the arm is
    "model". Raises KtbridgeError for a name that the server does not offer: some answer it as another.
    """
    served, colon, name = model.partition(":")
    if model not in listed and not (colon and name in listed and served in listed):
        offered = ", ".join(map(repr, listed)) or "nothing"
        raise KtbridgeError(
            f"the server does not list {model!r}; it offers {offered}.", "give one with --model"
        )
    base = f"{served}:{BASE}"
    named = [each for each in listed if each.startswith(f"{served}:") and each != base]
    arms = {"base": base} if base in listed else {}
    if served in listed:
        arms["expert"] = served
    if colon and name != BASE:
        arms["full"] = model
    elif len(named) == 1:
        arms["full"] = named[0]
    return arms if len(arms) > 1 else {"model": model}


class Server:
    """One server's API. ``url`` ends in /v1, as OpenAI clients have it."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600) -> None:
        """``timeout``: seconds without a byte after which a request has failed."""
        self.url = url.rstrip("/")
        self._key = key
        self._timeout = timeout
        # A proxy can't reach this machine's own addresses.
        local = is_loopback(urllib.parse.urlsplit(self.url).hostname or "")
        self._opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if local else [])
        )

    def models(self) -> list[str]:
        """The names that it lists. Raises KtbridgeError."""
        with self._open("/models") as response:
            listed = self._json(response.read())
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError) as error:
            raise self._strange() from error

    def chat(self, model: str, messages: Sequence[Message], **options: Any) -> Iterator[str]:
        """The answer in pieces, as they come. Raises KtbridgeError, with the server's own words."""
        body = {"model": model, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in options.items() if value is not None}
        with self._open("/chat/completions", json.dumps(body).encode()) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = self._json(data)
                if "error" in event:
                    raise KtbridgeError(f"the answer broke off: {_said(event)}.")
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
        raise KtbridgeError("the answer broke off: the server closed the connection.")

    @contextmanager
    def _open(self, path: str, data: bytes | None = None) -> Iterator[Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with self._opener.open(request, timeout=self._timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise KtbridgeError(f"{self.url} refuses ({error.code}): {_said(text)}.") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise KtbridgeError(
                f"{self.url} cannot be asked: {reason}.", "check --base-url, and that it serves"
            ) from error

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError as error:
            raise self._strange() from error
        if not isinstance(value, dict):
            raise self._strange()
        return value

    def _strange(self) -> KtbridgeError:
        return KtbridgeError(
            f"{self.url} does not answer as an OpenAI-compatible server does.",
            "give the URL that ends in /v1",
        )


def _said(answer: str | dict[str, Any]) -> str:
    """The words of an error body in OpenAI's shape, or the body itself."""
    try:
        body = json.loads(answer) if isinstance(answer, str) else answer
        return str(body["error"]["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return str(answer).strip()[:500]


class Conversation:
    """What was said so far, and which arm speaks."""

    def __init__(
        self, server: Server, arms: dict[str, str], arm: str, system: str | None, **options: Any
    ) -> None:
        """``options``: temperature, max_tokens, seed and the like, for every question."""
        self.server, self.arms, self.arm = server, arms, arm
        self.system = system
        self._options = options
        self._said: list[Message] = []

    def switch(self, arm: str) -> None:
        """Let ``arm`` speak from now on; what was said stays. Raises KtbridgeError."""
        if arm not in self.arms:
            raise KtbridgeError(
                f"this server has no {arm} arm for this model; it has {', '.join(self.arms)}."
            )
        self.arm = arm

    def clear(self) -> None:
        self._said = []

    def ask(self, question: str) -> Iterator[str]:
        """The answer of the arm that speaks; both become part of the conversation.

        An answer that is broken off half-way stays as far as it came; without any, the question goes, too.
        """
        pieces: list[str] = []
        try:
            for piece in self.ask_arm(self.arm, question):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self._said += [{"role": "user", "content": question}, answer]

    def ask_arm(self, arm: str, question: str) -> Iterator[str]:
        """An answer of ``arm`` to what was said and ``question``, which leaves no trace."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, *self._said, {"role": "user", "content": question}]
        return self.server.chat(self.arms[arm], messages, **self._options)
