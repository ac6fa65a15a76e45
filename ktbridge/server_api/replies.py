"""Replies of servers, read in one way for every command: completions, lists of models, errors, keys.

Replies are read as plain JSON, so that a reply with nulls, HTML or half a document becomes a named failure
instead of an exception somewhere else, or worse, an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.served_names import ModelEntry

SHORTEST_SECRET = 8
OTHER_LIMIT = "max_completion_tokens"
"""The name that newer servers have for ``max_tokens``, some of them alone."""
TIMED_OUT = "timed out"
_UNSUPPORTED = r"(?:un|not )supported|not permitted|deprecated|un(?:known|recognized|expected)"
_REFUSED_LIMIT = re.compile(
    rf"(?i)\bmax_tokens\b.{{0,60}}(?:{_UNSUPPORTED}|extra (?:inputs|fields))|"
    rf"(?:{_UNSUPPORTED}).{{0,60}}\bmax_tokens\b|\buse\W{{1,3}}max_completion_tokens"
)
_TEXT_PARTS = ("text", "output_text")
_THINKING_PARTS = ("thinking", "reasoning", "redacted_thinking", "summary_text", "reasoning_text")
_SHOWN = 300  # characters of a server's error
_ERROR_KEYS = ("error", "message", "detail", "error_message")  # the last: SGLang's of adapters
_LONGEST_ERROR = 100_000  # characters of an error's body that are read as JSON
_MOST_PARTS = 100_000  # lists and objects in a reply
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
Outcome = Literal["ok", "truncated", "think-only", "empty", "http-error"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "truncated", "think-only", "empty", "http-error")
LONGEST_ANSWER = 200_000
"""Characters of an answer, and of its thinking, that are kept: a run holds all of them in memory. More than
50,000 tokens of most texts; a longer answer is truncated, as one that reached its limit of tokens is."""
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
STOP_TOKEN_TAKEN = "the stop token at the end was taken off:"
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


class BadReplyError(ValueError):
    """A reply that violates HTTP, or the API with status 200: asking again won't help."""


class NoReplyError(Exception):
    """There is no reply, or half of one. The error's text says why."""


# --- the key


def check_key(key: str | None) -> str:
    """``key`` without white space around it, "" for none. Raises KtbridgeError if no header can carry it."""
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise KtbridgeError(
            "the API key holds characters that no request can carry.",
            "see what KTBRIDGE_API_KEY and KTBRIDGE_JUDGE_API_KEY hold",
        )
    return key


def hide_key(text: str, key: str | None) -> str:
    """``text`` of a server without the API key that it was sent, which it may repeat.

    A key of fewer than 8 characters is no secret, and may be part of an answer's words.
    """
    if key is None or len(key) < SHORTEST_SECRET:
        return text
    return text.replace(key, "***")


# --- the limit of tokens, which has two names


def refuses_limit(reason: str) -> bool:
    """Return whether a server's message refuses ``max_tokens`` for its name, as some do that want another."""
    return _REFUSED_LIMIT.search(" ".join(reason.split())) is not None


def rename_limit(body: Mapping[str, object]) -> dict[str, object]:
    """``body`` with its limit of tokens under the name that newer servers have for it."""
    return {OTHER_LIMIT if name == "max_tokens" else name: value for name, value in body.items()}


# --- a message


def read_content(content: object) -> tuple[str, str]:
    """The text and the thinking of a message's ``content``: a string, null, or a list of typed parts.

    Raises BadReplyError for what is neither text nor thinking.
    """
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list):
        what = "an object" if isinstance(content, Mapping) else f"{str(content)[:20]!r}"
        raise BadReplyError(f"the content is {what}, not text")
    text, thinking = [], []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if isinstance(part, str):
            text.append(part)
        elif kind in _THINKING_PARTS:
            thinking.append(read_thinking(part))
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            text.append(part["refusal"])
        elif kind in _TEXT_PARTS and isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text.append(part["text"])
        else:
            raise BadReplyError(f"the content has a part of type {str(kind)[:40]!r}, which is no text")
    return "".join(text), "\n".join(filter(None, thinking))


