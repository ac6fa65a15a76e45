"""JSON in and out without holding up the event loop, on which everyone else waits.

Reading and writing happen in threads, and in steps that are short even for the largest body: C code that
parses or writes JSON keeps all threads of Python waiting until it is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ktbridge.serve.local.replies import ClientGone
from ktbridge.serve.local.schema import ApiError, from_validation

SLICE = 256  # items of a list written in one step
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
                raw = await request.body()
            except ClientDisconnect:
                raise ClientGone from None
            if kind != "application/json":  # another site's page may send other kinds unasked
                raise ApiError(400, "the request needs Content-Type: application/json")
            body = await asyncio.to_thread(read_body, hints["body"], raw)
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


def read_body(kind: type[Body], raw: bytes) -> Body:
    """The request in ``raw``. Raises ApiError 400."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None


async def json_response(build: Callable[[], object]) -> Response:
    """What ``build`` returns, as JSON."""

    def write() -> bytes:
        return "".join(_pieces(build())).encode()

    return Response(await asyncio.to_thread(write), media_type="application/json")


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_text(key)}:"
            yield from _pieces(item)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + _text(value[start : start + SLICE])[1:-1]
        yield "]"
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from _pieces(item)
        yield "]"
    else:
        yield _text(value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
