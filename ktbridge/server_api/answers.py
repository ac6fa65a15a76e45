"""Answers of one server to many questions at once: bounded retries with backoff, strict validation."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ktbridge.errors import KtbridgeError
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
from ktbridge.server_api.replies import (
    OTHER_LIMIT,
    TIMED_OUT,
    BadReplyError,
    NotAReplyError,
    check_key,
    describe_failure,
    describe_reply,
    hide_key,
    read_content,
    read_json,
    read_list,
    read_object,
    read_thinking,
    refuse_surrogates,
    refuses_limit,
    rename_limit,
)
from ktbridge.server_api.served_names import APPLIED_PATHS, ModelEntry, applied_adapter

if TYPE_CHECKING:
    from ktbridge.server_api.connection import Reply

Outcome = Literal["ok", "truncated", "think-only", "empty", "http-error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")

LONGEST_ANSWER = 200_000
"""Characters of an answer, and of its thinking, that are kept: a run holds all of them in memory. More than
50,000 tokens of most texts; a longer answer is truncated, as one that reached its limit of tokens is."""
_LIST_TIMEOUT = 60.0  # seconds; listing models generates nothing
_LONG_WAIT = 5.0  # seconds that a server asks to wait and a user should hear of
_LONGEST_WAIT = 300.0  # the longest Retry-After in seconds that we accept before giving up
_TIMEOUTS = 2
# The next step if a server returns no list of models.
_NEXT_STEPS = {
    401: KEY,
    403: "see whether the key may list models",
    404: "give the server's base URL, the part before /v1",
}
# Some servers omit the finish reason (null) of a complete answer; TGI and gateways have names of their own.
# Any other reason is a failure.
_FINISHED = {
    *(None, "", "stop", "eos", "eos_token", "stop_token", "stop_sequence", "end_turn"),
    *("complete", "completed"),
}
_CUT = {"length", "max_tokens", "max_length", "model_length", "max_output_tokens"}
# What a server that doesn't skip special tokens leaves at the end of an answer.
_STOP_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<|return|>", "</s>", "<eos>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "[EOS]"),
    *("<｜end▁of▁sentence｜>", "[|endofturn|]", "<|endofturn|>", "<|eos|>"),
)
_STOP_TOKEN_TAKEN = "the stop token at the end was taken off:"
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """One answer. ``text`` is what a user would see; ``thinking`` is kept apart, unscored.

    ``seconds`` is the wall time of the attempt that succeeded. ``cut``: the limit of tokens ended it.
    """

    outcome: Outcome
    text: str = ""
    thinking: str = ""
    detail: str = ""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    cut: bool = False


class Client:
    """Requests to one base URL; use inside ``async with``.

    ``timeout`` (seconds) suits experts on slow CPUs. ``attempts`` bounds the tries of a request;
    between them the client waits ``backoff * 2**k`` seconds with full jitter, or for the server's
    Retry-After; then every request to this server waits. Only what may pass is tried again. ``faults``
    counts the failed attempts by kind, including those that a retry fixed; ``notes`` are sentences on what
    was done because this server needs it. ``on_wait`` is told of long waits that the server asks for.
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
    ) -> None:
        """Raises KtbridgeError for a key, a URL or a proxy that can't be used."""
        from ktbridge.server_api.connection import AsyncConnection

        self.url = url
        self.faults: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self._key = check_key(api_key)
        self._connection = AsyncConnection(url, self._key)
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

    async def models(self) -> list[ModelEntry]:
        """The entries of /v1/models; raises KtbridgeError if the list is not available."""
        url = f"{self.url}/models"
        try:
            reply = await self._connection.get(url, min(self._timeout, _LIST_TIMEOUT))
            if not reply.is_success:
                said = hide_key(describe_reply(reply.status, reply.body), self._key)
                step = _NEXT_STEPS.get(reply.status, "see the server's log")
                raise KtbridgeError(f"{url} answered {said}.", step)
            return read_list(reply.body, self._key)
        except OSError as error:
            raise KtbridgeError(
                f"{self.url} does not answer ({describe_failure(error)}).",
                "start the server, or correct its URL",
            ) from None
        except (BadReplyError, TypeError) as error:
            raise KtbridgeError(
                f"{url} is not a list of models ({error}).",
                "give the base URL of a server that speaks OpenAI's API",
            ) from None

    async def applied_adapter(self, engine: str) -> str:
        """The adapter that the server applies to every request, as far as ``engine`` tells; "" for none."""
        for path in APPLIED_PATHS.get(engine, ()):
            with suppress(OSError, BadReplyError):
                place = self.url.removesuffix("/v1") + path
                reply = await self._connection.get(place, min(self._timeout, _LIST_TIMEOUT))
                if reply.status == 200:
                    return applied_adapter(engine, read_json(reply.body))
        return ""

    async def chat(self, request: Mapping[str, object], attempts: int | None = None) -> Answer:
        """One chat completion. Server faults never raise: they are reported as the outcome.

        An API key that the server repeats is taken out. ``attempts`` instead of the client's own.
        """
        answer = await self._chat(request, attempts or self._attempts)
        shown = (
            hide_key(text, self._key) for text in (answer.text, answer.thinking, answer.detail)
        )
        text, thinking, detail = shown
        return replace(answer, text=text, thinking=thinking, detail=detail)

    async def _chat(self, request: Mapping[str, object], attempts: int) -> Answer:
        failed = timeouts = 0
        model = request.get("model")
        while True:
            await self._wait()
            start = time.monotonic()
            sent = rename_limit(request) if model in self._limit_renamed else request
            answer, asked = await self._try(sent)
            if answer.outcome != "http-error":
                return replace(answer, seconds=round(time.monotonic() - start, 3))
            renames = answer.status in (400, 422) and refuses_limit(answer.detail)
            if renames and "max_tokens" in sent:
                self._limit_renamed.add(model)
                self.notes[f"{model} takes its limit of tokens as {OTHER_LIMIT}"] = None
                continue
            self.faults[name_fault(answer.status, answer.detail)] += 1
            if kind_of(answer.status, answer.detail) not in TRANSIENT:
                return answer
            if asked is not None and asked > _LONGEST_WAIT:
                return replace(answer, detail=f"{answer.detail}{LONG_WAIT} {asked:.0f} s")
            self._hold_back(asked or 0.0, answer.detail)
            # A request that timed out once will probably do so again: one retry, not six.
            timeouts += answer.detail == TIMED_OUT
            failed += 1
            if failed >= attempts or timeouts == _TIMEOUTS:
                return answer
            await asyncio.sleep(random.uniform(0, self._backoff * 2 ** (failed - 1)))

    async def _try(self, request: Mapping[str, object]) -> tuple[Answer, float | None]:
        """The answer, or what failed, and the seconds after which the server wants to be asked again."""
        try:
            reply = await self._connection.chat(request, self._timeout)
            status = reply.status
            if reply.is_success:
                value = read_object(reply.body)
                if not value.get("error") or value.get("choices"):
                    return self._noted(read_completion(value)), None
                status = _hidden_status(value, reply)
            detail = describe_reply(status, reply.body)
            wait = read_retry_after(reply.headers) if status in RETRIED else None
            return Answer("http-error", detail=detail, status=status), wait
        except (BadReplyError, NotAReplyError) as error:
            return Answer("http-error", detail=f"{BAD_REPLY}{error}", status=200), None
        except OSError as error:
            return Answer("http-error", detail=describe_failure(error)), None

    def _noted(self, answer: Answer) -> Answer:
        if answer.detail.startswith(_STOP_TOKEN_TAKEN):
            self.notes[f"answers: {answer.detail}"] = None
        return answer

    def _hold_back(self, seconds: float, detail: str) -> None:
        """Let every request to this server wait as long as it wants."""
        until = time.monotonic() + seconds
        if seconds >= _LONG_WAIT and until > self._paused_until + 1:
            told = f"{self.url} wants to be asked again in {seconds:g} s ({detail})"
            self._on_wait(hide_key(told, self._key))
        self._paused_until = max(self._paused_until, until)

    async def _wait(self) -> None:
        while (left := self._paused_until - time.monotonic()) > 0:
            await asyncio.sleep(left)


