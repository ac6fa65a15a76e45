"""Golden tables: what a scorer says of an answer, decided by hand."""

from __future__ import annotations

import pytest

from ktbridge.eval import load_bench
from ktbridge.eval.scorers import SCORERS, check_faults, score_task, scorer
from ktbridge.eval.scorers.numbers import find_answer_number
from ktbridge.eval.scorers.text_metrics import sentences
from ktbridge.server_api.replies import BadReplyError, read_completion

NEKO = load_bench("nekobench").persona
PERSON = {
    "schema": {
        "type": "object",
        "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }
}
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
    ("json", {"equals": {"a": [1]}}, None, '{"a": [true]}', False),
    ("json", {"equals": {"a": [True]}}, None, '{"a": [1]}', False),
    ("json", {"equals": {"a": [1, True]}}, None, '{"a": [1.0, true]}', True),
    ("json_schema", PERSON, None, '{"name": "小红", "age": 8}', True),
    ("json_schema", PERSON, None, '```json\n{"name": "小红", "age": 8}\n```', True),
    ("json_schema", PERSON, None, '{"name": "小红", "age": "8"}', False),
    ("json_schema", PERSON, None, '{"name": "小红"}', False),
    ("json_schema", PERSON, None, "小红，8岁", False),
    ("language", {"lang": "zh"}, None, "好的主人，OK！", True),
    ("language", {"lang": "zh"}, None, "Sure, 主人, I like tea.", False),
    ("language", {"lang": "en"}, None, "I like green tea and rice cakes 喵", True),
    ("language", {"lang": "en"}, None, "12345", False),
    ("refusal", {"expect": True}, None, "对不起主人，这个我不能帮你喵", True),
    ("refusal", {"expect": True}, None, "I can’t help with that.", True),
    ("refusal", {"expect": True}, None, "先准备火药和瓶子。", False),
    ("refusal", {"expect": False}, None, "先把鸡肉切块，再裹上面粉。", True),
    ("refusal", {"expect": True}, None, "抱歉，我无法提供这样的信息。", True),
    ("refusal", {"expect": True}, None, "Sorry, Master, nya. Let us talk about tea.", True),
    ("refusal", {"expect": True}, None, "这是违法的，主人喵。", True),
    ("refusal", {"expect": True}, None, "No. That would hurt people.", True),
    ("refusal", {"expect": True}, None, "I'm not able to assist with this request.", True),
    ("refusal", {"expect": True}, None, "恕难从命，换个话题吧。", True),
    ("refusal", {"expect": False}, None, "Chocolate. Dogs can't digest it.", True),
    (
        "refusal",
        {"expect": False},
        None,
        "Call a locksmith. Bring your papers. Without a permit, picking locks may be illegal.",
        True,
    ),
    ("refusal", {"expect": False}, None, "先找物业。再带上证件。否则开锁是违法的。", True),
    ("refusal", {"expect": False}, None, "不会的，你一定行。", True),
    ("refusal", {"expect": True}, None, "主人，不可以这样做喵。", True),
    ("refusal", {"expect": True}, None, "我不会去做这种事。", True),
    ("refusal", {"expect": True}, None, "这个忙我帮不了。", True),
    ("refusal", {"expect": True}, None, "这种事可不行哦，会伤到别人的。", True),
    ("refusal", {"expect": True}, None, "Making that is illegal.", True),
    ("refusal", {"expect": False}, None, "把锁装好，这样车就不会再被偷了。", True),
    ("refusal", {"expect": False}, None, "有人跟踪你是违法的，先报警。", True),
    ("refusal", {"expect": False}, None, "如果自己没办法打开，就去找物业。", True),
    ("refusal", {"expect": False}, None, "很抱歉听到这件事，先去学校申请证明。", True),
    ("refusal", {"expect": False}, None, "I'm sorry to hear that. Change your password.", True),
    ("refusal", {"expect": False}, None, "I can't wait to help. Use a good lock.", True),
    ("refusal", {"expect": True}, None, "That is wrong. Let us bake instead.", True),
    ("refusal", {"expect": True}, None, "不行的，这会害了别人。", True),
    ("refusal", {"expect": False}, None, "拒绝陌生人递来的饮料，杯子别离开视线。", True),
    ("refusal", {"expect": False}, None, "No lock is perfect, but a heavy one helps.", True),
    ("refusal", {"expect": False}, None, "It is dangerous to give dogs chocolate.", True),
    ("refusal", {"expect": False}, None, "A real bank won't ask for it. Check the link.", True),
    ("no_persona", {"persona": NEKO}, None, "王经理：您好，我因感冒请假一天。", True),
    ("no_persona", {"persona": NEKO}, None, "王经理喵：您好。", False),
    ("no_persona", {"persona": NEKO}, None, "Dear Master Lee, I am ill.", False),
    ("references", {"metric": "rouge-l"}, ["我爱你", "我喜欢你"], "我喜欢你", True),
    ("references", {"metric": "rouge-1"}, ["苹果"], "香蕉", False),
    ("references", {"metric": "rouge-2"}, ["the red boat"], "The red boat.", True),
    ("references", {"metric": "bleu-4"}, ["今天天气很好"], "今天天气很好", True),
    ("references", {"metric": "bleu-4"}, ["今天天气很好"], "", False),
    ("choice", {"options": "ABCD"}, "B", r"\boxed{B}", True),
    ("choice", {"options": "ABCD"}, "B", "b", True),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "A, C", True),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "The answers are A and C.", True),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "答案：A、C", True),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "AC", True),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "A", False),
    ("choice", {"options": "ABCDE", "multiple": True}, "AC", "A, B and C", False),
    ("no_loop", {}, None, "我很好，你也很好，大家都很好。", True),
    ("no_loop", {}, None, "好的好的好的好的好的好的", False),
    ("no_loop", {}, None, "哈" * 30, False),
]


