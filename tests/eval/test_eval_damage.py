"""Damaged replies, files and questions: each is named, and none is scored or ends in a traceback."""

from __future__ import annotations

import json
import shutil

import evalruns
import pytest
from click.testing import CliRunner
from evalruns import SMALL, is_item

from ktbridge.cli.eval import command
from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.eval import load_bench, score_run, write_report
from ktbridge.eval.scorers import SCORERS
from ktbridge.eval.scorers.numbers import find_answer_number
from ktbridge.server_api.replies import BadReplyError, read_completion


def run(server, out, **options):
    return evalruns.run(server, out, **{"limit": 8, **options})


@pytest.mark.parametrize(
    ("finish", "outcome"),
    [
        ("stop", "ok"),
        (None, "ok"),
        ("eos_token", "ok"),
        ("STOP", "ok"),
        ("length", "truncated"),
        ("max_tokens", "truncated"),
        ("abort", "http-error"),
        ("content_filter", "http-error"),
        (["stop"], "http-error"),
    ],
)
def test_only_a_finished_answer_is_ok(finish, outcome):
    body = {"choices": [{"message": {"content": "好"}, "finish_reason": finish}]}
    answer = read_completion(body)
    assert answer.outcome == outcome
    assert (answer.detail == f"finish_reason {finish!r}") == (outcome == "http-error")


def test_an_aborted_answer_is_asked_again(server, tmp_path):
    server.behave = lambda request, nth: (
        (200, {}, server.completion("好", "abort")) if is_item(request) else None
    )
    assert run(server, tmp_path).outcomes == {"http-error": 24}
    server.behave = lambda request, nth: None
    done = run(server, tmp_path)
    assert (done.asked, done.outcomes) == (24, {"ok": 24})


def test_half_a_character_is_a_bad_reply(server, tmp_path):
    for message in ({"content": "\ud83d"}, {"content": "a", "reasoning": "\ud83d"}):
        with pytest.raises(BadReplyError, match="surrogate"):
            read_completion({"choices": [{"message": message}]})
    server.behave = lambda request, nth: (
        (200, {}, server.completion("\ud83d")) if is_item(request) else None
    )
    assert run(server, tmp_path, limit=1).outcomes == {"http-error": 3}
    write_report(tmp_path)
    server.listed = [{**entry, "root": "\ud83d"} for entry in server.listed]
    with pytest.raises(ProblemsError):
        run(server, tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("twenty-four", 24),
        ("The answer is twenty-one.", 21),
        ("thirty four", 34),
        ("two hundred and five", 205),
        ("three thousand two hundred", 3200),
        ("between three and five", 5),
        ("one hundred", 100),
        ("twenty", 20),
        ("nineteen eighty four", None),
        ("three point five", None),
        ("the twenty-first", None),
        ("two and a half", None),
        ("三万", 30000),
        ("三万五", 35000),
        ("一亿两千万", 120000000),
        ("三百五", 350),
        ("一千零一", 1001),
        ("二十四", 24),
        ("二〇二四", 2024),
        ("三点五", 3.5),
        ("万一", None),
        ("3万", 30000),
        ("5千克", 5),
        ("3万5千", 35000),
        ("ten - three = seven", 7),
        ("minus three", -3),
        ("The answer is minus three.", -3),
        ("It is negative twenty-four.", -24),
        ("ten minus three", 3),
        ("ten minus three is seven", 7),
        ("5 minus 8 is minus 3", -3),
        ("x minus 4 = 9", 9),
        ("负三", -3),
        ("答案是负三。", -3),
        ("零下三度", -3),
        ("答案是零下12度", -12),
        ("零上三度", 3),
        ("正负三", 3),
        ("负3万5千", -35000),
        ("−3", -3),
        ("x = − 3", -3),
        ("10-3", 3),
        ("答案是3/4", 0.75),
        ("2024/3/4", 4),
        ("1.5e3", 1500),
        ("3 eggs", 3),
    ],
)
def test_a_number_is_read_whole_or_not_at_all(text, value):
    assert find_answer_number(text) == value


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A spider has eight legs, so B.", "B"),
        ("A spider has eight legs. The answer is B", "B"),
        ("A. Spiders, not B", "A"),
        ("B) sparrow", "B"),
        ("B\nbecause A cannot fly", "B"),
        ("B麻雀", "B"),
        ("**B** sparrow", "B"),
        ("B is right", "B"),
        ("A is right", "A"),
    ],
)
def test_an_article_is_no_choice(text, letter):
    for gold in "AB":
        mark = SCORERS["choice"].score(text, {"options": "ABCD"}, gold)
        assert mark.value == float(gold == letter)


