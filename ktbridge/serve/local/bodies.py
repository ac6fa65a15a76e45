"""Bodies read without holding up the event loop, on which everyone else waits.

They are parsed in threads, and none that would take long: C code that parses JSON keeps all threads of
Python waiting until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ktbridge.json_parts import has_more
from ktbridge.serve.local.replies import ClientGone
from ktbridge.serve.local.schema import ApiError, from_validation

MOST_PARTS = 1 << 18
"""Fields and items of a whole body: they are parsed in one piece, 0.1 s for so many."""
Body = TypeVar("Body", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route whose ``body``, a pydantic model, is read here. It is published as FastAPI's own are."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        hints = get_type_hints(self.endpoint)
        if "body" not in hints:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            try:
                # Not ``request.body()``, which keeps it as long as the request.
                raw = [b"".join([piece async for piece in request.stream()])]
            except ClientDisconnect:
                raise ClientGone from None
            if kind != "application/json":  # another site's page may send other kinds unasked
                raise ApiError(400, "the request needs Content-Type: application/json")
            body = await asyncio.to_thread(lambda: read_body(hints["body"], raw.pop()))
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


def read_body(kind: type[Body], raw: bytes) -> Body:
    """The request in ``raw``. Raises ApiError 400."""
    if has_more(raw, b",:[{", MOST_PARTS):
        raise ApiError(
            400,
            f"the body has more than {MOST_PARTS:,} fields and items; send it in several requests",
        )
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
