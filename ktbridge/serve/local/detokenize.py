"""Incremental detokenisation: whole characters only, and nothing past a stop string."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    """Incremental detokenisation: ``feed`` tokens, receive the text that they completed.

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
    """Where each token begins: the length of the text that the tokens before it completed.

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
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """The held text, once it is clear that no stop string will complete it."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))
