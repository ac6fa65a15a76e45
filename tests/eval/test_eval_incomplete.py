"""What was planned and not had: named before any figure, and never an exit code of 0."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from itertools import groupby

import pytest
from evalruns import BENCH, SMALL, arm_words, invoke, is_item, knows, run, stored

from ktbridge.cli.eval import command as eval_command
from ktbridge.cli.report import command as report_command
from ktbridge.eval import failures, score_run, write_report
from ktbridge.eval.bench import with_max_tokens
from ktbridge.eval.store import ANSWERS, read_ledger, read_run
from ktbridge.server_api.failures import FEWER_TOKENS

from .test_eval_cli import command as words_of
from .test_eval_cli import environment


def evaluate(server, out, *more):
    return invoke(eval_command, "--bench", SMALL, "--output", out, *arm_words(server), *more)


def errors_of(results):
    return {one["code"] for one in results["warnings"] if one["severity"] == "error"}


def drop_answers(out, keep):
    """Leave the first ``keep`` answers, as an interrupted run does."""
    path = out / "answers.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


@pytest.mark.parametrize("repeat", [1, 5])
def test_slices_and_repeats_without_answers_are_no_silence(tmp_path, repeat):
    """Empty answers to two slices; or, of five answers to each item, four that were cut."""

    def answer(item, nth):
        return "" if item.slice in ("KRI-K", "KRI-R") and repeat == 1 else "plain " + knows(item)

    answers = {"base": lambda item, nth: "the plain " + knows(item), "full": answer}
    stored(tmp_path, answers, repeat=repeat)
    if repeat > 1:
        path = tmp_path / ANSWERS.name
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for number, line in enumerate(lines):
            if line["arm"] == "full" and number % repeat:
                line["outcome"] = "truncated"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    results = write_report(tmp_path)
    told = [one for one in results["warnings"] if one["severity"] == "error"]
    assert invoke(report_command, tmp_path).exit_code == 1
    if repeat > 1:
        assert [(one["code"], one["found"]) for one in told] == [
            ("KTB820", "336 of 420 answers cannot be scored: 336 truncated")
        ]
        return
    assert [one["code"] for one in told] == ["KTB821"]
    stored(tmp_path, {"base": answer, "full": answers["base"]})  # what the base can't answer is no loss
    assert not [one for one in write_report(tmp_path)["warnings"] if one["severity"] == "error"]
    assert all(name in told[0]["found"] for name in ("KRI-K", "KRI-R"))
    empty = next(one["found"] for one in results["warnings"] if one["code"] == "KTB820")
    assert "20 of 84 answers cannot be scored: 20 empty; of KRI-K" in empty


# --- the plan


@pytest.mark.slow
def test_what_was_not_asked_comes_before_any_figure(server, tmp_path):
    run(server, tmp_path, concurrency=1, limit=24)
    whole = write_report(tmp_path)
    assert failures(whole) == []
    assert (whole["plan"]["items"], whole["plan"]["answers"]) == (24, 72)
    drop_answers(tmp_path, 30)
    done = invoke(report_command, tmp_path)
    assert done.exit_code == 1
    told = done.stdout.index("KTB827")
    assert "14 of 24 planned items were not asked of every arm" in " ".join(done.stdout.split())
    assert told < done.stdout.index("base → full over 10 of 24 items")
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text("utf-8")
        assert text.index("KTB827") < text.index("base → full over 10 of 24 items")
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert results["warnings"][0]["code"] == "KTB827"
    assert results["plan"]["missing_answers"] == 42
    # Every slice lacks something, and of every slice something was asked.
    slices = results["plan"]["slices"].values()
    assert all(0 < one["missing"] < one["items"] for one in slices)
    assert evaluate(server, tmp_path, "--limit", 24).exit_code == 0
    assert write_report(tmp_path) == whole


def test_slices_are_asked_in_turn(server, tmp_path):
    run(server, tmp_path, concurrency=1, arms=server.arms[:1], limit=None)
    slices = {item.messages[-1]["content"]: item.slice for item in BENCH.items}
    asked = [slices[one["messages"][-1]["content"]] for one in server.requests if is_item(one)]
    first, rest = asked[0], asked[1:]  # the largest request comes first of all
    rounds = [len(set(rest[i : i + 8])) for i in range(0, 40, 8)]
    assert min(rounds) >= 7, (first, rest)
    assert max(len(list(same)) for _, same in groupby(rest[:56])) == 1


def test_plans_of_several_commands_add_up(server, tmp_path):
    run(server, tmp_path, arms=server.arms[:1], slices=("PES",), limit=None, repeat=2)
    run(server, tmp_path, arms=server.arms[:1], slices=("SAF",), limit=None)
    plan = read_run(tmp_path)["plan"]
    assert plan == {"base": {"PES": {"items": 14, "repeat": 2}, "SAF": {"items": 8, "repeat": 1}}}
    # A smaller limit takes the place of a larger one; another arm has a plan of its own.
    run(server, tmp_path, arms=server.arms[2:], limit=8)
    run(server, tmp_path, arms=server.arms[:1], limit=8)
    plan = read_run(tmp_path)["plan"]
    assert plan["base"] == plan["full"]
    assert {one["items"] for one in plan["full"].values()} == {1}
    assert score_run(tmp_path)["plan"]["missing_answers"] == 0
    drop_answers(tmp_path, 0)
    run(server, tmp_path, arms=server.arms[:1], limit=8)
    assert score_run(tmp_path)["left_out"] == ["full"]
    assert errors_of(write_report(tmp_path)) == {"KTB823"}


def test_missing_repeats_are_missing(server, tmp_path):
    run(server, tmp_path, repeat=2, concurrency=1, limit=8)
    drop_answers(tmp_path, 8 * 3 + 5)
    results = write_report(tmp_path)
    assert (results["plan"]["missing_items"], results["plan"]["missing_answers"]) == (0, 19)
    assert "19 of 48 planned answers (repeats)" in failures(results)[0]


def test_a_run_of_before_has_no_plan_and_is_read(server, tmp_path):
    run(server, tmp_path)
    document = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert document["date"] == "2026-01-02"
    for key in ("plan", "date"):
        del document[key]
    (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
    done = invoke(report_command, tmp_path, "--json")
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert (results["plan"], results["date"], results["valid"]) == (None, None, 16)
    run(server, tmp_path)
    assert score_run(tmp_path)["plan"]["missing_answers"] == 0
    document["plan"] = {"base": {"PES": {"items": 0, "repeat": 1}}}
    (tmp_path / "run.json").write_text(json.dumps(document), "utf-8")
    done = invoke(report_command, tmp_path)
    assert done.exit_code == 1
    assert "is damaged" in done.stderr


def test_a_bench_that_was_not_reached_is_an_error(server, tmp_path):
    arms = arm_words(server)
    words = ["--bench", SMALL, "--bench", "generic", "--limit", 4, "--output", tmp_path]
    assert invoke(eval_command, *words, *arms).exit_code == 0
    shutil.rmtree(tmp_path / "generic")
    done = invoke(report_command, tmp_path)
    assert done.exit_code == 1
    assert "nothing of it was asked" in done.stdout
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text("utf-8")
        assert text.index("nothing of it was asked") < text.index("base → full")


# --- requests that fail


LIMITED = "This model's maximum context length is 100 tokens. However, you requested {} tokens."


def limited(most):
    """A server that refuses requests for more than ``most`` answer tokens."""

    def behave(request, nth):
        if request["max_tokens"] <= most:
            return None
        return 400, {}, {"error": {"message": LIMITED.format(request["max_tokens"] + 12)}}

    return behave


def test_a_limit_of_tokens_is_found_before_the_questions(server, tmp_path):
    server.behave = limited(100)
    done = evaluate(server, tmp_path, "--limit", 24)
    assert done.exit_code == 1
    assert done.stderr.count("error KTB805") == 3
    assert done.stderr.count(FEWER_TOKENS) == 3
    assert "However, you requested 268 tokens." in done.stderr
    assert sum(map(is_item, server.requests)) <= 2 * 3
    # The directory says the same afterwards.
    report = invoke(report_command, tmp_path)
    assert report.exit_code == 1
    assert {"KTB827", "KTB820"} <= errors_of(json.loads((tmp_path / "results.json").read_text()))
    assert "--max-tokens" in report.stderr
    assert "run the same command again" not in report.stderr.partition("KTB820")[2]
    done = evaluate(server, tmp_path, "--limit", 24, "--max-tokens", 64)
    assert done.exit_code == 0, done.output
    asked = [one for one in server.requests if one["max_tokens"] == 64]
    assert len(asked) == 24 * 3
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert results["bench"]["max_tokens"] == 64
    assert results["valid"] == 24
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["max_tokens"] == 64
    assert "64 tokens" in (tmp_path / "report.html").read_text("utf-8")
    # Other limits are other answers.
    assert run(server, tmp_path, bench=with_max_tokens(BENCH, 63), limit=2).stored == 0


def test_where_some_requests_are_too_large_the_others_are_asked(server, tmp_path):
    texts = [item.messages[-1]["content"] for item in BENCH.select(limit=16)]
    largest = max(texts, key=lambda text: len(text.encode()))

    def behave(request, nth):
        return limited(32)(request, nth) if request["messages"][-1]["content"] == largest else None

    server.behave = behave
    told = []
    done = run(server, tmp_path, on_preflight=lambda found: told.extend(found.problems))
    assert {(one.code, one.severity) for one in told} == {("KTB805", "warning")}
    assert done.outcomes == {"ok": 45, "http-error": 3}
    assert sum(map(is_item, server.requests)) == 48, "none is asked twice"
    assert "KTB820" in errors_of(write_report(tmp_path))


@pytest.mark.quick("^6-1$")
@pytest.mark.parametrize(("failed", "code"), [(1, 0), (6, 1), (24, 1)])
def test_answers_that_failed_fail_the_command(server, tmp_path, failed, code):
    """Of 24 answers of an arm: one is a warning, more than a twentieth an error."""
    refused = [item.messages[-1]["content"] for item in BENCH.select(limit=24)]
    refused = sorted(refused, key=len)[1:-1][:failed] if failed < 24 else refused

    def behave(request, nth):
        mine = request["model"] == "tiny:neko" and is_item(request)
        if mine and request["messages"][-1]["content"] in refused:
            return 200, {}, server.completion("好", "abort")
        return None

    server.behave = behave
    run(server, tmp_path, limit=24)
    results = write_report(tmp_path)
    (found,) = [one for one in results["warnings"] if one["code"] == "KTB820"]
    assert found["severity"] == ("error" if code else "warning")
    assert f"{failed} http-error (finish_reason 'abort')" in found["found"]
    assert "run the same command again" in found["next_step"]
    assert bool(failures(results)) == bool(code)
    assert invoke(report_command, tmp_path).exit_code == code
    assert evaluate(server, tmp_path, "--limit", 24).exit_code == code


# --- a full disk

_SMALL_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from ktbridge.cli import main
main()
"""


@pytest.mark.slow
def test_a_full_disk_is_a_sentence_and_loses_nothing(server, tmp_path):
    """A limit on the size of files stands for the disk: the first answers fit, and half of one more."""
    assert resource.RLIMIT_FSIZE
    arms = arm_words(server)
    words = ["eval", "--bench", SMALL, "--output", tmp_path / "run", *arms, "--concurrency", 1]
    line = [sys.executable, "-c", _SMALL_FILES, "40000", *map(str, words)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    path = tmp_path / "run" / "answers.jsonl"
    assert f"{str(path)!r} cannot be written" in done.stderr
    assert "run the same command again" in done.stderr
    stored = path.read_bytes()
    assert stored.endswith(b"\n"), "no half of a line is left"
    kept = len(read_ledger(path.parent, ANSWERS))
    assert kept == stored.count(b"\n") > 100
    again = subprocess.run(words_of(*words), env=environment(), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"asked {252 - kept} questions; {kept} answers were stored before" in again.stderr
    line = [sys.executable, "-c", _SMALL_FILES, "40000", "report", str(tmp_path / "run")]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "results.json' cannot be written" in done.stderr
