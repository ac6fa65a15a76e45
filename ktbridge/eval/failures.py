"""Failed requests: the server's error message, and remedies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ktbridge.eval.text import shorten

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


def describe_reply(status: int, body: bytes) -> str:
    """ "HTTP 400: the prompt has ...": the message of an error's body, else the body's text."""
    text = body.decode("utf-8", "replace")
    message = _message(text)
    return f"HTTP {status}" + (f": {shorten(message, _SHOWN)}" if message else "")


def _message(text: str) -> str:
    """The message of a JSON error ({"error": {"message": ...}}, {"message": ...}, {"detail": ...})."""
    try:
        value: Any = json.loads(text)
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
    return " ".join(text.split())


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
