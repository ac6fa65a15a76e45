"""Text leaves in whole characters, and never past a stop string."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ktbridge.serve.local.sampling import (
    BYTE_OF,
    AnswerStream,
    Finish,
    Sampling,
    StopScanner,
    TextOffsets,
    TextStream,
    Tokens,
)


@pytest.fixture(scope="module")
def tokens(base):
    from transformers import AutoTokenizer

    return Tokens(AutoTokenizer.from_pretrained(base))


def test_pieces_join_to_the_whole(tokens):
    @given(st.lists(st.integers(0, 260), max_size=24))
    def check(ids):
        stream = TextStream(tokens)
        pieces = [stream.feed(token) for token in ids]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + stream.flush() == tokens.decode(ids).rstrip("\ufffd")

    check()


def test_raw_bytes_spell_the_text(tokens):
    text = "今天很好 ok 😺"
    ids = tokens.tokenizer.encode(text)
    assert b"".join(tokens.raw(token) for token in ids) == text.encode()
    end = tokens.tokenizer.eos_token_id
    assert tokens.raw(end) == b"<|im_end|>"


def test_offsets_are_places_in_the_text(tokens):
    text = "今😺a"
    ids = [tokens.tokenizer.convert_tokens_to_ids(c) for c in byte_level(text)]
    offsets = TextOffsets(tokens, start=5)
    assert [offsets.feed(token) for token in ids] == [5, 5, 5, 6, 6, 6, 6, 7]
    # Bytes that never become a character are counted as the text counts them.
    offsets, half = TextOffsets(tokens), ids[0]
    assert [offsets.feed(half) for _ in range(100)][-1] > 0


def byte_level(text: str) -> list[str]:
    of = {byte: c for c, byte in BYTE_OF.items()}
    return [of[byte] for byte in text.encode()]


@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_scanner_equals_searching_the_whole(pieces, stops):
    scanner = StopScanner(stops)
    out = ""
    for piece in pieces:
        out += scanner.feed(piece)
        if scanner.stopped:
            break
    else:
        out += scanner.flush()
    # The earliest moment at which any stop string is complete decides.
    text = ""
    for piece in pieces:
        text += piece
        if any(stop in text for stop in stops):
            text = text[: min(text.find(stop) for stop in stops if stop in text)]
            assert scanner.stopped
            break
    assert out == text


def test_a_stop_string_takes_its_tokens_with_it(tokens):
    """Text, logprobs and the reason agree, however stop strings fall over tokens and characters."""
    vocabulary = len(tokens.tokenizer)
    of_byte = tokens.tokenizer.convert_tokens_to_ids

    @given(
        st.lists(st.text(alphabet="abé喵😺", min_size=1, max_size=3), min_size=1, max_size=8),
        st.lists(st.text(alphabet="abé喵", min_size=1, max_size=3), max_size=2),
    )
    def check(words, stops):
        ids = []
        for i, word in enumerate(words):  # words of the vocabulary, and byte by byte
            whole = tokens.tokenizer.encode(word)
            ids += [of_byte(c) for c in byte_level(word)] if i % 2 else whole
        answer = AnswerStream(
            *(tokens, frozenset()),
            Sampling(len(ids), temperature=0, stop=tuple(stops), top_logprobs=0),
        )
        text, sent, ends = "", [], []
        for token in ids:
            logits = torch.zeros(vocabulary)
            logits[token] = 9
            for event in answer.take(logits):
                if isinstance(event, Finish):
                    ends.append(event)
                    continue
                text += event.text
                sent += [entry.token for entry in event.logprobs]
            # What is sent is always the shortest run of tokens that has the text in it.
            spelled = [tokens.raw(each) for each in sent]
            assert b"".join(spelled).startswith(text.encode())
            if ends:
                break
            assert len(b"".join(spelled[:-1])) < len(text.encode()) or not sent
        whole = "".join(words)
        found = [whole.index(stop) for stop in stops if stop in whole]
        assert ends[0].reason == ("stop" if found else "length")
        assert any(text == whole[:at] for at in found) or (not found and text == whole)
        assert ends[0].completion_tokens >= len(sent)

    check()
