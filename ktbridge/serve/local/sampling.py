"""One answer, token by token: logits in, text and logprobs out.

Logprobs are those of the model's own distribution (temperature 1, before top_p), natural log. They cover
the tokens of the text that is sent: not the end token, and not those that begin in a stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ktbridge.serve.local.detokenize import StopScanner, TextStream, Tokens

FinishReason = Literal["stop", "length"]
GREEDY_BELOW = 1e-5  # dividing logits by less can overflow, and is greedy anyway

HEAD = 512  # top-k tokens among which a nucleus is looked for first

SEED_STEP = 0x9E3779B97F4A7C15  # odd and large: seeds of neighbouring choices don't collide


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. ``temperature`` 0 is greedy; ``top_logprobs`` None: no logprobs.

    ``top_k``: tokens that are sampled among, before ``top_p``; 0: all.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    top_k: int = 0


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its logprob (None for the first of a prompt) and the likeliest alternatives."""

    token: int
    logprob: float | None
    top: Likeliest | tuple[()] = ()


class Likeliest:
    """Pairs of token and logprob, in a sixth of the memory of tuples: a reply may have millions."""

    __slots__ = ("_ids", "_values")

    def __init__(self, ids: Sequence[int], values: Sequence[float]) -> None:
        self._ids, self._values = array("i", ids), array("d", values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._ids, self._values, strict=True)


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: text that is final, and the tokens it was made of."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: bool = False


@dataclass(frozen=True)
class Finish:
    """The end of an answer. ``completion_tokens`` counts every generated token, the end token included."""

    reason: FinishReason
    completion_tokens: int


Event = Delta | Finish


class Answer:
    """One answer being generated: ``take`` the logits after the last token; returns what is new."""

    def __init__(
        self, tokens: Tokens, stop_ids: frozenset[int], sampling: Sampling, choice: int = 0
    ) -> None:
        """``choice``: index among a request's n answers; each samples differently from the same seed."""
        self._stop_ids = stop_ids
        self._sampling = sampling
        self._sampler = Sampler(sampling, choice)
        self._stream = TextStream(tokens)
        self._scanner = StopScanner(sampling.stop)
        self._pending: list[tuple[int, TokenLogprob]] = []
        """Logprobs to send, each with the text offset of its token."""
        self._read = 0  # characters completed by the tokens so far
        self._sent = 0  # and those of them that were sent
        self.count = 0
        self.token = -1
        """The newest token, which the next forward takes."""

    def take(self, row: torch.Tensor) -> list[Event]:
        """Choose the next token by logits ``row`` [V]; after a Finish, take no more."""
        if self._sampling.max_tokens == 0:
            return [Finish("length", 0)]
        self.token = self._sampler.pick(row)
        self.count += 1
        if self.token in self._stop_ids:
            return self._finish("stop")
        if self._sampling.top_logprobs is not None:
            entry = token_logprob(row, self.token, self._sampling.top_logprobs)
            self._pending.append((self._read, entry))
        text = self._scan(self._stream.feed(self.token))
        events = self._flush(text) if text else []
        if self._scanner.stopped:
            return events + self._finish("stop")
        if self.count == self._sampling.max_tokens:
            return events + self._finish("length")
        return events

    def _finish(self, reason: FinishReason) -> list[Event]:
        text = ""
        if not self._scanner.stopped:
            text = self._scan(self._stream.flush()) + self._scanner.flush()
        if self._scanner.stopped:
            reason = "stop"
        events = self._flush(text, last=not self._scanner.stopped)
        return [*events, Finish(reason, self.count)]

    def _scan(self, text: str) -> str:
        """The part of ``text``, just completed by tokens, that may be sent."""
        self._read += len(text)
        return self._scanner.feed(text)

    def _flush(self, text: str, *, last: bool = False) -> list[Event]:
        """``text`` with the tokens that begin in it or before it, or with all of them.

        Those of a stop string stay behind, as its text does, however the answer is cut into pieces.
        """
        self._sent += len(text)
        kept = len(self._pending) if last else 0
        while kept < len(self._pending) and self._pending[kept][0] < self._sent:
            kept += 1
        entries = tuple(entry for _, entry in self._pending[:kept])
        del self._pending[:kept]
        return [Delta(text, entries)] if text or entries else []


