"""Between HTTP and the worker: a request's arm, prompts and limits, its place in the queue, its reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ktbridge.serve.local.answers import collect, stopping, stream
from ktbridge.serve.local.batch import Ask, Batch
from ktbridge.serve.local.engine import Engine
from ktbridge.serve.local.errors import ApiError, model_not_found
from ktbridge.serve.local.metrics import Metrics
from ktbridge.serve.local.prompts import PromptBuilder
from ktbridge.serve.local.replies import ChatReply, CompletionReply, Echo
from ktbridge.serve.local.sampling import Sampling
from ktbridge.serve.local.schema import ChatRequest, CompletionRequest
from ktbridge.serve.local.worker import Job, QueueFull, ServerStopping, Worker
from ktbridge.serve.request import Limits
from ktbridge.served_names import ServedArm


class Service:
    """Serves ``arms`` of ``engine`` within ``limits``; its worker thread runs from the start."""

    def __init__(
        self,
        engine: Engine,
        arms: tuple[ServedArm, ...],
        fingerprints: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.engine, self.limits = engine, limits
        self.arms = {arm.name: arm for arm in arms}
        self._fingerprints = fingerprints
        self._started = int(time.time())
        running = limits.running if engine.batchable else 1
        self.most_choices = min(limits.choices, running)
        cells = engine.cells()
        self.context = min(engine.context_length, limits.context, cells)
        self.metrics = Metrics()
        batch = Batch(engine, running, cells, limits.chunk)
        self.worker = Worker(batch, limits.waiting, self.metrics)
        self._prompts = PromptBuilder(
            engine.tokenizer, vocab_size=engine.vocab_size, context_length=self.context
        )

    def find_arm(self, name: str) -> ServedArm:
        """Raises ApiError 404 for a name that isn't served."""
        if name not in self.arms:
            raise model_not_found(name, list(self.arms))
        return self.arms[name]

    def describe(self, arm: ServedArm) -> dict[str, Any]:
        """The arm as a model of OpenAI's list."""
        return {
            "id": arm.name,
            "object": "model",
            "created": self._started,
            "owned_by": "ktbridge",
            "description": arm.description,
            "fingerprint": self._fingerprints[arm.name],
            "max_model_len": self.context,
        }

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The reply to a chat, whole or as a stream. Raises ApiError."""
        arm, prompts = self.find_arm(body.model), self._prompts
        prompt = await asyncio.to_thread(prompts.chat, body.messages, body.chat_template_kwargs)
        for limit in (body.max_tokens, body.max_completion_tokens):
            prompts.room(prompt, limit, "messages")
        most = prompts.room(prompt, body.limit, "messages")
        sampling = _sampling(body, most, body.wanted_logprobs)
        job = self._start(arm, [prompt], [sampling], body.n)
        reply = ChatReply(arm.name, self.engine.tokens, logprobs=body.logprobs, n=body.n)
        return await self._respond(job, reply, body, request, [prompt])

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """The reply to prompts, whole or as a stream. Raises ApiError."""
        arm, prompts = self.find_arm(body.model), self._prompts
        ids = [await asyncio.to_thread(prompts.completion, given) for given in body.prompts]
        scored = body.echo and body.logprobs is not None
        samplings = [
            _sampling(body, prompts.room(prompt, body.max_tokens, "prompt"), body.logprobs, scored)
            for prompt in ids
        ]
        job = self._start(arm, ids, samplings, body.n)
        echoes = [self._echo(body, *pair) for pair in zip(body.prompts, ids, strict=True)]
        reply = CompletionReply(
            arm.name,
            self.engine.tokens,
            [echo for echo in echoes for _ in range(body.n)],
            logprobs=body.logprobs is not None,
            tops=bool(body.logprobs),
        )
        return await self._respond(job, reply, body, request, ids)

    async def _respond(
        self,
        job: Job,
        reply: ChatReply | CompletionReply,
        body: ChatRequest | CompletionRequest,
        request: Request,
        prompts: Sequence[list[int]],
    ) -> Response:
        """``reply`` of a queued request, whole or as a stream."""
        tokens = sum(map(len, prompts))
        if body.stream:
            return stream(job, reply, tokens, body.include_usage, self.metrics)
        choices = await collect(job, len(prompts) * body.n, request, self.metrics)
        return JSONResponse(reply.whole(choices, tokens))

    def _echo(self, body: CompletionRequest, given: str | list[int], prompt: list[int]) -> Echo:
        """The part of a prompt that the reply echoes."""
        if not body.echo:
            return Echo()
        decode = self.engine.tokens.decode
        text = given if isinstance(given, str) else decode(given, special=True)
        return Echo(text, len(prompt) if body.logprobs is not None else 0)

    def _start(
        self, arm: ServedArm, ids: Sequence[list[int]], samplings: Sequence[Sampling], n: int
    ) -> Job:
        """Queue one request: each of its prompts ``n`` times. Raises ApiError."""
        most = self.limits.waiting
        if n > self.most_choices:
            raise ApiError(400, f"n must be at most {self.most_choices} on this server", param="n")
        if len(ids) > most:
            raise ApiError(400, f"one request may bring at most {most} prompts", param="prompt")
        job = Job(arm.name, len(ids) * n, self.worker.outbox)
        pairs = enumerate(zip(ids, samplings, strict=True))
        try:
            self.worker.submit([Ask(arm, prompt, how, job, n, i * n) for i, (prompt, how) in pairs])
        except QueueFull:
            self.metrics.ended(arm.name, "rejected")
            full = "too many requests are waiting; try again later"
            raise ApiError(429, full, code="queue_full", retry_after=1) from None
        except ServerStopping:
            self.metrics.ended(arm.name, "rejected")
            raise stopping() from None
        return job


def _sampling(
    body: ChatRequest | CompletionRequest, most: int, tops: int | None, scored: bool = False
) -> Sampling:
    """As ``body`` asks: ``most`` tokens with ``tops`` logprobs each, the prompt's too if ``scored``."""
    return Sampling(
        max_tokens=most,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stops,
        top_logprobs=tops,
        prompt_logprobs=scored,
    )
