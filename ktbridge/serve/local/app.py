"""The HTTP face: routes, streaming, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from ktbridge import __version__
from ktbridge.serve.local.arms import Arm
from ktbridge.serve.local.decode import Finish, Sampling, TokenLogprob, generate
from ktbridge.serve.local.engine import Engine
from ktbridge.serve.local.errors import ApiError, from_validation, model_not_found
from ktbridge.serve.local.guard import LimitBody, RequireKey
from ktbridge.serve.local.prompts import PromptBuilder
from ktbridge.serve.local.replies import ChatReply, CompletionReply
from ktbridge.serve.local.schema import ChatRequest, CompletionRequest
from ktbridge.serve.local.worker import Job, QueueFull, ServerStopping, Worker

BODY_LIMIT = 4 * 1024 * 1024


class ClientGone(Exception):
    """The client hung up before its answer was ready."""


def create_app(
    engine: Engine,
    arms: tuple[Arm, ...],
    fingerprints: Mapping[str, str],
    *,
    api_key: str | None = None,
    body_limit: int = BODY_LIMIT,
) -> FastAPI:
    """The application that serves ``arms`` of ``engine``. Its lifespan owns the worker thread."""
    by_name = {arm.name: arm for arm in arms}
    started = int(time.time())
    worker = Worker()
    prompts = PromptBuilder(
        engine.tokenizer, vocab_size=engine.vocab_size, context_length=engine.context_length
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        worker.close()
        await asyncio.to_thread(worker.join)

    app = FastAPI(title="ktbridge", version=__version__, lifespan=lifespan)
    app.state.worker = worker
    add_error_handlers(app)
    # The last one added is the outermost: first the key, then the size.
    app.add_middleware(LimitBody, limit=body_limit)
    app.add_middleware(RequireKey, key=api_key)

    def find_arm(name: str) -> Arm:
        if name not in by_name:
            raise model_not_found(name, list(by_name))
        return by_name[name]

    def start(arm: Arm, prompt: list[int], sampling: Sampling) -> Job:
        job = Job(lambda cancelled: generate(engine, arm, prompt, sampling, cancelled))
        try:
            worker.submit(job)
        except QueueFull:
            raise ApiError(429, "too many requests are waiting; try again later") from None
        except ServerStopping:
            raise ApiError(503, "the server is shutting down") from None
        return job

    def describe(arm: Arm) -> dict[str, Any]:
        return {
            "id": arm.name,
            "object": "model",
            "created": started,
            "owned_by": "ktbridge",
            "description": arm.description,
            "fingerprint": fingerprints[arm.name],
            "max_model_len": engine.context_length,
        }

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": worker.waiting}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(arm) for arm in arms]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return describe(find_arm(name))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        arm = find_arm(body.model)
        prompt = await asyncio.to_thread(prompts.chat, body.messages, body.chat_template_kwargs)
        sampling = Sampling(
            max_tokens=prompts.room(prompt, body.limit, "messages"),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
            top_logprobs=body.wanted_logprobs,
        )
        reply = ChatReply(arm.name, engine.tokens, logprobs=body.logprobs)
        job = start(arm, prompt, sampling)
        if body.stream:
            return stream(job, reply, [reply.first()], len(prompt), body.include_usage)
        text, entries, finish = await collect(job, request)
        return JSONResponse(reply.whole(text, entries, finish, len(prompt)))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        arm = find_arm(body.model)
        prompt = await asyncio.to_thread(prompts.completion, body.prompt)
        sampling = Sampling(
            max_tokens=prompts.room(prompt, body.max_tokens, "prompt"),
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=body.stops,
            top_logprobs=body.logprobs,
            prompt_logprobs=body.echo and body.logprobs is not None,
        )
        echo = ""
        if body.echo:
            given = body.prompt
            echo = given if isinstance(given, str) else engine.tokens.decode(given, special=True)
        reply = CompletionReply(
            arm.name,
            engine.tokens,
            logprobs=body.logprobs is not None,
            tops=bool(body.logprobs),
            echo=echo,
            echoed=len(prompt) if sampling.prompt_logprobs else 0,
        )
        job = start(arm, prompt, sampling)
        if body.stream:
            opening = [reply.piece(echo, ())] if echo else []
            return stream(job, reply, opening, len(prompt), body.include_usage)
        text, entries, finish = await collect(job, request)
        return JSONResponse(reply.whole(echo + text, entries, finish, len(prompt)))

    return app


async def collect(job: Job, request: Request) -> tuple[str, list[TokenLogprob], Finish]:
    """A whole answer. Hanging up ends the generation."""

    async def gather() -> tuple[str, list[TokenLogprob], Finish]:
        texts: list[str] = []
        entries: list[TokenLogprob] = []
        async for event in job:
            if isinstance(event, Finish):
                return "".join(texts), entries, event
            texts.append(event.text)
            entries += event.logprobs
        raise ServerStopping

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(gather()), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientGone
        return answer.result()
    except ServerStopping:
        raise ApiError(503, "the server is shutting down") from None
    finally:
        job.cancel()
        answer.cancel()
        gone.cancel()


def stream(
    job: Job,
    reply: ChatReply | CompletionReply,
    opening: list[dict[str, Any]],
    prompt_tokens: int,
    include_usage: bool,
) -> StreamingResponse:
    """Server-sent events, one a Delta, closed by [DONE]. Hanging up ends the generation."""

    async def events() -> AsyncIterator[bytes]:
        try:
            for body in opening:
                yield sse(body)
            async for event in job:
                if not isinstance(event, Finish):
                    yield sse(reply.piece(event.text, event.logprobs))
                    continue
                yield sse(reply.last(event))
                if include_usage:
                    yield sse(reply.usage_only(event, prompt_tokens))
            yield b"data: [DONE]\n\n"
        except ServerStopping:
            yield sse(ApiError(503, "the server is shutting down").body())
        except Exception:
            yield sse(ApiError(500, "the generation failed; see the server's log").body())
        finally:
            job.cancel()

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def sse(body: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def add_error_handlers(app: FastAPI) -> None:
    """Every failure leaves in OpenAI's shape."""

    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

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
        return respond(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(ClientGone)
    async def _gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _bug(_: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "the server failed; see its log"))