class Sampler:
    """Samples the next token: greedy, or top-p at a temperature, reproducible by seed."""

    def __init__(self, sampling: Sampling, choice: int = 0) -> None:
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self.top_k = sampling.top_k
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            # torch takes seeds from -2**63; those from there to -1 mean the upper half of 2**64.
            self.generator.manual_seed((sampling.seed + choice * SEED_STEP) % 2**64)

    def pick(self, row: torch.Tensor) -> int:
        """``row``: logits [V] of any float dtype. Raises ArithmeticError for NaN among them.

        One uniform number per token is looked up in the cumulative probabilities. torch.multinomial draws
        one for each token of the vocabulary, which takes longer than the rest of a small model's step.
        """
        if self.temperature < GREEDY_BELOW:
            return int(row.argmax())
        # Subtracting the maximum first keeps a small temperature from making inf - inf.
        scaled = row.float()
        probabilities = ((scaled - scaled.max()) / self.temperature).softmax(-1)
        if self.top_k or self.top_p < 1:
            likeliest, ids = _head(probabilities, self.top_p, self.top_k)
            return int(ids[self._draw(likeliest)])
        return self._draw(probabilities)

    def _draw(self, weights: torch.Tensor) -> int:
        """Sample an index of ``weights`` [N] in proportion to its weight."""
        sums = weights.cumsum(-1, dtype=torch.float64)
        if not bool(sums[-1] > 0):
            raise ArithmeticError("the model's logits are not numbers")
        at = torch.rand(1, generator=self.generator, dtype=torch.float64) * sums[-1]
        # The first whose cumulative sum is greater: a token of probability 0 is never sampled.
        return min(int(torch.searchsorted(sums, at, right=True)), len(weights) - 1)


def _head(
    probabilities: torch.Tensor, top_p: float, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-p nucleus of ``probabilities`` [V], descending, and its ids: the shortest prefix with ``top_p``.

    With ``top_k`` it is the nucleus of the ``top_k`` likeliest, as if there were no others.
    """
    whole = len(probabilities)
    if 0 < top_k < whole:
        likeliest, ids = probabilities.topk(top_k)
        nucleus, places = _head(likeliest / likeliest.sum(), top_p)
        return nucleus, ids[places]
    # Sorting the whole vocabulary is the slowest part, and seldom needed.
    for size in (min(HEAD, whole), whole):
        likeliest, ids = probabilities.topk(size)
        sums = likeliest.cumsum(-1, dtype=torch.float64)
        if size == whole or bool(sums[-1] >= top_p):
            break
    kept = max(1, int((sums - likeliest < top_p).sum()))
    return likeliest[:kept], ids[:kept]


def token_logprob(row: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Logprob of ``token`` under logits ``row`` [V], with the ``top`` likeliest."""
    logprobs = row.float().log_softmax(-1)
    best: Likeliest | tuple[()] = ()
    if top:
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
        best = Likeliest(ids.tolist(), values.tolist())
    return TokenLogprob(token, float(logprobs[token]), best)


def prompt_logprobs(
    logits: torch.Tensor, prompt: Sequence[int], top: int, rows_at_once: int = 256
) -> list[TokenLogprob]:
    """Each prompt token given those before it; ``logits`` [T, V]. The first has no logprob.

    Computed in slices, so that float32 copies of a large vocabulary stay small.
    """
    entries = [TokenLogprob(prompt[0], None)]
    tops: Sequence[Likeliest | tuple[()]]
    for start in range(0, len(prompt) - 1, rows_at_once):
        targets = torch.tensor(prompt[start + 1 : start + 1 + rows_at_once])
        logprobs = logits[start : start + len(targets)].float().log_softmax(-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
        if top:
            values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
            tops = [*map(Likeliest, ids.tolist(), values.tolist())]
        else:
            tops = [()] * len(targets)
        for token, logprob, best in zip(targets.tolist(), chosen, tops, strict=True):
            entries.append(TokenLogprob(token, logprob, best))
    return entries
