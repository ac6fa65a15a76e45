"""Connections to one server, by the openai package's clients: whom they ask, how, and how much they read.

The package owns what a connection is: base URL, key, the environment's proxies and certificates, kept
connections, and aiohttp's transport for many requests at once. It makes no retries: the table in ``failures``
decides what is asked again. No redirect is followed, as the key would go along, and a reply is bounded while
it is read.

This module alone imports openai, httpx2 and aiohttp. That takes a second: the first connection imports it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import aiohttp
import anyio
import httpx2
import openai

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.server_api.hosts import is_loopback_url
from ktbridge.server_api.replies import TIMED_OUT, BadReplyError, NotAReplyError

LONGEST_REPLY = 1 << 23
"""Bytes of a whole reply: no list and no completion is as long, and many may be read at once."""
LONGEST_STREAM = 1 << 28
"""Bytes of a streamed one: tens of thousands of tokens."""
_STREAM = "text/event-stream"
_CONNECT_SECONDS = 60.0
_KEPT_SECONDS = 15.0  # of an idle connection
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# What is raised by any of the packages where there is no reply.
_FAILURES = (
    *(openai.APIConnectionError, httpx2.HTTPError, httpx2.StreamError, aiohttp.ClientError),
    *(OSError, ValueError),
)


class Reply(NamedTuple):
    """One HTTP response: status, headers by lower-case name, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Connection:
    """Connections to one server, a new one for each request, so that none is stale.

    ``timeout``: seconds without a byte; ``direct``: never through a proxy.
    """

    def __init__(self, url: str, key: str, timeout: float, direct: bool) -> None:
        """Raises KtbridgeError for a URL or a proxy that can't be used."""
        with _usable(url):
            http = openai.DefaultHttpxClient(
                **_http_settings(url, direct),
                limits=httpx2.Limits(max_keepalive_connections=0),
                event_hooks={"response": [_bound]},
            )
            self._sdk = openai.OpenAI(**_settings(url, key), timeout=timeout, http_client=http)

    @contextmanager
    def open(
        self, url: str, body: Mapping[str, object] | None, stream: bool = False
    ) -> Iterator[httpx2.Response]:
        """GET ``url``, or POST ``body`` to it: the reply of any status, yet to be read.

        Raises, and makes of what is raised while it is read, BadReplyError or an OSError.
        """
        how: Any = {"cast_to": httpx2.Response, "stream": True, "stream_cls": openai.Stream}
        if stream:
            how["options"] = {"headers": {"Accept": _STREAM}}
        try:
            try:
                response = (
                    self._sdk.get(url, **how)
                    if body is None
                    else self._sdk.post(url, body=body, **how)
                )
            except openai.APIStatusError as error:
                response = error.response
            with closing(response):
                yield response
        except _FAILURES as error:
            raise failure_of(error) from None


class AsyncConnection:
    """Kept connections to one server, for many requests at once; ``aclose`` at the end.

    A request returns the server's reply with any status. It raises TimeoutError if that isn't complete within
    ``seconds``, another OSError if there is none, BadReplyError for an encoding that wasn't asked for.
    """

    def __init__(self, url: str, key: str, direct: bool = False) -> None:
        """Raises KtbridgeError for a URL or a proxy that can't be used."""

        async def bound(response: httpx2.Response) -> None:
            _bound(response)

        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        with _usable(url):
            self._http = openai.DefaultAioHttpClient(
                **_http_settings(url, direct),
                # Callers bound what is in flight; without a number aiohttp's own 100 would.
                limits=httpx2.Limits(max_connections=1 << 16, keepalive_expiry=_KEPT_SECONDS),
                event_hooks={"response": [bound]},
            )
            settings = _settings(url, key)
            self._sdk = openai.AsyncOpenAI(**settings, timeout=timeout, http_client=self._http)
        self._chat_url = httpx2.URL(f"{url.rstrip('/')}/chat/completions")
        self._headers = httpx2.Headers({**self._sdk.auth_headers, **settings["default_headers"]})
        self._extensions = {"timeout": timeout.as_dict()}

    async def get(self, url: str, seconds: float) -> Reply:
        """GET a path below the base URL, or a whole URL."""
        return await self._reply(lambda: self._sdk.get(url, cast_to=httpx2.Response), seconds)

    async def chat(self, body: Mapping[str, object], seconds: float) -> Reply:
        """POST to /chat/completions.

        The request is put together here, for pace: by ``AsyncOpenAI.post`` one takes three times the
        processor time (scripts/bench_eval_client.py).
        """
        content, headers, more = _encode(body).encode(), self._headers, self._extensions

        def send() -> Awaitable[httpx2.Response]:
            request = httpx2.Request(
                "POST", self._chat_url, headers=headers, content=content, extensions=more
            )
            return self._http.send(request)

        return await self._reply(send, seconds)

    async def aclose(self) -> None:
        await self._sdk.close()

    async def _reply(self, send: Callable[[], Awaitable[httpx2.Response]], seconds: float) -> Reply:
        for again in (True, False):
            try:
                with anyio.fail_after(seconds):
                    response = await send()
            except openai.APIStatusError as error:
                response = error.response
            except _FAILURES as error:
                failure = failure_of(error)
                if again and isinstance(failure, _EndedError):
                    continue  # a kept connection that had been idle for too long is replaced once
                raise failure from None
            return Reply(response.status_code, response.headers, response.content)
        raise AssertionError


