"""From a job's events to an HTTP response, whole or streamed. A client disconnect ends the generation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse

from ktbridge.serve.local.errors import ApiError
from ktbridge.serve.local.metrics import Metrics
from ktbridge.serve.local.replies import ChatReply, Choice, CompletionReply
from ktbridge.serve.local.sampling import Finish, TokenLogprob
from ktbridge.serve.local.worker import Job, ServerStopping


class ClientGone(Exception):
    """The client disconnected before its answer was ready."""


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", retry_after=10)


async def collect(job: Job, choices: int, request: Request, metrics: Metrics) -> list[Choice]:
    """All choices of a job."""

    async def gather() -> list[Choice]:
        texts: list[list[str]] = [[] for _ in range(choices)]
        entries: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        ends: dict[int, Finish] = {}
        async for index, event in job:
            if isinstance(event, Finish):
                ends[index] = event
            else:
                texts[index].append(event.text)
                entries[index] += event.logprobs
        return [Choice("".join(texts[i]), entries[i], ends[i]) for i in range(choices)]

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    outcome = "failed"
    answer, gone = asyncio.ensure_future(gather()), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            outcome = "cancelled"
            raise ClientGone
        result = answer.result()
        outcome = "finished"
        return result
    except ServerStopping:
        raise stopping() from None
    finally:
        _ended(job, outcome, metrics)
        answer.cancel()
        gone.cancel()


def stream(
    job: Job,
    reply: ChatReply | CompletionReply,
    prompt_tokens: int,
    include_usage: bool,
    metrics: Metrics,
) -> StreamingResponse:
    """Server-sent events, one per Delta, closed by [DONE]. Events ready together are sent together."""

    outcome = "cancelled"

    async def events() -> AsyncIterator[bytes]:
        nonlocal outcome
        ready = b"".join(map(sse, reply.opening()))
        if ready:
            yield ready
        ready = b""
        try:
            ends = []
            async for index, event in job:
                if isinstance(event, Finish):
                    ends.append(event)
                    ready += sse(reply.last(index, event))
                else:
                    ready += sse(reply.piece(index, event.text, event.logprobs))
                if job.events.empty():
                    yield ready
                    ready = b""
            if include_usage:
                ready += sse(reply.usage_only(ends, prompt_tokens))
            outcome = "finished"
            yield ready + b"data: [DONE]\n\n"
        except ServerStopping:
            outcome = "failed"
            yield ready + sse(stopping().body())
        except Exception:
            outcome = "failed"
            failed = ApiError(500, "the generation failed; see the server's log")
            yield ready + sse(failed.body())

    return _Stream(events(), lambda: _ended(job, outcome, metrics))


class _Stream(StreamingResponse):
    """Always ends the job, even if the client disconnected before the first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _ended(job: Job, outcome: str, metrics: Metrics) -> None:
    job.cancel()
    first = None if job.first_token is None else job.first_token - job.asked
    whole = time.monotonic() - job.asked if outcome == "finished" else None
    metrics.ended(job.model, outcome, first, whole)


def sse(body: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