def _hidden_status(value: Mapping[str, Any], reply: Reply) -> int:
    """The status of an error that a gateway has from the server behind it, and puts into a reply with 200.

    Raises BadReplyError if there is none.
    """
    code = value["error"].get("code") if isinstance(value["error"], dict) else None
    if type(code) is not int or not 400 <= code < 600:
        said = describe_reply(reply.status, reply.body)
        raise BadReplyError(f"an error instead of an answer: {said}")
    return code


def read_completion(body: Mapping[str, Any]) -> Answer:
    """Turn the body of a chat completion into an answer. Raises BadReplyError if it is invalid."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        content, thinking = read_content(message.get("content") or message.get("refusal"))
        told = (message.get(key) for key in ("reasoning_content", "reasoning", "reasoning_details"))
        told_thinking = next(filter(None, map(read_thinking, told)), "")
        finish = choice.get("finish_reason")
        usage = body.get("usage")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadReplyError(f"no message in it ({type(error).__name__})") from None
    thinking = "\n".join(filter(None, (told_thinking, thinking)))
    usage = usage if isinstance(usage, Mapping) else {}
    tokens = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    refuse_surrogates([content, thinking])
    reason = finish.lower() if isinstance(finish, str) else finish
    if not (reason is None or isinstance(reason, str)) or reason not in _FINISHED | _CUT:
        # An aborted or filtered answer carries no information on the arm: the next run asks again.
        return Answer("http-error", detail=f"finish_reason {finish!r}", status=200)
    limit = reason in _CUT
    inline = "\n".join(part.strip() for part in _THINK.findall(content))
    text = _THINK.sub("", content)
    # Some templates open <think> in the prompt, so that only the closing tag is in the answer.
    before, closed, after = text.partition("</think>")
    if closed:
        inline, text = "\n".join(filter(None, (inline, before.strip()))), after
    text = text.strip()
    text, stop = _take_stops(text)
    thinking = "\n".join(filter(None, (thinking.strip(), inline)))
    outcome: Outcome = "truncated" if limit else "ok"
    if not text:
        outcome = "think-only" if thinking else "empty"
    cut = [
        f"{len(one):,} characters of it" for one in (text, thinking) if len(one) > LONGEST_ANSWER
    ]
    if len(text) > LONGEST_ANSWER:
        outcome = "truncated"
    detail = f"{_STOP_TOKEN_TAKEN} {stop}" if stop else ""
    detail = f"cut to {LONGEST_ANSWER:,}: there were {' and '.join(cut)}" if cut else detail
    counts = [count if type(count) is int else None for count in tokens]
    text, thinking = text[:LONGEST_ANSWER], thinking[:LONGEST_ANSWER]
    return Answer(outcome, text, thinking, detail, 200, counts[0], counts[1], cut=limit)


def _take_stops(text: str) -> tuple[str, str]:
    """``text`` without the stop tokens at its end, and these: some models end a turn with two."""
    taken: list[str] = []
    while stop := next((token for token in _STOP_TOKENS if text.endswith(token)), ""):
        if stop == "</s>" and "<s>" in text:  # HTML's
            break
        taken.insert(0, stop)
        text = text.removesuffix(stop).rstrip()
    return text, " ".join(taken)
