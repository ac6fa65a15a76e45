"""What stands before every route: the key and the size of the body. Plain ASGI, outermost first."""

from __future__ import annotations

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

    The comparison takes the same time however much of the key is right.
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
                await JSONResponse(error.body(), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """413 for bodies over ``limit`` bytes, whether announced or streamed."""

    def __init__(self, app: App, limit: int) -> None:
        self._app = app
        self._limit = limit

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

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                # FastAPI reads the body and lets exceptions of this kind through.
                raise HTTPException(413, str(self._error()))
            return message

        await self._app(scope, counted, send)

    async def _discard(self, receive: Receive) -> None:
        """Read some of a refused body: most clients look for an answer only once all is sent."""
        left = 16 * self._limit
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    def _error(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._limit} bytes", code="request_too_large"
        )
