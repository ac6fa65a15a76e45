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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.cards import Json
from ktbridge.eval.results.types import Outcome
from ktbridge.eval.text import shorten
from ktbridge.eval.transport import Reply, Transport
from ktbridge.json_parts import has_more
from ktbridge.openai_client import hide_key

ModelEntry = dict[
    str, object
]  # one model in /v1/models: its ``id``, and what else the server lists
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")

LONGEST_ANSWER = 200_000
"""Characters of an answer, and of its thinking, that are kept: a run holds all of them in memory. More than
50,000 tokens of most texts; a longer answer is truncated, as one that reached its limit of tokens is."""
_SHOWN = 300  # characters of a server's reply
AGAIN = "run the same command again, which asks only for what is missing"
KEY = "set KTBRIDGE_API_KEY (a judge's: KTBRIDGE_JUDGE_API_KEY) to the key that it wants"
FEWER_TOKENS = "give fewer answer tokens with --max-tokens N, or serve with a larger context"
# The same request may succeed later.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
TIMED_OUT = "timed out"
_REMEDIES = {
    401: KEY,
    403: "see what the key in KTBRIDGE_API_KEY may do",
    404: "see whether the server still lists the arm's model name, and correct --arm",
    413: FEWER_TOKENS,
    429: f"give a lower --concurrency and {AGAIN}",
}
# Wordings of SGLang, vLLM, llama.cpp, OpenAI and our own server.
_TOO_MANY = re.compile(
    r"(?i)context|max_(?:completion_|new_)?tokens|too (?:long|many tokens)|token (?:count|limit)|"
    r"(?:maximum|exceed\w*)[^.]{0,60}\b(?:length|tokens)"
)

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
_MOST_PARTS = 100_000  # lists and objects in a reply
_LONGEST_ERROR = 100_000  # characters of an error's body that are read as JSON
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
            entries = _read_reply(reply)["data"]
            if self._key:
                entries = json.loads(hide_key(_encode(entries), self._key))
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

    async def chat(self, request: Json) -> Answer:
        """One chat completion. Server faults never raise: they are reported as the outcome.

        An API key that the server repeats is taken out.
        """
        answer = await self._chat(request)
        shown = (
            hide_key(text, self._key) for text in (answer.text, answer.thinking, answer.detail)
        )
        text, thinking, detail = shown
        return replace(answer, text=text, thinking=thinking, detail=detail)

    async def _chat(self, request: Json) -> Answer:
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
    outcome: Outcome = "truncated" if finish == "length" else "ok"
    if not text:
        outcome = "think-only" if thinking else "empty"
    cut = [
        f"{len(one):,} characters of it" for one in (text, thinking) if len(one) > LONGEST_ANSWER
    ]
    if len(text) > LONGEST_ANSWER:
        outcome = "truncated"
    detail = f"cut to {LONGEST_ANSWER:,}: there were {' and '.join(cut)}" if cut else ""
    counts = [count if type(count) is int else None for count in tokens]
    text, thinking = text[:LONGEST_ANSWER], thinking[:LONGEST_ANSWER]
    return Answer(outcome, text, thinking, detail, 200, counts[0], counts[1])


def _read_reply(reply: Reply) -> dict[str, Any]:
    """The reply's JSON object. Raises BadReplyError for anything else."""
    coding = reply.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BadReplyError(f"content-encoding {coding!r}, which was not asked for")
    if has_more(reply.body, b"[{", _MOST_PARTS):
        raise BadReplyError(f"JSON of more than {_MOST_PARTS} parts")
    try:
        value = json.loads(reply.body)
    except (ValueError, RecursionError):
        start = " ".join(reply.body[:40].decode("utf-8", "replace").split())
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


# --- failed requests: what the server said, and what to do


def describe_reply(status: int, body: bytes) -> str:
    """ "HTTP 400: the prompt has ...": the message of an error's body, else the body's text."""
    text = body.decode("utf-8", "replace")
    message = _message(text)
    return f"HTTP {status}" + (f": {shorten(message, _SHOWN)}" if message else "")


def _message(text: str) -> str:
    """The message of a JSON error ({"error": {"message": ...}}, {"message": ...}, {"detail": ...})."""
    if len(text) > _LONGEST_ERROR:
        return " ".join(text[:_LONGEST_ERROR].split())
    try:
        value: object = json.loads(text)
        for _ in range(3):
            if not isinstance(value, dict):
                break
            value = next((value[k] for k in ("error", "message", "detail") if value.get(k)), None)
        if isinstance(value, str):
            text = value
        elif isinstance(value, list):  # FastAPI's list of errors
            faults = [str(one.get("msg", "")) for one in value if isinstance(one, dict)]
            text = "; ".join(filter(None, faults)) or text
    except (ValueError, RecursionError):
        pass
    # JSON can name half a character, which can't be stored.
    return " ".join(text.split()).encode("utf-8", "replace").decode()


def is_refusal(status: int) -> bool:
    """Whether the server would refuse the same request again."""
    return 400 <= status < 500 and status not in RETRIED


def remedy(status: int, detail: str) -> str:
    """The remedy for a failed request. ``status`` 0: there was no reply."""
    if status == 0 and detail.endswith(TIMED_OUT):
        return f"give more seconds with --timeout or a lower --concurrency, and {AGAIN}"
    if status in (400, 422) and _TOO_MANY.search(detail):
        return FEWER_TOKENS
    if status in _REMEDIES:
        return _REMEDIES[status]
    if is_refusal(status):
        return (
            "the server refuses these requests: change what its answer names (--extra-body, --arm)"
        )
    return f"see the server's log and {AGAIN}"


def remedies(failed: Iterable[tuple[int, str]]) -> str:
    """The remedies of several failures (status, detail), each once."""
    return "; ".join(dict.fromkeys(remedy(status, detail) for status, detail in failed))
