"""Between HTTP and the worker: a request's arm, its prompts as tokens, its place in the queue, its reply."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ktbridge.serve.local.batch import Ask, Batch, Job, QueueFull, ServerStopping, Worker
from ktbridge.serve.local.engine import LocalEngine
from ktbridge.serve.local.replies import (
    ChatReply,
    CompletionReply,
    Echo,
    collect_choices,
    server_is_stopping,
    stream,
    while_connected,
)
from ktbridge.serve.local.sampling import Sampling, Tokens
from ktbridge.serve.local.schema import ApiError, ChatMessage, ChatRequest, CompletionRequest
from ktbridge.serve.request import Limits
from ktbridge.server_api.served_names import ServedArm, base_name, split_name


class Service:
    """Serves ``arms`` of ``engine`` within ``limits``; its worker thread runs from the start."""

    def __init__(
        self,
        engine: LocalEngine,
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
        self.worker = Worker(Batch(engine, running, cells, limits.chunk), limits.waiting)
        self._prompts = Prompts(engine.tokens, engine.vocab_size, self.context)

    def find_arm(self, name: str) -> ServedArm:
        """Raises ApiError 404 for a name that isn't served."""
        if name not in self.arms:
            raise ApiError(
                404,
                f"there is no model {name[:80]!r} here; this server offers {', '.join(map(repr, self.arms))}",
                param="model",
                code="model_not_found",
            )
        return self.arms[name]

    def describe(self, arm: ServedArm) -> dict[str, object]:
        """The arm as a model of OpenAI's list; ``parent`` as vLLM and SGLang have it, the base's name."""
        base = base_name(split_name(arm.name)[0])
        adapted = arm.expert or arm.nonexpert is not None
        return {
            "id": arm.name,
            "object": "model",
            "created": self._started,
            "owned_by": "ktbridge",
            "description": arm.description,
            "parent": base if adapted and base in self.arms else None,
            "fingerprint": self._fingerprints[arm.name],
            "max_model_len": self.context,
        }

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The reply to a chat, whole or as a stream. Raises ApiError."""
        arm, prompts = self.find_arm(body.model), self._prompts
        self._check_counts(1, body.n)
        work = prompts.chat(body.messages, body.chat_template_kwargs)
        prompt = await while_connected(request, work)
        for limit in (body.max_tokens, body.max_completion_tokens):
            prompts.room(prompt, limit, "messages")
        most = prompts.room(prompt, body.limit, "messages")
        sampling = self._sampling(body, most, body.wanted_logprobs)
        job = self._start(arm, [prompt], [sampling], body.n)
        reply = ChatReply(arm.name, self.engine.tokens, logprobs=body.logprobs, n=body.n)
        return await self._respond(job, reply, body, request, [prompt])

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """The reply to prompts, whole or as a stream. Raises ApiError."""
        arm, prompts = self.find_arm(body.model), self._prompts
        self._check_counts(len(body.prompts), body.n)
        ids = [await while_connected(request, prompts.completion(given)) for given in body.prompts]
        scored = body.echo and body.logprobs is not None
        rooms = [prompts.room(prompt, body.max_tokens, "prompt") for prompt in ids]
        samplings = [self._sampling(body, room, body.logprobs, scored) for room in rooms]
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
            return stream(job, reply, tokens, body.include_usage)
        choices = await collect_choices(job, len(prompts) * body.n, request)
        return JSONResponse(reply.whole(choices, tokens))

    def _echo(self, body: CompletionRequest, given: str | list[int], prompt: list[int]) -> Echo:
        """The part of a prompt that the reply echoes."""
        if not body.echo:
            return Echo()
        decode = self.engine.tokens.decode
        text = given if isinstance(given, str) else decode(given, special=True)
        return Echo(text, len(prompt) if body.logprobs is not None else 0)

    def _check_counts(self, prompts: int, n: int) -> None:
        """Raise ApiError for more prompts or choices than one request may ask for, before any is read."""
        most = self.limits.waiting
        if n > self.most_choices:
            raise ApiError(400, f"n must be at most {self.most_choices} on this server", param="n")
        if prompts > most:
            raise ApiError(400, f"one request may bring at most {most} prompts", param="prompt")

    def _start(self, arm: ServedArm, ids: Sequence[list[int]], samplings: Sequence[Sampling], n: int) -> Job:
        """Queue one request: each of its prompts ``n`` times. Raises ApiError."""
        job = Job(len(ids) * n, self.worker.outbox)
        pairs = enumerate(zip(ids, samplings, strict=True))
        try:
            self.worker.submit([Ask(arm, prompt, how, job, n, i * n) for i, (prompt, how) in pairs])
        except QueueFull:
            full = "too many requests are waiting; try again later"
            raise ApiError(429, full, code="queue_full", headers={"Retry-After": "1"}) from None
        except ServerStopping:
            raise server_is_stopping() from None
        return job

    def _sampling(
        self, body: ChatRequest | CompletionRequest, most: int, tops: int | None, scored: bool = False
    ) -> Sampling:
        """As ``body`` asks: ``most`` tokens with ``tops`` logprobs each, the prompt's too if ``scored``."""
        return Sampling(
            max_tokens=most,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=body.seed,
            stop=tuple(body.stop),
            top_logprobs=tops,
            prompt_logprobs=scored,
        )


