"""Answers of a model that doesn't stop: scored, reported and shown in bounded time, none ends a run.

Nothing here looks at a clock: with a scorer of quadratic time these tests would take hours.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from evalruns import BENCH, knows, stored, validate

from ktbridge.eval import load_bench, score_run, write_report
from ktbridge.eval.scorers import FAMILIES, SCORERS, measure_texts, registry, score_task
from ktbridge.eval.scorers.numbers import chinese_number, find_answer_number

from .test_eval_scorers import MARKS, check_of

NEKO = load_bench("nekobench")
LONG = 400_000
TEXTS = {
    "one ideograph": "的" * LONG,
    "zeros": "零" * LONG,
    "digits": "1" * LONG,
    "numbers": "1 " * (LONG // 8),
    "fractions": "三分之" * (LONG // 8),
    "dots": "." * LONG + "x",
    "brackets": "(*" * (LONG // 2),
    "spaces": "answer" + " \n" * (LONG // 2) + "x",
    "fence": "```json\n" + "\n" * LONG + "x```",
    "list": "[" + ",".join(['"x"'] * (LONG // 4)) + "]",
    "nesting": "[" * LONG,
}
# One check of each scorer, and of letters one and several.
CHECKS = {
    (name, "multiple" in more): (check_of(name, more), gold) for name, more, gold, *_ in MARKS["answers"]
}


@pytest.mark.quick("^(fence|brackets|nesting|one ideograph)$")
@pytest.mark.parametrize("name", TEXTS)
def test_every_scorer_ends(name):
    assert {scorer for scorer, _ in CHECKS} == set(SCORERS)
    for check, gold in CHECKS.values():
        value, rows = score_task(TEXTS[name], [check], gold)
        assert 0 <= value <= 1
        assert len(rows[0]["reason"]) < 400
    NEKO.persona.score(TEXTS[name])


@pytest.mark.quick("std|lf")
@pytest.mark.parametrize("family", FAMILIES)
def test_text_metrics_measure_the_beginning_of_an_endless_answer(family):
    reference = ["今天的天气很好，我们去公园。"]
    found = measure_texts(family, ["今天的天气很好。" + "的" * LONG, reference[0]], [reference] * 2)
    assert "first 10000 characters of 1 longer" in found["signature"]
    assert found["length_ratio"] > 1000
    short = measure_texts(family, reference, [reference])
    assert "longer" not in short["signature"]


def test_numbers_without_end_are_no_number():
    assert find_answer_number("万亿" * 1000) is None
    assert find_answer_number("零" * 100_000) is None
    assert find_answer_number("9" * 100_000) is None
    assert find_answer_number("万亿" * 1000 + "。答案是12") == 12
    assert [chinese_number(text) for text in ("一万亿", "三亿五千万", "一万万")] == [
        10**12,
        350_000_000,
        10**8,
    ]


def test_a_scorer_that_fails_on_an_answer_is_named_and_the_rest_is_scored(tmp_path, monkeypatch):
    def fails(text: str, gold: float):
        raise RecursionError("maximum recursion depth exceeded")

    items = [item for item in BENCH.items if item.slice in ("KRI-R", "KRI-K")]
    known = registry.SCORERS["numeric"]
    monkeypatch.setitem(registry.SCORERS, "numeric", replace(known, function=fails))
    results = write_report(stored(tmp_path, {"base": knows, "full": knows}, items=items, repeat=2))
    validate(results)
    numeric = [one for one in items if one.checks[0]["scorer"] == "numeric"]
    assert 0 < len(numeric) < len(items)
    assert results["outcomes"]["full"]["score-error"] == len(numeric)
    assert results["tables"]["task"]["KRI-K"]["full"]["mean"] == 1
    found = [one for one in results["warnings"] if one["code"] == "KTB828"]
    assert [(one["severity"], one["where"]) for one in found] == [
        ("error", "arm base"),
        ("error", "arm full"),
    ]
    assert "numeric: RecursionError" in found[0]["found"]
    monkeypatch.setitem(registry.SCORERS, "numeric", known)
    assert "score-error" not in score_run(tmp_path)["outcomes"]["full"]


@pytest.mark.slow
def test_long_answers_are_folded_cut_and_cannot_turn_the_text_around(tmp_path):
    texts = ["啊" * 2_000_000, "line\n" * 9, "short", "safe \u202egnp.exe"]
    items = BENCH.items[: len(texts)]
    place = {item.id: i for i, item in enumerate(items)}
    out = stored(tmp_path, {"base": knows, "full": lambda item, nth: texts[place[item.id]]}, items=items)
    write_report(out)
    page = (out / "report.html").read_text("utf-8")
    assert len(page) < 400_000
    assert "show the first 16,000 and the last 4,000 of 2,000,000 characters" in page
    articles = re.findall(r"<article.*?</article>", page, re.S)
    assert [one.count('<input type="checkbox" class="more"') for one in articles] == [1, 1, 0, 0]
    assert all(f'<label for="{place}"' in page for place in re.findall(r'class="more" id="(.*?)"', page))
    assert "safe [U+202E]gnp.exe" in articles[3]
    assert "\u202e" not in page
    # All of it is in results.json.
    rows = json.loads((out / "results.json").read_text("utf-8"))["items"]
    assert [row["answers"]["full"]["text"] for row in rows] == texts