def test_true_is_not_one():
    score = SCORERS["json"].score
    assert score('{"a": [true]}', {"equals": {"a": [1]}}, None)[0] == 0
    assert score('{"a": [1]}', {"equals": {"a": [True]}}, None)[0] == 0
    assert score('{"a": [1.0, true]}', {"equals": {"a": [1, True]}}, None)[0] == 1


@pytest.mark.parametrize("gold", ["NaN", "1e999", '"\\ud83d"'])
def test_a_gold_that_no_file_can_hold_is_a_problem_of_the_bench(tmp_path, gold):
    copy = shutil.copytree(SMALL, tmp_path / "mine")
    lines = (copy / "items.jsonl").read_text("utf-8").splitlines()
    row = {key: value for key, value in json.loads(lines[0]).items() if key != "gold"}
    lines[0] = json.dumps(row)[:-1] + f', "gold": {gold}}}'
    (copy / "items.jsonl").write_text("\n".join(lines), "utf-8")
    with pytest.raises(ProblemsError) as caught:
        load_bench(copy)
    assert [(one.code, one.where) for one in caught.value.problems] == [("KTB813", "items.jsonl:1")]


def test_no_share_of_nothing_is_shown(server, tmp_path):
    server.behave = lambda request, nth: (
        (200, {}, server.completion("")) if is_item(request) else None
    )
    run(server, tmp_path)
    results = write_report(tmp_path)
    assert set(results["persona_parts"]["base"].values()) == {None}
    assert "–</td>" in (tmp_path / "report.html").read_text("utf-8")
    assert " 0 %" not in (tmp_path / "report.html").read_text("utf-8")


def test_an_arm_without_answers_is_left_out(server, tmp_path):
    run(server, tmp_path)
    path = tmp_path / "run.json"
    document = json.loads(path.read_text("utf-8"))
    card = {**document["arms"]["full"], "name": "fulll", "fingerprint": "0"}
    document["arms"]["fulll"] = card
    path.write_text(json.dumps(document), "utf-8")
    results = write_report(tmp_path)
    assert results["valid"] == 8
    assert [one["name"] for one in results["arms"]] == ["base", "expert", "full"]
    assert [one["where"] for one in results["warnings"] if one["code"] == "KTB823"] == ["arm fulll"]


@pytest.mark.parametrize("key", ["name", "model", "url", "fingerprint", "server", "sampling"])
def test_a_damaged_card_is_said_so(server, tmp_path, key):
    run(server, tmp_path, limit=1)
    path = tmp_path / "run.json"
    document = json.loads(path.read_text("utf-8"))
    del document["arms"]["base"][key]
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(KtbridgeError, match="is damaged"):
        score_run(tmp_path)


def test_a_record_without_text_is_said_so(server, tmp_path):
    run(server, tmp_path, limit=1)
    path = tmp_path / "answers.jsonl"
    record = json.loads(path.read_text("utf-8").splitlines()[0])
    for broken in (
        {name: value for name, value in record.items() if name != "text"},
        record | {"text": None},
        record | {"outcome": []},
    ):
        path.write_text(json.dumps(broken) + "\n", "utf-8")
        with pytest.raises(KtbridgeError, match="damaged at line 1"):
            score_run(tmp_path)


@pytest.mark.parametrize("slices", [",", "", " , "])
def test_slices_without_a_name_are_refused(tmp_path, slices):
    words = ["--bench", str(SMALL), "--arm", "a=m@http://127.0.0.1:1", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, [*words, "--slices", slices], standalone_mode=False)
    assert result.exit_code == 2
    assert "names no slice" in result.output
