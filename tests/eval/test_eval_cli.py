"""The commands as a user runs them: in a process of their own, killed, interrupted and resumed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import ktbridge
from ktbridge.cli.report import command as report

SMALL = Path(__file__).with_name("small")

ROOT = Path(ktbridge.__file__).parents[1]


def command(*words):
    return [sys.executable, "-c", "from ktbridge.cli import main; main()", *map(str, words)]


def environment():
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def ktb(*words):
    return subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=120)


def start(*words):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*words), env=environment(), text=True, **pipes)


def eval_words(server, out, *more):
    arms = [word for arm in server.arms for word in ("--arm", arm)]
    return ("eval", "--bench", str(SMALL), "--out", out, *arms, *more)


def lines_in(path):
    """Answers in a file, or in all of a directory of benches."""
    files = [path] if path.suffix else list(path.glob("*/answers.jsonl"))
    return sum(one.read_bytes().count(b"\n") for one in files if one.exists())


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
    assert "From base to full: persona improved by 0." in done.stdout
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
    as_json = CliRunner().invoke(report, [str(out), "--json"])
    assert json.loads(as_json.stdout) == json.loads(results)


@pytest.mark.slow
def test_kill_9_then_resume_gives_the_same_bytes(server, tmp_path):
    """Two benches, two repeats; killed at two moments drawn anew each time, in either bench."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    bench = Path(shutil.copytree(SMALL, tmp_path / "second"))
    head = (bench / "bench.yaml").read_text("utf-8")
    (bench / "bench.yaml").write_text(head.replace("name: nekobench", "name: second"), "utf-8")
    (bench / "persona.yaml").unlink()
    more = ("--bench", bench, "--repeat", 2, "--limit", 16, "--no-judge")
    total = {"nekobench": 2 * 3 * 16, "second": 2 * 3 * 16}
    assert ktb(*eval_words(server, whole, *more)).returncode == 0
    server.requests.clear()
    server.behave = slowly
    goals = sorted(random.SystemRandom().sample(range(1, sum(total.values()) - 4), 2))
    for goal in goals:
        process = start(*eval_words(server, torn, *more, "--concurrency", 3))
        wait_for_lines(process, torn, goal)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        for path in torn.glob("*/answers.jsonl"):
            with open(path, "ab") as handle:
                handle.write(b'{"key":"torn in the mid')
    stored = {name: lines_in(torn / name / "answers.jsonl") for name in total}
    last = ktb(*eval_words(server, torn, *more))
    assert last.returncode == 0, (goals, last.stderr)
    for name, count in stored.items():
        assert f"{name}: asked {total[name] - count} questions; {count} answers" in last.stderr
    written = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    reports = [path for path in written if path.suffix in (".html", ".md")]
    reports += [path for path in written if path.name in ("results.json", "run.json")]
    assert len(reports) == 3 * 3 + 2
    for path in reports:
        assert (torn / path).read_bytes() == (whole / path).read_bytes(), (goals, path)
    # Only what was in flight at a kill is asked again.
    asked = sum(request["max_tokens"] > 32 for request in server.requests)
    assert sum(total.values()) <= asked <= sum(total.values()) + 2 * 3, goals


@pytest.mark.slow
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
    part = ktb("report", tmp_path)
    assert part.returncode == 1, "a part of a bench is no result"
    assert "planned items were not asked of every arm" in " ".join(part.stdout.split())
    assert part.stdout.index("KTB827") < part.stdout.index("base → full")
    server.behave = lambda request, nth: None
    done = ktb(*eval_words(server, tmp_path))
    assert f"asked {252 - stored} questions; {stored} answers were stored before" in done.stderr
    assert done.returncode == 0
    assert "KTB827" not in done.stdout + done.stderr


def test_a_part_of_the_bench(server, tmp_path):
    done = ktb(*eval_words(server, tmp_path, "--slices", "SAF, CTRL", "--limit", 6, "--json"))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["asked"] == 6
    assert {row["slice"] for row in results["items"]} == {"SAF", "CTRL"}
    assert results["verdict"]["persona"] is None, "no slice that is there for the persona"


@pytest.mark.slow
def test_an_arm_that_changes_nothing_fails_its_own_command_and_no_later_one(server, tmp_path):
    """A sweep asks one adapter after the other of one evaluation."""
    from evalruns import invoke, prompt_of

    from ktbridge.cli.eval import command as evaluate

    server.behave = lambda request, nth: (
        (200, {}, server.completion(server.plain("tiny:base", prompt_of(request))))
        if request["model"] == "tiny"
        else None
    )

    def ask(name, model):
        words = ("--bench", SMALL, "--out", tmp_path, "--arm", f"{name}={model}@{server.url}")
        return invoke(evaluate, *words, "--limit", 16, "--no-judge")

    assert ask("base", "tiny:base").exit_code == 0
    same = ask("r8", "tiny")
    assert same.exit_code == 1
    assert "KTB822" in same.stdout + same.stderr
    other = ask("r16", "tiny:neko")
    assert other.exit_code == 0, other.output
    assert "not of this command's arms, and no reason for its exit code: arms base and r8" in other.stderr
    assert ask("r8", "tiny").exit_code == 1
    assert invoke(report, tmp_path).exit_code == 1
