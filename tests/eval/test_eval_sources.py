"""Benches over other people's data: their layouts are read, and what cannot be used is said."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from publicscript import MODULES, write_script

from ktbridge.errors import ProblemsError, UsageError
from ktbridge.eval import load_bench
from ktbridge.eval.bench import FILES, benches_root, load_compat, parse_bench
from ktbridge.eval.contamination import find_contamination, overlap_problems
from ktbridge.eval.judge.prompts import DigitRequest, ReplyError, ShownAnswer, parse_judge
from ktbridge.eval.scorers import score_task

NEKOBENCH = Path(__file__).parents[3] / "shared" / "data" / "nekobench" / "NekoBench.json"
JUDGE = parse_judge("m@http://127.0.0.1:1")
SOURCED = ("translational-style", "afrimed-qa", "beyond-dialogue", "llemr", "generic")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


# --- our samples


@pytest.mark.parametrize("name", SOURCED)
def test_each_bench_loads_its_sample_and_says_where_it_came_from(name, tmp_path):
    bench = load_bench(name)
    assert bench.name == name
    source = next((benches_root() / name).glob("sample.*"))
    assert bench.data["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (bench.data["loader"], bench.data["file"]) == (name, source.name)
    assert bench.data["items"] == len(bench.items) >= 4
    assert {item.slice for item in bench.items} == {one.name for one in bench.slices}
    assert bench.persona.name == "none"
    # What a run stores is enough to make the same bench again, without the data file.
    again = parse_bench({key: bench.files[key] for key in FILES})
    assert (again.sha256, again.items, again.data) == (bench.sha256, bench.items, bench.data)
    # Every reference is a full mark; so is every right option.
    for item in bench.items:
        if item.checks[0]["scorer"] != "regex":
            gold = item.gold[0] if isinstance(item.gold, list) else str(item.gold)
            assert score_task(gold, item.checks, item.gold)[0] == pytest.approx(1, abs=1e-6)
    # The folder is copied and made one's own.
    mine = shutil.copytree(benches_root() / name, tmp_path / "mine")
    assert load_bench(mine).items == bench.items
    text = (mine / "bench.yaml").read_text("utf-8").replace(f"loader: {name}", "loader: vibes")
    (mine / "bench.yaml").write_text(text, "utf-8")
    with pytest.raises(UsageError, match="unknown loader 'vibes'"):
        load_bench(mine)


def test_afrimed_options_become_letters_and_several_may_be_right():
    items = {item.cluster: item for item in load_bench("afrimed-qa").items}
    one = items["o-01"]
    assert one.messages[0]["content"].split("\n")[1:3] == ["A. Aedes", "B. Anopheles"]
    assert (one.gold, one.sub) == ("B", "Infectious Disease")
    two = items["o-03"]
    assert two.gold == "AC"
    assert "More than one" in two.messages[0]["content"]
    for text, mark in (("A, C", 1), ("A and C.", 1), ("A", 0), ("A, B, C", 0)):
        assert score_task(text, two.checks, two.gold)[0] == mark
    assert "E." not in items["o-04"].messages[0]["content"], "N/A is no option"
    assert len(items["o-07"].judge) == 4
    rows = [
        row
        for item, text in ((one, "B"), (two, "A and C"), (items["o-04"], "Anything."))
        for row in score_task(text, item.checks, item.gold)[1]
    ]
    assert [row["parsed"] for row in rows] == [True, True, False]


def test_answers_to_one_question_are_gathered_and_rounds_are_kept():
    style = load_bench("translational-style")
    assert style.data["records"] == 11
    assert [len(item.gold) for item in style.items][:3] == [2, 1, 2]
    talk = load_bench("beyond-dialogue")
    second = talk.items[1]
    assert [one["role"] for one in second.messages] == ["system", "user", "assistant", "user"]
    assert second.cluster == talk.items[0].cluster, "scenes of one role belong together"
    assert (talk.partner.turns, talk.partner.slices) == (4, ["DIALOGUE"])
    facts = {item.sub: item for item in talk.items if item.slice == "OBJECTIVE"}
    assert score_task("True, she does.", facts["judgment"].checks, "yes")[0] == 1
    assert score_task("It is not true.", facts["judgment"].checks, "yes")[0] == 0


def test_a_stay_is_a_cluster_and_its_data_stays_on_the_machine():
    bench = load_bench("llemr")
    clusters = [item.cluster for item in bench.items][:3]
    assert clusters == ["stay-900001", "stay-900001", "stay-900002"]
    for url in ("http://127.0.0.1:8000/v1", "http://localhost:8000", "http://[::1]:80/v1"):
        bench.refuse_remote(url, "judge", "")
    for url in ("https://judge.org/v1", "http://127.0.0.1.example.org", "http://10.0.0.7/v1"):
        with pytest.raises(UsageError, match="is private"):
            bench.refuse_remote(url, "judge", "")
        load_bench("generic").refuse_remote(url, "judge", "")


def test_a_bench_says_itself_how_records_become_items(tmp_path):
    head = {
        "name": "mine",
        "slices": ["EASY"],
        "source": {
            "file": "rows.csv",
            "rows": [{"when": {"level": "1"}, "slice": "EASY", "question": "{q}?", "answer": "{a|b}"}],
            "others": "of level {level}",
        },
    }
    (tmp_path / "bench.yaml").write_text(json.dumps(head))
    (tmp_path / "rows.csv").write_text("q,a,b,level\nHow,,so,1\nWhy,x,y,2\n")
    bench = load_bench(tmp_path)
    assert [(one.messages[0]["content"], one.gold) for one in bench.items] == [("How?", ["so"])]
    assert bench.data["skipped"] == {"of level 2": 1}
    head["source"]["rows"][0]["answr"] = "{a}"
    (tmp_path / "bench.yaml").write_text(json.dumps(head))
    with pytest.raises(ProblemsError) as caught:
        load_bench(tmp_path)
    found = [(one.code, one.where) for one in caught.value.problems]
    assert found == [("KTB811", "bench.yaml: source.rows")]


# --- the user's copy


def test_the_users_copy_is_read_hashed_and_its_holes_are_counted(tmp_path):
    rows = [
        ["a", "test", "mcq", "Which one?", '{"option1": "x", "option2": "y"}', "option2", ""],
        ["b", "test", "mcq", "Which one?", '{"option1": "x", "option2": "y"}', "option2", ""],
        ["c", "test", "mcq", "And now?", '{"option1": "x", "option2": "y"}', "option9", ""],
        ["d", "test", "mcq", "And then?", "{not json", "option1", ""],
        ["e", "train", "saq", "Why, in two\nlines?", "", "", "Because."],
        ["f", "test", "consumer_queries", "Help?", "", "", ""],
    ]
    path = tmp_path / "afri.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as handle:
        names = "sample_id split question_type question answer_options correct_answer answer_rationale"
        csv.writer(handle).writerows([names.split(), *rows])
    bench = load_bench("afrimed-qa", path)
    assert [item.cluster for item in bench.items] == ["a", "e"]
    assert bench.items[1].messages[0]["content"] == "Why, in two\nlines?"
    assert (bench.data["records"], bench.data["file"]) == (6, "afri.csv")
    assert bench.data["skipped"] == {
        "the same question again": 1,
        "whose right option is not among its options": 1,
        "with options that are not JSON": 1,
        "of the type consumer_queries, which has no right answer": 1,
    }
    assert str(tmp_path) not in json.dumps(bench.data), "a report names the file, not the place"
    assert bench.items[0].checks[0]["options"] == "AB"


def test_generic_takes_the_usual_shapes(tmp_path):
    talk = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好呀"}]
    rows = [
        {"messages": talk},
        {"instruction": "Add", "input": "1 and 2", "output": "3"},
        {"prompt": "Which?", "references": ["this", "that"], "cluster": "c"},
        {"question": "Nothing to compare with"},
        {"prompt": "Two?", "gold": 2, "checks": [{"scorer": "numeric"}], "id": "two"},
    ]
    bench = load_bench("generic", write(tmp_path / "mine.jsonl", rows))
    asked = [item.messages[-1]["content"] for item in bench.items]
    assert asked == ["你好", "Add\n1 and 2", "Which?", "Two?"]
    assert [item.gold for item in bench.items] == [["你好呀"], ["3"], ["this", "that"], 2]
    assert [item.lang for item in bench.items] == ["zh", "en", "en", "en"]
    assert bench.data["skipped"] == {"without references, gold or checks": 1}


def test_a_file_that_is_not_there_or_not_text_or_not_wanted(tmp_path):
    """Rows that can't be used: tests/golden/mistakes.py."""
    twice = [{"prompt": "a", "answer": "b", "id": "x"}] * 2
    bench = load_bench("generic", write(tmp_path / "mine.jsonl", [*twice, {"prompt": "c"}]))
    assert bench.data["skipped"]["the same question again"] == 1, "one item twice is one item"
    with pytest.raises(UsageError, match="no data file"):
        load_bench("generic", tmp_path / "nosuch.jsonl")
    with pytest.raises(UsageError, match="items of its own"):
        load_bench("nekobench", tmp_path / "x.jsonl")
    for name, data, words in (
        ("a.jsonl", b"\xff\xfe", "UTF-16"),
        ("b.jsonl", b'{"a": 1}\n{"a": ', "b.jsonl:2"),
        ("c.json", b"[", "not valid JSON"),
        ("d.csv", b'a,b\n"x', "not CSV"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ProblemsError) as caught:
            load_bench("generic", tmp_path / name)
        assert words in str(caught.value.problems[0])


# --- the public NekoBench


@pytest.mark.skipif(not NEKOBENCH.is_file(), reason="the public questions are not shipped")
def test_the_600_public_questions():
    bench = load_compat("nekobench", NEKOBENCH)
    assert len(bench.items) == 600
    assert {item.id for item in bench.items} >= {"pes-001", "kri-100", "erm-100"}
    assert bench.notes[0].startswith("Public NekoBench questions.")
    assert bench.persona.name == "neko"
    assert bench.data["sha256"].startswith("18e939926d39")
    again = parse_bench({key: bench.files[key] for key in FILES})
    assert again.items == bench.items
    # None of our 300 is one of theirs.
    report = find_contamination(load_bench("nekobench"), NEKOBENCH)
    assert report["records"] == 600
    assert report["hits"] == []
    assert overlap_problems(report) == []


def test_a_copy_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "N.json"
    good = {"module": "PES", "question": "你好吗？"}
    bad = [{"module": "XYZ", "question": "a"}, {"module": "INS"}, {**good, "question": "你好吗？ "}]
    path.write_text(json.dumps([good, *bad]), "utf-8")
    with pytest.raises(ProblemsError) as caught:
        load_compat("nekobench", path)
    assert [problem.where for problem in caught.value.problems] == [
        f"N.json: record {number}" for number in (2, 3, 4)
    ]
    with pytest.raises(UsageError, match="--compat 'mmlu'"):
        load_compat("mmlu", path)
    with pytest.raises(UsageError, match="no data file"):
        load_compat("nekobench", tmp_path / "nosuch")
    path.write_text(json.dumps([good]), "utf-8")
    (item,) = load_compat("nekobench", path).items
    assert item.judge == []


@pytest.mark.parametrize("name", ["script.ipynb", "script.py"])
def test_the_judge_is_asked_word_for_word_what_the_public_script_asks(tmp_path, name):
    path, script = tmp_path / "N.json", write_script(tmp_path / name)
    path.write_text(json.dumps([{"module": m, "question": f"{m}？"} for m in MODULES]), "utf-8")
    bench = load_compat("nekobench", path, script)
    for module, item in zip(MODULES, bench.items, strict=True):
        (asked,) = DigitRequest(JUDGE, item, (ShownAnswer("很好 {{asked of PES}}"),), "base").messages
        assert asked == {
            "role": "user",
            "content": f"# Mark {module}\n[Q]: {module}？\n[A]: 很好 {{{{asked of PES}}}}\nOne digit.",
        }
    assert hashlib.sha256(script.read_bytes()).hexdigest() in bench.notes[-1]
    again = parse_bench({key: bench.files[key] for key in FILES})
    assert again.items == bench.items
    for other in (write_script(tmp_path / name, limit=99), path):
        with pytest.raises(UsageError, match=r"not the public script|can't be read"):
            load_compat("nekobench", path, other)


@pytest.mark.parametrize(
    ("reply", "digit"),
    [
        ("4", 4),
        (" 0\n", 0),
        ("6", None),
        ("4/5", 4),
        ("Score: 3", 3),
        ("", None),
        ("四", None),
        ("9 of 5", 5),
    ],
)
def test_a_grade_is_the_first_digit_in_the_reply(reply, digit):
    item = next(one for one in load_bench("nekobench").items if one.judge)
    request = DigitRequest(JUDGE, item, (), "base")
    if digit is None:
        with pytest.raises(ReplyError):
            request.read(reply)
    else:
        assert request.read(reply).digit == digit
