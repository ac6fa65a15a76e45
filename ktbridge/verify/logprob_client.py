"""Prompt logprobs of fixed tokens, over an OpenAI-compatible API or SGLang's own."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ktbridge.errors import KtbridgeError
from ktbridge.openai_client import OpenAIClient, Refused
from ktbridge.served_names import split_name
from ktbridge.verify.verdict import mean_distance

# Ordinary sentences beside random tokens: an adapter may affect one and hardly the other.
TEXTS = (
    "The old bridge was closed for repairs, so we walked along the river until it grew dark.",
    "请用一句话介绍一下你自己，然后告诉我今天适合做什么。",
    "Question: how many legs does a spider have?\nAnswer: a spider has eight legs.",
    "小明把书放进书包，锁好门，慢慢地走回了家。",
)
SEED = 20_260
_NOT_SERVED = (400, 404)  # statuses with which servers refuse a model that they don't serve


def fixed_prompts(
    tokenizer: Any, vocab_size: int, *, random_prompts: int = 4, length: int = 32
) -> list[list[int]]:
    """The token sequences that are measured: the same ones for every server of one model.

    ``random_prompts`` sequences of ``length`` ordinary token ids, and a few tokenised texts.
    """
    special = set(tokenizer.all_special_ids)
    size = min(vocab_size, len(tokenizer))
    ordinary = [token for token in range(size) if token not in special]
    draw = random.Random(SEED)
    prompts = [draw.choices(ordinary, k=length) for _ in range(random_prompts)]
    prompts += [tokenizer.encode(text, add_special_tokens=False)[: 2 * length] for text in TEXTS]
    return [prompt for prompt in prompts if len(prompt) > 1]


@dataclass(frozen=True)
class Answer:
    """Logprobs of the prompts' tokens, averaged over all requests.

    ``spread``: the largest mean |Δ| of a request to the first one; None when there was only one.
    """

    logprobs: list[float]
    spread: float | None


class LogprobClient(OpenAIClient):
    """Asks one server for the logprobs of prompts."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120) -> None:
        super().__init__(url, api_key, timeout)
        self._sglang: bool | None = None

    def ask_all(
        self,
        models: Iterable[str],
        prompts: Sequence[Sequence[int]],
        repeat: int = 1,
        needed: Collection[str | None] = (),
    ) -> dict[str, Answer]:
        """Logprobs of each of ``models``, requested ``repeat`` times in turn.

        A listed model need not be served: with a merged adapter, sglang-kt 0.7.2 lists the bare name
        and refuses it. One that is refused is left out, unless it is ``needed``: then Refused.
        """
        rounds: dict[str, list[list[float]]] = {model: [] for model in models}
        for _ in range(repeat):
            for model in list(rounds):
                try:
                    rounds[model].append(self.prompt_logprobs(model, prompts))
                except Refused as refused:
                    if model in needed or refused.status not in _NOT_SERVED:
                        raise
                    del rounds[model]
        return {model: _answer(vectors) for model, vectors in rounds.items()}

    def prompt_logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Natural logprobs of every token but the first of each prompt, in order."""
        if self._is_sglang():
            return self._native_logprobs(model, prompts)
        values: list[float] = []
        for prompt in prompts:
            request = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": 0,
                "echo": True,
                "logprobs": 0,
                "temperature": 0,
            }
            answer = self.ask("/completions", request)
            try:
                got = answer["choices"][0]["logprobs"]["token_logprobs"]
            except (KeyError, IndexError, TypeError):
                raise self._unusable("/completions", "no prompt logprobs") from None
            if not isinstance(got, list) or len(got) != len(prompt):
                raise self._unusable("/completions", f"not {len(prompt)} logprobs") from None
            if not all(isinstance(v, float | int) and math.isfinite(v) for v in got[1:]):
                raise self._unusable("/completions", "logprobs that are not numbers")
            values += [float(value) for value in got[1:]]
        return values

    def _is_sglang(self) -> bool:
        """SGLang computes no prompt logprobs over OpenAI's API, only over its own."""
        if self._sglang is None:
            try:
                self._sglang = "model_path" in self.ask("/model_info", native=True)
            except (KtbridgeError, TypeError):
                self._sglang = False
        return self._sglang

    def _native_logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[float]:
        """The same from SGLang's /generate, where an adapter goes by its bare name."""
        _, adapter = split_name(model)
        values: list[float] = []
        for prompt in prompts:
            request: dict[str, Any] = {
                "input_ids": list(prompt),
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            if adapter is not None:
                request["lora_path"] = adapter
            answer = self.ask("/generate", request, native=True)
            try:
                rows = answer["meta_info"]["input_token_logprobs"]
                got = [(float(row[0]), row[1]) for row in rows[1:]]
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._unusable("/generate", "no prompt logprobs") from None
            if [token for _, token in got] != list(prompt[1:]):
                raise self._unusable("/generate", f"not the logprobs of {len(prompt)} tokens")
            if not all(math.isfinite(value) for value, _ in got):
                raise self._unusable("/generate", "logprobs that are not numbers")
            values += [value for value, _ in got]
        return values

    def _unusable(self, path: str, what: str) -> KtbridgeError:
        return KtbridgeError(
            f"{self.url}{path} answered with {what}, so nothing can be verified.",
            "use a server whose /v1/completions supports echo with logprobs",
        )


def _answer(vectors: Sequence[Sequence[float]]) -> Answer:
    first, *others = vectors
    spread = max((mean_distance(first, other) for other in others), default=None)
    return Answer([sum(column) / len(vectors) for column in zip(*vectors, strict=True)], spread)
