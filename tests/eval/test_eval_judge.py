"""Judges with known faults, over real HTTP: each fault is measured, named, and never a score."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from evalruns import invoke
from findings import codes
from scriptedjudge import (
    BENCH,
    ITEMS,
    checks,
    fair,
    gather,
    judge_it,
    make_bench,
    pair,
    parts_of,
    read,
    truth,
)

from ktbridge.cli.report import command as report_command
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.eval import score_run
from ktbridge.eval.judge.prompts import VERSION, compared_arms, parse_judge, plan_judging
from ktbridge.eval.judge.run import judge_preflight, judge_run
from ktbridge.eval.judge.score import read_judgements
from ktbridge.eval.store import JUDGEMENTS, Ledger, read_snapshot


@pytest.fixture(scope="module")
def collected_(world_, tmp_path_factory):
    root = tmp_path_factory.mktemp("judge")
    return gather(world_, make_bench(root / "bench"), root / "run")


@pytest.fixture(scope="module")
def rows(collected_):
    return score_run(collected_)["items"]


@pytest.fixture(scope="module")
def answers(rows):
    return {row["id"]: row["answers"] for row in rows}


@pytest.fixture
def run(collected_, tmp_path):
    return Path(shutil.copytree(collected_, tmp_path / "run"))


# --- a fair judge


def test_a_fair_judge_gives_the_right_verdicts_and_is_asked_once(world, run, rows, answers):
    assert read_judgements(run, read_snapshot(run), []) is None
    progress = []
    done = judge_it(world, run, pairs=True, on_progress=lambda *now: progress.append(now))
    assert codes(done.problems) == set()
    found = read(run, rows)
    for item, by_arm in answers.items():
        for arm, answer in by_arm.items():
            right, score = truth(answer["text"]), found.scores[item][arm]
            assert (score.outcome, score.share) == ("ok", round(sum(right) / 3, 6))
            assert [one["yes"] for one in score.checks] == right
            assert score.checks[0]["question"] == "Does the answer thank the user?"
            assert score.checks[0]["evidence"] == "seen"
    for one in found.pairs:
        base, full = (answers[one["item"]][arm]["text"] for arm in ("base", "full"))
        gap = sum(truth(full)) - sum(truth(base))
        assert (one["of"], one["minus"], one["flipped"]) == ("full", "base", False)
        assert one["result"] == ("win" if gap > 0 else "loss" if gap < 0 else "tie")
    card = found.card
    assert len(found.pairs) == ITEMS
    assert card["anchors"]["asked"] == card["anchors"]["right"] == 12 + 9
    assert card["anchor_pairs"] == {"asked": 4, "right": 4}
    assert card["flip_rate"] == card["parse_fail_rate"] == 0
    assert card["position_bias"]["first_share"] == 0.5
    assert card["length_bias"]["low"] < 0.5 < card["length_bias"]["high"]
    assert card["calls"] == done.asked == len(world.asked)
    assert progress[-1] == (done.asked, done.asked)
    assert {one["temperature"] for one in world.asked} == {0}
    forms = [one["response_format"]["json_schema"]["schema"] for one in world.asked]
    # Evidence is written before the verdict.
    orders = {tuple(form.get("properties", {}).get("q1", form)["properties"]) for form in forms}
    assert orders == {("evidence", "verdict"), ("evidence", "winner")}
    again = judge_it(world, run)
    assert (again.asked, again.stored) == (0, done.asked)
    assert len(world.asked) == done.asked
    assert read(run, rows) == found


def test_anchors_stand_among_the_others(world, run):
    judge_it(world, run, concurrency=1)
    known = [n for n, one in enumerate(world.asked) if parts_of(one)["message"].startswith("Hi ")]
    assert len(known) == 8
    assert known[0] > 0
    assert known[-1] > len(world.asked) - 8
    assert max(b - a for a, b in itertools.pairwise(known)) < 10


# --- judges with known faults


def test_position_bias_is_measured_and_costs_ties(world, run, rows):
    def behave(request, nth):
        parts = parts_of(request)
        if "first-answer" not in parts or parts["message"].startswith("Hi "):
            return fair(request)
        # Three times of four it looks no further than the first answer.
        half = int(hashlib.sha256(parts["message"].encode()).hexdigest(), 16) % 4
        return pair("first") if half else fair(request)

    world.behave = behave
    problems = judge_it(world, run, pairs=True).problems
    assert {"KTB881", "KTB882"} <= codes(problems, "warning")
    assert codes(problems, "error") == set()
    found = read(run, rows)
    known = {json.dumps(one["messages"]) for one in world.asked}
    assert len(known) == len(world.asked)
    verdicts = [
        json.loads(behave(one, 1))["winner"]
        for one in world.asked
        if "first-answer" in parts_of(one) and not parts_of(one)["message"].startswith("Hi ")
    ]
    decided = [one for one in verdicts if one != "tie"]
    bias = found.card["position_bias"]
    assert bias["n"] == len(decided)
    assert bias["first_share"] == pytest.approx(decided.count("first") / len(decided), abs=1e-6)
    assert 0.5 < bias["low"] < bias["first_share"] < bias["high"]
    flipped = [one for one in found.pairs if one["flipped"]]
    assert found.card["flip_rate"] == pytest.approx(len(flipped) / ITEMS, abs=1e-6)
    assert len(flipped) > ITEMS / 2
    assert {one["result"] for one in flipped} == {"tie"}
    (told,) = [one for one in problems if one.code == "KTB881"]
    assert "chose the answer shown first" in told.found


def test_a_judge_that_only_sees_the_place_has_no_pairs_reported(world, run, rows):
    world.behave = lambda request, nth: (
        pair("second") if "first-answer" in parts_of(request) else fair(request)
    )
    done = judge_it(world, run, pairs=True)
    assert codes(done.problems, "error") == {"KTB886"}
    found = read(run, rows)
    assert found.pairs == []
    assert found.card["position_bias"]["first_share"] == 0
    assert found.card["flip_rate"] == 1
    assert found.scores["i0"]["base"].outcome == "ok"
    told = next(one.found for one in done.problems if one.code == "KTB881")
    assert told.startswith("position bias: 100%")
    assert told.endswith("shown second")


def test_length_bias_is_measured_on_pairs(world, run, rows, answers):
    def behave(request, nth):
        parts = parts_of(request)
        if "first-answer" not in parts:
            return fair(request)
        one, two = len(parts["first-answer"]), len(parts["second-answer"])
        return pair("first" if one > two else "second" if two > one else "tie")

    world.behave = behave
    done = judge_it(world, run, pairs=True)
    # Two of the four known pairs have the longer answer as the bad one.
    assert codes(done.problems, "error") == {"KTB886"}
    assert "KTB883" in codes(done.problems, "warning")
    card = read(run, rows).card
    unequal = sum(len(by_arm["base"]["text"]) != len(by_arm["full"]["text"]) for by_arm in answers.values())
    bias = card["length_bias"]
    assert (bias["from"], bias["longer_share"], bias["excess"]) == ("pairs", 1, 0.5)
    assert bias["n"] == unequal
    assert bias["low"] > 0.5
    assert bias["correlation"] > 0.7
    assert card["flip_rate"] == 0
    assert card["anchor_pairs"] == {"asked": 4, "right": 2}


def test_length_bias_is_measured_on_checklists(world, run, rows):
    world.behave = lambda request, nth: (
        fair(request)
        if parts_of(request)["message"].startswith("Hi ")
        else checks([len(parts_of(request)["answer"]) > size for size in (25, 40, 55)])
    )
    assert "KTB883" in codes(judge_it(world, run).problems, "warning")
    bias = read(run, rows).card["length_bias"]
    assert (bias["from"], bias["longer_share"]) == ("checks", 1)
    assert bias["correlation"] > 0.7


@pytest.mark.parametrize("verdict", [True, False])
def test_a_judge_that_always_says_the_same_is_named_and_refused(world, run, verdict, rows):
    world.behave = lambda request, nth: checks([verdict] * 3)
    problems = judge_it(world, run).problems
    assert codes(problems, "error") == {"KTB876", "KTB878"}
    told = next(one for one in problems if one.code == "KTB878")
    word, known = ("yes", "9 of 9 on known-bad") if verdict else ("no", "12 of 12 on known-good")
    assert told.found.startswith(f"it nearly always says {word}: {verdict:.0%} of 108 verdicts")
    assert known in told.found
    assert "useless" in told.expected
    found = read(run, rows)
    assert found.scores == {}
    assert found.card["refused"]
    assert found.card["yes_rate"] == float(verdict)


def test_a_judge_without_a_verdict_on_bad_answers_is_refused(world, run, rows):
    """It may say yes to everything; a condition on what it judged has then nothing to compare."""
    bad = ("I never say what people like to hear", "Never.", "No. It has a size", "Green.")

    def behave(request, nth):
        answer = parts_of(request).get("answer", "")
        return "I would rather not." if answer.startswith(bad) else checks([True] * 3)

    world.behave = behave
    problems = judge_it(world, run).problems
    told = next(one for one in problems if one.code == "KTB876")
    assert told.found == "none of the bad anchors got a verdict"
    assert read(run, rows).card["refused"]
    done = invoke(report_command, run, "--fail-on", "judge:overall<-0.1")
    assert done.exit_code == 1
    assert "judge:overall was not compared" in " ".join(done.output.split())


def test_without_anchors_always_yes_is_a_warning(world_, world, tmp_path):
    folder = make_bench(tmp_path / "bench", re.sub(r"    anchors:\n(      - .*\n)+", "", BENCH))
    out = gather(world_, folder, tmp_path / "run")
    world.behave = lambda request, nth: checks([True] * 3)
    problems = judge_it(world, out).problems
    assert codes(problems, "warning") == codes(problems) == {"KTB875", "KTB878"}
    assert "useless" in next(one.expected for one in problems if one.code == "KTB878")
    assert read(out).scores["i0"]["base"].share == 1


def test_a_reply_that_cannot_be_read_is_told_so_once_and_is_no_score(world, run, rows):
    lost, mended = "thing 3.", "thing 5."

    def behave(request, nth):
        message = parts_of(request)["message"]
        if message.endswith(lost) or (message.endswith(mended) and len(request["messages"]) == 2):
            return "I would say that this is a fine answer: 5/5"
        return f"<think>{{}} hm</think>```json\n{fair(request)}\n```"

    world.behave = behave
    done = judge_it(world, run)
    assert codes(done.problems) == set()  # 2 of 56 are few
    found = read(run, rows)
    assert {score.outcome for score in found.scores["i3"].values()} == {"parse-fail"}
    assert {score.share for score in found.scores["i3"].values()} == {None}
    assert {score.outcome for score in found.scores["i5"].values()} == {"ok"}
    assert found.card["parse_fail_rate"] == pytest.approx(2 / done.asked, abs=1e-6)
    assert found.card["calls"] == len(world.asked) == done.asked + 4
    complaint = next(one["messages"] for one in world.asked if len(one["messages"]) == 4)
    assert "not JSON" in complaint[3]["content"]
    # A parse failure is an outcome: it isn't asked for again.
    assert judge_it(world, run).asked == 0
    os.unlink(run / "judgements.jsonl")
    world.behave = lambda request, nth: "fine!"
    assert "KTB879" in codes(judge_it(world, run).problems, "error")
    assert read(run, rows).scores == {}


def test_errors_are_named_and_asked_again(world, run, rows):
    """HTML, a 429 that passes, a hang, a cut-off reply: one item each."""

    def behave(request, nth):
        message = parts_of(request)["message"]
        if message.endswith("thing 1."):
            return 200, {"content-type": "text/html"}, "<html>Bad gateway</html>"
        if message.endswith("thing 2.") and nth == 1:
            return 429, {"retry-after": "0"}, {"error": {"message": "slow down"}}
        if message.endswith("thing 4."):
            time.sleep(0.8)
        if message.endswith("thing 6."):
            return world.completion(fair(request)[:30], "length")
        return fair(request)

    world.behave = behave
    done = judge_it(world, run, timeout=0.4)
    assert codes(done.problems) == {"KTB880"}
    found = read(run, rows)
    outcomes = {
        name: {score.outcome for score in found.scores[name].values()}
        for name in ("i0", "i1", "i2", "i4", "i6")
    }
    assert outcomes["i0"] == outcomes["i2"] == {"ok"}
    assert outcomes["i1"] == outcomes["i4"] == {"judge-error"}
    assert outcomes["i6"] == {"parse-fail"}
    details = {
        (record["item"], record["detail"])
        for line in (run / "judgements.jsonl").read_text().splitlines()
        if (record := json.loads(line))["outcome"] != "ok"
    }
    assert ("i1", "bad reply: not JSON, it begins with '<html>Bad gateway</html>'") in details
    assert ("i4", "timed out") in details
    assert ("i6", "a reply cut off after 4096 tokens") in details
    world.reset()
    again = judge_it(world, run)
    assert again.asked == len(world.asked) == 4
    assert {score.outcome for score in read(run, rows).scores["i1"].values()} == {"ok"}


def test_a_judge_that_is_gone_stops_the_run(world, run):
    world.behave = lambda request, nth: (time.sleep(0.3), fair(request))[1]
    with pytest.raises(KtbridgeError, match="stopped answering"):
        judge_it(world, run, timeout=0.05)
    assert len((run / "judgements.jsonl").read_text().splitlines()) < 30
    # The server, which the next test uses too, still reads requests that were given up.
    time.sleep(0.7)


def test_a_server_without_response_format_is_asked_in_plain_words_or_says_what_to_leave_out(world, run):
    """Another name of the limit, and answers in parts: tests/golden/clients.py."""

    def behave(request, nth):
        if "response_format" in request:
            return 400, {}, {"error": {"message": "unknown field response_format"}}
        return fair(request)

    world.behave = behave
    done = judge_it(world, run, concurrency=1)
    assert codes(done.problems) == set()
    assert sum("response_format" in one for one in world.asked) == 1
    assert len(world.asked) == done.asked + 1
    said = {"error": {"message": "Unsupported value: 'temperature' does not support 0"}}
    world.behave = lambda request, nth: (400, {}, said) if "temperature" in request else "x"
    with pytest.raises(ProblemsError) as caught:
        judge_preflight(parse_judge(f"arbiter@{world.url}"), backoff=0.001)
    (problem,) = caught.value.problems
    assert problem.code == "KTB872"
    assert """--judge-extra-body '{"temperature": null}'""" in problem.next_step


def test_a_judge_of_the_served_family_is_warned_about(world, run, rows):
    problems = judge_it(world, run, model="Qwen2.5-72B-Instruct").problems
    assert codes(problems) == {"KTB884"}
    assert read(run, rows).card["same_family"]
    # Another judge is another set of judgements; the last one is reported.
    judge_it(world, run)
    assert read(run, rows).card["model"] == "arbiter"
    assert not read(run, rows).card["same_family"]


def test_an_arm_that_was_never_asked_is_not_compared(rows, run):
    bench, judge = read_snapshot(run), parse_judge("m@http://127.0.0.1:1")
    more = [{**row, "answers": {**row["answers"], "late": {"outcome": "not-run"}}} for row in rows]
    plan = plan_judging(bench, more, judge, pairs=True)
    assert plan == plan_judging(bench, rows, judge, pairs=True)
    assert {(ask.of, ask.minus) for ask in plan.pairs} == {("full", "base")}
    assert compared_arms(["base", "expert", "full"]) == [("full", "base"), ("full", "expert")]
    # Equal answers need no judge.
    same = [{**rows[0], "answers": dict.fromkeys(("base", "full"), rows[0]["answers"]["base"])}]
    plan = plan_judging(bench, same, judge, pairs=True)
    assert (plan.pairs, plan.anchor_pairs, len(plan.same)) == ([], [], 1)
    assert len({ask.key for ask in plan.scores}) == 1


def test_every_ok_repeat_is_judged_and_the_mean_told(world, run, rows):
    """Three repeats: one that the judge calls all good, a cut one, one that it calls all bad."""
    arm, row = "full", rows[0]
    first = row["answers"][arm]
    good, bad = "Thank you, a red one.", "I never do."
    texts = [{"outcome": "ok", "text": good}, {"outcome": "truncated", "text": "Th"}]
    texts.append({"outcome": "ok", "text": bad})
    repeated = {
        **row,
        "answers": {**row["answers"], arm: {**first, "text": good, "repeats": texts}},
    }
    bench = read_snapshot(run)
    judge = parse_judge(f"arbiter@{world.url}")
    plan = plan_judging(bench, [repeated], judge, pairs=False)
    mine = [ask for ask in plan.scores if ask.of == arm]
    assert [good in ask.messages[1]["content"] for ask in mine] == [True, False]
    with Ledger(run, JUDGEMENTS) as journal:
        for ask in plan.mixed():
            said = fair({"messages": ask.messages})
            counts = dict.fromkeys(("attempts", "prompt_tokens", "completion_tokens"), 1)
            record = {"key": ask.key, "outcome": "ok", "reply": said, "detail": "", **counts}
            journal.add(record)
    card = {"model": "arbiter", "url": judge.url, "version": VERSION, "pairs": False, "server": {}}
    (run / "judge.json").write_text(json.dumps(card))
    score = read(run, [repeated]).scores[row["id"]][arm]
    assert (score.outcome, score.share) == ("ok", 0.5)
    assert [check["yes"] for check in score.checks] == [True] * 3, "the first one's"


@pytest.mark.slow
def test_fields_for_the_judge_are_sent_and_make_it_another_judge(world, run):
    fields = {"max_tokens": 900, "chat_template_kwargs": {"enable_thinking": False}}
    fields["temperature"] = None
    judge = parse_judge(f"arbiter@{world.url}", fields)
    plain = judge_it(world, run)
    world.asked.clear()
    done = judge_run(run, judge, backoff=0.001, concurrency=8)
    assert (done.asked, done.stored) == (plain.asked, 0)
    for request in world.asked:
        assert request["max_tokens"] == 900
        assert request["chat_template_kwargs"] == {"enable_thinking": False}
        assert "temperature" not in request
    assert judge_run(run, judge, backoff=0.001).asked == 0
    found = read(run)
    assert found.card["extra_body"] == fields
    assert found.scores


def test_judging_that_was_killed_goes_on(world, run):
    """Twenty judgements and a torn line are left; the kill itself is tested with `ktbridge eval`."""
    judge_it(world, run, pairs=True)
    whole, card = score_run(run), (run / "judge.json").read_bytes()
    journal = run / "judgements.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:20]) + b'{"key": "torn')
    part = score_run(run)
    waiting = {one["code"]: one["severity"] for one in part["warnings"]}
    assert waiting["KTB885"] == "error", "what the judge was not asked is told"
    assert "judge" in part["axes"], "and what it was asked is not lost"
    world.asked.clear()
    done = judge_it(world, run, pairs=True)
    assert (done.stored, done.asked, len(world.asked)) == (20, len(lines) - 20, len(lines) - 20)
    assert score_run(run) == whole
    assert (run / "judge.json").read_bytes() == card
