"""Logprobs of one server's models, by whichever way it has; on fixed tokens where it can, sampled ones else.

| way | asked for | tokens |
| --- | --- | --- |
| sglang | ``input_token_logprobs`` of SGLang's own /generate | fixed |
| tgi | ``prefill`` of text-generation-inference's own /generate | fixed, as the server tokenises them |
| prompt_logprobs | ``prompt_logprobs`` of /v1/completions, which vLLM has | fixed |
| echo | ``echo`` with ``logprobs`` of /v1/completions | fixed |
| sampled | ``logprobs`` of what the server generates (``ktbridge.verify.sampled``) | the server's |

Fixed tokens are given as ids and so are the same for every server and arm; TGI takes text and answers with
its ids. Sources of the shapes: vLLM's entrypoints/openai/completion, SGLang's srt/entrypoints, llama.cpp's
tools/server, llama-cpp-python's server, text-generation-inference's router and its recorded answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import OpenAIClient, Refused
from ktbridge.server_api.served_names import split_name
from ktbridge.verify.references import mean_distance

if TYPE_CHECKING:
    from ktbridge.verify.sampled import Sampler

SAMPLED = "sampled"
ENOUGH = 32  # sampled tokens, below which nothing is claimed
WORKERS = 8  # requests under way at a time, where several models are asked together
FIXED = {
    "sglang": "/generate with logprob_start_len (SGLang)",
    "tgi": "/generate with decoder_input_details (TGI)",
    "prompt_logprobs": "/v1/completions with prompt_logprobs (vLLM)",
    "echo": "/v1/completions with echo and logprobs",
}
WAYS = {**FIXED, SAMPLED: "logprobs of the tokens that the server generates itself"}
# Ways of an API of an engine's own: where that says what it is, newest path first, and by which field.
_NATIVE = {
    "sglang": (("/model_info", "/get_model_info"), "model_path"),
    "tgi": (("/info",), "model_id"),
}
_NOT_SERVED = (400, 404)  # statuses with which servers refuse a model that they don't serve
_KEY = (401, 403)


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence whose logprobs are known: ``tokens[start:]``, each after all before it."""

    tokens: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return len(self.tokens) - self.start


Asked = tuple[Span, list[float]]
Fixed = tuple[list[int], list[object]]  # tokens, and the logprobs of all but the first
Ask = Callable[
    [str, int], "Asked | None"
]  # a model and a prompt's number; None: this one can't be used


@dataclass(frozen=True)
class Answer:
    """Logprobs of the tokens of ``spans``, in order, averaged over all requests.

    ``spread``: the largest mean |Δ| of a request to the first one; None when there was only one.
    """

    spans: tuple[Span, ...]
    logprobs: list[float]
    spread: float | None


