"""From a job's events to a response in OpenAI's formats, whole or streamed; a client's end ends the job's."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ktbridge.serve.local.batch import Job, ServerStopping
from ktbridge.serve.local.sampling import Finish, TextOffsets, TokenLogprob, Tokens
from ktbridge.serve.local.schema import ApiError

Json = dict[str, object]
Result = TypeVar("Result")


def server_is_stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})


@dataclass
class WholeChoice:
    """One whole answer."""

    text: str
    entries: list[TokenLogprob]
    finish: Finish


class Reply:
    """Builds the documents of one answer: whole, or in chunks."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, model: str, tokens: Tokens) -> None:
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._tokens = tokens

    def whole(self, choices: Sequence[WholeChoice], prompt_tokens: int) -> Json:
        bodies = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        usage = _usage(prompt_tokens, [choice.finish for choice in choices])
        return self._body(self.whole_kind, bodies) | {"usage": usage}

    def usage_only(self, ends: Sequence[Finish], prompt_tokens: int) -> Json:
        return self._body(self.chunk_kind, []) | {"usage": _usage(prompt_tokens, ends)}

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        raise NotImplementedError

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        head: Json = {"id": self._id, "created": self._created, "object": kind}
        return head | {"model": self._model, "choices": choices}


class ChatReply(Reply):
    """The answer to one chat request: ``n`` choices."""

    id_prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokens: Tokens, *, logprobs: bool, n: int = 1) -> None:
        super().__init__(model, tokens)
        self._wants_logprobs = logprobs
        self._n = n

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": choice.finish.reason,
        }

    def opening(self) -> list[Json]:
        start = {"role": "assistant", "content": ""}
        return [self._chunk(index, start, (), None) for index in range(self._n)]

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> Json:
        return self._chunk(index, {"content": text}, entries, None)

    def last(self, index: int, finish: Finish) -> Json:
        return self._chunk(index, {}, (), finish.reason)

    def _chunk(
        self, index: int, delta: dict[str, str], entries: Sequence[TokenLogprob], reason: str | None
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": reason,
        }
        return self._body(self.chunk_kind, [choice])

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> Json | None:
        if not self._wants_logprobs:
            return None
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(token, value) for token, value in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = token_text(self._tokens, token)
        return {"token": text, "logprob": logprob, "bytes": list(self._tokens.raw(token))}


@dataclass
class Echo:
    """The prompt echoed at the start of a choice: its text, and how many of its tokens come with logprobs."""

    text: str = ""
    tokens: int = 0


class CompletionReply(Reply):
    """The answer to one request of the older completions endpoint, one Echo per choice."""

    id_prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, model: str, tokens: Tokens, echoes: Sequence[Echo], *, logprobs: bool, tops: bool
    ) -> None:
        super().__init__(model, tokens)
        self._echoes = echoes
        self._wants_tops = tops
        self._tables = [LogprobTable(tokens, echo) for echo in echoes] if logprobs else None

    def _whole_choice(self, index: int, choice: WholeChoice) -> Json:
        text = self._echoes[index].text + choice.text
        return self._choice(index, text, choice.entries, choice.finish.reason)

    def opening(self) -> list[Json]:
        echoes = enumerate(self._echoes)
        return [self.piece(index, echo.text, ()) for index, echo in echoes if echo.text]

    def piece(self, index: int, text: str, entries: Sequence[TokenLogprob]) -> Json:
        return self._body(self.chunk_kind, [self._choice(index, text, entries, None)])

    def last(self, index: int, finish: Finish) -> Json:
        return self._body(self.chunk_kind, [self._choice(index, "", (), finish.reason)])

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprob], reason: str | None) -> Json:
        table = None if self._tables is None else self._tables[index].add(entries)
        if table is not None and not self._wants_tops:
            table["top_logprobs"] = None
        return {"index": index, "text": text, "logprobs": table, "finish_reason": reason}


class LogprobTable:
    """The older endpoint's logprob columns of one choice, with the text offset of each token."""

    def __init__(self, tokens: Tokens, echo: Echo) -> None:
        self._tokens = tokens
        self._echoed = echo.tokens
        self._prompt_offsets = TextOffsets(tokens, special=True)
        self._offsets = TextOffsets(tokens, start=len(echo.text))

    def add(self, entries: Sequence[TokenLogprob]) -> Json:
        """Return the columns of the next ``entries``."""
        offsets = []
        for entry in entries:
            source = self._prompt_offsets if self._echoed > 0 else self._offsets
            offsets.append(source.feed(entry.token))
            self._echoed -= 1
        table: Json = {
            "tokens": [token_text(self._tokens, entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
        }
        tops = [
            {token_text(self._tokens, token): value for token, value in entry.top}
            if entry.logprob is not None
            else None
            for entry in entries
        ]
        return table | {"top_logprobs": tops, "text_offset": offsets}


def token_text(tokens: Tokens, token: int) -> str:
    """A token as text; half a character is written as OpenAI does, ``bytes:\\xe4``."""
    raw = tokens.raw(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _usage(prompt: int, ends: Iterable[Finish]) -> dict[str, int]:
    answer = sum(finish.completion_tokens for finish in ends)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


# --- answering -------------------------------------------------------------------------------------


async def collect_choices(job: Job, choices: int, request: Request) -> list[WholeChoice]:
    """All choices of a job."""

    async def gather() -> list[WholeChoice]:
        texts: list[list[str]] = [[] for _ in range(choices)]
        entries: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        ends: dict[int, Finish] = {}
        async for index, event in job:
            if isinstance(event, Finish):
                ends[index] = event
            else:
                texts[index].append(event.text)
                entries[index] += event.logprobs
        return [WholeChoice("".join(texts[i]), entries[i], ends[i]) for i in range(choices)]

    try:
        return await while_connected(request, gather())
    except ServerStopping:
        raise server_is_stopping() from None
    finally:
        job.cancel()


async def while_connected(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client has gone. Raises ClientDisconnect then."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        done.cancel()
        gone.cancel()


def stream(
    job: Job, reply: ChatReply | CompletionReply, prompt_tokens: int, include_usage: bool
) -> StreamingResponse:
    """Server-sent events, one per Delta, closed by [DONE]. Events ready together are sent together."""

    async def events() -> AsyncIterator[bytes]:
        if ready := b"".join(map(_sse, reply.opening())):
            yield ready
        ready = b""
        try:
            ends = []
            async for index, event in job:
                if isinstance(event, Finish):
                    ends.append(event)
                    ready += _sse(reply.last(index, event))
                else:
                    ready += _sse(reply.piece(index, event.text, event.logprobs))
                if job.events.empty():
                    yield ready
                    ready = b""
            if include_usage:
                ready += _sse(reply.usage_only(ends, prompt_tokens))
            yield ready + b"data: [DONE]\n\n"
        except ServerStopping:
            yield ready + _sse(server_is_stopping().body)
        except Exception:
            failed = ApiError(500, "the generation failed; see the server's log")
            yield ready + _sse(failed.body)

    return _Stream(events(), job)


class _Stream(StreamingResponse):
    """Always ends the job, even if the client disconnected before the first event."""

    def __init__(self, events: AsyncIterator[bytes], job: Job) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def _sse(body: Json) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
