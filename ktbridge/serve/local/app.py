"""The HTTP API: who may ask, what a body may be, routes, and errors in OpenAI's format.

For proofs on localhost: a body is bounded in size and time, connections are left to uvicorn.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ktbridge.serve.local.engine import LocalEngine
from ktbridge.serve.local.schema import ApiError, ChatRequest, CompletionRequest, Kind, read_request
from ktbridge.serve.local.service import Service
from ktbridge.serve.request import Limits
from ktbridge.server_api import hosts
from ktbridge.server_api.served_names import ServedArm

LINGER_SECONDS = 1.0  # a client on this machine sends gigabytes meanwhile
_CLOSE = {"Connection": "close"}  # else the rest of a body is parsed as the next request


def create_app(
    engine: LocalEngine,
    arms: tuple[ServedArm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> Starlette:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread.

    Without a key, only requests that name this machine are answered, and none that another site's page sends.
    ``app.state.worker`` is what computes: ``drain()`` refuses further requests, ``close()`` aborts all.
    """
    limits = limits or Limits()
    service = Service(engine, arms, fingerprints, limits)
    worker = service.worker

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        worker.close()
        await asyncio.to_thread(worker.join)

    async def health(_: Request) -> Response:
        if worker.failure is not None:
            raise ApiError(503, "the thread that computes has died; see the server's log")
        return JSONResponse({"status": "ok", "waiting": worker.waiting, "running": worker.running})

    async def models(_: Request) -> Response:
        described = [service.describe(arm) for arm in service.arms.values()]
        return JSONResponse({"object": "list", "data": described})

    async def model(request: Request) -> Response:
        return JSONResponse(service.describe(service.find_arm(request.path_params["name"])))

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            _post("/v1/chat/completions", ChatRequest, service.chat, limits),
            _post("/v1/completions", CompletionRequest, service.completions, limits),
        ],
        middleware=[Middleware(CheckCaller, key=api_key)],
        exception_handlers=dict.fromkeys(
            (ApiError, HTTPException, ClientDisconnect, Exception), _answer_error
        ),
        lifespan=lifespan,
    )
    app.state.worker = worker
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
        await (self._app if error is None else _reply(error))(scope, receive, send)


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


def _post(
    path: str, kind: type[Kind], answer: Callable[[Kind, Request], Awaitable[Response]], limits: Limits
) -> Route:
    """Return the route of requests whose body is a ``kind``."""

    async def endpoint(request: Request) -> Response:
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await _read_body(request, limits)
        if given != "application/json":  # another site's page may send other kinds unasked
            raise ApiError(400, "the request needs Content-Type: application/json")
        return await answer(read_request(kind, body), request)

    return Route(path, endpoint, methods=["POST"])


async def _read_body(request: Request, limits: Limits) -> bytes:
    """Return a request's body. Raises ApiError: 413 for a large one, 408 for a late one.

    Of a large one the rest is read and forgotten for a while: a connection that is closed with bytes unread
    may lose the reply.
    """
    announced, body = request.headers.get("content-length", "0"), bytearray()
    large = announced.isdigit() and int(announced) > limits.body
    if large and "expect" in request.headers:
        raise _too_large(limits)  # before it is sent: reading would ask for it
    try:
        with anyio.fail_after(LINGER_SECONDS if large else limits.body_seconds) as time_limit:
            async for piece in request.stream():
                body += b"" if large else piece
                if len(body) > limits.body:
                    large, body = True, bytearray()
                    time_limit.deadline = anyio.current_time() + LINGER_SECONDS
    except TimeoutError:
        if not large:
            text = "the rest of the body didn't come in time"
            raise ApiError(408, text, headers=_CLOSE) from None
    if large:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    text = f"the body is larger than {limits.body} bytes"
    return ApiError(413, text, code="request_too_large", headers=_CLOSE)


def _reply(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return a failure in OpenAI's error format."""
    match error:
        case ApiError():
            return _reply(error)
        case ClientDisconnect():
            return Response(status_code=499)
        case HTTPException(status_code=404):
            text = f"there is no {request.method} {request.url.path[:200]} here"
            return _reply(ApiError(404, text))
        case HTTPException():
            return _reply(ApiError(error.status_code, error.detail, headers=error.headers))
    return _reply(ApiError(500, "the server failed; see its log"))
