"""Answers and replies that attack an evaluation: scored in linear time, read in bounded memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mockserver import answering

from ktbridge.errors import KtbridgeError
from ktbridge.eval import store, write_report
from ktbridge.eval.client import Client
from ktbridge.eval.scorers import SCORERS, ScorerError, score_task

CHECKS: dict[str, tuple[dict[str, Any], Any]] = {
    "exact": ({}, "x"), "aliases": ({}, ["four", "四"]), "numeric": ({}, 4),
    "choice": ({"options": "ABCD"}, "B"), "regex": ({"pattern": r"\d+ %"}, None),
    "contains": ({"any": ["cat", "猫"], "none": ["dog"]}, None),
    "counts": ({"of": ["cat", "cats", "橙"], "n": 2}, None),
    "max_len": ({"unit": "words", "n": 5}, None), "min_len": ({"unit": "sentences", "n": 5}, None),
    "json": ({"equals": {"a": 1}}, None), "json_schema": ({"schema": {"type": "array"}}, None),
    "language": ({"lang": "zh"}, None), "no_loop": ({}, None), "refusal": ({"expect": True}, None),
    "no_persona": (
        {"persona": SimpleNamespace(address=re.compile("master"), tics=re.compile("nya"))}, None),
    "references": ({"metric": "rouge-l"}, ["the cat 猫"]),
}  # fmt: skip
PIECES = (
    "a", "万亿", "1", "1,", "1/", "-", "e1", "A ", "(*", " ", "\n", "[", '{"a":', "I cannot ", "sorry ", "这",
    "负", "三点", "分之", "minus ", "one and ", "hundred ", "=", "答案 ", "'", ".", "…", "\u202e", "\u0301",
    "ﷺ", "<think>", "\x00", "```", "\\", "9" * 400,
)  # fmt: skip
ANSWERS = st.lists(
    st.tuples(st.sampled_from(PIECES), st.sampled_from((1, 2, 50, 3000))), max_size=6
).map(lambda runs: "".join(piece * count for piece, count in runs))


def score(name: str, text: str) -> float:
    check, gold = CHECKS[name]
    return score_task(text, [{"scorer": name, **check}], gold)[0]


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(text=st.one_of(ANSWERS, st.text(max_size=200)))
def test_no_answer_fails_a_scorer(text: str) -> None:
    assert set(CHECKS) == set(SCORERS)
    for name in SCORERS:
        assert 0 <= score(name, text) <= 1


@pytest.mark.parametrize("piece", ["a", "万亿", "1,", "[1,", "I can", "minus "])
def test_scoring_is_linear_in_the_answer(piece: str) -> None:
    """The first was RecursionError in the reading of numerals, and 99 s in another scorer."""
    text = piece * (400_000 // len(piece))
    for name in SCORERS:
        start = time.monotonic()
        score(name, text)
        assert time.monotonic() - start < 8, name


def test_a_pattern_of_exponential_cost_is_one_items_outcome() -> None:
    start = time.monotonic()
    with pytest.raises(ScorerError, match="regex: TimeoutError"):
        score_task("a" * 60 + "b", [{"scorer": "regex", "pattern": r"^(a|a)*$"}], None)
    assert time.monotonic() - start < 30


class Bomb(BaseHTTPRequestHandler):
    """Lists by the million, a body without an end, an answer that is all brackets."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        try:
            if b"endless" in asked:
                while True:
                    self.wfile.write(b" " * 65536)
            if b"bomb" in asked:
                self.wfile.write(b'{"choices":[' + b"[]," * 2_600_000 + b"0]}")
            else:
                text = json.dumps("[" * 500_000 + '\\"')
                self.wfile.write(b'{"choices":[{"message":{"content":%s}}]}' % text.encode())
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def bomber() -> Iterator[str]:
    with answering(Bomb) as url:
        yield f"{url}/v1"


def test_replies_are_read_in_bounded_memory(bomber: str) -> None:
    """16 at once were 0.7 to 2.0 GB, over 70 s."""

    async def ask() -> list[str]:
        async with Client(bomber, attempts=1) as client:
            requests = [
                client.chat({"messages": [{"role": "user", "content": word}]})
                for word in ["bomb"] * 8 + ["endless"] * 8 + ["brackets"]
            ]
            answers = await asyncio.gather(*requests)
            assert answers[-1].text == "[" * 500_000 + '\\"'
            return [answer.detail for answer in answers[:-1]]

    tracemalloc.start()
    start = time.monotonic()
    told = asyncio.run(ask())
    assert tracemalloc.get_traced_memory()[1] < 400e6
    tracemalloc.stop()
    assert time.monotonic() - start < 40
    assert {"parts" in one for one in told[:8]} == {True}
    assert {"longer than" in one for one in told[8:]} == {True}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


STORED: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a sparse giant": giant,
    "a directory": lambda path: path.mkdir(),
    "deep JSON": lambda path: path.write_text("[" * 100_000 + "\n"),
    "half a character": lambda path: path.write_text(
        '{"arms": "\\ud800", "benches": ["\\ud800"]}\n'
    ),
}


@pytest.mark.parametrize("name", ["run.json", "benches.json", "answers.jsonl", "imported.json"])
@pytest.mark.parametrize("what", STORED)
def test_a_runs_files_are_read_if_they_are_files(tmp_path: Path, name: str, what: str) -> None:
    """A report waited for a pipe for ever, read a device until memory was full, or ended in a traceback."""
    STORED[what](tmp_path / name)
    if name == "answers.jsonl":
        (tmp_path / "run.json").write_text('{"arms": {}, "probes": {}}')
        with pytest.raises(KtbridgeError):
            store.read_ledger(tmp_path, store.ANSWERS)
    with pytest.raises(KtbridgeError):
        write_report(tmp_path)
