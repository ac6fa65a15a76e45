"""A client for one OpenAI-compatible server: bounded retries with backoff, strict validation.

We parse replies as plain JSON, so that a reply with nulls, HTML or a truncated document becomes a
named outcome instead of an exception somewhere else, or worse, an answer.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.eval.failures import (
    BAD_REPLY,
    KEY,
    LONG_WAIT,
    RETRIED,
    TIMED_OUT,
    TRANSIENT,
    describe_reply,
    kind_of,
)
from ktbridge.eval.results.cards import Json
from ktbridge.eval.results.types import Outcome
from ktbridge.eval.transport import NotAReplyError, Reply, Transport
from ktbridge.json_parts import has_more
from ktbridge.openai_client import (
    OTHER_LIMIT,
    hide_key,
    read_content,
    read_thinking,
    refuses_limit,
    rename_limit,
)
from ktbridge.server_api.served_names import (
    APPLIED_PATHS,
    ModelEntry,
    applied_adapter,
    listed_models,
)

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
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_STOP_TOKEN_TAKEN = "the stop token at the end was taken off:"
_MOST_PARTS = 100_000  # lists and objects in a reply
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


class BadReplyError(Exception):
    """A reply with status 200 that violates the API."""


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
        self.url = url
        self._on_wait = on_wait
        self.faults: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self._limit_renamed: set[object] = set()  # models that want max_completion_tokens
        self._attempts = attempts
        self._backoff = backoff
        self._timeout = timeout
        self._not_before = 0.0
        self._random = random.Random()
        self._transport = Transport(url, api_key)
        self._key = api_key

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.close()

    async def models(self) -> list[ModelEntry]:
        """The entries of /v1/models; raises KtbridgeError if the list is not available."""
        try:
            reply = await self._transport.models(min(self._timeout, _LIST_TIMEOUT))
            if not 200 <= reply.status < 300:
                raise KtbridgeError(
                    hide_key(
                        f"{self.url}/models answered {describe_reply(reply.status, reply.body)}.",
                        self._key,
                    ),
                    _NEXT_STEPS.get(reply.status, "see the server's log"),
                )
            entries = listed_models(_read_json(reply))
            if self._key:
                entries = json.loads(hide_key(_encode(entries), self._key))
            _refuse_surrogates(entries)
        except OSError as error:
            raise KtbridgeError(
                f"{self.url} does not answer ({_cause(error)}).",
                "start the server, or correct its URL",
            ) from None
        except (BadReplyError, TypeError) as error:
            raise KtbridgeError(
                f"{self.url}/models is not a list of models ({error}).",
                "give the base URL of a server that speaks OpenAI's API",
            ) from None
        return list(entries)

    async def applied_adapter(self, engine: str) -> str:
        """The adapter that the server applies to every request, as far as ``engine`` tells; "" for none."""
        for path in APPLIED_PATHS.get(engine, ()):
            with suppress(OSError, ValueError, RecursionError):
                reply = await self._transport.native(path, min(self._timeout, _LIST_TIMEOUT))
                if reply.status == 200:
                    return applied_adapter(engine, json.loads(reply.body))
        return ""

    async def chat(self, request: Json, attempts: int | None = None) -> Answer:
        """One chat completion. Server faults never raise: they are reported as the outcome.

        An API key that the server repeats is taken out. ``attempts`` instead of the client's own.
        """
        answer = await self._chat(request, attempts or self._attempts)
        shown = (
            hide_key(text, self._key) for text in (answer.text, answer.thinking, answer.detail)
        )
        text, thinking, detail = shown
        return replace(answer, text=text, thinking=thinking, detail=detail)

    async def _chat(self, request: Json, attempts: int) -> Answer:
        timeouts = attempt = 0
        model = request.get("model")
        while True:
            await self._wait_until(self._not_before)
            pause = self._random.uniform(0, self._backoff * 2**attempt)
            start = time.monotonic()
            sent = rename_limit(request) if model in self._limit_renamed else request
            answer, asked = await self._try(sent)
            if answer.outcome != "http-error":
                return replace(answer, seconds=round(time.monotonic() - start, 3))
            if (
                answer.status in (400, 422)
                and "max_tokens" in sent
                and refuses_limit(answer.detail)
            ):
                self._limit_renamed.add(model)
                self.notes[f"{model} takes its limit of tokens as {OTHER_LIMIT}"] = None
                continue
            self.faults[_fault(answer)] += 1
            if kind_of(answer.status, answer.detail) not in TRANSIENT:
                return answer
            if asked is not None:
                if asked > _LONGEST_WAIT:
                    return replace(answer, detail=f"{answer.detail}{LONG_WAIT} {asked:.0f} s")
                until = time.monotonic() + asked
                if asked >= _LONG_WAIT and until > self._not_before + 1:
                    where = f"{self.url} wants to be asked again in {asked:g} s"
                    self._on_wait(hide_key(f"{where} ({answer.detail})", self._key))
                self._not_before = max(self._not_before, until)
            # A request that timed out once will probably do so again: one retry, not six.
            timeouts += answer.detail == TIMED_OUT
            attempt += 1
            if attempt >= attempts or timeouts == _TIMEOUTS:
                return answer
            await asyncio.sleep(pause)

    async def _try(self, request: Json) -> tuple[Answer, float | None]:
        """The answer, or what failed, and the seconds after which the server wants to be asked again."""
        try:
            reply = await self._transport.chat(request, self._timeout)
            status, body = reply.status, reply.body
            if 200 <= status < 300:
                value = _read_reply(reply)
                if not value.get("error") or value.get("choices"):
                    return self._noted(read_completion(value)), None
                # Gateways put an error of the server behind them into a reply with status 200.
                code = value["error"].get("code") if isinstance(value["error"], dict) else None
                if type(code) is not int or not 400 <= code < 600:
                    said = describe_reply(status, body)
                    raise BadReplyError(f"an error instead of an answer: {said}")
                status = code
            detail = describe_reply(status, body)
            wait = _retry_after(reply.headers) if status in RETRIED else None
            return Answer("http-error", detail=detail, status=status), wait
        except (BadReplyError, NotAReplyError) as error:
            return Answer("http-error", detail=f"{BAD_REPLY}{error}", status=200), None
        except TimeoutError:
            return Answer("http-error", detail=TIMED_OUT), None
        except OSError as error:
            return Answer("http-error", detail=_cause(error)), None

    def _noted(self, answer: Answer) -> Answer:
        if answer.detail.startswith(_STOP_TOKEN_TAKEN):
            self.notes[f"answers: {answer.detail}"] = None
        return answer

    async def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            await asyncio.sleep(left)
            moment = self._not_before


def _fault(answer: Answer) -> str:
    """The kind under which ``faults`` counts a failed attempt."""
    if answer.status >= 400:
        return f"HTTP {answer.status}"
    if answer.status:
        return "bad reply" if BAD_REPLY in answer.detail else "unfinished answer"
    return "timed out" if answer.detail == TIMED_OUT else "connection"


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
    except ValueError as error:
        raise BadReplyError(str(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadReplyError(f"no message in it ({type(error).__name__})") from None
    thinking = "\n".join(filter(None, (told_thinking, thinking)))
    usage = usage if isinstance(usage, Mapping) else {}
    tokens = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    _refuse_surrogates([content, thinking])
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


def _read_reply(reply: Reply) -> dict[str, Any]:
    """The reply's JSON object. Raises BadReplyError for anything else."""
    value = _read_json(reply)
    if not isinstance(value, dict):
        raise BadReplyError(f"a JSON {type(value).__name__} instead of an object")
    return value


def _read_json(reply: Reply) -> object:
    """The reply's JSON value. Raises BadReplyError if it is none."""
    coding = reply.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BadReplyError(f"content-encoding {coding!r}, which was not asked for")
    if has_more(reply.body, b"[{", _MOST_PARTS):
        raise BadReplyError(f"JSON of more than {_MOST_PARTS} parts")
    try:
        return json.loads(reply.body)
    except (ValueError, RecursionError):
        start = " ".join(reply.body[:40].decode("utf-8", "replace").split())
        events = re.match(rb"\s*(?:data|event|id|:)", reply.body)
        what = "a stream of events and not JSON" if events else "not JSON"
        raise BadReplyError(f"{what}, it begins with {start!r}") from None


def _refuse_surrogates(value: object) -> None:
    """Raise BadReplyError if a text contains a lone surrogate, which UTF-8 can't encode."""
    try:
        _encode(value).encode()
    except (UnicodeEncodeError, RecursionError):
        raise BadReplyError("a lone surrogate, half of a character, in its text") from None


def _cause(error: OSError) -> str:
    """The cause of a failed connection, without Python's errno."""
    if isinstance(error, TimeoutError):
        return TIMED_OUT
    if error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error) or type(error).__name__


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: a number or an HTTP date)."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
