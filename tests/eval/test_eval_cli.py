"""The commands as a user runs them: in a process of their own, killed, interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ktbridge

SMALL = Path(__file__).with_name("small")

ROOT = Path(ktbridge.__file__).parents[1]


def command(*words):
    return [sys.executable, "-c", "from ktbridge.cli import main; main()", *map(str, words)]


def environment():
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def ktb(*words, **options):
    return subprocess.run(
        command(*words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def start(*words):
    return subprocess.Popen(
        command(*words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def eval_words(server, out, *more):
    arms = [word for arm in server.arms for word in ("--arm", arm)]
    return ("eval", "--bench", str(SMALL), "--out", out, *arms, *more)


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, path, count):
    deadline = time.monotonic() + 60
    while lines_in(path) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slowly(request, nth):
    time.sleep(0.01)


def test_eval_ends_with_the_report(server, tmp_path):
    out = tmp_path / "run"
    done = ktb(*eval_words(server, out))
    assert done.returncode == 0, done.stderr
    assert "From base to full: persona rose by +0." in done.stdout
    assert "252 questions" in done.stderr
    for name in ("PES", "CTRL", "overall"):
        assert name in done.stdout
    results = (out / "results.json").read_bytes()
    page = (out / "report.html").read_bytes()
    assert json.loads(results)["schema"] == "ktbridge.eval/1"
    assert len(json.loads(results)["contrasts"]) == 2 * 9 * 3

    # report asks no server and writes the same bytes; --json prints one document and no talk.
    server.close()
    again = ktb("report", out)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert ((out / "results.json").read_bytes(), (out / "report.html").read_bytes()) == (
        results,
        page,
    )
    as_json = ktb("report", out, "--json")
    assert json.loads(as_json.stdout) == json.loads(results)


def test_kill_9_then_resume_gives_the_same_bytes(server, tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert ktb(*eval_words(server, whole)).returncode == 0
    server.requests.clear()
    server.behave = slowly
    for goal in (30, 110):
        process = start(*eval_words(server, torn, "--concurrency", 3))
        wait_for_lines(process, torn / "answers.jsonl", goal)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        with open(torn / "answers.jsonl", "ab") as handle:
            handle.write(b'{"key":"torn in the mid')
    stored = lines_in(torn / "answers.jsonl")
    assert 110 <= stored < 252
    last = ktb(*eval_words(server, torn))
    assert last.returncode == 0, last.stderr
    assert f"{stored} answers were stored before" in last.stderr
    for name in ("results.json", "report.html"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes(), name
    # Only what was in flight at a kill is asked again.
    asked = sum(request["max_tokens"] > 32 for request in server.requests)
    assert 252 <= asked <= 252 + 2 * 3


def test_ctrl_c_loses_nothing(server, tmp_path):
    server.behave = slowly
    process = start(*eval_words(server, tmp_path, "--concurrency", 2))
    wait_for_lines(process, tmp_path / "answers.jsonl", 20)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == 130, talk
    assert "interrupted; every answer received is in" in talk
    assert "Traceback" not in talk
    stored = lines_in(tmp_path / "answers.jsonl")
    server.behave = lambda request, nth: None
    done = ktb(*eval_words(server, tmp_path))
    assert f"asked {252 - stored} questions; {stored} answers were stored before" in done.stderr


def test_a_part_of_the_bench(server, tmp_path):
    done = ktb(*eval_words(server, tmp_path, "--slices", "SAF, CTRL", "--limit", 6, "--json"))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["asked"] == 6
    assert {row["slice"] for row in results["items"]} == {"SAF", "CTRL"}
    assert results["verdict"]["persona"] is None, "no slice that is there for the persona"


def test_failures_are_a_sentence_and_an_exit_code(server, tmp_path):
    server.behave = lambda request, nth: (200, {}, server.completion("好。"))
    words = eval_words(server, tmp_path / "any")
    cases = [
        (words, 1, "KTB803"),
        (("report", tmp_path), 1, "no evaluation"),
        (("eval", "--bench", "nosuch", *words[3:]), 2, "there is no bench 'nosuch'"),
        (("eval", "--bench", str(SMALL), "--arm", "base", "--out", tmp_path), 2, "NAME=MODEL@URL"),
        ((*words, "--slices", "NOPE"), 2, "no slice 'NOPE'"),
    ]
    for line, code, text in cases:
        done = ktb(*line)
        assert done.returncode == code, (line, done.stderr)
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
