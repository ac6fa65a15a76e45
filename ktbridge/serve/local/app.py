"""The HTTP API: routes, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ktbridge import __version__
from ktbridge.serve.local.bodies import BodyRoute
from ktbridge.serve.local.engine import Engine
from ktbridge.serve.local.middleware import KnownHost, LimitBody, RequireKey
from ktbridge.serve.local.replies import ClientGone
from ktbridge.serve.local.schema import (
    SEED_RANGE,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    bounded,
)
from ktbridge.serve.local.service import Service
from ktbridge.serve.request import Limits
from ktbridge.server_api.served_names import ServedArm


def create_app(
    engine: Engine,
    arms: tuple[ServedArm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread.

    Without a key, only requests that name this machine are answered, and none that another site's page sends.
    ``app.state.drain()`` stops accepting requests; ``app.state.worker.close()`` aborts those in progress.
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
        docs_url=None,  # their pages load another host's scripts
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "The request, or when it came"},
            "5XX": {"model": ErrorBody, "description": "The server's failure, or its end"},
        },
    )
    app.state.worker = worker
    app.state.drain = drain
    _add_error_handlers(app)
    # The last middleware added is the outermost: first the key or the host, then the size.
    app.add_middleware(LimitBody, limit=limits.body, seconds=limits.body_seconds, stopping=stop)
    if api_key is None:
        app.add_middleware(KnownHost)
    else:
        app.add_middleware(RequireKey, key=api_key)
    app.include_router(_routes(service))
    _publish_bounds(app, service)
    return app


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


def _add_error_handlers(app: FastAPI) -> None:
    """Return every failure in OpenAI's error format."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return respond(
                ApiError(404, f"there is no {request.method} {request.url.path[:200]} here")
            )
        return respond(ApiError(error.status_code, str(error.detail), headers=error.headers))

    @app.exception_handler(ClientGone)
    async def _gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "the server failed; see its log"))
