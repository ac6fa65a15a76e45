"""Failed requests: of which kind a failure is, who is at fault, what is asked again, and what to do about it.

A kind is read from the status and the detail, which a run stores, so that a report says of a failure what the
run said.

| kind | whose fault | asked again |
| --- | --- | --- |
| busy, server, silence | the server's, for now | yes, later |
| key, quota, reply, model, parameter | ours: any other question would fail in the same way | no |
| length, request | this question's | no |
| answer | the model's: a reply, but no answer | no |
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from ktbridge.server_api.replies import OTHER_LIMIT, TIMED_OUT, refuses_limit

Kind = Literal[
    "key", "quota", "reply", "model", "parameter", "length", "request", "answer",
    "busy", "server", "silence",
]  # fmt: skip
TRANSIENT: frozenset[Kind] = frozenset({"busy", "server", "silence"})
WHOLE: frozenset[Kind] = frozenset({"key", "quota", "reply", "model", "parameter"})
"""Kinds that have nothing to do with the question: the next one would fail in the same way."""
BAD_REPLY = "bad reply: "
LONG_WAIT = "; the server wants to be asked again in"
KEY = "set KTBRIDGE_API_KEY (a judge's: KTBRIDGE_JUDGE_API_KEY) to the key that it wants"
AGAIN = "run the same command again, which asks only for what is missing"
FEWER_TOKENS = "give fewer answer tokens with --max-tokens N, or serve with a larger context"
_REMEDIES: Mapping[Kind, str] = {
    "key": KEY,
    "quota": "add credit or quota to the account of the key in KTBRIDGE_API_KEY (a judge's: "
    f"KTBRIDGE_JUDGE_API_KEY), and {AGAIN}",
    "model": "see whether the server still lists the arm's model name, and correct --arm",
    "length": FEWER_TOKENS,
    "busy": f"give a lower --concurrency and {AGAIN}",
}
# The same request may succeed later: RFC 9110's, and those of proxies and gateways (520 to 524, 529).
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
_QUOTA = re.compile(
    r"(?i)insufficient[_ ](?:quota|balance|credits?|funds)|billing[_ ](?:hard[_ ]limit|not[_ ]active)|"
    r"(?:exceeded|out of)[^.]{0,40}\b(?:quota|credits?|budget)|budget[^.]{0,30}exceeded|"
    r"(?:quota|credits?|balance)[^.]{0,30}(?:exceeded|exhausted|too low)|payment required|arrear|"
    r"余额不足|欠费"
)
# Quotas by the minute pass.
_PASSING = re.compile(
    r"(?i)\b(?:re)?try (?:again )?(?:in|after)\b|\bper[ _-](?:second|minute|hour)|\brate.?limit"
)
# Wordings of SGLang, vLLM, llama.cpp, OpenAI and our own server.
_TOO_MANY = re.compile(
    r"(?i)context|max_(?:completion_|new_)?tokens|too (?:long|many tokens)|token (?:count|limit)|"
    r"(?:maximum|exceed\w*)[^.]{0,60}\b(?:length|tokens)"
)
_REFUSES_FIELD = re.compile(
    r"(?i)unsupported|unrecognized|unknown (?:parameter|field|argument|name)|unexpected (?:keyword|field)|"
    r"not (?:supported|permitted|allowed)|does not support|extra (?:inputs|fields)"
)
# A field in quotes, before or after a colon, or one that we send by its bare name.
_NAMED = re.compile(
    r"['\"`]([a-z][a-z_]*)['\"`]|^HTTP \d+: ([a-z][a-z_]*): |"
    r"(?:argument|parameter|field|keyword)s?(?: supplied)?: ([a-z][a-z_]*)\b|"
    r"\b(temperature|top_[pk]|min_p|seed|chat_template_kwargs|(?:frequency|presence)_penalty|"
    r"repetition_penalty|reasoning_effort|enable_thinking|logprobs)\b"
)
_NO_FIELD = {"model", "messages", "content", "role", "system", "user", "assistant", "text", "type"}


def kind_of(status: int, detail: str) -> Kind:
    """The kind of a failed request. ``status`` 0: there was no reply."""
    if status == 0:
        return "silence"
    if status < 300:
        return "reply" if BAD_REPLY in detail else "answer"
    if status < 400 or status in (405, 501):
        return "reply"
    if status == 402 or (status in (400, 403, 429) and _QUOTA.search(detail) and not _PASSING.search(detail)):
        return "quota"
    if status in (401, 403):
        return "key"
    if status == 404:
        return "model"
    if status in RETRIED:
        return "busy" if status == 429 else "server"
    if status in (400, 422) and refused_field(detail):
        return "parameter"
    if status == 413 or (status in (400, 422) and _TOO_MANY.search(detail)):
        return "length"
    return "request" if status < 500 else "server"


def is_refusal(status: int, detail: str = "") -> bool:
    """Return whether the server would refuse the same request again."""
    return status >= 300 and kind_of(status, detail) not in TRANSIENT


def refused_field(detail: str) -> str:
    """The field of a request that a server refuses for its name or its value; "" for none."""
    if refuses_limit(detail):
        return "max_tokens"
    if not _REFUSES_FIELD.search(detail):
        return ""
    names = ("".join(found) for found in _NAMED.findall(detail))
    return next((name for name in names if name not in _NO_FIELD), "")


def name_fault(status: int, detail: str) -> str:
    """The name under which a failed attempt is counted."""
    if status >= 400:
        return f"HTTP {status}"
    if status:
        return "bad reply" if BAD_REPLY in detail else "unfinished answer"
    return "timed out" if detail == TIMED_OUT else "connection"


def read_retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: a number or an HTTP date); 0 for none."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError, IndexError):
        return 0.0


# --- what to do about it


def remedy(status: int, detail: str, option: str = "--extra-body") -> str:
    """The remedy for a failed request; ``option`` sets fields of the requests that failed."""
    kind = kind_of(status, detail)
    if kind in TRANSIENT and LONG_WAIT in detail:
        return f"wait as long as the server says, and {AGAIN}"
    if kind == "silence" and detail.endswith(TIMED_OUT):
        return f"give more seconds with --timeout or a lower --concurrency, and {AGAIN}"
    if kind == "parameter":
        field = refused_field(detail)
        if field == "max_tokens":
            return f"""name the limit otherwise: {option} '{{"max_tokens": null, "{OTHER_LIMIT}": N}}'"""
        sampled = (
            "; its answers are then sampled, and differ from run to run" if field == "temperature" else ""
        )
        return f"""leave the field out: {option} '{{"{field}": null}}'{sampled}"""
    if kind == "reply":
        return _other_reply(status, detail)
    if kind in _REMEDIES:
        return _REMEDIES[kind]
    if kind == "request":
        return f"the server refuses these requests: change what its answer names ({option}, --arm)"
    return f"see the server's log and {AGAIN}"


def _other_reply(status: int, detail: str) -> str:
    if status >= 300:
        return "give the URL of the API itself, what stands before /v1: this one takes no questions"
    if "begins with '<" in detail:
        return (
            "give the URL of the API itself, what stands before /v1: this one answers with a page, as a "
            "gateway's login does"
        )
    if f"{BAD_REPLY}a stream" in detail:
        return "have the server, or the gateway before it, answer without streaming"
    return "see the server's log: what it answers is no chat completion of OpenAI's API"


def remedies(failed: Iterable[tuple[int, str]]) -> str:
    """The remedies of several failures (status, detail), each once."""
    return "; ".join(dict.fromkeys(remedy(status, detail) for status, detail in failed))


def thinking_is_off(fields: Mapping[str, object]) -> bool:
    """Return whether ``fields`` of a request switch thinking off, in any of the ways that servers know."""
    template = fields.get("chat_template_kwargs")
    switches = [fields, template] if isinstance(template, Mapping) else [fields]
    names = ("enable_thinking", "thinking", "think")
    if any(one.get(name) is False for one in switches for name in names):
        return True
    thinking, reasoning = fields.get("thinking"), fields.get("reasoning")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        return True
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    off = isinstance(reasoning, Mapping) and reasoning.get("enabled") is False
    return off or "none" in (effort, fields.get("reasoning_effort"))


def think_only_remedy(fields: Mapping[str, object], option: str = "--extra-body") -> str:
    """The remedy for answers of thinking alone, given the ``fields`` that were sent with each request."""
    if thinking_is_off(fields):
        return (
            "start the server without its reasoning parser: the request switches thinking off, and the "
            "parser takes the answer for thoughts"
        )
    off = """{"chat_template_kwargs": {"enable_thinking": false}}"""
    more = "give --max-tokens N" if option == "--extra-body" else "raise max_tokens there"
    return f"switch thinking off with {option} '{off}', or {more}"
