"""The client that chat, verify, the demo and the launcher ask a server with: one request after the other.

eval asks many at once, by ``answers``. Both have their connection from ``connection`` and read replies by
``replies``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.failures import BAD_REPLY
from ktbridge.server_api.hosts import is_loopback, server_url
from ktbridge.server_api.replies import (
    BadReplyError,
    check_key,
    describe_failure,
    describe_reply,
    hide_key,
    read_content,
    read_error,
    read_json,
    read_list,
    refuses_limit,
    rename_limit,
)
from ktbridge.server_api.served_names import (
    APPLIED_PATHS,
    ModelEntry,
    applied_adapter,
)

if TYPE_CHECKING:
    from httpx2 import Response

    from ktbridge.server_api.connection import Connection

Message = dict[str, str]


class Refused(KtbridgeError):
    """The server answered with an error. ``status``: HTTP's; ``reason``: the server's own message."""

    def __init__(self, url: str, status: int, said: str) -> None:
        key_is_wrong = "set KTBRIDGE_API_KEY to the server's key"
        step = key_is_wrong if status == 401 else "check --server, --model and the server's log"
        super().__init__(f"{url} answered {said.rstrip('.')}.", step)
        self.status, self.reason = status, said.partition(": ")[2]


class OpenAIClient:
    """One server. Every failure raises KtbridgeError."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 600, direct: bool = False
    ) -> None:
        """``url`` with or without /v1; ``timeout``: seconds without a byte after which a request has failed.

        ``direct``: never through a proxy, as for this machine's own addresses, which no proxy can reach.
        """
        self.url = server_url(url)
        self._key = check_key(api_key)
        self._timeout = timeout
        self._direct = direct or is_loopback(urlsplit(self.url).hostname or "")
        self._limit_renamed = False

    @functools.cached_property
    def _connection(self) -> Connection:
        from ktbridge.server_api.connection import Connection

        return Connection(self.url, self._key, self._timeout, self._direct)

    # --- what it is and has

    def is_healthy(self) -> bool:
        """Return whether the server answers /health with 200, all of it within the timeout."""
        return self._get_in_time("/health", native=True) is not None

    def models_in_time(self) -> list[str] | None:
        """As ``models``, or None where no list comes, all of it within the timeout."""
        body = self._get_in_time("/models")
        with suppress(BadReplyError, TypeError):
            return None if body is None else [str(one["id"]) for one in read_list(body, self._key)]
        return None

    def _get_in_time(self, path: str, native: bool = False) -> bytes | None:
        """The body of a reply with status 200. In other requests the timeout begins anew with each byte."""
        from ktbridge.server_api.connection import AsyncConnection

        async def get() -> bytes | None:
            async with aclosing(AsyncConnection(self.url, self._key, self._direct)) as connection:
                reply = await connection.get(self._place(path, native), self._timeout)
            return reply.body if reply.status == 200 else None

        with suppress(OSError, BadReplyError):
            return asyncio.run(get())
        return None

    def models(self) -> list[str]:
        """The model names that the server lists."""
        return list(self.entries())

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
        with self._open("/models") as response:
            body = response.read()
        try:
            return {str(model["id"]): dict(model) for model in read_list(body, self._key)}
        except (BadReplyError, TypeError) as error:
            raise KtbridgeError(
                f"{self.url}/models is not a list of models ({error}).",
                "give the URL of an OpenAI-compatible API: what stands before /v1/models",
            ) from None

    # --- requests

    def ask(
        self, path: str, body: Mapping[str, object] | None = None, *, native: bool = False
    ) -> Any:
        """The JSON document that the server answers with."""
        with self._open(path, body, native) as response:
            return read_json(response.read())

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
        with self._open("/chat/completions", body, stream=True) as response:
            page: str | None = ""  # the first line, until there is an event
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    page = page if page or page is None else line.strip()
                    continue
                page = None
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = read_json(data.encode())
                if not isinstance(event, dict) or "error" in event:
                    said = hide_key(read_error(data)[0], self._key)
                    raise KtbridgeError(f"the answer broke off: {said}.")
                try:
                    for choice in event.get("choices") or ():
                        if text := read_content((choice.get("delta") or {}).get("content"))[0]:
                            yield text
                        if reason := choice.get("finish_reason"):
                            ended(str(reason))
                except (AttributeError, TypeError):
                    raise BadReplyError("an event that is no part of an answer") from None
            if page:
                raise BadReplyError(f"no stream of events, it begins with {page[:40]!r}")
        raise KtbridgeError("the answer broke off: the server closed the connection.")

    def _place(self, path: str, native: bool = False) -> str:
        """The URL of a ``path``. ``native``: one beside /v1, not below it."""
        return (self.url.removesuffix("/v1") if native else self.url) + path

    @contextmanager
    def _open(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        native: bool = False,
        stream: bool = False,
    ) -> Iterator[Response]:
        """GET ``path``, or POST ``body`` to it, for a reply that is yet to be read.

        A second time with the limit of tokens by its other name, where the server wants that.
        """
        url = self._place(path, native)
        try:
            with ExitStack() as stack:
                for again in (True, False):
                    if body is not None and self._limit_renamed:
                        body = rename_limit(body)
                    response = stack.enter_context(self._connection.open(url, body, stream))
                    if response.is_success:
                        break
                    status = response.status_code
                    said = hide_key(describe_reply(status, response.read()), self._key)
                    unnamed = again and status in (400, 422) and "max_tokens" in (body or ())
                    if not (unnamed and refuses_limit(said)):
                        raise Refused(url, status, said)
                    self._limit_renamed = True
                yield response
        except (OSError, ValueError) as error:
            bad = BAD_REPLY if isinstance(error, BadReplyError) else ""
            reason = hide_key(bad + describe_failure(error), self._key)
            raise KtbridgeError(
                f"{url} cannot be asked: {reason}.",
                "check that the server runs and that --server is its URL",
            ) from error
