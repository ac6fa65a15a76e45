"""Logprobs of one server's models, by whichever way it has; on fixed tokens where it can, sampled ones else.

The ways are those of ``ktbridge.verify.protocols``, whose tokens are the same for every server and arm, and
``sampled``: ``logprobs`` of what the server generates itself (``ktbridge.verify.sampled``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ktbridge.errors import KtbridgeError
from ktbridge.server_api.client import OpenAIClient, Refused
from ktbridge.verify.protocols import (
    PROTOCOLS,
    LogprobProtocol,
    SpanLogprobs,
    TokenSpan,
    Unusable,
    finite_floats,
    shorten_refusal,
)
from ktbridge.verify.verdict import mean_distance

if TYPE_CHECKING:
    from ktbridge.verify.sampled import ContinuationSampler

SAMPLED = "sampled"
ENOUGH = 32  # sampled tokens, below which nothing is claimed
WORKERS = 8  # requests under way at a time, where several models are asked together
WAYS = {name: protocol.words for name, protocol in PROTOCOLS.items()} | {
    SAMPLED: "logprobs of the tokens that the server generates itself"
}
_NOT_SERVED = (400, 404)  # statuses with which servers refuse a model that they don't serve
_KEY = (401, 403)
Ask = Callable[[str, int], SpanLogprobs | None]
"""Asks a model for a prompt by its number; None: this one can't be used."""


@dataclass(frozen=True)
class ServedLogprobs:
    """Logprobs of the tokens of ``spans``, in order, averaged over all requests.

    ``spread``: the largest mean |Δ| of a request to the first one; None when there was only one.
    """

    spans: tuple[TokenSpan, ...]
    logprobs: list[float]
    spread: float | None


class LogprobClient(OpenAIClient):
    """Asks one server for logprobs. ``way`` is the one in use, of WAYS; "" before ``choose``."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120) -> None:
        super().__init__(url, api_key, timeout)
        self.way = ""
        self.prompts: Sequence[Sequence[int]] = ()

    def choose(
        self, model: str, prompts: Sequence[Sequence[int]], sampler: ContinuationSampler, way: str = "auto"
    ) -> None:
        """Decide how to ask, by asking ``model`` for the first prompt: ``way``, or the first that works.

        Raises KtbridgeError, with what each way gave, if none does.
        """
        self.prompts, self._sampler = prompts, sampler
        wanted = list(WAYS) if way == "auto" else [way]
        said = []
        for name in wanted:
            if way == "auto" and name in PROTOCOLS and not self._is(PROTOCOLS[name]):
                continue
            try:
                if name == SAMPLED:
                    sampler.choose(self, model)
                else:
                    self._fixed(name)(model, 0)
            except Refused as refused:
                if refused.status in _KEY:
                    raise
                said.append(f"{name}: {shorten_refusal(refused)}")
            except Unusable as unusable:
                said.append(f"{name}: {unusable.what}")
            except KtbridgeError as error:
                if not said:
                    raise
                gone = f"{error.sentence.rstrip('.')}, after these answers: {'; '.join(said)}."
                raise KtbridgeError(gone, "see the server's log") from error
            else:
                self.way = name
                return
        raise KtbridgeError(
            f"{self.url} gives no logprobs of {model} that can be verified ({'; '.join(said)}).",
            "start the server with logprobs, or verify another engine: docs/verify.md has what each gives",
        )

    def ask_all(
        self, models: Iterable[str], repeat: int = 1, needed: Collection[str | None] = ()
    ) -> dict[str, ServedLogprobs]:
        """Logprobs of each of ``models``, requested ``repeat`` times in turn.

        A listed model need not be served: with a merged adapter, sglang-kt 0.7.2 lists the bare name
        and refuses it. One that is refused is left out, unless it is ``needed``: then Refused.
        """
        ask = self._asking()
        rounds: dict[str, list[list[SpanLogprobs | None]]] = {model: [] for model in models}
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
        self, models: Sequence[str], sampler: ContinuationSampler | None = None
    ) -> dict[str, ServedLogprobs]:
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
        protocol = PROTOCOLS[way](self._sampler.text, self._sampler.size)

        def ask(model: str, number: int) -> SpanLogprobs:
            prompt = self.prompts[number]
            body = protocol.request(model, prompt)
            answer = self.ask(protocol.path, body, native=protocol.native)
            tokens, values = protocol.read(answer, prompt)
            return TokenSpan(tuple(tokens), 1), finite_floats(values)

        return ask

    def _is(self, protocol: type[LogprobProtocol]) -> bool:
        """Return whether the server is the engine that ``protocol`` is an API of; any is of OpenAI's."""
        for path in protocol.told_at:
            try:
                if protocol.field in self.ask(path, native=True):
                    return True
            except (KtbridgeError, TypeError):
                continue
        return not protocol.told_at


def _answer(rounds: Sequence[Sequence[SpanLogprobs | None]]) -> ServedLogprobs:
    """One answer of all rounds: of each sequence as much as they have in common."""
    spans: list[TokenSpan] = []
    vectors: list[list[float]] = [[] for _ in rounds]
    for same in zip(*rounds, strict=True):
        if None in same or not (size := _common([a[0] for a in same if a])):
            continue
        first = next(a for a in same if a)[0]
        spans.append(TokenSpan(first.tokens[: first.start + size], first.start))
        for vector, asked in zip(vectors, same, strict=True):
            assert asked is not None
            vector += asked[1][:size]
    first_vector, *others = vectors
    spread = max((mean_distance(first_vector, other) for other in others), default=None)
    mean = [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    return ServedLogprobs(tuple(spans), mean, spread)


def _common(spans: Sequence[TokenSpan]) -> int:
    """Return how many measured tokens the spans begin with alike; 0 if they don't follow the same ones."""
    if len({(span.start, span.tokens[: span.start]) for span in spans}) > 1:
        return 0
    columns = zip(*(span.tokens[span.start :] for span in spans), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
