"""What to do about failed requests and answers of nothing but thinking, by `ktbridge eval`'s own options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ktbridge.eval.results.cards import Json
from ktbridge.server_api.failures import KEY, LONG_WAIT, TRANSIENT, Kind, kind_of, refused_field
from ktbridge.server_api.replies import OTHER_LIMIT, TIMED_OUT

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
            "; its answers are then sampled, and differ from run to run"
            if field == "temperature"
            else ""
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
    if "stream" in detail:
        return "have the server, or the gateway before it, answer without streaming"
    return "see the server's log: what it answers is no chat completion of OpenAI's API"


def remedies(failed: Iterable[tuple[int, str]]) -> str:
    """The remedies of several failures (status, detail), each once."""
    return "; ".join(dict.fromkeys(remedy(status, detail) for status, detail in failed))


def thinking_is_off(fields: Json) -> bool:
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


def think_only_remedy(fields: Json, option: str = "--extra-body") -> str:
    """What helps where answers are thinking alone, given the ``fields`` that were sent with each request."""
    if thinking_is_off(fields):
        return (
            "start the server without its reasoning parser: the request switches thinking off, and the "
            "parser takes the answer for thoughts"
        )
    off = """{"chat_template_kwargs": {"enable_thinking": false}}"""
    more = "give --max-tokens N" if option == "--extra-body" else "raise max_tokens there"
    return f"switch thinking off with {option} '{off}', or {more}"