class _EndedError(ConnectionError):
    """The connection's end where a reply was due."""


def failure_of(error: BaseException) -> OSError | ValueError:
    """What is behind an error of ``_FAILURES``, in words of our own where the system has none.

    The packages wrap each other's errors, and call a refused connection timed out: the innermost of ours,
    aiohttp's or the system's tells.
    """
    chain: list[BaseException] = [error]
    while (deeper := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(deeper)
    for one in chain:
        if isinstance(one, BadReplyError | NotAReplyError):
            return one
        if isinstance(one, httpx2.HTTPStatusError):  # of which no more could be read
            return ConnectionError(
                f"HTTP {one.response.status_code}, and the message body is incomplete"
            )
        if isinstance(one, ssl.SSLError) and one.reason:
            told = getattr(one, "verify_message", "") or one.reason.replace("_", " ").lower()
            return ConnectionError(f"no TLS connection: {told}")
        if isinstance(one, aiohttp.ServerDisconnectedError | ConnectionResetError):
            return _EndedError("the server ended the connection without a reply")
        if isinstance(one, aiohttp.ClientPayloadError):
            return ConnectionError("the message body is incomplete")
        if isinstance(one, aiohttp.ClientResponseError):
            return NotAReplyError(f"not HTTP: {_line(one.message)}")
        if isinstance(one, TimeoutError | asyncio.TimeoutError):  # two before Python 3.11
            return TimeoutError(TIMED_OUT)
        if isinstance(one, OSError) and not isinstance(one, ssl.SSLError):
            return one
    told = _line(str(error)) or type(error).__name__
    for one in chain:
        if isinstance(one, httpx2.TimeoutException):
            return TimeoutError(TIMED_OUT)
        if isinstance(one, httpx2.RemoteProtocolError):
            told = _line(str(one))
            if told.startswith("Server disconnected"):
                return _EndedError("the server ended the connection without a reply")
            if "message body" in told or "chunk" in told:
                return ConnectionError("the message body is incomplete")
            return NotAReplyError(f"not HTTP: {told}")
    return ConnectionError(told)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _http_settings(url: str, direct: bool) -> dict[str, Any]:
    """A proxy from the environment is for other machines: none can reach this one."""
    trusts = not (direct or is_loopback_url(url))
    return {"follow_redirects": False, "trust_env": trusts, "verify": _certificates()}


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Certificates that are trusted: reading them takes longer than a hundred requests."""
    return httpx2.create_ssl_context()


def _settings(url: str, key: str) -> dict[str, Any]:
    headers = {
        "User-Agent": f"ktbridge/{ktbridge.__version__}",
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    # Without a key the package would take OPENAI_API_KEY, which is for another server.
    settings = {"base_url": url, "api_key": key or "none", "max_retries": 0}
    return {**settings, "default_headers": headers}


@contextmanager
def _usable(url: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        raise KtbridgeError(
            f"{url} cannot be asked: {_line(str(error))}.",
            "correct --server, or the proxy in HTTP_PROXY, HTTPS_PROXY and ALL_PROXY",
        ) from None


def _bound(response: httpx2.Response) -> None:
    """Let ``response`` be read as it comes, up to a number of bytes."""
    coding = response.headers.pop("content-encoding", "identity")
    if coding.lower() != "identity" and response.is_success:
        raise BadReplyError(f"content-encoding {coding!r}, which was not asked for")
    streamed = response.is_success and response.request.headers["accept"] == _STREAM
    response.stream = _BoundedStream(response.stream, LONGEST_STREAM if streamed else LONGEST_REPLY)


class _BoundedStream(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._left, self._most = stream, most, most

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield self._counted(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield self._counted(part)

    def _counted(self, part: bytes) -> bytes:
        self._left -= len(part)
        if self._left < 0:
            raise NotAReplyError(f"a reply longer than {self._most} bytes")
        return part

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
