"""The client of OpenAI servers: eval asks many requests at once; chat, verify and the launcher one by one.

``Client`` is for asyncio, ``OpenAIClient`` its face for everyone else.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlsplit

from ktbridge.errors import KtbridgeError
from ktbridge.server_api import replies
from ktbridge.server_api.failures import (
    BAD_REPLY,
    KEY,
    LONG_WAIT,
    RETRIED,
    TRANSIENT,
    kind_of,
    name_fault,
    read_retry_after,
)
from ktbridge.server_api.hosts import is_loopback, server_url
from ktbridge.server_api.replies import Answer, BadReplyError, NoReplyError
from ktbridge.server_api.served_names import APPLIED_PATHS, ModelEntry, applied_adapter

if TYPE_CHECKING:
    from httpx2 import Response

Message = dict[str, str]
Body = Mapping[str, object]
_Result = TypeVar("_Result")
_LIST_TIMEOUT = 60.0  # seconds; listing models generates nothing
_LONG_WAIT = 5.0  # seconds that a server asks to wait and a user should hear of
_LONGEST_WAIT = 300.0  # the longest Retry-After in seconds that we accept before giving up
_TIMEOUTS = 2
_NEXT_STEPS = {
    401: KEY,
    403: "see whether the key may do this",
    404: "give the server's base URL, the part before /v1, and a model that it lists",
}


class Refused(KtbridgeError):
    """The server answered with an error. ``status``: HTTP's; ``reason``: the server's own message."""

    def __init__(self, url: str, status: int, said: str) -> None:
        step = _NEXT_STEPS.get(status, "see the server's log, and check --server and --model")
        super().__init__(f"{url} answered {said.rstrip('.')}.", step)
        self.status, self.reason = status, said.partition(": ")[2]


class Client:
    """Requests to one base URL, ending in /v1; use inside ``async with``.

    ``timeout`` (seconds) suits experts on slow CPUs. ``attempts`` bounds the tries of a completion;
    between them the client waits ``backoff * 2**k`` seconds with full jitter, or for the server's
    Retry-After; then every request to this server waits. Only what may pass is tried again. ``faults``
    counts the failed attempts by kind, including those that a retry fixed; ``notes`` are sentences on what
    was done because this server needs it. ``on_wait`` is told of long waits that the server asks for.
    ``direct``: never through a proxy, as for this machine's own addresses, which no proxy can reach.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 900.0,
        attempts: int = 6,
        backoff: float = 0.5,
        on_wait: Callable[[str], None] = lambda told: None,
        direct: bool = False,
    ) -> None:
        """Raises KtbridgeError for a key, a URL or a proxy that can't be used."""
        from ktbridge.server_api.connection import Connection

        self.url = url
        self.faults: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self._key = replies.check_key(api_key)
        self._connection = Connection(url, self._key, direct)
        self._chat_url = f"{url}/chat/completions"
        self._timeout = timeout
        self._attempts = attempts
        self._backoff = backoff
        self._on_wait = on_wait
        self._paused_until = 0.0
        self._limit_renamed: set[object] = set()  # models that want max_completion_tokens

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._connection.aclose()

    # --- one request: the reply, or KtbridgeError

    async def is_healthy(self) -> bool:
        """Return whether the server answers /health with a status of success."""
        with suppress(KtbridgeError):
            async with self._reply("/health", native=True):
                return True
        return False

    async def models(self) -> list[ModelEntry]:
        """The entries of /v1/models."""
        async with self._reply("/models") as reply:
            return replies.read_list(reply.content, self._key)

    async def applied_adapter(self, engine: str) -> str | None:
        """The adapter that the server applies to every request, "" for none; None: it doesn't tell."""
        for path in APPLIED_PATHS.get(engine, ()):
            with suppress(KtbridgeError):
                document = await self.ask(path, native=True)
                if isinstance(document, dict | list):
                    return applied_adapter(engine, document)
        return None

    async def ask(self, path: str, body: Body | None = None, *, native: bool = False) -> Any:
        """The JSON document that the server answers with. ``native``: a path beside /v1, not below it."""
        async with self._reply(path, body, native) as reply:
            return replies.read_json(reply.content)

    async def send(self, path: str, body: Body, *, native: bool = False) -> str:
        """The text that the server answers with, of any type: its word that something was done."""
        async with self._reply(path, body, native) as reply:
            return self._hidden(reply.content.decode(errors="replace"))

    async def stream(self, body: Body, ended: Callable[[str], None]) -> AsyncIterator[str]:
        """The pieces of an answer as they come; ``ended`` is called with the finish reason."""
        body = {**body, "stream": True}
        async with self._reply("/chat/completions", body, stream=True) as reply:
            page: str | None = ""  # the first line, until there is an event
            async for line in reply.aiter_lines():
                if not line.startswith("data:"):
                    page = page if page or page is None else line.strip()
                    continue
                page = None
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = replies.read_json(data.encode())
                if not isinstance(event, dict) or "error" in event:
                    said = self._hidden(replies.read_error(data)[0])
                    raise KtbridgeError(f"the answer broke off: {said}.")
                try:
                    for choice in event.get("choices") or ():
                        content = (choice.get("delta") or {}).get("content")
                        if text := replies.read_content(content)[0]:
                            yield text
                        if reason := choice.get("finish_reason"):
                            ended(str(reason))
                except (AttributeError, TypeError):
                    raise BadReplyError("an event that is no part of an answer") from None
            if page:
                raise BadReplyError(f"no stream of events, it begins with {page[:40]!r}")
        raise KtbridgeError("the answer broke off: the server closed the connection.")

    @asynccontextmanager
    async def _reply(
        self, path: str, body: Body | None = None, native: bool = False, stream: bool = False
    ) -> AsyncIterator[Response]:
        url = (self.url.removesuffix("/v1") if native else self.url) + path
        seconds = self._timeout if body else min(self._timeout, _LIST_TIMEOUT)
        try:
            async with AsyncExitStack() as stack:
                while True:
                    sent = body and self._with_name_of_limit(body)
                    opened = self._connection.open(url, sent, seconds, stream)
                    reply = await stack.enter_async_context(opened)
                    if reply.is_success:
                        break
                    said = self._hidden(replies.describe_reply(reply.status_code, await reply.aread()))
                    if not self._renames_limit(sent, reply.status_code, said):
                        raise Refused(url, reply.status_code, said)
                yield reply
        except NoReplyError as error:
            told = self._hidden(f"{url} does not answer ({error}).")
            raise KtbridgeError(told, "start the server, or correct its URL") from None
        except BadReplyError as error:
            told = self._hidden(f"{url} gave a bad reply: {error}.")
            step = "give the URL of an OpenAI-compatible API: what stands before /v1"
            raise KtbridgeError(told, step) from None

    def _hidden(self, text: str) -> str:
        return replies.hide_key(text, self._key)

    def _with_name_of_limit(self, body: Body) -> Body:
        renamed = body.get("model") in self._limit_renamed
        return replies.rename_limit(body) if renamed else body

    def _renames_limit(self, sent: Body | None, status: int, said: str) -> bool:
        """Return whether the server wants the limit of tokens in ``sent`` by its other name: it gets that."""
        if status not in (400, 422) or not sent or "max_tokens" not in sent:
            return False
        if not replies.refuses_limit(said):
            return False
        model = sent.get("model")
        self._limit_renamed.add(model)
        self.notes[f"{model} takes its limit of tokens as {replies.OTHER_LIMIT}"] = None
        return True

    # --- completions, of which some are tried again

    async def chat(self, request: Body, attempts: int | None = None) -> Answer:
        """One chat completion. Server faults never raise: they are reported as the outcome.

        An API key that the server repeats is taken out. ``attempts`` instead of the client's own.
        """
        answer = await self._chat(request, attempts or self._attempts)
        text, thinking, detail = map(self._hidden, (answer.text, answer.thinking, answer.detail))
        return replace(answer, text=text, thinking=thinking, detail=detail)

    async def _chat(self, request: Body, attempts: int) -> Answer:
        failed = timeouts = 0
        while True:
            while (left := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
            start = time.monotonic()
            sent = self._with_name_of_limit(request)
            answer, asked = await self._try(sent)
            if answer.outcome != "http-error":
                return replace(answer, seconds=round(time.monotonic() - start, 3))
            if self._renames_limit(sent, answer.status, answer.detail):
                continue
            self.faults[name_fault(answer.status, answer.detail)] += 1
            if kind_of(answer.status, answer.detail) not in TRANSIENT:
                return answer
            if asked > _LONGEST_WAIT:
                return replace(answer, detail=f"{answer.detail}{LONG_WAIT} {asked:.0f} s")
            self._hold_back(asked, answer.detail)
            # A request that timed out once will probably do so again: one retry, not six.
            timeouts += answer.detail == replies.TIMED_OUT
            failed += 1
            if failed >= attempts or timeouts == _TIMEOUTS:
                return answer
            await asyncio.sleep(random.uniform(0, self._backoff * 2 ** (failed - 1)))

    async def _try(self, request: Body) -> tuple[Answer, float]:
        """The answer, or what failed, and the seconds after which the server wants to be asked again."""
        try:
            async with self._connection.open(self._chat_url, request, self._timeout) as reply:
                status = reply.status_code
            if reply.is_success:
                value = replies.read_object(reply.content)
                if not value.get("error") or value.get("choices"):
                    answer = replies.read_completion(value)
                    if answer.detail.startswith(replies.STOP_TOKEN_TAKEN):
                        self.notes[f"answers: {answer.detail}"] = None
                    return answer, 0.0
                # Gateways put an error of the server behind them into a reply with status 200.
                code = value["error"].get("code") if isinstance(value["error"], dict) else None
                if type(code) is not int or not 400 <= code < 600:
                    said = replies.describe_reply(status, reply.content)
                    raise BadReplyError(f"an error instead of an answer: {said}")
                status = code
            detail = replies.describe_reply(status, reply.content)
            wait = read_retry_after(reply.headers) if status in RETRIED else 0.0
            return Answer("http-error", detail=detail, status=status), wait
        except BadReplyError as error:
            return Answer("http-error", detail=f"{BAD_REPLY}{error}", status=200), 0.0
        except NoReplyError as error:
            return Answer("http-error", detail=str(error)), 0.0

    def _hold_back(self, seconds: float, detail: str) -> None:
        """Let every request to this server wait for as long as it wants."""
        until = time.monotonic() + seconds
        if seconds >= _LONG_WAIT and until > self._paused_until + 1:
            told = f"{self.url} wants to be asked again in {seconds:g} s ({detail})"
            self._on_wait(self._hidden(told))
        self._paused_until = max(self._paused_until, until)


class OpenAIClient:
    """One server, asked one request after the other, from any thread. Every failure raises KtbridgeError."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 600, direct: bool = False
    ) -> None:
        """``url`` with or without /v1; the rest as of ``Client``. A stream's ``timeout`` begins anew with
        each byte."""
        self.url = server_url(url)
        self._key = replies.check_key(api_key)
        self._timeout = timeout
        self._direct = direct or is_loopback(urlsplit(self.url).hostname or "")
        self._limit_renamed: set[object] = set()

    def is_healthy(self) -> bool:
        """Return whether the server answers /health with 200, all of it within the timeout."""
        return self._run(lambda client: client.is_healthy())

    def models(self) -> list[str]:
        """The model names that the server lists."""
        return list(self.entries())

    def entries(self) -> dict[str, ModelEntry]:
        """The server's list of models by id."""
        return {str(one["id"]): dict(one) for one in self._run(lambda client: client.models())}

    def applied_adapter(self, engine: str) -> str | None:
        """The adapter that the server applies to every request, "" for none; None: it doesn't tell."""
        return self._run(lambda client: client.applied_adapter(engine))

    def ask(self, path: str, body: Body | None = None, *, native: bool = False) -> Any:
        """The JSON document that the server answers with. ``native``: a path beside /v1, not below it."""
        return self._run(lambda client: client.ask(path, body, native=native))

    def send(self, path: str, body: Body, *, native: bool = False) -> str:
        """The text that the server answers with, of any type: its word that something was done."""
        return self._run(lambda client: client.send(path, body, native=native))

    def chat(
        self,
        model: str,
        messages: Sequence[Message],
        ended: Callable[[str], None] = lambda reason: None,
        **options: object,
    ) -> Iterator[str]:
        """Stream the answer in pieces; ``ended`` is called with the finish reason."""
        body = {name: value for name, value in options.items() if value is not None}
        body |= {"model": model, "messages": list(messages)}
        pieces: SimpleQueue[str | None] = SimpleQueue()

        async def read(client: Client) -> None:
            async for piece in client.stream(body, ended):
                pieces.put(piece)

        reading = self._begin(read)
        reading.end.add_done_callback(lambda end: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
            reading.end.result()
        finally:
            reading.cancel()

    def _run(self, work: Callable[[Client], Awaitable[_Result]]) -> _Result:
        return self._begin(work).end.result()

    def _begin(self, work: Callable[[Client], Awaitable[_Result]]) -> _Background[_Result]:
        async def begin() -> _Result:
            url, timeout, direct = self.url, self._timeout, self._direct
            async with Client(url, api_key=self._key, timeout=timeout, direct=direct) as client:
                client._limit_renamed = self._limit_renamed
                return await work(client)

        return _Background(begin)


class _Background(Generic[_Result]):
    """Work in an event loop of a daemon thread, so that who waits for its ``end`` can be interrupted."""

    def __init__(self, work: Callable[[], Awaitable[_Result]]) -> None:
        self._work = work
        self.end: Future[_Result] = Future()
        self._task: asyncio.Task[_Result] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def cancel(self) -> None:
        if self._task is not None and not self.end.done():
            with suppress(RuntimeError):  # its loop has just been closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        async def note_task() -> _Result:
            self._task = asyncio.current_task()
            return await self._work()

        try:
            self.end.set_result(asyncio.run(note_task()))
        except BaseException as error:
            self.end.set_exception(error)
