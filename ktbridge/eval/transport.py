"""HTTP to one server, through the openai package's client on aiohttp.

Requests go to the package's HTTP client itself, not through ``AsyncOpenAI``: the objects that it builds
for each request cost twice the CPU time of the request (scripts/bench_eval_client.py measures it), and
we read replies ourselves. The package is imported when the first client is opened: the import takes
longer than a report.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.hosts import is_loopback_url

_CONNECT_TIMEOUT = 60.0  # seconds
_LONGEST_BODY = 1 << 26  # bytes: no chat completion is as long
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Reply(NamedTuple):
    """One HTTP response: status, headers by lower-case name, and the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


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
        import aiohttp  # noqa: F401  the package would report its absence as a RuntimeError
        import openai

        # Loading the system's certificates takes longer than many runs; plain HTTP needs none.
        plain = url.startswith("http:")
        self._url = url.rstrip("/")
        self._http = openai.DefaultAioHttpClient(
            headers={
                "user-agent": f"ktbridge/{ktbridge.__version__}",
                "accept": "application/json",
                "accept-encoding": "identity",
                "authorization": f"Bearer {key}",
                "content-type": "application/json",
            },
            follow_redirects=False,
            timeout=openai.Timeout(None, connect=_CONNECT_TIMEOUT),
            trust_env=not is_loopback_url(url),
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True,
        )

    async def models(self, timeout: float) -> Reply:
        """GET /models."""
        return await self._ask("GET", "/models", None, timeout)

    async def chat(self, request: Mapping[str, object], timeout: float) -> Reply:
        """POST /chat/completions."""
        body = _encode(request).encode()
        return await self._ask("POST", "/chat/completions", body, timeout)

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
        try:
            return await asyncio.wait_for(self._send(method, path, body), timeout)
        except asyncio.TimeoutError:  # not the builtin before Python 3.11
            raise TimeoutError from None

    async def _send(self, method: str, path: str, body: bytes | None) -> Reply:
        import aiohttp

        for again in (True, False):
            request = self._http.build_request(method, self._url + path, content=body)
            try:
                response = await self._http.send(request, stream=True)
                try:
                    return Reply(
                        response.status_code, response.headers, await _read(response.aiter_raw())
                    )
                finally:
                    await response.aclose()
            except Exception as error:
                # The package reports most of aiohttp's failures as time-outs; the cause is exact.
                cause = error if isinstance(error, aiohttp.ClientError) else error.__cause__
                if not isinstance(cause, aiohttp.ClientError | OSError):
                    raise
                # A kept connection that had been idle for too long is replaced by a new one.
                dropped = isinstance(cause, aiohttp.ServerDisconnectedError | ConnectionResetError)
                if not (dropped and again):
                    raise _described(cause) from None
        raise AssertionError


async def _read(body: AsyncIterator[bytes]) -> bytes:
    parts, size = [], 0
    async for part in body:
        size += len(part)
        if size > _LONGEST_BODY:
            raise ConnectionError(f"a reply longer than {_LONGEST_BODY} bytes")
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
        return ConnectionError(f"not HTTP: {cause.message}")
    if isinstance(cause, aiohttp.ServerTimeoutError):
        return TimeoutError()
    if isinstance(cause, OSError):
        return cause
    return ConnectionError(" ".join(str(cause).split()) or type(cause).__name__)
