"""What a scorer says of an answer, by tables that were decided by hand (``golden/marks.yaml``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ktbridge.eval import load_bench
from ktbridge.eval.scorers import SCORERS, check_faults, score_task, scorer
from ktbridge.eval.scorers.numbers import find_answer_number
from ktbridge.eval.scorers.rules import Persona
from ktbridge.eval.scorers.text_metrics import sentences

NEKOBENCH = load_bench("nekobench")
PERSON = {
    "schema": {
        "type": "object",
        "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
}
MARKS = yaml.safe_load(Path(__file__).with_name("golden").joinpath("marks.yaml").read_text("utf-8"))


def check_of(name, parameters):
    known = {"person": PERSON, "neko": {"persona": NEKOBENCH.persona}}
    return {"scorer": name} | (known[parameters] if isinstance(parameters, str) else parameters)


@pytest.mark.parametrize(("name", "parameters", "gold", "answer", "passes"), MARKS["answers"])
def test_scorer(name, parameters, gold, answer, passes):
    mark = SCORERS[name].score(answer, check_of(name, parameters), gold)
    assert mark.value == pytest.approx(float(passes), abs=1e-6)


def test_every_scorer_has_a_row_that_passes_and_one_that_fails():
    for name in SCORERS:
        assert {row[4] for row in MARKS["answers"] if row[0] == name} == {True, False}, name
    with pytest.raises(ValueError, match="'exact'"):
        scorer("exact")(lambda text: None)


@pytest.mark.parametrize(("text", "letter"), MARKS["letters"])
def test_an_article_is_no_choice(text, letter):
    for gold in "AB":
        mark = SCORERS["choice"].score(text, {"options": "ABCD"}, gold)
        assert mark.value == float(gold == letter)


def test_what_could_be_read_is_told_apart_from_what_is_right():
    checks = (
        {"scorer": "choice", "options": "ABCD"},
        check_of("max_len", {"unit": "chars", "n": 3}),
    )
    texts = ("B", "C", "It flies", "A or B")
    rows = [row for text in texts for row in score_task(text, checks, "B")[1]]
    assert [row["mark"] for row in rows[::2]] == [1, 0, 0, 0]
    assert [row["parsed"] for row in rows[::2]] == [True, True, False, False]
    assert not any("parsed" in row for row in rows[1::2])


@pytest.mark.parametrize(("check", "gold", "words"), MARKS["refused"])
def test_a_check_that_makes_no_sense_is_refused(check, gold, words):
    ((found, expected),) = check_faults(check, gold)
    assert words in found
    assert expected


def test_patterns_of_a_persona_are_each_their_own():
    made = {
        "address": {}, "breaks": {}, "max_tics_per_sentence": 1, "name": "x", "target_rate": 1.0,
        "weights": {"address": 0.5, "tic": 0.5},
    }  # fmt: skip
    persona = Persona.model_validate({**made, "tics": {"en": ["(?i)NYA", "meow"]}})
    assert [persona.score(text)["tic_rate"] for text in ("nya.", "meow.", "MEOW.")] == [1, 1, 0]
    assert Persona.model_validate({**made, "tics": {"en": [r"(\w)\1{3}"]}}).score("aaaa.")["tic_rate"] == 1
    for pattern in (r"(\w)\1{3}", "(?P<a>x)"):
        with pytest.raises(ValueError, match="refers to a group"):
            Persona.model_validate({**made, "tics": {"en": ["meow", pattern]}})


@pytest.mark.parametrize(("text", "value"), MARKS["numbers"])
def test_a_number_is_read_whole_or_not_at_all(text, value):
    assert find_answer_number(text) == value


@pytest.mark.parametrize(("text", "score"), MARKS["personas"])
def test_persona_rules(text, score):
    assert NEKOBENCH.persona.score(text)["score"] == pytest.approx(score)


def test_sentences_split_in_both_languages_and_not_inside_numbers():
    assert sentences("好！3.5元。OK?  Yes. 喵～") == ["好", "3.5元", "OK", "Yes", "喵～"]


ITEMS = {item.id: item for item in NEKOBENCH.items}


@pytest.mark.parametrize("name", MARKS["bench"])
def test_a_good_answer_passes_and_the_persona_leaking_in_does_not_where_it_must_not(name):
    item, good = ITEMS[name], MARKS["bench"][name]
    mark, rows = score_task(good, item.checks, item.gold)
    assert mark == 1, rows
    if item.slice == "CTRL":
        assert score_task(good + "主人喵～", item.checks, item.gold)[0] < 1
    if item.slice in ("INS", "CTRL"):
        assert score_task("主人好呀喵～我们来聊天吧！", item.checks, item.gold)[0] < 1


def test_every_gold_answer_passes_its_own_check():
    refusals = {"zh": "对不起，我不能帮你做这件事。", "en": "Sorry, I can't help with that."}
    for item in NEKOBENCH.items:
        if item.gold is not None:
            gold = item.gold[0] if isinstance(item.gold, list) else item.gold
            mark, rows = score_task(str(gold), item.checks, item.gold)
            assert mark == 1, (item.id, rows)
        refused = refusals[item.lang]
        if item.sub == "harmful":
            assert score_task(refused, item.checks, None)[0] == 1
        if item.sub == "harmless":
            assert score_task(refused, item.checks, None)[0] < 1
