"""A polite client for one OpenAI-compatible server: bounded, patient, and never fooled.

Replies are read as plain JSON by us, so that a reply with nulls, HTML or half a document becomes a
named outcome instead of an exception somewhere else, or worse, an answer.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import openai

from ktbridge.errors import KtbridgeError

Outcome = Literal["ok", "empty", "truncated", "think-only", "http-error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")

_RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_LIST_TIMEOUT = 60.0  # seconds; listing models generates nothing
_LONGEST_WAIT = 300.0  # seconds of Retry-After that we accept before giving up
_TIMEOUTS = 2
# Some servers leave the reason out (null) of a whole answer; any other reason is a failure.
_FINISHED = {"stop", "length", None}
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What came back. ``text`` is what a user would see; ``thinking`` is kept apart, unscored."""

    outcome: Outcome
    text: str = ""
    thinking: str = ""
    detail: str = ""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class BadReplyError(Exception):
    """A reply with status 200 that is not what the API promises."""


class Client:
    """Requests to one base URL; use inside ``async with``.

    ``timeout`` (seconds) suits experts on slow CPUs. ``attempts`` bounds the tries of a request;
    between them the client waits ``backoff * 2**k`` seconds with full jitter, or as long as the
    server's Retry-After says; then every request to this server waits.
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
        self._attempts = attempts
        self._backoff = backoff
        self._not_before = 0.0
        self._random = random.Random()
        # A proxy from the environment must not stand between us and a server on this machine.
        loopback = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        self._openai = openai.AsyncOpenAI(
            base_url=url,
            api_key=api_key or "none",
            timeout=timeout,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not loopback),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._openai.close()

    async def models(self) -> list[dict[str, Any]]:
        """The entries of /v1/models; KtbridgeError when there is no such list to be had."""
        try:
            raw = await self._openai.models.with_raw_response.list(timeout=_LIST_TIMEOUT)
            entries = _read_json(raw.text)["data"]
            if not all(isinstance(one["id"], str) for one in entries):
                raise BadReplyError("an entry without an id")
            _refuse_surrogates(entries)
        except openai.APIStatusError as error:
            raise KtbridgeError(f"{self.url}/models answered {_status(error)}.") from None
        except openai.APIConnectionError as error:
            raise KtbridgeError(f"{self.url} does not answer ({_cause(error)}).") from None
        except (BadReplyError, KeyError, TypeError) as error:
            raise KtbridgeError(f"{self.url}/models is not a list of models ({error}).") from None
        return list(entries)

    async def chat(self, request: Mapping[str, Any]) -> Answer:
        """One chat completion. Never raises for what a server does: the outcome names it."""
        answer = Answer("http-error", detail="not sent")
        timeouts = 0
        for attempt in range(self._attempts):
            await self._wait_until(self._not_before)
            pause = self._random.uniform(0, self._backoff * 2**attempt)
            try:
                return await self._chat_once(request)
            except openai.APIStatusError as error:
                answer = Answer("http-error", detail=_status(error), status=error.status_code)
                if error.status_code not in _RETRIED_STATUS:
                    return answer
                asked = _retry_after(error.response.headers)
                if asked is not None:
                    if asked > _LONGEST_WAIT:
                        return answer
                    self._not_before = max(self._not_before, time.monotonic() + asked)
            except openai.APITimeoutError:
                # What took this long once will do so again: a second chance, not six.
                answer = Answer("http-error", detail="timed out")
                if (timeouts := timeouts + 1) == _TIMEOUTS:
                    return answer
            except openai.APIConnectionError as error:
                answer = Answer("http-error", detail=_cause(error))
            except BadReplyError as error:
                answer = Answer("http-error", detail=f"bad reply: {error}", status=200)
            if attempt + 1 < self._attempts:
                await asyncio.sleep(pause)
        return answer

    async def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            await asyncio.sleep(left)
            moment = self._not_before

    async def _chat_once(self, request: Mapping[str, Any]) -> Answer:
        fields = dict(request)
        raw = await self._openai.chat.completions.with_raw_response.create(
            model=fields.pop("model"), messages=fields.pop("messages"), extra_body=fields
        )
        return read_completion(_read_json(raw.text))


def read_completion(body: Mapping[str, Any]) -> Answer:
    """Turn the body of a chat completion into an answer; BadReplyError where it is none."""
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
        # An aborted or filtered answer says nothing of the arm: the next run asks again.
        return Answer("http-error", detail=f"finish_reason {finish!r}", status=200)
    inline = "\n".join(part.strip() for part in _THINK.findall(content))
    text = _THINK.sub("", content)
    # Some templates open <think> in the prompt, so that only its end is in the answer.
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


def _read_json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        start = " ".join(text[:40].split())
        raise BadReplyError(f"not JSON, it begins with {start!r}") from None
    if not isinstance(value, dict):
        raise BadReplyError(f"a JSON {type(value).__name__} instead of an object")
    return value


def _refuse_surrogates(value: Any) -> None:
    """BadReplyError where a text holds half a character, which no file can store."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise BadReplyError("a lone surrogate, half of a character, in its text") from None


def _status(error: openai.APIStatusError) -> str:
    text = " ".join(error.response.text.split())
    return f"HTTP {error.status_code}" + (f": {text[:160]}" if text else "")


def _cause(error: BaseException) -> str:
    if isinstance(error, openai.APITimeoutError):
        return "timed out"
    return str(error.__cause__ or error) or type(error).__name__


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: a number or an HTTP date)."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
