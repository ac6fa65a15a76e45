"""HTTP to one server, by aiohttp.

The openai package's own client takes two to three times the CPU time of a request
(scripts/bench_eval_client.py measures both), and we read replies ourselves. aiohttp is imported when the
first client is opened: that takes longer than a report.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.server_api.hosts import is_loopback_url

if TYPE_CHECKING:
    from aiohttp import ClientSession, StreamReader

_CONNECT_TIMEOUT = 60.0  # seconds
_LONGEST_BODY = 1 << 23  # bytes: no chat completion is as long, and many may be read at once
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Reply(NamedTuple):
    """One HTTP response: status, headers by lower-case name, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class NotAReplyError(ConnectionError):
    """What came is no HTTP response, or one without an end: asking again won't help."""


class Transport:
    """Kept connections to one base URL (ending in /v1); ``close`` at the end.

    Both requests return the server's reply with any status; they raise TimeoutError if it is not
    complete within ``timeout`` seconds, ConnectionError (or another OSError) if there is none.
    Redirects are not followed. A proxy from the environment is used except for this machine.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises KtbridgeError for a key that is not valid in a header."""
        key = (api_key or "").strip() or "none"
        if not (key.isascii() and key.isprintable()):
            raise KtbridgeError(
                "the API key holds characters that no request can carry.",
                "see what KTBRIDGE_API_KEY and KTBRIDGE_JUDGE_API_KEY hold",
            )
        self._url = url.rstrip("/")
        self._headers = {
            "User-Agent": f"ktbridge/{ktbridge.__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
        }
        self._open: ClientSession | None = None

    async def models(self, timeout: float) -> Reply:
        """GET /models."""
        return await self._ask("GET", "/models", None, timeout)

    async def chat(self, request: Mapping[str, object], timeout: float) -> Reply:
        """POST /chat/completions."""
        body = _encode(request).encode()
        return await self._ask("POST", "/chat/completions", body, timeout)

    async def native(self, path: str, timeout: float) -> Reply:
        """GET a path beside /v1, of an API of the engine's own."""
        return await self._ask("GET", path, None, timeout, self._url.removesuffix("/v1"))

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()

    def _session(self) -> ClientSession:
        """Made by the first request: aiohttp wants a running event loop."""
        import aiohttp

        if self._open is None:
            self._open = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # callers bound what is in flight
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trust_env=not is_loopback_url(self._url),
                auto_decompress=False,
            )
        return self._open

    async def _ask(
        self, method: str, path: str, body: bytes | None, timeout: float, root: str | None = None
    ) -> Reply:
        import aiohttp

        session, url = self._session(), (self._url if root is None else root) + path
        limits = aiohttp.ClientTimeout(timeout, sock_connect=_CONNECT_TIMEOUT)
        for again in (True, False):
            try:
                async with session.request(
                    method, url, data=body, timeout=limits, allow_redirects=False
                ) as response:
                    headers = {name.lower(): value for name, value in response.headers.items()}
                    return Reply(response.status, headers, await _read(response.content))
            except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
                if not again:  # a kept connection that had been idle for too long is replaced once
                    raise _described(error) from None
            except aiohttp.ClientError as error:
                raise _described(error) from None
            except asyncio.TimeoutError:  # not the builtin before Python 3.11
                raise TimeoutError from None
        raise AssertionError


async def _read(body: StreamReader) -> bytes:
    parts, size = [], 0
    async for part in body.iter_any():
        size += len(part)
        if size > _LONGEST_BODY:
            raise NotAReplyError(f"a reply longer than {_LONGEST_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def _described(cause: Exception) -> OSError:
    """A failure of aiohttp as the OSError that our callers expect."""
    import aiohttp

    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return ConnectionError("the server ended the connection without a reply")
    if isinstance(cause, aiohttp.ClientPayloadError):
        return ConnectionError("the message body is incomplete")
    if isinstance(cause, aiohttp.ClientResponseError):
        return NotAReplyError(f"not HTTP: {' '.join(cause.message.split())[:200]}")
    if isinstance(cause, aiohttp.ServerTimeoutError):
        return TimeoutError()
    if isinstance(cause, OSError):  # aiohttp's ClientOSError is one
        return cause
    return ConnectionError(" ".join(str(cause).split()) or type(cause).__name__)
