"""The HTTP API: who may ask, what a body may be, routes, and errors in OpenAI's format.

For proofs on localhost: a body is bounded in size and time, connections are left to uvicorn.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

import anyio
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktbridge import __version__
from ktbridge.serve.local.engine import LocalEngine
from ktbridge.serve.local.replies import ClientGone
from ktbridge.serve.local.schema import (
    SEED_RANGE,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    bounded,
    read_request,
)
from ktbridge.serve.local.service import Service
from ktbridge.serve.request import Limits
from ktbridge.server_api import hosts
from ktbridge.server_api.served_names import ServedArm

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read, so that its client gets to the answer."""


def create_app(
    engine: LocalEngine,
    arms: tuple[ServedArm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread.

    Without a key, only requests that name this machine are answered, and none that another site's page sends.
    ``app.state.worker`` is what computes: ``drain()`` refuses further requests, ``close()`` aborts all.
    """
    limits = limits or Limits()
    service = Service(engine, arms, fingerprints, limits)
    worker = service.worker

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()
        await asyncio.to_thread(worker.join)

    app = FastAPI(
        title="ktbridge",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # their pages load another host's scripts
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request, or when it came"},
            "5XX": {"model": ErrorBody, "description": "The server's failure, or its end"},
        },
    )
    app.state.worker = worker
    _add_error_handlers(app)
    # The last middleware added is the outermost: first who asks, then the size.
    app.add_middleware(LimitBody, limit=limits.body, seconds=limits.body_seconds)
    app.add_middleware(CheckCaller, key=api_key)
    app.include_router(_routes(service))
    _publish_bounds(app, service)
    return app


class CheckCaller:
    """401 for requests without the server's key; without a key, 403 for those of other sites' pages."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            error = check_host(headers)
            if self._key is not None:
                error = check_bearer(scope["path"], headers.get("authorization", ""), self._key)
        await (self._app if error is None else _respond(error))(scope, receive, send)


def check_bearer(path: str, authorization: str, key: str) -> ApiError | None:
    """Return what is wrong with a request's bearer token; /health needs none. Takes constant time."""
    scheme, _, token = authorization.partition(" ")
    right = hmac.compare_digest(token.strip().encode("latin-1"), key.encode())
    if path == "/health" or (right and scheme.lower() == "bearer"):
        return None
    wanted = {"WWW-Authenticate": "Bearer"}  # required in a 401: RFC 9110, 11.6.1
    text = "the API key is missing or wrong"
    return ApiError(401, text, code="invalid_api_key", headers=wanted)


def check_host(headers: Headers) -> ApiError | None:
    """Return an error if a request's Host or Origin isn't this machine.

    A page of another site can make a browser here send requests, and by a DNS name that it points at
    127.0.0.1 also read the answers (DNS rebinding). Neither can choose these two headers.
    """
    urls = {"Host": f"http://{headers.get('host', '127.0.0.1')}"}
    if "origin" in headers:
        urls["Origin"] = headers["origin"]
    for name, url in urls.items():
        if not hosts.is_loopback_url(url):
            return ApiError(
                403,
                f"{name}: {headers[name][:80]} isn't this machine, and this server has no API key; "
                "call it as http://127.0.0.1, or start it with KTBRIDGE_API_KEY",
            )
    return None


class LimitBody:
    """Reads a body before any route: 413 over ``limit`` bytes, announced or sent, 408 after ``seconds``."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        announced = Headers(scope=scope).get("content-length", "0")
        large = announced.isdigit() and int(announced) > self._limit
        with anyio.move_on_after(self._seconds) as waiting:
            while not large and (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                large = len(body) > self._limit
                if not message.get("more_body", False):
                    break
        if waiting.cancelled_caught:
            # Without "close" the rest of the body would be parsed as the next request.
            close = {"Connection": "close"}
            late = ApiError(408, "the rest of the body didn't come in time", headers=close)
            await _respond(late)(scope, receive, send)
            return
        if large:
            await self._refuse(receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """413 at once; then read on: a connection that is closed with bytes unread may lose the answer."""
        reply = _respond(
            ApiError(
                413,
                f"the body is larger than {self._limit} bytes",
                code="request_too_large",
                headers={"Connection": "close"},
            )
        )
        await send({"type": "http.response.start", "status": 413, "headers": reply.raw_headers})
        await send({"type": "http.response.body", "body": reply.body, "more_body": True})
        with anyio.move_on_after(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class BodyRoute(APIRoute):
    """A route whose ``body``, a pydantic model, is read strictly; it is published as FastAPI's own are."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if given != "application/json":  # another site's page may send other kinds unasked
                raise ApiError(400, "the request needs Content-Type: application/json")
            body = read_request(kind, await request.body())
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


def _routes(service: Service) -> APIRouter:
    routes = APIRouter(route_class=BodyRoute)

    @routes.get("/health")
    async def health() -> dict[str, str | int]:
        worker = service.worker
        if worker.failure is not None:
            raise ApiError(503, "the thread that computes has died; see the server's log")
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


def _respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def _add_error_handlers(app: FastAPI) -> None:
    """Return every failure in OpenAI's error format."""

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return _respond(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return _respond(
                ApiError(404, f"there is no {request.method} {request.url.path[:200]} here")
            )
        return _respond(ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(ClientGone)
    async def _gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return _respond(ApiError(500, "the server failed; see its log"))