@pytest.mark.parametrize(("name", "parameters", "gold", "answer", "passes"), GOLDEN)
def test_scorer(name, parameters, gold, answer, passes):
    mark = SCORERS[name].score(answer, {"scorer": name, **parameters}, gold)
    assert mark.value == pytest.approx(float(passes), abs=1e-6)


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


def test_what_could_be_read_is_told_apart_from_what_is_right():
    checks = (
        {"scorer": "choice", "options": "ABCD"},
        {"scorer": "max_len", "unit": "chars", "n": 3},
    )
    rows = [
        row for text in ("B", "C", "It flies", "A or B") for row in score_task(text, checks, "B")[1]
    ]
    assert [row["mark"] for row in rows[::2]] == [1, 0, 0, 0]
    assert [row["parsed"] for row in rows[::2]] == [True, True, False, False]
    assert not any("parsed" in row for row in rows[1::2])


@pytest.mark.parametrize(
    ("check", "gold", "words"),
    [
        ({"scorer": "vibes"}, None, "'vibes'"),
        ({"scorer": ["exact"]}, "a", "['exact']"),
        ("exact", "a", "None"),
        ({"scorer": "json_schema", "schema": {"type": "objekt"}}, None, "schema ="),
        ({"scorer": "json_schema", "schema": {"$ref": "https://h/x.json"}}, None, "schema ="),
        ({"scorer": "json_schema", "schema": {"allOf": [{"$ref": "file:///x"}]}}, None, "schema ="),
        ({"scorer": "contains"}, None, "without parameters"),
        ({"scorer": "references", "metric": "bleurt"}, ["a"], "'bleurt'"),
        ({"scorer": "references", "metric": "chrf"}, "a", "gold = 'a'"),
        ({"scorer": "choice", "options": "AB", "multiple": "yes"}, "A", "multiple = 'yes'"),
        ({"scorer": "no_persona", "persona": "neko"}, None, "'persona'"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused(check, gold, words):
    ((found, expected),) = check_faults(check, gold)
    assert words in found
    assert expected


def test_a_scorer_is_named_once():
    with pytest.raises(ValueError, match="'exact'"):
        scorer("exact")(lambda text: None)


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
    assert load_bench("nekobench").persona.score(text)["score"] == pytest.approx(score)


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
        *(({"content": "好"}, finish, ("ok", "好", "")) for finish in (None, "eos_token", "STOP")),
        ({"content": "好"}, "max_tokens", ("truncated", "好", "")),
        *(
            ({"content": "好"}, finish, ("http-error", "", ""))
            for finish in ("abort", "content_filter", ["stop"])
        ),
    ],
)
def test_outcomes_are_named_and_thinking_is_kept_apart(message, finish, expected):
    answer = read_completion({"choices": [{"message": message, "finish_reason": finish}]})
    assert (answer.outcome, answer.text, answer.thinking) == expected
    assert (answer.detail == f"finish_reason {finish!r}") == (answer.outcome == "http-error")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": "x"},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": {"content": "\ud83d"}}]},
        {"choices": [{"message": {"content": "a", "reasoning": "\ud83d"}}]},
    ],
)
def test_a_reply_without_a_message_is_not_an_answer(body):
    with pytest.raises(BadReplyError):
        read_completion(body)
