"""One chat completion as an answer: what a user would see, what was thinking, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ktbridge.server_api.replies import (
    BadReplyError,
    read_content,
    read_thinking,
    refuse_surrogates,
)

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
    cut = [
        f"{len(one):,} characters of it" for one in (text, thinking) if len(one) > LONGEST_ANSWER
    ]
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
