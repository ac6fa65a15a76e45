"""The report's page shows any answer without being hurt by it; gates, words and numbers.

What a report says of runs of many kinds: tests/golden/evaluation.py.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from evalruns import BENCH, EVIL, Page, knows, run, stored, validate
from golden.evaluation import judged

from ktbridge.document import to_markdown
from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval import failures, load_bench, score_run, write_report
from ktbridge.eval.report.document import build_report, diff_words, render_report
from ktbridge.eval.report.sentences import clause_text
from ktbridge.eval.results.build import check_validity
from ktbridge.eval.results.compare import (
    check_gates,
    decide_verdict,
    interval,
    parse_gate,
    refuse_unknown,
    signed,
)
from ktbridge.eval.store import write_benches

ARMS = ("base", "expert", "full")


def test_the_published_schema_is_that_of_the_types():
    published = runpy.run_path(str(Path(__file__).parents[2] / "scripts/make_schema.py"))
    assert published["PATH"].read_text("utf-8") == published["render"](), "scripts/make_schema.py"
    assert published["GATE_PATH"].read_text("utf-8") == published["render_gate"]()


def test_the_page_needs_no_network(tmp_path):
    items = BENCH.select(limit=24)
    results = write_report(stored(tmp_path, dict.fromkeys(ARMS, knows), items=items))
    html = (tmp_path / "report.html").read_text("utf-8")
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "xlink:href", "action", "srcset", "data", "ping"} & names
    links = {value for name, value in page.attributes if name == "href"}
    places = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert "#side-by-side" in links
    assert links <= places, "every link leads to a place in the page"
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", html)
    assert "default-src 'none'" in html
    # The servers' addresses are shown as text in the run card, and nothing else looks like a URL.
    assert set(re.findall(r"https?://[^\s<\"]+", html)) == {"http://127.0.0.1:1/v1"}
    assert page.tags.count("svg") >= 4
    assert page.tags.count("article") == 24
    assert results["verdict"]["headline"] in page.text
    assert results["verdict"]["line"] in page.text
    validate(json.loads((tmp_path / "results.json").read_text("utf-8")))


def test_answers_cannot_break_out_of_the_page(server, tmp_path):
    server.listed = [{**entry, "root": EVIL} for entry in server.listed]

    def behave(request, nth):
        if "no-such" in request["model"]:
            return None
        text = f"{request['model']} {EVIL}"
        return 200, {}, server.completion(text, reasoning_content=EVIL)

    server.behave = behave
    run(server, tmp_path, limit=8)
    write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    # The document's own language is the only attribute of that kind; no handler crept in.
    assert not any(name.startswith("on") for name, _ in page.attributes)
    # Marks of the word diff stand inside the first and last arm's texts and must not open them.
    assert {"ins", "del"} <= set(page.tags)
    assert page.text.count(EVIL) >= 8 * 3 * 2
    assert "{{ 7*7 }}" in page.text


def test_no_name_can_break_out_of_page_or_markdown(tmp_path):
    results = score_run(stored(tmp_path, dict.fromkeys(ARMS, knows), items=BENCH.items[:3]))
    results["bench"]["notes"] = [EVIL]
    results["bench"]["name"] = results["arms"][0]["url"] = results["items"][0]["id"] = EVIL
    results["arms"][1]["model"] = "x | `y` | <b>"
    results["verdict"]["line"] = EVIL
    results["verdict"]["clauses"] = [{"text": EVIL, "verdict": "improved"}]
    page = Page(render_report(results))
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    text = to_markdown([build_report(results)])
    assert not {"script", "img", "b"} & set(Page(text).tags)
    rows = [line for line in text.splitlines() if line.startswith("| expert")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 6


def test_a_headline_within_the_noise_is_warned_about(tmp_path):
    items = [item for item in BENCH.items if item.slice == "KRI-K"]
    results = write_report(stored(tmp_path, {"base": knows, "full": knows}, repeat=2, items=items))
    assert not [one for one in results["warnings"] if one["code"] == "KTB826"]
    for one in results["contrasts"]:
        one["verdict"], one["mean"] = "improved", 0.09
    for arm in ("base", "full"):
        results["repeat"]["noise"][arm]["task"]["floor"] = 0.14  # of two means of two: 0.14/sqrt(2)
    told = [one for one in check_validity(results) if one.code == "KTB826"]
    assert [one.where for one in told] == ["task: full − base"]
    assert "(0.10)" in told[0].found
    results["repeat"]["n"] = 4
    assert not [one for one in check_validity(results) if one.code == "KTB826"]


def test_a_judge_is_an_axis_of_its_own(tmp_path):
    """The stored judge of the golden files, with evidence that would break the page."""
    judged(tmp_path)
    out = tmp_path / "run"
    path, card = out / "judgements.jsonl", out / "judge.json"
    path.write_text(path.read_text("utf-8").replace("seen", json.dumps(json.dumps(EVIL)[1:-1])[1:-1]))
    card.rename(tmp_path / "judge.json")
    plain = score_run(out)
    assert (plain["axes"], plain["judge"], plain["pairs"]) == (["task"], None, [])
    (tmp_path / "judge.json").rename(card)
    results = score_run(out)
    validate(results)
    assert results["axes"] == ["task", "judge"]
    asked = {key: results["judge"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert results["costs"] == {"@judge": {**asked, "answers": 96}, **plain["costs"]}
    assert results["verdict"]["judge"] == results["contrasts"][-2]["verdict"]
    assert "judged quality: " in results["verdict"]["line"]
    # Nothing of the judge leaks into what rules and golds say.
    assert results["tables"]["task"] == plain["tables"]["task"]
    page = Page(render_report(results))
    read = [answer for row in results["items"] for answer in row["answers"].values()]
    assert page.text.count(EVIL) == sum(len(one["judge_checks"]) for one in read) > 50
    assert page.tags.count("script") == 1
    assert "judge: parse-fail" in page.text


def test_a_dialogue_is_shown_turn_by_turn(tmp_path):
    out = stored(tmp_path, {"base": knows, "full": knows}, items=BENCH.items[:2])
    lines = (out / "answers.jsonl").read_text("utf-8").splitlines()
    turns = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": "第二句。"}]
    lines[0] = json.dumps({**json.loads(lines[0]), "turns": turns})
    (out / "answers.jsonl").write_text("\n".join([*lines, ""]), "utf-8")
    results = write_report(out)
    assert results["items"][0]["answers"]["base"]["turns"] == turns
    page = Page((out / "report.html").read_text("utf-8"))
    assert page.tags.count("script") == 1
    assert EVIL in page.text
    assert "第二句。" in page.text
    validate(results)
    (out / "contamination.json").write_text("{}")
    with pytest.raises(KtbridgeError, match="is damaged"):
        write_report(out)


def test_several_benches_have_an_index(tmp_path):
    items = BENCH.select(("KRI-K", "PES"), limit=16)
    answers = {"base": knows, "full": lambda item, nth: "嗯。"}
    for name in ("one", "two"):
        stored(tmp_path / name, answers, items=items)
    (tmp_path / "none").mkdir()
    write_benches(tmp_path, [tmp_path / name for name in ("one", "two", "none")])
    index = write_report(tmp_path)
    assert [one["name"] for one in index["benches"]] == ["one", "two", "none"]
    assert [text for text in failures(index) if text.startswith("none: ")]
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    links = [value for name, value in page.attributes if name == "href"]
    assert links[:2] == ["one/report.html", "two/report.html"]
    assert all((tmp_path / link).is_file() for link in links[:2])
    files = [tmp_path / name for name in ("results.json", "report.html", "report.md")]
    before = [path.read_bytes() for path in files]
    write_report(tmp_path)
    assert [path.read_bytes() for path in files] == before
    runs = [one["results"] for one in index["benches"] if one["results"]]
    problems = check_gates((parse_gate("KRI<-0.2"), parse_gate("PES<-0.9")), runs)
    assert [one.where for one in problems] == ["nekobench: --fail-on KRI<-0.2"] * 2
    with pytest.raises(UsageError, match="has no slice 'NOPE'"):
        check_gates((parse_gate("NOPE<0"),), runs)


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("KRI-K<-0.2", True),
        ("task:KRI-K <= -1", True),
        ("KRI-K<-1", False),
        ("high(KRI-K)<0", True),
        ("low(task:overall)<-0.1", True),
        ("persona:KRI-K<0", False),
        ("CTRL<0", True),  # not asked: nothing was shown
    ],
)
def test_gates(tmp_path, text, fails):
    items = [item for item in BENCH.items if item.slice == "KRI-K"]
    out = stored(tmp_path, {"base": knows, "full": lambda item, nth: "嗯。"}, items=items)
    problem = parse_gate(text).check(score_run(out))
    assert (problem is not None) == fails
    if problem:
        assert problem.code == "KTB840"
        assert text in problem.where


@pytest.mark.parametrize("text", ["", "KRI", "KRI<", "<-0.2", "KRI=1", "mean(KRI)<0", "a:<1", "K<x"])
def test_what_is_no_gate(text):
    with pytest.raises(UsageError, match="--fail-on"):
        parse_gate(text)


def test_a_gate_for_no_slice_is_refused_before_anything_is_asked(tmp_path):
    other = load_bench("generic")
    fine = [parse_gate(text) for text in ("KRI<0", "task:overall<0", "persona:overall<0")]
    refuse_unknown(fine, [BENCH, other], judged=False)
    refuse_unknown([parse_gate("judge:overall<0")], [BENCH], judged=True)
    for text, benches, said in (
        ("NOPE<0", [BENCH, other], "has no slice 'NOPE'"),
        ("overall<0", [BENCH], "names no axis"),
        ("judge:overall<0", [BENCH, other], "no axis 'judge'"),
        ("persona:overall<0", [other], "no axis 'persona'"),
    ):
        with pytest.raises(UsageError, match=said):
            refuse_unknown([parse_gate(text)], benches, judged=False)
    results = score_run(stored(tmp_path, {"base": knows, "full": knows}, items=BENCH.items[:2]))
    for text in ("NOPE<0", "voice:KRI-K<0", "overall<0", "judge:KRI-K<0"):
        with pytest.raises(UsageError, match="--fail-on"):
            parse_gate(text).check(results)


@pytest.mark.parametrize(
    ("axis", "low", "high", "p", "clusters", "word"),
    [
        ("task", 0.02, 0.2, 0.01, 9, "improved"),
        ("task", 0.02, 0.2, 0.2, 40, "may have improved"),
        ("task", -0.09, -0.02, 0.2, 40, "may have dropped"),
        ("task", -0.3, -0.02, 0.01, 9, "dropped"),
        ("task", -0.3, 0.1, 0.3, 40, "inconclusive"),
        ("task", -0.05, 0.3, 0.3, 36, "within margin"),
        ("task", -0.05, 0.3, 0.3, 34, "inconclusive"),
        ("judge", -0.05, 0.3, 0.3, 40, "within margin"),
        ("persona", -0.05, 0.3, 0.3, 40, "inconclusive"),
        ("persona", -0.05, 0.05, 0.9, 40, "within margin"),
    ],
)
def test_words_for_a_contrast(axis, low, high, p, clusters, word):
    contrast = {"low": low, "high": high, "clusters": clusters}
    assert decide_verdict("overall", axis, contrast, p, p, 0.1) == word


@pytest.mark.parametrize(
    ("verdict", "mean", "low", "high", "text"),
    [
        ("improved", 0.62, 0.48, 0.75, " ↑ 0.62 [0.48, 0.75]"),
        ("dropped", -0.21, -0.31, -0.12, " ↓ 0.21 [0.12, 0.31] beyond margin"),
        ("dropped", -0.21, -0.37, -0.05, " ↓ 0.21 [0.05, 0.37]"),
        ("may have dropped", -0.1, -0.2, -0.01, ": may have dropped by 0.10 [0.01, 0.20]"),
        ("inconclusive", 0.1, -0.2, 0.4, ": inconclusive, +0.10 [−0.20, +0.40]"),
        ("within margin", 0.0, -0.05, 0.05, ": within margin, 0.00 [−0.05, +0.05]"),
    ],
)
def test_a_finding_in_few_words(verdict, mean, low, high, text):
    contrast = {"verdict": verdict, "mean": mean, "low": low, "high": high, "n": 3}
    assert clause_text(contrast | {"detectable": 0.2}, 0.1) == text
    if verdict == "inconclusive":
        assert "too few items" in clause_text(contrast | {"detectable": None}, 0.1)


@pytest.mark.parametrize(
    ("before", "after", "gone", "new"),
    [
        ("我们今天去公园吧", "主人，我们今天去海边吧喵", ["公园吧"], ["主人，", "海边吧喵"]),
        ("I like green tea.", "I like black tea.", ["green"], ["black"]),
        ("same", "same", [], []),
    ],
)
def test_differences_are_words_or_characters(before, after, gone, new):
    left, right = diff_words(before, after)
    assert [text for changed, text in left if changed] == gone
    assert [text for changed, text in right if changed] == new
    assert "".join(text for _, text in left) == before
    assert "".join(text for _, text in right) == after


def test_texts_with_nothing_in_common_are_not_marked():
    assert diff_words("完全不同的话", "something else entirely") is None
    assert diff_words("a b " * 5000, "b a " * 5000) is None


def test_numbers_are_signed_and_an_end_near_zero_shows_its_side():
    assert interval({"mean": -0.1, "low": -0.2, "high": -0.004}) == "−0.10 [−0.20, −0.004]"
    assert interval({"mean": 0.625, "low": 0.0, "high": 0.2}) == "+0.62 [0.00, +0.20]"
    assert signed(-0.004) == "0.00"
