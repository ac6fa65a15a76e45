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
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import openai

import ktbridge
from ktbridge.errors import KtbridgeError
from ktbridge.eval.wire import Reply, Wire

Outcome = Literal["ok", "empty", "truncated", "think-only", "http-error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")

_RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_LIST_TIMEOUT = 60.0  # seconds; listing models generates nothing
_LONGEST_WAIT = 300.0  # seconds of Retry-After that we accept before giving up
_TIMEOUTS = 2
# Some servers leave the reason out (null) of a whole answer; any other reason is a failure.
_FINISHED = {"stop", "length", None}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """What came back. ``text`` is what a user would see; ``thinking`` is kept apart, unscored.

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

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class BadReplyError(Exception):
    """A reply with status 200 that is not what the API promises."""


class Client:
    """Requests to one base URL; use inside ``async with``.

    ``timeout`` (seconds) suits experts on slow CPUs. ``attempts`` bounds the tries of a request;
    between them the client waits ``backoff * 2**k`` seconds with full jitter, or as long as the
    server's Retry-After says; then every request to this server waits. ``faults`` counts the attempts
    that failed, by kind, those that were made good included.

    Requests go through the openai package where a proxy or TLS stands between; on plain HTTP, where
    thousands a second are wanted, they are written on kept connections (scripts/bench_eval_client.py
    measures both). Either way the request is the same.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 900.0,
        attempts: int = 6,
        backoff: float = 0.5,
        direct: bool | None = None,
    ) -> None:
        self.url = url
        self.faults: Counter[str] = Counter()
        self._attempts = attempts
        self._backoff = backoff
        self._timeout = timeout
        self._not_before = 0.0
        self._random = random.Random()
        parts = urlsplit(url)
        # A proxy from the environment must not stand between us and a server on this machine.
        loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
        # Reading the system's certificates takes longer than many a run; plain HTTP trusts none.
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if parts.scheme == "http" else True
        self._openai = openai.AsyncOpenAI(
            base_url=url,
            api_key=api_key or "none",
            timeout=timeout,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not loopback, verify=trusted),
        )
        if direct is None:
            direct = parts.scheme == "http" and (loopback or not _behind_proxy(parts))
        self._wire = Wire(parts.hostname or "", parts.port or 80) if direct else None
        self._target = parts.path.rstrip("/") + "/chat/completions"
        self._headers = [
            ("host", parts.netloc.rpartition("@")[2]),
            ("user-agent", f"ktbridge/{ktbridge.__version__}"),
            ("accept", "application/json"),
            ("accept-encoding", "identity"),
            ("content-type", "application/json"),
            *self._openai.auth_headers.items(),
        ]

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._wire:
            await self._wire.close()
        await self._openai.close()

    async def models(self) -> list[dict[str, Any]]:
        """The entries of /v1/models; KtbridgeError when there is no such list to be had."""
        try:
            raw = await self._openai.models.with_raw_response.list(timeout=_LIST_TIMEOUT)
            entries = _read_json(raw.content)["data"]
            if not all(isinstance(one["id"], str) for one in entries):
                raise BadReplyError("an entry without an id")
            _refuse_surrogates(entries)
        except openai.APIStatusError as error:
            said = _status(error.status_code, error.response.content)
            raise KtbridgeError(f"{self.url}/models answered {said}.") from None
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
            start = time.monotonic()
            try:
                reply = await self._send(request)
                if 200 <= reply.status < 300:
                    answer = read_completion(_read_reply(reply))
                    return replace(answer, seconds=round(time.monotonic() - start, 3))
                detail = _status(reply.status, reply.body)
                self.faults[f"HTTP {reply.status}"] += 1
                answer = Answer("http-error", detail=detail, status=reply.status)
                if reply.status not in _RETRIED_STATUS:
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
                # What took this long once will do so again: a second chance, not six.
                self.faults["timed out"] += 1
                answer = Answer("http-error", detail="timed out")
                if (timeouts := timeouts + 1) == _TIMEOUTS:
                    return answer
            except OSError as error:
                self.faults["connection"] += 1
                answer = Answer("http-error", detail=str(error) or type(error).__name__)
            if attempt + 1 < self._attempts:
                await asyncio.sleep(pause)
        return answer

    async def _wait_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            await asyncio.sleep(left)
            moment = self._not_before

    async def _send(self, request: Mapping[str, Any]) -> Reply:
        """The server's reply, whatever its status; TimeoutError or OSError where there is none."""
        if self._wire:
            body = _encode(request).encode()
            return await self._wire.post(self._target, self._headers, body, self._timeout)
        fields = dict(request)
        try:
            raw = await self._openai.chat.completions.with_raw_response.create(
                model=fields.pop("model"), messages=fields.pop("messages"), extra_body=fields
            )
            return Reply(raw.status_code, {}, raw.content)
        except openai.APIStatusError as error:
            return Reply(error.status_code, error.response.headers, error.response.content)
        except openai.APITimeoutError:
            raise TimeoutError from None
        except openai.APIConnectionError as error:
            raise ConnectionError(_cause(error)) from None


def _behind_proxy(parts: SplitResult) -> bool:
    bypassed = urllib.request.proxy_bypass(parts.hostname or "")
    return not bypassed and not {"http", "all"}.isdisjoint(urllib.request.getproxies())


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


def _refuse_surrogates(value: Any) -> None:
    """BadReplyError where a text holds half a character, which no file can store."""
    try:
        _encode(value).encode()
    except (UnicodeEncodeError, RecursionError):
        raise BadReplyError("a lone surrogate, half of a character, in its text") from None


def _status(status: int, body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return f"HTTP {status}" + (f": {text[:160]}" if text else "")


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
