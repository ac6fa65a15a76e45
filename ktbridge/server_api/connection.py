"""Connections to one server, by the openai package's client: whom it asks, how, and how much it reads.

The package owns what a connection is: the key, the environment's proxies and certificates, kept connections,
aiohttp's transport. Requests are put together here: ``AsyncOpenAI.post`` takes more than twice the processor
time, and ``ktbridge eval`` has thousands of them. There are no retries: the
table in ``failures`` decides what is asked again. No redirect is followed, as the key would go along, and a
reply is bounded while it is read.

This module alone imports openai, httpx2 and aiohttp. That takes a second: the first client imports it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

import aiohttp
import anyio
import httpx2
import openai

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.server_api.hosts import is_loopback_url
from ktbridge.server_api.replies import TIMED_OUT, BadReplyError, NoReplyError

LONGEST_REPLY = 1 << 23
"""Bytes of a whole reply: no list and no completion is as long, and many may be read at once."""
LONGEST_STREAM = 1 << 28
"""Bytes of a streamed one, which isn't kept."""
_MOST = "ktbridge.most"  # an extension of our requests: bytes of the reply
_CONNECT_SECONDS = 60.0
_HEADERS = {
    "User-Agent": f"ktbridge/{ktbridge.__version__}",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# What any of the packages raises where there is no reply.
_FAILURES = (httpx2.HTTPError, aiohttp.ClientError, OSError, asyncio.TimeoutError)


class Connection:
    """Kept connections to one server; ``aclose`` at the end."""

    def __init__(self, url: str, key: str, direct: bool) -> None:
        """``direct``: never through a proxy. Raises KtbridgeError for a URL or a proxy that can't be used."""
        try:
            self._http = openai.DefaultAioHttpClient(
                follow_redirects=False,
                trust_env=not (direct or is_loopback_url(url)),
                verify=_certificates(),
                # Callers bound what is in flight; without a number aiohttp's own 100 would.
                limits=httpx2.Limits(max_connections=1 << 16, keepalive_expiry=15.0),
                event_hooks={"response": [_bound]},
            )
            # Without a key the package takes OPENAI_API_KEY, which is for another server.
            key = key or "none"
            self._sdk = openai.AsyncOpenAI(base_url=url, api_key=key, http_client=self._http)
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise KtbridgeError(
                f"{url} cannot be asked: {_line(error)}.",
                "correct the URL, or the proxy in HTTP_PROXY, HTTPS_PROXY and ALL_PROXY",
            ) from None
        self._headers = httpx2.Headers({**self._sdk.auth_headers, **_HEADERS})

    @asynccontextmanager
    async def open(
        self, url: str, body: Mapping[str, object] | None, seconds: float, stream: bool = False
    ) -> AsyncIterator[httpx2.Response]:
        """GET ``url``, or POST ``body`` to it; the reply has any status, and is whole within ``seconds``.

        A ``stream`` is yet to be read, and ``seconds`` are those without a byte. Raises NoReplyError, and
        BadReplyError for what is no HTTP, is longer than it may be, or is encoded, which wasn't asked for.
        """
        method, content = ("GET", None) if body is None else ("POST", _encode(body).encode())
        more = _limits(seconds, LONGEST_STREAM) if stream else _WHOLE
        for again in (True, False):
            request = httpx2.Request(
                method, _url(url), headers=self._headers, content=content, extensions=more
            )
            try:
                with anyio.fail_after(None if stream else seconds):
                    response = await self._http.send(request, stream=stream)
                break
            except (*_FAILURES, ValueError) as error:
                failure = failure_of(error)
                # A kept connection that had been idle for too long is replaced once.
                if not (again and isinstance(failure, _EndedError)):
                    raise failure from None
        try:
            async with aclosing(response):
                yield response
        except _FAILURES as error:
            raise failure_of(error) from None

    async def aclose(self) -> None:
        await self._sdk.close()


class _EndedError(NoReplyError):
    pass


def failure_of(error: BaseException) -> BadReplyError | NoReplyError:
    """Return what is behind an error of ``_FAILURES``.

    The packages wrap each other's errors, and call a refused connection timed out: the outermost of ours,
    aiohttp's or the system's tells.
    """
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case BadReplyError():
                return cause
            case ssl.SSLError(reason=str(reason)):
                told = getattr(cause, "verify_message", "") or reason.replace("_", " ").lower()
                return NoReplyError(f"no TLS connection: {told}")
            case aiohttp.ServerDisconnectedError() | ConnectionResetError():
                return _EndedError("the server ended the connection without a reply")
            case aiohttp.ClientPayloadError():
                return NoReplyError("the message body is incomplete")
            case aiohttp.ClientResponseError():
                return BadReplyError(f"not HTTP: {_line(cause.message)}")
            case TimeoutError() | asyncio.TimeoutError():  # two before Python 3.11
                return NoReplyError(TIMED_OUT)
            case OSError(errno=int(number)) if not isinstance(cause, ssl.SSLError):
                known = os.strerror(number).lower() if number > 0 else cause.strerror
                return NoReplyError(known or _line(cause))
        error, cause = cause, cause.__cause__ or cause.__context__
    return NoReplyError(_line(error) or type(error).__name__)


def _limits(seconds: float | None, most: int) -> dict[str, object]:
    """Extensions of a request: seconds without a byte, and bytes of the reply."""
    return {"timeout": httpx2.Timeout(seconds, connect=_CONNECT_SECONDS).as_dict(), _MOST: most}


_WHOLE = _limits(None, LONGEST_REPLY)
_url = functools.lru_cache(maxsize=64)(httpx2.URL)
# The certificates that are trusted: reading them takes longer than a hundred requests.
_certificates = functools.cache(httpx2.create_ssl_context)


def _line(text: object) -> str:
    return " ".join(str(text).split())[:200]


async def _bound(response: httpx2.Response) -> None:
    """Let ``response`` be read as it comes, up to a number of bytes."""
    coding = response.headers.pop("content-encoding", "identity")
    if coding.lower() != "identity" and response.is_success:
        raise BadReplyError(f"content-encoding {coding!r}, which was not asked for")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    most = response.request.extensions[_MOST]
    length = response.headers.get("content-length", "")
    if not (length.isdecimal() and int(length) <= most):  # which aiohttp would hold it to
        response.stream = _BoundedStream(response.stream, most)


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for part in self._stream:
            read += len(part)
            if read > self._most:
                raise BadReplyError(f"a reply longer than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
