"""The HTTP API: the API key, the size of bodies, routes, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktbridge import __version__
from ktbridge.serve.local.engine import Engine
from ktbridge.serve.local.replies import ClientGone
from ktbridge.serve.local.schema import (
    SEED_RANGE,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    bounded,
    from_validation,
)
from ktbridge.serve.local.service import Service
from ktbridge.serve.request import Limits
from ktbridge.served_names import ServedArm

OPEN_PATHS = frozenset({"/health"})


def create_app(
    engine: Engine,
    arms: tuple[ServedArm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread.

    ``app.state.drain()`` stops accepting requests; ``app.state.worker.close()`` aborts those
    in progress.
    """
    limits = limits or Limits()
    service = Service(engine, arms, fingerprints, limits)
    worker, stop = service.worker, asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()
        await asyncio.to_thread(worker.join)

    def drain() -> None:
        worker.drain()
        stop.set()

    app = FastAPI(
        title="ktbridge",
        version=__version__,
        lifespan=lifespan,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request, or when it came"},
            "5XX": {"model": ErrorBody, "description": "The server's failure, or its end"},
        },
    )
    app.state.worker = worker
    app.state.drain = drain
    _add_error_handlers(app)
    # The last middleware added is the outermost: first the key, then the size.
    app.add_middleware(LimitBody, limit=limits.body, seconds=limits.body_seconds, stopping=stop)
    app.add_middleware(RequireKey, key=api_key)
    app.include_router(_routes(service))
    _publish_bounds(app, service)
    return app


def _routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str | int]:
        worker = service.worker
        return {"status": "ok", "waiting": worker.waiting, "running": worker.running}

    @routes.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [service.describe(arm) for arm in service.arms.values()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        return service.describe(service.find_arm(name))

    streamed: dict[int | str, dict[str, object]] = {200: {"content": {"text/event-stream": {}}}}

    @routes.post("/v1/chat/completions", response_model=None, responses=streamed)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @routes.post("/v1/completions", response_model=None, responses=streamed)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.completions(body, request)

    return routes


def _publish_bounds(app: FastAPI, service: Service) -> None:
    """Write what this server allows into the schema that it publishes, which ``app`` keeps."""
    schemas = app.openapi()["components"]["schemas"]
    most = {
        "n": service.most_choices,
        "max_tokens": service.context - 1,
        "max_completion_tokens": service.context - 1,
        "prompt": service.engine.vocab_size - 1,
        "seed": SEED_RANGE - 1,
    }
    for request in ("ChatRequest", "CompletionRequest"):
        fields = schemas[request]["properties"]
        fields["model"]["enum"] = list(service.arms)
        for name in most.keys() & fields.keys():
            fields[name] = bounded(fields[name], most[name], service.limits.waiting)


def _add_error_handlers(app: FastAPI) -> None:
    """Return every failure in OpenAI's error format."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return respond(ApiError(404, f"there is no {request.method} {request.url.path} here"))
        return respond(ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(ClientGone)
    async def _gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "the server failed; see its log"))


# --- middleware: plain ASGI, before every route -----------------------------------------------------


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

    def __init__(self, app: ASGIApp, key: str | None) -> None:
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


class LimitBody:
    """413 for bodies over ``limit`` bytes, announced or streamed; 408 on timeout.

    Once ``stopping`` is set, an incomplete request is refused with 503, so that a half-sent body
    doesn't delay the shutdown.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float, stopping: asyncio.Event) -> None:
        """``seconds``: timeout for the next piece of the body."""
        self._app = app
        self._limit = limit
        self._seconds = seconds
        self._stopping = stopping
        self._too_large = f"the body is larger than {limit} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self._limit:
            await self._discard(receive)
            error = ApiError(413, self._too_large, code="request_too_large")
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        size = 0
        complete = False

        async def counted() -> Message:
            nonlocal size, complete
            if complete:  # next comes the client's disconnect, which has no timeout
                return await receive()
            message = await self._receive_in_time(receive)
            size += len(message.get("body", b""))
            if size > self._limit:
                # FastAPI reads the body and lets exceptions of this kind through.
                raise HTTPException(413, self._too_large)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, counted, send)

    async def _receive_in_time(self, receive: Receive) -> Message:
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