class Prompts:
    """Renders and tokenizes prompts in a thread of their own, and checks them against the context length.

    A text that can't fit by its length is refused before it is tokenized, which would hold up the prompts
    behind it. The thread's tokenizer is its own, since a tokenizer changes its settings while it encodes.
    """

    def __init__(self, tokens: Tokens, vocab_size: int, context: int) -> None:
        self._vocab_size, self._context = vocab_size, context
        self._longest = tokens.longest()
        self._templates = bool(getattr(tokens.tokenizer, "chat_template", None))
        self._tokenizer = copy.deepcopy(tokens.tokenizer)
        self._thread = ThreadPoolExecutor(1, "ktbridge-prompts")

    async def chat(self, messages: Sequence[ChatMessage], variables: Mapping[str, object]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Raises ApiError."""
        if not self._templates:
            raise ApiError(
                400,
                "this model's tokenizer has no chat template; use /v1/completions",
                code="no_chat_template",
            )
        rows = [message.as_template_input() for message in messages]

        def work() -> list[int]:
            try:
                text = self._tokenizer.apply_chat_template(
                    rows,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,  # type: ignore[arg-type]
                )
            except Exception as error:  # templates may raise any exception, jinja's included
                raise ApiError(
                    400, f"the chat template refuses these messages: {str(error)[:300]}", param="messages"
                ) from error
            # The template wrote the special tokens itself.
            return self._encode(str(text), special=False, param="messages")

        return await asyncio.wrap_future(self._thread.submit(work))

    async def completion(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt given as text or as ids. Raises ApiError."""
        if isinstance(prompt, str):
            work = self._thread.submit(self._encode, prompt, special=True, param="prompt")
            return await asyncio.wrap_future(work)
        if any(token >= self._vocab_size for token in prompt):
            raise ApiError(400, f"token ids must be below {self._vocab_size}, the vocabulary", param="prompt")
        return prompt

    def room(self, prompt: Sequence[int], limit: int | None, param: str) -> int:
        """Return how many tokens may be generated: ``limit``, or what the context leaves."""
        size, context = len(prompt), self._context
        if not prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        left = context - size
        # A prompt that fills the context can still be scored, though not continued.
        if left < 0 or (left == 0 and limit != 0):
            raise self._too_long(f"has {size} tokens", param)
        if limit is None:
            return left
        if limit > left:
            text = (
                f"the prompt has {size} tokens and {limit} more were asked for; this model's context is "
                f"{context}"
            )
            raise ApiError(400, text, param="max_tokens", code="context_length_exceeded")
        return limit

    def _encode(self, text: str, *, special: bool, param: str) -> list[int]:
        if len(text) > self._context * self._longest:  # a character is a byte or more
            how = f"has {len(text):,} characters, at most {self._longest} of which are a token"
            raise self._too_long(how, param)
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _too_long(self, how: str, param: str) -> ApiError:
        text = f"the prompt {how}; this model's context is {self._context}, the answer included"
        return ApiError(400, text, param=param, code="context_length_exceeded")
