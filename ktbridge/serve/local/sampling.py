"""One answer, token by token: logits in, text and logprobs out; whole characters, nothing past a stop string.

Logprobs are those of the model's own distribution (temperature 1, before top_p), natural log. They cover
the tokens of the text that is sent: not the end token, and not those that begin in a stop string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

FinishReason = Literal["stop", "length"]
Likeliest = tuple[tuple[int, float], ...]
"""Tokens and their logprobs, the likeliest first."""
GREEDY_BELOW = 1e-5  # dividing logits by less can overflow, and is greedy anyway

HEAD = 512  # top-k tokens among which a nucleus is looked for first

SEED_STEP = 0x9E3779B97F4A7C15  # odd and large: seeds of neighboring choices don't collide


@dataclass(frozen=True)
class Sampling:
    """Settings of an answer. ``temperature`` 0 is greedy; ``top_logprobs`` None: no logprobs.

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
    top: Likeliest = ()


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer: text that is final, and the tokens it was made of."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finish:
    """The end of an answer. ``completion_tokens`` counts every generated token, the end token included."""

    reason: FinishReason
    completion_tokens: int


Event = TextDelta | Finish


class AnswerStream:
    """One answer being generated: ``take`` the logits after the last token; returns what is new."""

    def __init__(self, tokens: Tokens, stop_ids: frozenset[int], sampling: Sampling, choice: int = 0) -> None:
        """``choice``: index among a request's n answers; each samples differently from the same seed."""
        self._stop_ids = stop_ids
        self._sampling = sampling
        self._sampler = TokenSampler(sampling, choice)
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
        return [TextDelta(text, entries)] if text or entries else []


class TokenSampler:
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


def _head(probabilities: torch.Tensor, top_p: float, top_k: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
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
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), best)


def prompt_logprobs(
    logits: torch.Tensor, prompt: Sequence[int], top: int, rows_at_once: int = 256
) -> list[TokenLogprob]:
    """Each prompt token given those before it; ``logits`` [T, V]. The first has no logprob.

    Computed in slices, so that float32 copies of a large vocabulary stay small.
    """
    entries = [TokenLogprob(prompt[0], None)]
    for start in range(0, len(prompt) - 1, rows_at_once):
        targets = torch.tensor(prompt[start + 1 : start + 1 + rows_at_once])
        logprobs = logits[start : start + len(targets)].float().log_softmax(-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0].tolist()
        values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
        best = map(zip, ids.tolist(), values.tolist())
        entries += map(TokenLogprob, targets.tolist(), chosen, map(tuple, best))
    return entries


# --- from tokens to text ---------------------------------------------------------------------------

UNFINISHED = "\ufffd"
MOST_WAITING = 32  # tokens in a row without text: no character is that long
BYTE_OF: dict[str, int] = {stand_in: byte for byte, stand_in in bytes_to_unicode().items()}
"""Byte-level BPE vocabularies spell each byte as a printable character (GPT-2's table)."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokens:
    """A tokenizer seen token by token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._byte_of = BYTE_OF if _is_byte_level(tokenizer) else None
        self._special = frozenset(tokenizer.all_special_ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``; special tokens are left out unless ``special``."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def raw(self, token: int) -> bytes:
        """The bytes one token stands for, half characters included."""
        if token not in self._special:
            piece = self.tokenizer.convert_ids_to_tokens(token)
            piece = piece if isinstance(piece, str) else ""
            if self._byte_of is not None and all(c in self._byte_of for c in piece):
                return bytes(self._byte_of[c] for c in piece)
            if match := BYTE_TOKEN.fullmatch(piece):
                return bytes.fromhex(match[1])
        return self.decode([token], special=True).encode()

    def longest(self) -> int:
        """Bytes of the longest token: no text of more bytes than that times n has n tokens."""
        known = self._byte_of or {}
        return max(
            len(piece) if all(letter in known for letter in piece) else len(piece.encode())
            for piece in self.tokenizer.get_vocab()
        )


class TextStream:
    """Incremental detokenization: ``feed`` tokens, receive the text that they completed.

    The joined pieces equal the text decoded at once: each new token is decoded together with those
    since the last emitted piece, because a token's text may depend on the one before it.
    """

    def __init__(self, tokens: Tokens, *, special: bool = False) -> None:
        self._tokens = tokens
        self._special = special
        self._ids: list[int] = []
        self._emitted = 0  # ids already sent, kept as context for the next

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._advance()
        return text

    def give_up(self) -> str:
        """Return what is left, half characters as replacement characters; later tokens follow it."""
        text = self._new_text()
        self._advance()
        return text

    def flush(self) -> str:
        """Return what is left at the end, without the half character that never got its other half."""
        return self._new_text().rstrip(UNFINISHED)

    def _advance(self) -> None:
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)

    def _new_text(self) -> str:
        before = self._tokens.decode(self._ids[: self._emitted], special=self._special)
        return self._tokens.decode(self._ids, special=self._special)[len(before) :]


class TextOffsets:
    """Offsets at which tokens begin: the length of the text that the tokens before it completed.

    Tokens that share a character therefore share its offset.
    """

    def __init__(self, tokens: Tokens, *, special: bool = False, start: int = 0) -> None:
        self._stream = TextStream(tokens, special=special)
        self._length = start
        self._waiting = 0

    def feed(self, token: int) -> int:
        offset = self._length
        text = self._stream.feed(token)
        self._waiting = 0 if text else self._waiting + 1
        if self._waiting > MOST_WAITING:
            text, self._waiting = self._stream.give_up(), 0
        self._length += len(text)
        return offset


class StopScanner:
    """Passes text on until a stop string appears; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        if not self._stops or not text:
            return text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        cut = len(self._held) - max(_overlap(self._held, stop) for stop in self._stops)
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """The held text, once it is clear that no stop string will complete it."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))
