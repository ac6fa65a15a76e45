"""Middleware before every route: API key and body size. Plain ASGI, outermost first."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ktbridge.serve.local.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})


def allowed(path: str, authorization: bytes | None, key: str | None) -> bool:
    """Whether a request may pass: no key set, an open path, or the right bearer token.

    The comparison takes constant time.
    """
    if key is None or path in OPEN_PATHS:
        return True
    scheme, _, token = (authorization or b"").partition(b" ")
    return hmac.compare_digest(token.strip(), key.encode()) and scheme.lower() == b"bearer"


class RequireKey:
    """401 for requests without the server's key."""

    def __init__(self, app: App, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = dict(scope["headers"]).get(b"authorization")
            if not allowed(scope["path"], header, self._key):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                wanted = {"WWW-Authenticate": "Bearer"}  # required in a 401: RFC 9110, 11.6.1
                await JSONResponse(error.body(), 401, wanted)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """413 for bodies over ``limit`` bytes, announced or streamed; 408 on timeout.

    Once ``stopping`` is set, an incomplete request is refused with 503, so that a half-sent body
    doesn't delay the shutdown.
    """

    def __init__(self, app: App, limit: int, seconds: float, stopping: asyncio.Event) -> None:
        """``seconds``: timeout for the next piece of the body."""
        self._app = app
        self._limit = limit
        self._seconds = seconds
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._limit:
            await self._discard(receive)
            error = self._error()
            await JSONResponse(error.body(), error.status)(scope, receive, send)
            return
        size = 0
        complete = False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size, complete
            if complete:  # next comes the client's disconnect, which has no timeout
                return await receive()
            message = await self._receive_in_time(receive)
            size += len(message.get("body", b""))
            if size > self._limit:
                # FastAPI reads the body and lets exceptions of this kind through.
                raise HTTPException(413, str(self._error()))
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)

    async def _receive_in_time(self, receive: Receive) -> MutableMapping[str, Any]:
        """The next message, unless the server stops or the client takes too long."""
        message = asyncio.ensure_future(receive())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(
                {message, stop}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
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

    async def _discard(self, receive: Receive) -> None:
        """Read some of a refused body: most clients look for an answer only once all is sent."""
        left = 16 * self._limit
        while left > 0:
            message = await self._receive_in_time(receive)
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._limit} bytes", code="request_too_large"
        )
