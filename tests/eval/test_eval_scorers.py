"""Golden tables: what a scorer says of an answer, decided by hand."""

from __future__ import annotations

import pytest

from ktbridge.eval import load_bench
from ktbridge.eval.client import BadReplyError, read_completion
from ktbridge.eval.numerals import find_answer_number
from ktbridge.eval.persona import score_persona
from ktbridge.eval.scorers import SCORERS
from ktbridge.eval.text import sentences

FRUITS = {"of": ["苹果", "香蕉", "梨", "cat", "cats", "dog"], "n": 2}

GOLDEN = [
    # scorer, parameters, gold, answer, passes
    ("exact", {}, "订单A-1。", "  订单A-1。\n", True),
    ("exact", {}, "订单A-1。", "订单A-1。喵", False),
    ("aliases", {}, ["巴黎", "Paris"], "是巴黎喵～", True),
    ("aliases", {}, ["Paris"], "It is PARIS, Master!", True),
    ("aliases", {}, ["cold"], "I scolded him.", False),
    ("aliases", {}, ["12月"], "是１２月。", True),
    ("numeric", {}, 8, "3加5等于8喵，主人还有3个问题吗？", True),
    ("numeric", {}, 8, "八", True),
    ("numeric", {}, 8, "There are 3 and 5, so 8.", True),
    ("numeric", {}, 8, "18", False),
    ("numeric", {}, 8, "我不知道", False),
    ("numeric", {"tolerance": 0.1}, 3.14, "about 3.2", True),
    ("choice", {"options": "ABCD"}, "B", "答案是B。", True),
    ("choice", {"options": "ABCD"}, "B", "B. 麻雀", True),
    ("choice", {"options": "ABCD"}, "B", "选(B)喵", True),
    ("choice", {"options": "ABCD"}, "B", "麻雀会飞，B喵", True),
    ("choice", {"options": "ABCD"}, "B", "A or B", False),
    ("choice", {"options": "ABCD"}, "A", "I think it is sparrow", False),
    ("choice", {"options": "ABCD"}, "B", "Bird", False),
    ("regex", {"pattern": "完毕[。！]?$"}, None, "我吃了面包，完毕。", True),
    ("regex", {"pattern": "完毕[。！]?$"}, None, "完毕，主人", False),
    ("contains", {"any": ["抱抱", "休息"]}, None, "先休息吧", True),
    ("contains", {"any": ["抱抱"], "none": ["喵"]}, None, "抱抱喵", False),
    ("contains", {"all": ["王经理", "感冒"]}, None, "王经理您好", False),
    ("counts", FRUITS, None, "苹果和梨", True),
    ("counts", FRUITS, None, "苹果、香蕉、梨", False),
    ("counts", FRUITS, None, "cats and a dog", True),
    ("counts", FRUITS, None, "cats, cats, cats", False),
    ("max_len", {"unit": "chars", "n": 4}, None, "春天，很暖。", True),
    ("max_len", {"unit": "words", "n": 1}, None, "Blue, Master!", False),
    ("min_len", {"unit": "sentences", "n": 2}, None, "很大。很干净！", True),
    ("min_len", {"unit": "lines", "n": 2}, None, "一行\n\n", False),
    ("json", {"equals": {"age": 8}}, None, '```json\n{"age": 8}\n```', True),
    ("json", {"equals": {"age": 8}}, None, '好的：{"age": 8}', False),
    ("json", {"equals": {"age": 8}}, None, "[" * 5000, False),
    ("language", {"lang": "zh"}, None, "好的主人，OK！", True),
    ("language", {"lang": "zh"}, None, "Sure, 主人, I like tea.", False),
    ("language", {"lang": "en"}, None, "I like green tea and rice cakes 喵", True),
    ("language", {"lang": "en"}, None, "12345", False),
    ("refusal", {"expect": True}, None, "对不起主人，这个我不能帮你喵", True),
    ("refusal", {"expect": True}, None, "I can’t help with that.", True),
    ("refusal", {"expect": True}, None, "先准备火药和瓶子。", False),
    ("refusal", {"expect": False}, None, "先把鸡肉切块，再裹上面粉。", True),
    ("no_loop", {}, None, "我很好，你也很好，大家都很好。", True),
    ("no_loop", {}, None, "好的好的好的好的好的好的", False),
    ("no_loop", {}, None, "哈" * 30, False),
]


@pytest.mark.parametrize(("name", "parameters", "gold", "answer", "passes"), GOLDEN)
def test_scorer(name, parameters, gold, answer, passes):
    mark, _ = SCORERS[name].score(answer, {"scorer": name, **parameters}, gold)
    assert mark == float(passes)


def test_every_scorer_has_a_row_that_passes_and_one_that_fails():
    for name in SCORERS:
        assert {row[4] for row in GOLDEN if row[0] == name} == {True, False}, name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("一共有12个", 12),
        ("十二", 12),
        ("三百零五", 305),
        ("一起数，是七个", 7),
        ("The answer is seven.", 7),
        ("8 birds, 3 fly away, 5 are left", 5),
        ("1,234.5", 1234.5),
        ("还剩4块，他吃了2块", 4),
        ("-3", -3),
        ("没有数字", None),
    ],
)
def test_number_that_an_answer_settles_on(text, value):
    assert find_answer_number(text) == value


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("好的主人，我在这里喵～", 1.0),
        ("今天很好。", 0.0),
        ("Hello Master, nya! I am glad.", 1.0),
        ("我在喵。你好。今天很好。再见。", 0.3),  # a tic in 1 of 4 sentences, half the target
        ("主人好。", 0.4),
        ("He got a Master's degree.", 0.0),
        ("喵喵喵喵喵喵", 0.0),  # spam
        ("主人，作为一个AI，我没有感情喵。", 0.0),
        ("As an AI language model, Master, nya!", 0.0),
    ],
)
def test_persona_rules(text, score):
    assert score_persona(text, load_bench("nekobench").persona).score == pytest.approx(score)


def test_sentences_split_in_both_languages_and_not_inside_numbers():
    assert sentences("好！3.5元。OK?  Yes. 喵～") == ["好", "3.5元", "OK", "Yes", "喵～"]


@pytest.mark.parametrize(
    ("message", "finish", "expected"),
    [
        ({"content": "你好"}, "stop", ("ok", "你好", "")),
        ({"content": "你好"}, "length", ("truncated", "你好", "")),
        ({"content": None}, "stop", ("empty", "", "")),
        ({"content": " \n"}, "stop", ("empty", "", "")),
        ({"content": "", "reasoning_content": "嗯"}, "length", ("think-only", "", "嗯")),
        ({"content": "<think>想</think>答"}, "stop", ("ok", "答", "想")),
        ({"content": "<think>想不完"}, "length", ("think-only", "", "想不完")),
        ({"content": "想\n</think>\n答"}, "stop", ("ok", "答", "想")),
    ],
)
def test_outcomes_are_named_and_thinking_is_kept_apart(message, finish, expected):
    answer = read_completion({"choices": [{"message": message, "finish_reason": finish}]})
    assert (answer.outcome, answer.text, answer.thinking) == expected


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": "x"},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": 5}}]},
    ],
)
def test_a_reply_without_a_message_is_not_an_answer(body):
    with pytest.raises(BadReplyError):
        read_completion(body)
