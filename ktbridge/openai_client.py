"""The client of OpenAI-compatible servers that chat, verify and the launcher's readiness check use.

Standard library only, so that a deploy pipeline can ask a server without more packages. What servers do
differently is read here for every command: eval's client, which asks many requests at once, uses it too.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.hosts import is_loopback, is_loopback_url, server_url
from ktbridge.server_api.served_names import (
    APPLIED_PATHS,
    ModelEntry,
    ServedModel,
    applied_adapter,
    engine_of,
    listed_models,
    read_models,
)

Message = dict[str, str]
LONGEST_REPLY = 1 << 28
"""Bytes of one reply: tens of thousands of tokens with twenty logprobs each."""
LONGEST_LIST = 1 << 24
"""Bytes of a list of models."""
SHORTEST_SECRET = 8
Result = TypeVar("Result")


def hide_key(text: str, key: str | None) -> str:
    """``text`` of a server without the API key that it was sent, which it may repeat.

    A key of fewer than 8 characters is no secret, and may be part of an answer's words.
    """
    if key is None or len(key) < SHORTEST_SECRET:
        return text
    return text.replace(key, "***")


_UNSUPPORTED = r"(?:un|not )supported|not permitted|deprecated|un(?:known|recognized|expected)"
_REFUSED_LIMIT = re.compile(
    rf"(?i)\bmax_tokens\b.{{0,60}}(?:{_UNSUPPORTED}|extra (?:inputs|fields))|"
    rf"(?:{_UNSUPPORTED}).{{0,60}}\bmax_tokens\b|\buse\W{{1,3}}max_completion_tokens"
)
OTHER_LIMIT = "max_completion_tokens"
"""What newer servers call ``max_tokens``, some of them alone."""
_TEXT_PARTS = ("text", "output_text")
_THINKING_PARTS = ("thinking", "reasoning", "redacted_thinking", "summary_text", "reasoning_text")


def refuses_limit(reason: str) -> bool:
    """Return whether a server's message refuses ``max_tokens`` for its name, as some do that want another."""
    return _REFUSED_LIMIT.search(" ".join(reason.split())) is not None


def rename_limit(body: Mapping[str, object]) -> dict[str, object]:
    """``body`` with its limit of tokens under the name that newer servers have for it."""
    renamed = {"max_tokens": OTHER_LIMIT}
    return {renamed.get(name, name): value for name, value in body.items()}


def read_content(content: object) -> tuple[str, str]:
    """The text and the thinking of a message's ``content``: a string, null, or a list of typed parts.

    Raises ValueError for what is neither text nor thinking.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        what = "an object" if isinstance(content, Mapping) else f"{str(content)[:20]!r}"
        raise ValueError(f"the content is {what}, not text")
    text, thinking = [], []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if isinstance(part, str):
            text.append(part)
        elif kind in _THINKING_PARTS:
            thinking.append(read_thinking(part))
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            text.append(part["refusal"])
        elif (
            kind in _TEXT_PARTS and isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ):
            text.append(part["text"])
        else:
            raise ValueError(f"the content has a part of type {str(kind)[:40]!r}, which is no text")
    return "".join(text), "\n".join(filter(None, thinking))


def read_thinking(value: object) -> str:
    """All text in a message's reasoning, in whichever of the forms servers have."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(read_thinking, value)))
    if isinstance(value, Mapping):
        keys = ("thinking", "reasoning", "text", "summary", "content")
        return "\n".join(filter(None, (read_thinking(value.get(key)) for key in keys)))
    return ""


