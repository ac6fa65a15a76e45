"""Answers as servers gave them, played back: ``recorded/*.json``, each with where it is from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mockserver import JsonServer

from ktbridge.errors import KtbridgeError
from ktbridge.verify.logprobs import LogprobClient
from ktbridge.verify.protocols import PROTOCOLS, TokenSpan
from ktbridge.verify.sampled import ContinuationSampler

RECORDED = {
    file.stem: json.loads(file.read_text("utf-8"))
    for file in sorted((Path(__file__).parent / "recorded").glob("*.json"))
}


class Played(JsonServer):
    """Gives one answer to whatever it is asked."""

    def __init__(self, answer: Any) -> None:
        super().__init__([{"id": "tiny"}])
        self.answer = answer

    def respond(self, request: dict[str, Any]) -> Any:
        return 200, {}, self.answer


class Vocabulary:
    """As much of a tokenizer as fixed tokens need: its size, and some text to send."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def asked(record: dict[str, Any], way: str) -> tuple[tuple[TokenSpan, ...], list[float]]:
    server = Played(record["answer"])
    try:
        client = LogprobClient(server.url, timeout=10)
        prompts = [record["prompt"]]
        client.choose("tiny", prompts, ContinuationSampler(Vocabulary(record["vocabulary"]), prompts), way)
        answer = client.ask_all(["tiny"])["tiny"]
    finally:
        server.close()
    return answer.spans, answer.logprobs


@pytest.mark.parametrize("name", RECORDED)
def test_what_a_server_answered_is_read(name):
    record = RECORDED[name]
    for way in (record["way"], *record["also"]):
        spans, logprobs = asked(record, way)
        assert spans == (TokenSpan(tuple(record["tokens"]), 1),)
        assert logprobs == record["logprobs"]


@pytest.mark.parametrize("name", RECORDED)
def test_and_by_no_other_way(name):
    """An answer without what a way needs is refused in words, not by an exception of Python's."""
    record = RECORDED[name]
    for way in PROTOCOLS.keys() - {record["way"], *record["also"]}:
        with pytest.raises(KtbridgeError, match=f"{way}: "):
            asked(record, way)
