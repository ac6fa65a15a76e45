"""Answers and replies that attack an evaluation: scored in linear time, read in bounded memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from evalruns import SMALL, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from mockserver import JsonServer, answering, completion
from readercommands import measured

from ktbridge.errors import KtbridgeError
from ktbridge.eval import load_bench, store, write_report
from ktbridge.eval.scorers import SCORERS, ScorerError, score_task
from ktbridge.eval.scorers.registry import time_limit
from ktbridge.server_api.client import Client
from ktbridge.server_api.replies import LONGEST_ANSWER, read_completion

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
ANSWERS = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from((1, 2, 50, 3000))), max_size=6).map(
    lambda runs: "".join(piece * count for piece, count in runs)
)


def score(name: str, text: str) -> float:
    check, gold = CHECKS[name]
    return score_task(text, [{"scorer": name, **check}], gold)[0]


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(text=st.one_of(ANSWERS, st.text(max_size=200)))
def test_no_answer_fails_a_scorer(text):
    assert set(CHECKS) == set(SCORERS)
    for name in SCORERS:
        assert 0 <= score(name, text) <= 1


@pytest.mark.parametrize("piece", ["a", "万亿", "1,", "[1,", "I can", "minus "])
def test_scoring_is_linear_in_the_answer(piece):
    """The first was RecursionError in the reading of numerals, and 99 s in another scorer."""
    text = piece * (400_000 // len(piece))
    for name in SCORERS:
        start = time.monotonic()
        score(name, text)
        assert time.monotonic() - start < 8, name


def test_a_pattern_of_exponential_cost_is_one_items_outcome():
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
                text = json.dumps("[" * 150_000 + '\\"')
                self.wfile.write(b'{"choices":[{"message":{"content":%s}}]}' % text.encode())
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def bomber():
    with answering(Bomb) as url:
        yield f"{url}/v1"


def test_replies_are_read_in_bounded_memory(bomber):
    """16 at once were 0.7 to 2.0 GB, over 70 s."""

    async def ask():
        async with Client(bomber, attempts=1) as client:
            requests = [
                client.chat({"messages": [{"role": "user", "content": word}]})
                for word in ["bomb"] * 8 + ["endless"] * 8 + ["brackets"]
            ]
            answers = await asyncio.gather(*requests)
            assert answers[-1].text == "[" * 150_000 + '\\"'
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
    "half a character": lambda path: path.write_text('{"arms": "\\ud800", "benches": ["\\ud800"]}\n'),
}


@pytest.mark.parametrize("name", ["run.json", "benches.json", "answers.jsonl"])
@pytest.mark.parametrize("what", STORED)
def test_a_runs_files_are_read_if_they_are_files(tmp_path, name, what):
    """A report waited for a pipe for ever, read a device until memory was full, or ended in a traceback."""
    STORED[what](tmp_path / name)
    if name == "answers.jsonl":
        (tmp_path / "run.json").write_text('{"arms": {}, "probes": {}}')
        with pytest.raises(KtbridgeError):
            store.read_ledger(tmp_path, store.ANSWERS)
    with pytest.raises(KtbridgeError):
        write_report(tmp_path)


LOOPING = json.dumps(completion("meow " * 1_400_000)).encode()


class Looping(JsonServer):
    """A model that says the same for 7 MB, whatever is asked."""

    def respond(self, request: dict[str, Any]) -> Any:
        return 200, {"content-type": "application/json"}, LOOPING


def peak(*words: object) -> int:
    """The command's memory at most, in KB."""
    found = measured(*words, timeout=200)
    assert "Traceback" not in found.stderr
    return int(found.stderr.rpartition("PEAK")[2])


def test_huge_answers_are_cut(tmp_path):
    """16 answers of 7 MB were 0.97 GB in eval and 0.73 GB in report."""
    out = tmp_path / "out"
    with closing(Looping([{"id": "m"}])) as server:
        arm = f"base=m@{server.url}"
        options = ("--limit", "16", "--concurrency", "16", "--no-judge", "--output", out)
        assert peak("eval", "--bench", SMALL, "--arm", arm, *options) < 400_000
    assert peak("report", out) < 400_000
    results = json.loads((out / "results.json").read_text())
    answers = [row["answers"]["base"] for row in results["items"]]
    assert len(answers) == 16
    assert {(one["outcome"], len(one["text"])) for one in answers} == {("truncated", LONGEST_ANSWER)}
    assert "6,999,999 characters" in answers[0]["detail"]


def test_an_answer_within_the_bound_is_whole_whatever_was_thought():
    body = completion("x" * LONGEST_ANSWER, reasoning_content="y" * (LONGEST_ANSWER + 1))
    answer = read_completion(body)
    assert (answer.outcome, len(answer.text), len(answer.thinking)) == (
        "ok", LONGEST_ANSWER, LONGEST_ANSWER,
    )  # fmt: skip
    assert f"{LONGEST_ANSWER + 1:,}" in answer.detail


COSTLY = "(a|a)*c"
HAYSTACK = json.dumps("a" * 60)


def test_patterns_of_a_bench_end(tmp_path):
    """A persona's and a JSON Schema's would have taken centuries."""
    folder = tmp_path / "bench"
    shutil.copytree(SMALL, folder)
    persona = yaml.safe_load((folder / "persona.yaml").read_text())
    persona["breaks"] = {"en": [COSTLY]}
    (folder / "persona.yaml").write_text(yaml.safe_dump(persona))
    lines = (folder / "items.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines if json.loads(line)["slice"] == "PES"][:2]
    items[1]["checks"] = [{"scorer": "json_schema", "schema": {"type": "string", "pattern": COSTLY}}]
    (folder / "items.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    settings = yaml.safe_load((folder / "bench.yaml").read_text())
    settings["slices"] = {"PES": settings["slices"]["PES"]}
    (folder / "bench.yaml").write_text(yaml.safe_dump(settings))
    out = tmp_path / "out"
    stored(out, {"base": lambda item, nth: HAYSTACK}, load_bench(folder))
    peak("report", out)
    rows = json.loads((out / "results.json").read_text())["items"]
    told = [row["answers"]["base"] for row in rows]
    assert [one["outcome"] for one in told] == ["score-error"] * 2
    assert "persona: it took more than 2 seconds" in told[0]["detail"]
    assert "json_schema: TimeoutError" in told[1]["detail"]


def test_a_limit_of_time_leaves_nothing_behind():
    with pytest.raises(TimeoutError), time_limit(0.05):
        re.search(COSTLY, "a" * 60)
    with time_limit(0.05):
        pass
    start = time.process_time()
    while time.process_time() < start + 0.2:  # no signal comes afterwards
        pass
    inside: list[int] = []

    def elsewhere():
        with time_limit(0.01):
            inside.append(1)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert inside == [1]