class Refused(KtbridgeError):
    """The server answered with an error. ``status``: HTTP's; ``reason``: the server's own message."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        key_is_wrong = "set KTBRIDGE_API_KEY to the server's key"
        step = key_is_wrong if status == 401 else "check --server, --model and the server's log"
        super().__init__(f"{url} answered {status}: {reason}.", step)
        self.status, self.reason = status, reason


class OpenAIClient:
    """One server. ``url`` is the root of its API, ending in /v1. Every failure raises KtbridgeError."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 600, direct: bool = False
    ) -> None:
        """``url`` with or without /v1; ``timeout``: seconds without a byte after which a request has failed.

        ``direct``: never through a proxy, as for this machine's own addresses, which no proxy can reach.
        """
        self.url = server_url(url)
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        key = (api_key or "").strip()
        if not key.isprintable():  # checked here: the library's own message would show the key
            raise KtbridgeError(
                "the API key holds a line break or another control character.",
                "set KTBRIDGE_API_KEY to the key alone",
            )
        self._key = key
        self._probe: threading.Thread | None = None
        self._limit_renamed = False
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        host = urllib.parse.urlsplit(self.url).hostname or ""
        direct = direct or is_loopback_url(self.url) or is_loopback(host)
        self._opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if direct else [])
        )

    def is_healthy(self) -> bool:
        """Return whether the server answers /health with 200, all of its head within the timeout."""

        def ask() -> int:
            with self.open("/health", native=True) as response:
                return response.status

        return self._in_time(ask) == 200

    def models_in_time(self) -> list[str] | None:
        """As ``models``, or None where no list comes, all of it within the timeout."""
        return self._in_time(self.models)

    def _in_time(self, ask: Callable[[], Result]) -> Result | None:
        """What ``ask`` returns, or None where it fails, takes longer, or the one before is still asking.

        The library's own timeout begins anew with each byte.
        """
        if self._probe is not None and self._probe.is_alive():
            return None
        found: list[Result] = []

        def run() -> None:
            with suppress(KtbridgeError):
                found.append(ask())

        self._probe = threading.Thread(target=run, name="probe", daemon=True)
        self._probe.start()
        self._probe.join(self._timeout)
        return found[0] if found else None

    def models(self) -> list[str]:
        """The model names that the server lists."""
        return list(self.entries())

    def served_models(self) -> dict[str, ServedModel]:
        """The models by the names that requests must use, with what the server says of each."""
        entries = self.entries()
        return read_models(entries, self.applied_adapter(engine_of(entries)) or "")

    def applied_adapter(self, engine: str) -> str | None:
        """The adapter that the server applies to every request, "" for none; None: it doesn't tell."""
        for path in APPLIED_PATHS.get(engine, ()):
            with suppress(KtbridgeError):
                document = self.ask(path, native=True)
                if isinstance(document, dict | list):
                    return applied_adapter(engine, document)
        return None

    def entries(self) -> dict[str, ModelEntry]:
        """The server's list of models by id."""
        listed = self.ask("/models", most=LONGEST_LIST)
        try:
            return {str(model["id"]): dict(model) for model in listed_models(listed)}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise KtbridgeError(
                f"{self.url}/models answered with no list of models.",
                "give the URL of an OpenAI-compatible API: what stands before /v1/models",
            ) from None

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        ended: Callable[[str], None] = lambda reason: None,
        **options: object,
    ) -> Iterator[str]:
        """Stream the answer in pieces; ``ended`` is called with the finish reason."""
        body: dict[str, object] = {"model": model, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in options.items() if value is not None}
        with self._post("/chat/completions", body) as response:
            page: bytes | None = b""
            while line := response.readline(LONGEST_LIST):  # a longer one is no event
                if not line.startswith(b"data:"):
                    page = page if page or page is None else line.strip()
                    continue
                page = None
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = _parsed(data)
                if not isinstance(event, dict) or "error" in event:
                    text = hide_key(_error_text(data.decode(errors="replace")), self._key)
                    raise KtbridgeError(f"the answer broke off: {text}.")
                try:
                    for choice in event.get("choices") or ():
                        if text := read_content((choice.get("delta") or {}).get("content"))[0]:
                            yield text
                        if reason := choice.get("finish_reason"):
                            ended(str(reason))
                except (AttributeError, TypeError):
                    raise ValueError("an event of its reply is no part of an answer") from None
            if page:
                raise ValueError(f"its reply is no stream of events; {_beginning(page)}")
        raise KtbridgeError("the answer broke off: the server closed the connection.")

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        native: bool = False,
        most: int = LONGEST_REPLY,
    ) -> Any:
        """The JSON document that the server answers with; ``most``: its bytes."""
        asked = self.open(path, native=native) if body is None else self._post(path, body, native)
        with asked as response:
            text = response.read(most + 1)
            if len(text) > most:
                raise ValueError(f"its reply is longer than {most:,} bytes")
            return _parsed(text)

    @contextmanager
    def _post(
        self, path: str, body: Mapping[str, object], native: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """POST ``body``; again with the limit of tokens by its other name where the server wants that."""
        if self._limit_renamed:
            body = rename_limit(body)
        with ExitStack() as stack:
            try:
                response = stack.enter_context(self.open(path, body, native=native))
            except Refused as refused:
                named = refused.status in (400, 422) and refuses_limit(refused.reason)
                if not named or "max_tokens" not in body:
                    raise
                response = stack.enter_context(self.open(path, rename_limit(body), native=native))
                self._limit_renamed = True
            yield response

    @contextmanager
    def open(
        self, path: str, body: Mapping[str, object] | None = None, *, native: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """GET ``path``, or POST ``body`` to it. ``native``: a path beside /v1, not below it."""
        url = (self.url.removesuffix("/v1") if native else self.url) + path
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, self._headers)
            with self._opener.open(request, timeout=self._timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(url, error.code, hide_key(_refusal(error), self._key)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            told = hide_key(str(getattr(error, "reason", error)), self._key)
            reason = " ".join(told.split())[:200]
            raise KtbridgeError(
                f"{url} cannot be asked: {reason or type(error).__name__}.",
                "check that the server runs and that --server is its URL",
            ) from error


def _parsed(text: bytes | str) -> Any:
    """The JSON value in ``text``. Raises ValueError, which ``open`` makes a sentence of."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON of its reply is nested too deep") from None
    except ValueError:
        raise ValueError(f"its reply is not JSON; {_beginning(text)}") from None


def _beginning(text: bytes | str) -> str:
    """Return how a reply begins, to be told what it is instead."""
    start = text[:60].decode(errors="replace") if isinstance(text, bytes) else text[:60]
    return f"it begins with {' '.join(start.split())[:40]!r}"


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(10_000).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    return _error_text(text) or str(error.reason)


def _error_text(text: str) -> str:
    """The message of an error body in OpenAI's format, or the beginning of the body."""
    try:
        return str(_parsed(text)["error"]["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:500]
