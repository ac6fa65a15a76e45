"""Ask for logprobs of fixed tokens in each server's own words: requests and replies, without a network.

| name | asked for |
| --- | --- |
| sglang | ``input_token_logprobs`` of SGLang's own /generate |
| tgi | ``prefill`` of text-generation-inference's own /generate, which takes text and has ids of its own |
| prompt_logprobs | ``prompt_logprobs`` of /v1/completions, which vLLM has |
| echo | ``echo`` with ``logprobs`` of /v1/completions |

Sources of the shapes: vLLM's entrypoints/openai/completion, SGLang's srt/entrypoints, llama.cpp's
tools/server, llama-cpp-python's server, text-generation-inference's router and its recorded answers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import Refused
from ktbridge.server_api.served_names import split_name


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of one sequence whose logprobs are known: ``tokens[start:]``, each after all before it."""

    tokens: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return len(self.tokens) - self.start


SpanLogprobs = tuple[TokenSpan, list[float]]
Fixed = tuple[Sequence[int], list[object]]  # tokens, and the logprobs of all but the first


class Unusable(KtbridgeError):
    """The server answered, but not with logprobs that can be used. ``what``: with what instead."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the server answered with {what}, so nothing can be verified.")
        self.what = what


class LogprobProtocol(ABC):
    """One API: its requests, and the logprobs in its replies.

    ``text`` turns a prompt into text and ``vocabulary`` is the number of ids, for servers that take no ids.
    A server with an API of its own gives ``field`` at one of the paths ``told_at``, newest first.
    """

    words: ClassVar[str]
    path: ClassVar[str] = "/completions"
    native: ClassVar[bool] = False
    told_at: ClassVar[tuple[str, ...]] = ()
    field: ClassVar[str] = ""

    def __init__(self, text: Callable[[Sequence[int]], str], vocabulary: int) -> None:
        self._text, self._vocabulary = text, vocabulary

    @abstractmethod
    def request(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        """The body that asks ``model`` for the logprobs of ``prompt``."""

    @abstractmethod
    def read(self, answer: object, prompt: Sequence[int]) -> Fixed:
        """Tokens and logprobs in the reply. Raises Unusable for anything but those of ``prompt``."""


class SglangGenerate(LogprobProtocol):
    """SGLang's /generate, where an adapter goes by its bare name."""

    words = "/generate with logprob_start_len (SGLang)"
    path, native = "/generate", True
    told_at, field = ("/model_info", "/get_model_info"), "model_path"

    def request(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        _, adapter = split_name(model)
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        } | ({} if adapter is None else {"lora_path": adapter})

    def read(self, answer: object, prompt: Sequence[int]) -> Fixed:
        rows = _rows(dig(answer, "meta_info", "input_token_logprobs"))
        if [dig(row, 1) for row in rows[1:]] != list(prompt[1:]):
            raise Unusable(f"not the logprobs of {len(prompt)} tokens")
        return prompt, [dig(row, 0) for row in rows[1:]]


class TgiGenerate(LogprobProtocol):
    """TGI's /generate, which has one model and takes text; its rows have the ids that it made of it."""

    words = "/generate with decoder_input_details (TGI)"
    path, native = "/generate", True
    told_at, field = ("/info",), "model_id"

    def request(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
        return {"inputs": self._text(prompt), "parameters": parameters}

    def read(self, answer: object, prompt: Sequence[int]) -> Fixed:
        rows = dig(answer, "details", "prefill")
        if not isinstance(rows, list) or len(rows) < 2:
            raise Unusable("no prompt logprobs: TGI 3 has them when started with --enable-prefill-logprobs")
        ids = [dig(row, "id") for row in rows]
        first, *values = [dig(row, "logprob") for row in rows]
        if first is not None or not all(type(n) is int and 0 <= n < self._vocabulary for n in ids):
            raise Unusable("no logprobs of tokens of this vocabulary, the first without one")
        return ids, values


class PromptLogprobs(LogprobProtocol):
    """vLLM's ``prompt_logprobs``: a row a token, the first null; each has the token itself by its id."""

    words = "/v1/completions with prompt_logprobs (vLLM)"

    def request(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        asked = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        return {"model": model, "prompt": list(prompt), **asked}

    def read(self, answer: object, prompt: Sequence[int]) -> Fixed:
        rows = _rows(dig(answer, "choices", 0, "prompt_logprobs"))
        found = [dig(row, str(t), "logprob") for row, t in zip(rows[1:], prompt[1:], strict=False)]
        if len(rows) != len(prompt) or None in found:
            raise Unusable(f"not the logprobs of {len(prompt)} tokens")
        return prompt, found


class EchoedPrompt(LogprobProtocol):
    """OpenAI's ``echo``. ``logprobs`` is 1 because SGLang takes 0 for none; what is generated comes last."""

    words = "/v1/completions with echo and logprobs"

    def request(self, model: str, prompt: Sequence[int]) -> dict[str, object]:
        asked = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        return {"model": model, "prompt": list(prompt), **asked}

    def read(self, answer: object, prompt: Sequence[int]) -> Fixed:
        got = _rows(dig(answer, "choices", 0, "logprobs", "token_logprobs"))
        generated = len(got) - len(prompt)
        if generated not in (0, dig(answer, "usage", "completion_tokens")) or got[0] is not None:
            raise Unusable(f"not the logprobs of {len(prompt)} tokens, the first without one")
        return prompt, got[1 : len(prompt)]


PROTOCOLS: dict[str, type[LogprobProtocol]] = {
    "sglang": SglangGenerate,
    "tgi": TgiGenerate,
    "prompt_logprobs": PromptLogprobs,
    "echo": EchoedPrompt,
}
"""The ways of asking for fixed tokens, in the order in which they are tried."""


def _rows(value: object) -> list[object]:
    if not isinstance(value, list):
        raise Unusable("no prompt logprobs")
    return value


def dig(value: Any, *path: str | int) -> Any:
    """``value[a][b]…``, None where there is no such thing."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def finite_floats(values: Sequence[object]) -> list[float]:
    """The values as floats. Raises Unusable for what is no finite number."""
    found = [float(v) for v in values if isinstance(v, float | int) and math.isfinite(v)]
    if len(found) != len(values):
        raise Unusable("logprobs that are not numbers")
    return found


def shorten_refusal(refused: Refused) -> str:
    """A refusal in a few words: some servers answer with a page."""
    words = " ".join(refused.reason.split())
    return f"{refused.status}, {words[:120]}{'…' if len(words) > 120 else ''}"
