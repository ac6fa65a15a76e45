"""The token loop: prompt in, text and logprobs out, one request at a time.

Logprobs are those of the model's own distribution (temperature 1, before top_p), natural log.
The loop runs in the worker's thread; it asks ``cancelled`` before every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ktbridge.serve.local.arms import Arm
from ktbridge.serve.local.text import StopScanner, TextStream, Tokens

FinishReason = Literal["stop", "length"]
GREEDY_BELOW = 1e-5  # dividing logits by less than this can overflow, and is greedy anyway


class Model(Protocol):
    """What the loop needs of an engine."""

    tokens: Tokens
    stop_ids: frozenset[int]

    def select(self, arm: Arm) -> None: ...

    def forward(
        self, ids: Sequence[int], cache: object | None, all_logits: bool
    ) -> tuple[torch.Tensor, object]: ...


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. ``temperature`` 0 is greedy; ``top_logprobs`` None wants none."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its logprob (None for the first of a prompt) and the likeliest alternatives."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: text that is final, and the tokens it was made of."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: bool = False


@dataclass(frozen=True)
class Finish:
    """The end. ``completion_tokens`` counts every generated token, the end token included."""

    reason: FinishReason
    completion_tokens: int


Event = Delta | Finish


class Cancelled(Exception):
    """Nobody waits for this answer any more."""


def generate(
    model: Model,
    arm: Arm,
    prompt: Sequence[int],
    sampling: Sampling,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Continue ``prompt`` (token ids, at least one) and yield Deltas, then one Finish."""
    if cancelled():
        raise Cancelled
    model.select(arm)
    logits, cache = model.forward(prompt, None, sampling.prompt_logprobs)
    if sampling.prompt_logprobs:
        entries = prompt_logprobs(logits, prompt, sampling.top_logprobs or 0)
        yield Delta("", tuple(entries), prompt=True)
    row = logits[-1]
    del logits
    if sampling.max_tokens == 0:
        yield Finish("length", 0)
        return

    picker = Picker(sampling)
    stream = TextStream(model.tokens)
    scanner = StopScanner(sampling.stop)
    pending: list[TokenLogprob] = []
    reason: FinishReason = "length"
    count = 0
    while True:
        token = picker.pick(row)
        count += 1
        if token in model.stop_ids:
            reason = "stop"
            break
        if sampling.top_logprobs is not None:
            pending.append(token_logprob(row, token, sampling.top_logprobs))
        text = scanner.feed(stream.feed(token))
        if text:
            yield Delta(text, tuple(pending))
            pending.clear()
        if scanner.stopped:
            reason = "stop"
            break
        if count == sampling.max_tokens:
            break
        if cancelled():
            raise Cancelled
        logits, cache = model.forward((token,), cache, False)
        row = logits[-1]
    text = "" if scanner.stopped else scanner.feed(stream.flush()) + scanner.flush()
    if scanner.stopped:
        reason = "stop"
    if text or pending:
        yield Delta(text, tuple(pending))
    yield Finish(reason, count)


class Picker:
    """Chooses the next token: greedy, or from the nucleus at a temperature, repeatable by seed."""

    def __init__(self, sampling: Sampling) -> None:
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def pick(self, row: torch.Tensor) -> int:
        """``row``: logits [V] of any float dtype."""
        if self.temperature < GREEDY_BELOW:
            return int(row.argmax())
        # Subtracting the maximum first keeps a small temperature from making inf - inf.
        scaled = row.float()
        probabilities = ((scaled - scaled.max()) / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True, stable=True)
            # The nucleus is the shortest head that reaches top_p; it always holds one token.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            outside[0] = False
            drawn = torch.multinomial(ordered.masked_fill(outside, 0), 1, generator=self.generator)
            return int(ids[drawn])
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def token_logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Logprob of ``token`` under logits ``row`` [V], with the ``top`` likeliest."""
    logprobs = row.float().log_softmax(-1)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), best)


def prompt_logprobs(
    logits: torch.Tensor, prompt: Sequence[int], top: int, rows_at_once: int = 256
) -> list[TokenLogprob]:
    """Each prompt token given those before it; ``logits`` [T, V]. The first has no logprob.

    Worked off in slices, so that float32 copies of a large vocabulary stay small.
    """
    entries = [TokenLogprob(prompt[0], None)]
    for start in range(0, len(prompt) - 1, rows_at_once):
        targets = torch.tensor(prompt[start + 1 : start + 1 + rows_at_once])
        logprobs = logits[start : start + len(targets)].float().log_softmax(-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
        if top:
            values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
            tops = [
                tuple(zip(i, v, strict=True))
                for i, v in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        else:
            tops = [()] * len(targets)
        for token, logprob, best in zip(targets.tolist(), chosen, tops, strict=True):
            entries.append(TokenLogprob(token, logprob, best))
    return entries