class LogprobClient(OpenAIClient):
    """Asks one server for logprobs. ``way`` is the one in use, of WAYS; "" before ``choose``."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120) -> None:
        super().__init__(url, api_key, timeout)
        self.way = ""

    def choose(
        self, model: str, prompts: Sequence[Sequence[int]], sampler: Sampler, way: str = "auto"
    ) -> None:
        """Decide how to ask, by asking ``model`` for the first prompt: ``way``, or the first that works.

        Raises KtbridgeError, with what each way gave, if none does.
        """
        self.prompts, self._sampler = prompts, sampler
        wanted = list(WAYS) if way == "auto" else [way]
        said = []
        for name in wanted:
            if name in _NATIVE and way == "auto" and not self._is(name):
                continue
            try:
                if name == SAMPLED:
                    sampler.choose(self, model)
                else:
                    self._fixed(name)(model, 0)
            except Refused as refused:
                if refused.status in _KEY:
                    raise
                said.append(f"{name}: {short(refused)}")
            except Unusable as unusable:
                said.append(f"{name}: {unusable.what}")
            else:
                self.way = name
                return
        raise KtbridgeError(
            f"{self.url} gives no logprobs of {model} that can be verified ({'; '.join(said)}).",
            "start the server with logprobs, or verify another engine: docs/verify.md has what each gives",
        )

    def ask_all(
        self, models: Iterable[str], repeat: int = 1, needed: Collection[str | None] = ()
    ) -> dict[str, Answer]:
        """Logprobs of each of ``models``, requested ``repeat`` times in turn.

        A listed model need not be served: with a merged adapter, sglang-kt 0.7.2 lists the bare name
        and refuses it. One that is refused is left out, unless it is ``needed``: then Refused.
        """
        ask = self._asking()
        rounds: dict[str, list[list[Asked | None]]] = {model: [] for model in models}
        for _ in range(repeat):
            for model in list(rounds):
                try:
                    rounds[model].append([ask(model, n) for n in range(len(self.prompts))])
                except Refused as refused:
                    if model in needed or refused.status not in _NOT_SERVED:
                        raise
                    del rounds[model]
        answers = {model: _answer(asked) for model, asked in rounds.items()}
        for model, answer in answers.items():
            if self.way == SAMPLED and len(answer.logprobs) < ENOUGH:
                raise KtbridgeError(
                    f"{len(answer.logprobs)} tokens that {model} sampled are known, of {ENOUGH} at least.",
                    "verify it without --repeat, or on an engine that gives prompt logprobs",
                )
        return answers

    def ask_together(
        self, models: Sequence[str], sampler: Sampler | None = None
    ) -> dict[str, Answer]:
        """Logprobs of each of ``models``, all requested at once, WORKERS of them under way at a time.

        ``sampler``: of tokens that it has generated, in place of the way in use.
        """
        ask = sampler or self._asking()
        prompts = sampler.prompts if sampler else self.prompts
        jobs = [(model, number) for number in range(len(prompts)) for model in models]
        pool = ThreadPoolExecutor(WORKERS)
        try:
            found = list(pool.map(lambda job: ask(*job), jobs))
        finally:
            pool.shutdown(cancel_futures=True)
        count = len(models)
        return {model: _answer([found[place::count]]) for place, model in enumerate(models)}

    def _asking(self) -> Ask:
        """The way in use."""
        return self._sampler if self.way == SAMPLED else self._fixed(self.way)

    def _fixed(self, way: str) -> Ask:
        one = {
            "sglang": self._ask_sglang,
            "tgi": self._ask_tgi,
            "prompt_logprobs": self._ask_prompt_logprobs,
            "echo": self._ask_echo,
        }[way]

        def ask(model: str, number: int) -> Asked:
            tokens, values = one(model, list(self.prompts[number]))
            return Span(tuple(tokens), 1), numbers(values)

        return ask

    def _ask_echo(self, model: str, prompt: list[int]) -> Fixed:
        """``logprobs`` is 1 because SGLang takes 0 for none; what is generated all the same comes last."""
        request: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 0}
        request |= {"echo": True, "logprobs": 1, "temperature": 0}
        answer = self.ask("/completions", request)
        got = dig(answer, "choices", 0, "logprobs", "token_logprobs")
        if not isinstance(got, list):
            raise Unusable("no prompt logprobs")
        generated = len(got) - len(prompt)
        if generated not in (0, dig(answer, "usage", "completion_tokens")) or got[0] is not None:
            raise Unusable(f"not the logprobs of {len(prompt)} tokens, the first without one")
        return prompt, got[1 : len(prompt)]

    def _ask_prompt_logprobs(self, model: str, prompt: list[int]) -> Fixed:
        """A row a token, the first null; each has the token itself by its id."""
        request: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": 1}
        request |= {"prompt_logprobs": 0, "temperature": 0}
        rows = dig(self.ask("/completions", request), "choices", 0, "prompt_logprobs")
        if not isinstance(rows, list):
            raise Unusable("no prompt logprobs")
        found = [dig(row, str(t), "logprob") for row, t in zip(rows[1:], prompt[1:], strict=False)]
        if len(rows) != len(prompt) or None in found:
            raise Unusable(f"not the logprobs of {len(prompt)} tokens")
        return prompt, found

    def _ask_sglang(self, model: str, prompt: list[int]) -> Fixed:
        """SGLang's /generate, where an adapter goes by its bare name."""
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
        rows = dig(answer, "meta_info", "input_token_logprobs")
        if not isinstance(rows, list):
            raise Unusable("no prompt logprobs")
        if [dig(row, 1) for row in rows[1:]] != prompt[1:]:
            raise Unusable(f"not the logprobs of {len(prompt)} tokens")
        return prompt, [dig(row, 0) for row in rows[1:]]

    def _ask_tgi(self, model: str, prompt: list[int]) -> Fixed:
        """TGI's /generate, which has one model and takes text; its rows have the ids that it made of it."""
        parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
        request = {"inputs": self._sampler.text(prompt), "parameters": parameters}
        rows = dig(self.ask("/generate", request, native=True), "details", "prefill")
        if not isinstance(rows, list) or len(rows) < 2:
            raise Unusable(
                "no prompt logprobs: TGI 3 has them when started with --enable-prefill-logprobs"
            )
        ids = [dig(row, "id") for row in rows]
        first, *values = [dig(row, "logprob") for row in rows]
        if first is not None or not all(
            type(n) is int and 0 <= n < self._sampler.size for n in ids
        ):
            raise Unusable("no logprobs of tokens of this vocabulary, the first without one")
        return ids, values

    def _is(self, way: str) -> bool:
        """Return whether the server is the engine that ``way`` is an API of."""
        paths, field = _NATIVE[way]
        for path in paths:
            try:
                if field in self.ask(path, native=True):
                    return True
            except (KtbridgeError, TypeError):
                continue
        return False


class Unusable(KtbridgeError):
    """The server answered, but not with logprobs that can be used. ``what``: with what instead."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the server answered with {what}, so nothing can be verified.")
        self.what = what


def short(refused: Refused) -> str:
    """A refusal in a few words: some servers answer with a page."""
    words = " ".join(refused.reason.split())
    return f"{refused.status}, {words[:120]}{'…' if len(words) > 120 else ''}"


def dig(value: Any, *path: str | int) -> Any:
    """``value[a][b]…``, None where there is no such thing."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def numbers(values: Sequence[object]) -> list[float]:
    """The values as floats. Raises Unusable for what is no finite number."""
    found = [float(v) for v in values if isinstance(v, float | int) and math.isfinite(v)]
    if len(found) != len(values):
        raise Unusable("logprobs that are not numbers")
    return found


def _answer(rounds: Sequence[Sequence[Asked | None]]) -> Answer:
    """One answer of all rounds: of each sequence as much as they have in common."""
    spans: list[Span] = []
    vectors: list[list[float]] = [[] for _ in rounds]
    for same in zip(*rounds, strict=True):
        if None in same or not (size := _common([a[0] for a in same if a])):
            continue
        first = next(a for a in same if a)[0]
        spans.append(Span(first.tokens[: first.start + size], first.start))
        for vector, asked in zip(vectors, same, strict=True):
            assert asked is not None
            vector += asked[1][:size]
    first_vector, *others = vectors
    spread = max((mean_distance(first_vector, other) for other in others), default=None)
    mean = [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    return Answer(tuple(spans), mean, spread)


def _common(spans: Sequence[Span]) -> int:
    """Return how many measured tokens the spans begin with alike; 0 if they don't follow the same ones."""
    if len({(span.start, span.tokens[: span.start]) for span in spans}) > 1:
        return 0
    columns = zip(*(span.tokens[span.start :] for span in spans), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
