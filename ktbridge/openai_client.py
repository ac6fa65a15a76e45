"""The one client of OpenAI-compatible servers that chat, verify and the launcher's readiness check use.

Standard library only, so that a deploy pipeline can ask a server without more packages.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ktbridge.errors import KtbridgeError
from ktbridge.hosts import is_loopback, is_loopback_url, server_url

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
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        host = urllib.parse.urlsplit(self.url).hostname or ""
        direct = direct or is_loopback_url(self.url) or is_loopback(host)
        self._opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if direct else [])
        )

    def is_healthy(self) -> bool:
        """Whether the server answers /health with 200, all of its head within the timeout."""

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
        return list(self.owners())

    def owners(self) -> dict[str, tuple[str, str | None]]:
        """The model names that the server lists -> its own name for itself, and the base an adapter is of.

        The first is ``owned_by`` ("vllm", "sglang", "llamacpp", …), the second ``parent``, where given.
        """
        listed = self.ask("/models", most=LONGEST_LIST)
        try:
            return {
                str(model["id"]): (str(model.get("owned_by")), model.get("parent"))
                for model in listed["data"]
            }
        except (KeyError, TypeError, AttributeError):
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
        with self.open("/chat/completions", body) as response:
            while line := response.readline(LONGEST_LIST):  # a longer one is no event
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = _parsed(data)
                if not isinstance(event, dict) or "error" in event:
                    text = hide_key(_error_text(data.decode(errors="replace")), self._key)
                    raise KtbridgeError(f"the answer broke off: {text}.")
                for choice in event.get("choices", ()):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
                    if reason := choice.get("finish_reason"):
                        ended(reason)
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
        with self.open(path, body, native=native) as response:
            text = response.read(most + 1)
            if len(text) > most:
                raise ValueError(f"its reply is longer than {most:,} bytes")
            return _parsed(text)

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
            reason = " ".join(str(getattr(error, "reason", error)).split())[:200]
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
