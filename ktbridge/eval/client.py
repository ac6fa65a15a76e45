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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ktbridge.errors import KtbridgeError
from ktbridge.eval.failures import KEY, RETRIED, TIMED_OUT, describe_reply
from ktbridge.eval.transport import Reply, Transport

ModelEntry = dict[str, Any]  # one model in /v1/models, with whatever else the server lists of it
Request = Mapping[str, Any]  # the body of a chat completion
Outcome = Literal["ok", "empty", "truncated", "think-only", "http-error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")

_LIST_TIMEOUT = 60.0  # seconds; listing models generates nothing
_LONGEST_WAIT = 300.0  # the longest Retry-After in seconds that we accept before giving up
_TIMEOUTS = 2
# The next step if a server returns no list of models.
_NEXT_STEPS = {
    401: KEY,
    403: "see whether the key may list models",
    404: "give the server's base URL, the part before /v1",
}
# Some servers omit the finish reason (null) of a complete answer; any other reason is a failure.
_FINISHED = {"stop", "length", None}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """One answer. ``text`` is what a user would see; ``thinking`` is kept apart, unscored.

    ``seconds`` is the wall time of the attempt that succeeded.
    """

    outcome: Outcome
    text: str = ""
    thinking: str = ""
    detail: str = ""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None

    def as_dict(self) -> dict[str, object]:
        return dict(vars(self))


class BadReplyError(Exception):
    """A reply with status 200 that violates the API."""


class Client:
    """Requests to one base URL; use inside ``async with``.

    ``timeout`` (seconds) suits experts on slow CPUs. ``attempts`` bounds the tries of a request;
    between them the client waits ``backoff * 2**k`` seconds with full jitter, or for the server's
    Retry-After; then every request to this server waits. ``faults`` counts the failed attempts by
    kind, including those that a retry fixed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 900.0,
        attempts: int = 6,
        backoff: float = 0.5,
    ) -> None:
        self.url = url
        self.faults: Counter[str] = Counter()
        self._attempts = attempts
        self._backoff = backoff
        self._timeout = timeout
        self._not_before = 0.0
        self._random = random.Random()
        self._transport = Transport(url, api_key)

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
                    f"{self.url}/models answered {describe_reply(reply.status, reply.body)}.",
                    _NEXT_STEPS.get(reply.status, "see the server's log"),
                )
            entries = _read_reply(reply)["data"]
            if not all(isinstance(one["id"], str) for one in entries):
                raise BadReplyError("an entry without an id")
            _refuse_surrogates(entries)
        except OSError as error:
            raise KtbridgeError(
                f"{self.url} does not answer ({_cause(error)}).",
                "start the server, or correct its URL",
            ) from None
        except (BadReplyError, KeyError, TypeError) as error:
            raise KtbridgeError(
                f"{self.url}/models is not a list of models ({error}).",
                "give the base URL of a server that speaks OpenAI's API",
            ) from None
        return list(entries)

    async def chat(self, request: Request) -> Answer:
        """One chat completion. Server faults never raise: they are reported as the outcome."""
        answer = Answer("http-error", detail="not sent")
        timeouts = 0
        for attempt in range(self._attempts):
            await self._wait_until(self._not_before)
            pause = self._random.uniform(0, self._backoff * 2**attempt)
            start = time.monotonic()
            try:
                reply = await self._transport.chat(request, self._timeout)
                if 200 <= reply.status < 300:
                    answer = read_completion(_read_reply(reply))
                    return replace(answer, seconds=round(time.monotonic() - start, 3))
                detail = describe_reply(reply.status, reply.body)
                self.faults[f"HTTP {reply.status}"] += 1
                answer = Answer("http-error", detail=detail, status=reply.status)
                if reply.status not in RETRIED:
                    return answer
                asked = _retry_after(reply.headers)
                if asked is not None:
                    if asked > _LONGEST_WAIT:
                        return answer
                    self._not_before = max(self._not_before, time.monotonic() + asked)
            except BadReplyError as error:
                self.faults["bad reply"] += 1
                answer = Answer("http-error", detail=f"bad reply: {error}", status=200)
            except TimeoutError:
                # A request that timed out once will probably do so again: one retry, not six.
                self.faults["timed out"] += 1
                answer = Answer("http-error", detail=TIMED_OUT)
                if (timeouts := timeouts + 1) == _TIMEOUTS:
                    return answer
            except OSError as error:
                self.faults["connection"] += 1
                answer = Answer("http-error", detail=_cause(error))
            if attempt + 1 < self._attempts:
                await asyncio.sleep(pause)
        return answer

    async def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            await asyncio.sleep(left)
            moment = self._not_before


def read_completion(body: Mapping[str, Any]) -> Answer:
    """Turn the body of a chat completion into an answer. Raises BadReplyError if it is invalid."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        content = message.get("content") or ""
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        finish = choice.get("finish_reason")
        usage = body.get("usage") or {}
        tokens = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadReplyError(f"no message in it ({type(error).__name__})") from None
    if not isinstance(content, str) or not isinstance(thinking, str):
        raise BadReplyError("the content is not text")
    _refuse_surrogates([content, thinking])
    if not (finish is None or isinstance(finish, str)) or finish not in _FINISHED:
        # An aborted or filtered answer carries no information on the arm: the next run asks again.
        return Answer("http-error", detail=f"finish_reason {finish!r}", status=200)
    inline = "\n".join(part.strip() for part in _THINK.findall(content))
    text = _THINK.sub("", content)
    # Some templates open <think> in the prompt, so that only the closing tag is in the answer.
    before, closed, after = text.partition("</think>")
    if closed:
        inline, text = "\n".join(filter(None, (inline, before.strip()))), after
    text = text.strip()
    thinking = "\n".join(filter(None, (thinking.strip(), inline)))
    outcome: Outcome
    if not text:
        outcome = "think-only" if thinking else "empty"
    else:
        outcome = "truncated" if finish == "length" else "ok"
    counts = [count if type(count) is int else None for count in tokens]
    return Answer(outcome, text, thinking, "", 200, counts[0], counts[1])


def _read_reply(reply: Reply) -> dict[str, Any]:
    coding = reply.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BadReplyError(f"content-encoding {coding!r}, which was not asked for")
    return _read_json(reply.body)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        start = " ".join(data[:40].decode("utf-8", "replace").split())
        raise BadReplyError(f"not JSON, it begins with {start!r}") from None
    if not isinstance(value, dict):
        raise BadReplyError(f"a JSON {type(value).__name__} instead of an object")
    return value


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
    except (TypeError, ValueError):
        return None