def read_thinking(value: object) -> str:
    """All text in a message's reasoning, in whichever of the forms servers have."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(read_thinking, value)))
    if isinstance(value, Mapping):
        keys = ("thinking", "reasoning", "text", "summary", "content")
        return "\n".join(filter(None, (read_thinking(value.get(key)) for key in keys)))
    return ""


# --- a completion


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
    cut = [f"{len(one):,} characters of it" for one in (text, thinking) if len(one) > LONGEST_ANSWER]
    if len(text) > LONGEST_ANSWER:
        outcome = "truncated"
    detail = f"{STOP_TOKEN_TAKEN} {stop}" if stop else ""
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


# --- JSON


def read_json(body: bytes) -> object:
    """The JSON value of a reply's body. Raises BadReplyError if it is none."""
    if _has_too_many_parts(body):
        raise BadReplyError(f"JSON of more than {_MOST_PARTS} parts")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        start = " ".join(body[:40].decode("utf-8", "replace").split())
        events = re.match(rb"\s*(?:data|event|id|:)", body)
        what = "a stream of events and not JSON" if events else "not JSON"
        raise BadReplyError(f"{what}, it begins with {start!r}") from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a reply's body. Raises BadReplyError for anything else."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise BadReplyError(f"a JSON {type(value).__name__} instead of an object")
    return value


def read_list(body: bytes, key: str | None) -> list[ModelEntry]:
    """The models in a reply of /models, without ``key``: under "data", or in some gateways' bare list.

    Raises BadReplyError if there are none.
    """
    document = read_json(body)
    listed = document.get("data") if isinstance(document, Mapping) else document
    if not isinstance(listed, list):
        raise BadReplyError("no list of models")
    if not all(isinstance(one, Mapping) and isinstance(one.get("id"), str) for one in listed):
        raise BadReplyError("no list of models (an entry has no id)")
    refuse_surrogates(listed)
    return list(json.loads(hide_key(_encode(listed), key)))


def refuse_surrogates(value: object) -> None:
    """Raise BadReplyError if a text contains a lone surrogate, which UTF-8 can't encode."""
    try:
        _encode(value).encode()
    except (UnicodeEncodeError, RecursionError):
        raise BadReplyError("a lone surrogate, half of a character, in its text") from None


# --- errors


def describe_reply(status: int, body: bytes) -> str:
    """ "HTTP 400: the prompt has ...": the message of an error's body, else the body's text."""
    text = body.decode("utf-8", "replace")
    message, code = read_error(text)
    if status in (402, 403, 429) and code and code not in message:
        message = f"{message} ({code})" if message else code
    return f"HTTP {status}" + (f": {shorten(message, _SHOWN)}" if message else "")


def read_error(text: str) -> tuple[str, str]:
    """Message and code of a JSON error ({"error": {"message": ...}}, or one of ``_ERROR_KEYS``)."""
    code = ""
    if len(text) > _LONGEST_ERROR:
        return " ".join(text[:_LONGEST_ERROR].split()), code
    try:
        value: object = json.loads(text)
        for _ in range(3):
            if not isinstance(value, dict):
                break
            code = next((c for key in ("code", "type") if isinstance(c := value.get(key), str)), "")
            value = next((value[k] for k in _ERROR_KEYS if value.get(k)), None)
        if isinstance(value, str):
            text = value
        elif isinstance(value, list):  # FastAPI's list of errors
            text = "; ".join(filter(None, map(_fault, value))) or text
    except (ValueError, RecursionError):
        pass
    # JSON can name half a character, which can't be stored.
    words = (" ".join(one.split()).encode("utf-8", "replace").decode() for one in (text, code))
    return next(words), next(words)


def _fault(row: object) -> str:
    """An error of FastAPI's list, with the request's field that it is about."""
    if not isinstance(row, dict):
        return ""
    place = row.get("loc")
    field = place[-1] if isinstance(place, list) and len(place) == 2 else None
    said = str(row.get("msg", ""))
    return f"{field}: {said}" if isinstance(field, str) and said else said


def shorten(text: str, most: int) -> str:
    """At most ``most`` characters of ``text`` and "…", cut between words if possible."""
    if len(text) <= most:
        return text
    head = text[:most]
    cut = head.rfind(" ", most - 40)
    return (head[:cut] if cut > 0 else head).rstrip() + " …"


def _has_too_many_parts(body: bytes) -> bool:
    """Return whether JSON has more than ``_MOST_PARTS`` lists and objects outside its texts.

    Counted before it is parsed: C code that parses it keeps every thread waiting until it is done, and makes
    of a few bytes an object of many times their size. What stands in the texts doesn't count: one may be
    brackets and commas without end.
    """
    if _count_openings(body) <= _MOST_PARTS:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * _MOST_PARTS:
        return True
    return sum(map(_count_openings, plain.split(b'"')[::2])) > _MOST_PARTS


def _count_openings(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")
