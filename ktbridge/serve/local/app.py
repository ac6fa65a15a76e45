"""The HTTP face: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ktbridge import __version__
from ktbridge.serve.local.answers import ClientGone, collect, stopping, stream
from ktbridge.serve.local.batch import Ask, Batch
from ktbridge.serve.local.decode import Sampling
from ktbridge.serve.local.engine import Engine
from ktbridge.serve.local.errors import ERRORS, ApiError, from_validation, model_not_found
from ktbridge.serve.local.guard import LimitBody, RequireKey
from ktbridge.serve.local.limits import Limits
from ktbridge.serve.local.metrics import CONTENT_TYPE, Metrics
from ktbridge.serve.local.prompts import PromptBuilder
from ktbridge.serve.local.replies import ChatReply, CompletionReply, Echo
from ktbridge.serve.local.schema import SEED_RANGE, ChatRequest, CompletionRequest, bounded
from ktbridge.serve.local.worker import Job, QueueFull, ServerStopping, Worker
from ktbridge.served_names import ServedArm

STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(
    engine: Engine,
    arms: tuple[ServedArm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread.

    ``app.state.drain()`` has it take no more requests; ``app.state.worker.close()`` gives up those
    that are under way.
    """
    limits = limits or Limits()
    by_name = {arm.name: arm for arm in arms}
    started = int(time.time())
    running = limits.running if engine.batchable else 1
    most_choices = min(limits.choices, running)
    cells = engine.cells()
    context = min(engine.context_length, limits.context, cells)
    metrics = Metrics()
    worker = Worker(Batch(engine, running, cells, limits.chunk), limits.waiting, metrics)
    stop = asyncio.Event()
    prompts = PromptBuilder(engine.tokenizer, vocab_size=engine.vocab_size, context_length=context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()
        await asyncio.to_thread(worker.join)

    def drain() -> None:
        worker.drain()
        stop.set()

    app = FastAPI(title="ktbridge", version=__version__, lifespan=lifespan, responses=ERRORS)
    app.state.worker = worker
    app.state.drain = drain
    add_error_handlers(app)
    # The last one added is the outermost: first the key, then the size.
    app.add_middleware(LimitBody, limit=limits.body, seconds=limits.body_seconds, stopping=stop)
    app.add_middleware(RequireKey, key=api_key)

    def find_arm(name: str) -> ServedArm:
        if name not in by_name:
            raise model_not_found(name, list(by_name))
        return by_name[name]

    def start(
        arm: ServedArm, ids: Sequence[list[int]], samplings: Sequence[Sampling], n: int
    ) -> Job:
        """Queue one request: each of its prompts ``n`` times. Raises ApiError."""
        if n > most_choices:
            raise ApiError(400, f"n must be at most {most_choices} on this server", param="n")
        if len(ids) > limits.waiting:
            said = f"one request may bring at most {limits.waiting} prompts"
            raise ApiError(400, said, param="prompt")
        job = Job(arm.name, len(ids) * n, worker.outbox)
        pairs = enumerate(zip(ids, samplings, strict=True))
        try:
            worker.submit([Ask(arm, prompt, how, job, n, i * n) for i, (prompt, how) in pairs])
        except QueueFull:
            metrics.ended(arm.name, "rejected")
            full = "too many requests are waiting; try again later"
            raise ApiError(429, full, code="queue_full", retry_after=1) from None
        except ServerStopping:
            metrics.ended(arm.name, "rejected")
            raise stopping() from None
        return job

    def describe(arm: ServedArm) -> dict[str, Any]:
        return {
            "id": arm.name,
            "object": "model",
            "created": started,
            "owned_by": "ktbridge",
            "description": arm.description,
            "fingerprint": fingerprints[arm.name],
            "max_model_len": context,
        }

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": worker.waiting, "running": worker.running}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def numbers() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(arm) for arm in arms]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return describe(find_arm(name))

    @app.post("/v1/chat/completions", response_model=None, responses=STREAMS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        arm = find_arm(body.model)
        prompt = await asyncio.to_thread(prompts.chat, body.messages, body.chat_template_kwargs)
        for limit in (body.max_tokens, body.max_completion_tokens):
            prompts.room(prompt, limit, "messages")
        sampling = Sampling(
            max_tokens=prompts.room(prompt, body.limit, "messages"),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
            top_logprobs=body.wanted_logprobs,
        )
        job = start(arm, [prompt], [sampling], body.n)
        reply = ChatReply(arm.name, engine.tokens, logprobs=body.logprobs, n=body.n)
        if body.stream:
            return stream(job, reply, len(prompt), body.include_usage, metrics)
        choices = await collect(job, body.n, request, metrics)
        return JSONResponse(reply.whole(choices, len(prompt)))

    @app.post("/v1/completions", response_model=None, responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arm = find_arm(body.model)
        ids = [await asyncio.to_thread(prompts.completion, given) for given in body.prompts]
        scored = body.echo and body.logprobs is not None
        samplings = [
            Sampling(
                max_tokens=prompts.room(prompt, body.max_tokens, "prompt"),
                temperature=body.temperature,
                top_p=body.top_p,
                seed=body.seed,
                stop=body.stops,
                top_logprobs=body.logprobs,
                prompt_logprobs=scored,
            )
            for prompt in ids
        ]
        job = start(arm, ids, samplings, body.n)

        def echo(given: str | list[int], prompt: list[int]) -> Echo:
            if not body.echo:
                return Echo()
            text = given if isinstance(given, str) else engine.tokens.decode(given, special=True)
            return Echo(text, len(prompt) if scored else 0)

        reply = CompletionReply(
            arm.name,
            engine.tokens,
            [echo(*pair) for pair in zip(body.prompts, ids, strict=True) for _ in range(body.n)],
            logprobs=body.logprobs is not None,
            tops=bool(body.logprobs),
        )
        tokens = sum(map(len, ids))
        if body.stream:
            return stream(job, reply, tokens, body.include_usage, metrics)
        choices = await collect(job, len(ids) * body.n, request, metrics)
        return JSONResponse(reply.whole(choices, tokens))

    schemas = app.openapi()["components"]["schemas"]  # kept by the app
    most = {
        "n": most_choices,
        "max_tokens": context - 1,
        "max_completion_tokens": context - 1,
        "prompt": engine.vocab_size - 1,
        "seed": SEED_RANGE - 1,
    }
    for request in ("ChatRequest", "CompletionRequest"):
        fields = schemas[request]["properties"]
        fields["model"]["enum"] = list(by_name)
        for name in most.keys() & fields.keys():
            fields[name] = bounded(fields[name], most[name], limits.waiting)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every failure leaves in OpenAI's shape."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

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
        said = ApiError(error.status_code, str(error.detail))
        said.headers.update(error.headers or {})
        return respond(said)

    @app.exception_handler(ClientGone)
    async def _gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "the server failed; see its log"))
