"""What is checked before any route, as plain ASGI: who asks, and the size and time of the body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktbridge.serve.local.schema import ApiError
from ktbridge.server_api import hosts

OPEN_PATHS = frozenset({"/health"})
LINGER_SECONDS = 2.0
AT_ONCE = 8  # bodies of the largest size that are held together
SMALL_BODY = 1 << 16  # bytes; one that is smaller is read in any case


def allowed(path: str, authorization: bytes | None, key: str) -> bool:
    """Return whether a request may pass: an open path, or the right bearer token.

    The comparison takes constant time.
    """
    if path in OPEN_PATHS:
        return True
    scheme, _, token = (authorization or b"").partition(b" ")
    return hmac.compare_digest(token.strip(), key.encode()) and scheme.lower() == b"bearer"


class RequireKey:
    """401 for requests without the server's key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = dict(scope["headers"]).get(b"authorization")
            if not allowed(scope["path"], header, self._key):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                wanted = {"WWW-Authenticate": "Bearer"}  # required in a 401: RFC 9110, 11.6.1
                await JSONResponse(error.body, 401, wanted)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class KnownHost:
    """403 for a request whose Host or Origin isn't this machine.

    A page of another site can make a browser here send requests, and by a DNS name that it points at
    127.0.0.1 also read the answers (DNS rebinding). Neither can choose these two headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                given = value.decode("latin-1")
                if name == b"host":
                    url = f"http://{given}"
                elif name == b"origin":
                    url = given
                else:
                    continue
                if not hosts.is_loopback_url(url):
                    text = (
                        f"{name.decode().title()}: {given[:80]} isn't this machine, and this server has no "
                        "API key; call it as http://127.0.0.1, or start it with KTBRIDGE_API_KEY"
                    )
                    await JSONResponse(ApiError(403, text).body, 403)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class LimitBody:
    """413 for bodies over ``limit`` bytes, announced or sent; 408 for those that take too long.

    429 for a large one while ``AT_ONCE`` times ``limit`` bytes of others are held: memory is bounded.

    Once ``stopping`` is set, an incomplete request is refused with 503, so that a half-sent body
    doesn't delay the shutdown.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float, stopping: asyncio.Event) -> None:
        """``seconds``: timeout for the whole body."""
        self._app = app
        self._limit = limit
        self._seconds = seconds
        self._stopping = stopping
        self._too_large = f"the body is larger than {limit} bytes"
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._limit:
            await self._refuse(receive, send)
            return
        size = 0
        complete = False
        end = asyncio.get_running_loop().time() + self._seconds

        async def counted() -> Message:
            nonlocal size, complete
            if complete:  # next comes the client's disconnect, which has no timeout
                return await receive()
            message = await self._receive_until(end, receive)
            more = len(message.get("body", b""))
            size += more
            self._held += more
            close = {"Connection": "close"}
            if size > self._limit:
                await self._discard(message, receive)
                raise HTTPException(413, self._too_large, close)
            if size > SMALL_BODY and self._held > AT_ONCE * self._limit:
                await self._discard(message, receive)
                full = "too many large requests at once; try again later"
                raise HTTPException(429, full, close | {"Retry-After": "1"})
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= size

    async def _receive_until(self, end: float, receive: Receive) -> Message:
        """The next message, unless the server stops or ``end`` of the loop's clock comes first."""
        message = asyncio.ensure_future(receive())
        stop = asyncio.ensure_future(self._stopping.wait())
        left = end - asyncio.get_running_loop().time()
        try:
            await asyncio.wait(
                {message, stop}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED
            )
            if message.done():
                return message.result()
            # The rest of the body would be parsed as the next request.
            close = {"Connection": "close"}
            if stop.done():
                raise HTTPException(503, "the server is shutting down", close)
            raise HTTPException(408, "the rest of the body didn't come in time", close)
        finally:
            message.cancel()
            stop.cancel()

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """413 at once; then read a while, since most clients look for an answer only once all is sent."""
        error = ApiError(413, self._too_large, code="request_too_large")
        reply = JSONResponse(error.body, 413, {"Connection": "close"})
        await send({"type": "http.response.start", "status": 413, "headers": reply.raw_headers})
        await send({"type": "http.response.body", "body": reply.body, "more_body": True})
        await self._discard({"more_body": True}, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, last: Mapping[str, object], receive: Receive) -> None:
        """Read what follows ``last`` of a body, for a while, and keep nothing.

        A connection that is closed with bytes unread is reset, and its client may lose the answer.
        """
        end = asyncio.get_running_loop().time() + LINGER_SECONDS
        with suppress(HTTPException):
            while last.get("more_body", False):
                last = await self._receive_until(end, receive)
