"""One verification from end to end: arms to query, their logprobs, references, verdict, explanation.

Prompt logprobs of fixed tokens come over an OpenAI-compatible API or SGLang's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.adapter import Adapter, read_adapter
from ktbridge.errors import KtbridgeError
from ktbridge.model import read_model_config, resolve_model
from ktbridge.openai_client import OpenAIClient, Refused
from ktbridge.served_names import base_name, listed_as, split_name
from ktbridge.verify.hypotheses import Facts, explain
from ktbridge.verify.verdict import Verification, judge, mean_distance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Ordinary sentences beside random tokens: an adapter may affect one and hardly the other.
TEXTS = (
    "The old bridge was closed for repairs, so we walked along the river until it grew dark.",
    "请用一句话介绍一下你自己，然后告诉我今天适合做什么。",
    "Question: how many legs does a spider have?\nAnswer: a spider has eight legs.",
    "小明把书放进书包，锁好门，慢慢地走回了家。",
)
SEED = 20_260
_NOT_SERVED = (400, 404)  # statuses with which servers refuse a model that they don't serve


def arms_to_ask(
    model: str, listed: Sequence[str], expert_model: str | None = None
) -> dict[str, str]:
    """Served names to measure -> expected reference: base, expert or full.

    ``model`` is measured as full. For ``S:NAME`` its neighbours ``S:base`` and ``S`` are measured where
    the server lists them. A name that isn't listed is refused: some engines answer it with the base.
    """
    served, adapter = split_name(model)
    known = set(listed)
    if listed_as(model, known) is None:
        raise _not_listed(model, known, "--model")
    if expert_model is not None and expert_model not in known:
        raise _not_listed(expert_model, known, "--expert-model")
    arms = {}
    if adapter is not None:
        if base_name(served) in known:
            arms[base_name(served)] = "base"
        if served in known and expert_model is None:
            arms[served] = "expert"
    if expert_model is not None:
        arms[expert_model] = "expert"
    arms[model] = "full"
    return arms


def _not_listed(model: str, known: set[str], option: str) -> KtbridgeError:
    return KtbridgeError(
        f"the server does not list {model!r}; it lists {', '.join(sorted(known)) or 'nothing'}.",
        f"choose {option} from these" if known else "check --server and the server's log",
    )


def verify(
    base_url: str,
    model: str,
    adapter_dir: str,
    base_model: str,
    *,
    expert_model: str | None = None,
    api_key: str | None = None,
    repeat: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Verification:
    """Measure the server at ``base_url`` (http://HOST:PORT) against references computed here.

    ``model`` is the served name to judge, ``expert_model`` one that should have the expert LoRA alone;
    ``adapter_dir`` is what training wrote, ``base_model`` a checkpoint's directory. ``repeat`` asks the
    server several times; differences between identical requests count as noise.
    ``on_progress(done, total)`` counts decoder layers of a stage that ``on_stage`` names.

    Raises KtbridgeError when the server cannot be measured or the references not be computed;
    a Verification is only ever made of numbers from both.
    """
    base = Path(resolve_model(base_model))
    adapter = read_adapter(adapter_dir)
    halves = (bool(adapter.expert_layers()), bool(adapter.nonexpert_keys()))
    if not any(halves):
        raise KtbridgeError(
            f"the adapter in {adapter_dir} has no LoRA tensor.", "check it with `ktbridge validate`"
        )
    server = LogprobClient(base_url, api_key)
    arms = arms_to_ask(model, server.models(), expert_model)

    from ktbridge.experts.loading import load_tokenizer
    from ktbridge.verify.reference_model import ReferenceModel, compute_references

    vocab_size = read_model_config(base).text["vocab_size"]
    prompts = fixed_prompts(load_tokenizer(base), vocab_size)
    asked = server.ask_all(arms, prompts, repeat, needed=(model, expert_model))
    reference_model = ReferenceModel(base, adapter, prompts)
    on_stage("computing references")
    references = compute_references(reference_model, halves, on_progress)
    # An adapter with one half has fewer arms than the names suggest.
    means = {
        "base": "base",
        "expert": "expert" if halves[0] else "base",
        "full": "full" if all(halves) else "expert" if halves[0] else "nonexpert",
    }
    served = {name: (means[arms[name]], answer.logprobs) for name, answer in asked.items()}
    spread = {name: a.spread for name, a in asked.items() if a.spread is not None}
    result = judge(model, served, references, spread)
    if not result.in_doubt:
        return result
    on_stage("trying explanations")
    return explain(
        result,
        asked[model].logprobs,
        references,
        facts_of(adapter),
        lambda variants: reference_model.logprobs(variants, on_progress=on_progress),
    )


def facts_of(adapter: Adapter) -> Facts:
    """Ranks and layers of the halves of ``adapter``."""
    layers = {
        "expert": adapter.expert_layers(),
        "nonexpert": tuple(sorted({part.key.layer for part in adapter.nonexpert.values()})),
    }
    ranks = {"expert": adapter.rank, "nonexpert": adapter.nonexpert_rank}
    return Facts(
        {half: rank for half, rank in ranks.items() if layers[half]},
        {half: found for half, found in layers.items() if found},
    )


def fixed_prompts(
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    *,
    random_prompts: int = 4,
    length: int = 32,
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
        ask = self._ask_sglang if self._is_sglang() else self._ask_openai
        return [value for prompt in prompts for value in ask(model, list(prompt))]

    def _ask_openai(self, model: str, prompt: list[int]) -> list[float]:
        request: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 0}
        request |= {"echo": True, "logprobs": 0, "temperature": 0}
        answer = self.ask("/completions", request)
        try:
            got = answer["choices"][0]["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise self._unusable("/completions", "no prompt logprobs") from None
        if not isinstance(got, list) or len(got) != len(prompt):
            raise self._unusable("/completions", f"not {len(prompt)} logprobs")
        return self._numbers("/completions", got[1:])

    def _is_sglang(self) -> bool:
        """SGLang computes no prompt logprobs over OpenAI's API, only over its own."""
        if self._sglang is None:
            try:
                self._sglang = "model_path" in self.ask("/model_info", native=True)
            except (KtbridgeError, TypeError):
                self._sglang = False
        return self._sglang

    def _ask_sglang(self, model: str, prompt: list[int]) -> list[float]:
        """The same from SGLang's /generate, where an adapter goes by its bare name."""
        request: dict[str, object] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        _, adapter = split_name(model)
        if adapter is not None:
            request["lora_path"] = adapter
        answer = self.ask("/generate", request, native=True)
        try:
            rows = answer["meta_info"]["input_token_logprobs"][1:]
            values, tokens = [row[0] for row in rows], [row[1] for row in rows]
        except (KeyError, IndexError, TypeError):
            raise self._unusable("/generate", "no prompt logprobs") from None
        if tokens != prompt[1:]:
            raise self._unusable("/generate", f"not the logprobs of {len(prompt)} tokens")
        return self._numbers("/generate", values)

    def _numbers(self, path: str, values: list[object]) -> list[float]:
        numbers = [float(v) for v in values if isinstance(v, float | int) and math.isfinite(v)]
        if len(numbers) != len(values):
            raise self._unusable(path, "logprobs that are not numbers")
        return numbers

    def _unusable(self, path: str, what: str) -> KtbridgeError:
        return KtbridgeError(
            f"{self.url}{path} answered with {what}, so nothing can be verified.",
            "use a server whose /v1/completions supports echo with logprobs",
        )


def _answer(vectors: Sequence[Sequence[float]]) -> Answer:
    first, *others = vectors
    spread = max((mean_distance(first, other) for other in others), default=None)
    return Answer([sum(column) / len(vectors) for column in zip(*vectors, strict=True)], spread)
