"""Messages as other tools write them: turns in several of them, thoughts, switches, content parts."""

import json

import pytest
from trainrun import ASK, TELL, messages_of, settings, write_lines

from ktbridge.sft.data import load_rows
from ktbridge.sft.data.messages import SWITCHES

DONE = {"role": "assistant", "content": "done"}
RESULT = {"role": "tool", "content": "2"}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SAID_CALL = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'}
THINKING = {**TELL, "content": "<think>\nhm\n</think>"}
TURN = {**CALLING, "reasoning_content": "hm"}


def read(tmp_path, *rows, stage="sft", **changes):
    path = write_lines(tmp_path / "rows.jsonl", rows)
    return load_rows(settings(path, stage=stage, **changes))


def answer(content, **more):
    return {"messages": [ASK, {"role": "assistant", "content": content, **more}]}


def turn(*messages):
    return {"messages": [ASK, *messages]}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([THINKING, SAID_CALL], TURN),
        ([{**TELL, "content": None, "thinking": "hm"}, CALLING], TURN),
        (
            [{**TELL, "content": "Look:"}, SAID_CALL, SAID_CALL],
            {**CALLING, "content": "Look:", "tool_calls": [CALL] * 2},
        ),
        ([THINKING, {**TELL, "content": "Look:"}, CALLING], {**TURN, "content": "Look:"}),
        ([THINKING, TELL], {**TELL, "reasoning_content": "hm"}),
        (
            [{**TELL, "content": "a\n"}, {**TELL, "content": "b"}],
            {**TELL, "content": "a\n\nb"},
        ),
    ],
    ids=["block", "field", "parallel", "three", "thoughts", "answers"],
)
@pytest.mark.parametrize("form", ["messages", "completion", "kto", "dpo"])
def test_assistant_messages_in_a_row_are_one_turn(tmp_path, messages, expected, form):
    """In every form of rows and every stage, and it is said once with the number of rows."""
    row = {
        "messages": {"messages": [ASK, *messages, RESULT, DONE]},
        "completion": {"prompt": [ASK, messages[0]], "completion": [*messages[1:], RESULT, DONE]},
        "kto": {"messages": [ASK, *messages], "label": True},
        "dpo": {"prompt": [ASK], "chosen": [ASK, *messages], "rejected": [ASK, DONE]},
    }[form]
    rows = read(tmp_path, row, row, stage=form if form in ("kto", "dpo") else "sft")
    if form == "dpo":
        assert messages_of(rows) == [[ASK, expected]] * 2
    else:
        end = [] if form == "kto" else [RESULT, DONE]
        assert messages_of(rows) == [[ASK, expected, *end]] * 2
    (note,) = rows.notes
    assert (note.code, note.severity) == ("KTD062", "info")
    assert note.found.startswith("2 of 2 rows")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes"),
        ("\nhm</think>yes", "<think>\nhm</think>yes"),
        ("</think>\n\nyes", "<think>\n</think>\n\nyes"),
        (
            "<think>a</think>\n<think>\nb\n</think>\n\nyes",
            "<think>\na\n\nb\n</think>\n\nyes",
        ),
        (" <think>a `</think>` b <think> c</think>yes", None),
        ("write '<think>' there", None),
    ],
)
@pytest.mark.parametrize("form", ["messages", "alpaca", "dpo"])
def test_thoughts_are_one_block_at_an_answers_head(tmp_path, content, expected, form):
    row = {
        "messages": answer(content),
        "alpaca": {"instruction": ASK["content"], "output": content},
        "dpo": {"prompt": ASK["content"], "chosen": content, "rejected": "no"},
    }[form]
    rows = read(tmp_path, row, stage="dpo" if form == "dpo" else "sft")
    (found,) = messages_of(rows)
    assert found[-1] == {**TELL, "content": expected or content}
    assert not rows.notes


@pytest.mark.parametrize("key", SWITCHES)
def test_each_tools_switch_of_a_message_is_its_weight(tmp_path, key):
    for value in (0, 0.0, False, [0, 0], 1, 1.0, True, [1]):
        learned = value not in (0, [0, 0])
        row = {"messages": [{**ASK, key: 0}, {**TELL, key: value}, ASK, DONE]}
        rows = read(tmp_path, row)
        first = TELL if learned else {**TELL, "weight": 0}
        assert messages_of(rows) == [[ASK, first, ASK, DONE]]
        assert not rows.notes


def v1(role, *parts, weight=0.0):
    content = [{"type": kind, "value": value} for kind, value in parts]
    return {"role": role, "content": content, "loss_weight": weight}


def test_rows_of_llama_factory_v1_are_read(tmp_path):
    ask, call = v1("user", ("text", ASK["content"])), ("tool_call", SAID_CALL["content"])
    row = {
        "messages": [
            ask, v1("assistant", ("reasoning", "hm"), call, weight=1.0),
            v1("tool", ("text", "2")),
            v1("assistant", ("text", "i am "), ("text", "a cat"), weight=1.0),
        ],
        "tools": json.dumps([TOOL]), "_dataset_name": "mine",
    }  # fmt: skip
    rows = read(tmp_path, row)
    assert messages_of(rows) == [[ASK, TURN, RESULT, TELL]]
    assert not rows.notes
    pair = {
        "chosen_messages": [ask, v1("assistant", ("text", "done"), weight=1.0)],
        "rejected_messages": [ask, v1("assistant", ("text", "i am a cat"), weight=1.0)],
    }
    (found,) = read(tmp_path, pair, stage="dpo").rows
    assert found.answers == [[ASK, DONE], [ASK, TELL]]


PAIR = {"prompt": "q", "chosen": "b", "rejected": "c"}
REFUSED = {
    "sft": [
        (answer("<think>\nhm, since"), "thoughts that never end: <think> without </think>"),
        (answer("Well. <think>\nhm, since"), "thoughts that never end"),
        (answer("<think>a</think>b<think>c"), "thoughts that never end"),
        (answer("Well. <think>a</think>b"), "words in front of thoughts: <think> begins an answer"),
        (answer("<think>a</think>b<think>c</think>d"), "<think> behind an answer's words"),
        (answer("a</think>b</think>c"), "</think> behind an answer's words"),
        (answer("<think>\na\n</think>\n\n"), "thoughts without an answer or a tool call behind them"),
        (answer([{"type": "reasoning", "value": " "}]), "an empty assistant message"),
        (answer("", reasoning="a"), "thoughts without an answer or a tool call"),
        ({"instruction": "say", "output": "<think>a"}, "thoughts that never end"),
        ({"prompt": "say", "completion": "<think>a"}, "thoughts that never end"),
        (turn(TELL, {**TELL, "weight": 0}), "of which only some are learned: they are one turn"),
        (turn(CALLING, TELL), "an answer behind a tool call whose result is missing"),
        (turn(TELL, TURN), "thoughts behind the words of the same turn"),
        (turn({**ASK, "train": True}, TELL), "a user message with train: only answers are learned"),
        (answer("a", loss_scale=0.3), "loss_scale 0.3: an answer is learned (1) or not (0)"),
        (answer("a", loss_mask=[0, 1]), "loss_mask [0, 1]: an answer is learned (1) or not (0)"),
        (answer("a", weight=0, train=True), "switches that contradict each other: weight and train"),
        (answer("a", masked=True), "a message with masked: it may say what is learned, which weight,"),
        (answer("a", do_train="no"), "a message with do_train: it may say"),
        (answer("a", learnable="False"), "a message with learnable: it may say"),
        (answer("a", train_detail=[{"train": False}]), "a message with train_detail: it may say"),
        ({**turn(TELL), "loss_weight": 0.5}, "with loss_weight 0.5: every row counts alike"),
        ({"instruction": "a", "output": "b", "train": False}, "with train False: every row counts"),
        (answer([{"type": "text", "values": "a"}]), "without text: its keys are type, values"),
        (
            turn({"role": "asistant", "content": "a"}),
            "the unknown role 'asistant': message 2; known are system, user, assistant, human, gpt, tool, "
            "function, observation, tool_response, function_call, tool_call. Did you mean assistant?",
        ),
        (turn({"content": "a"}), "a message without the key from: message 2 has the keys content"),
        # Beside those of tests/golden/mistakes.py, which holds their reasons as well.
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "an empty assistant message"),
        ({"messages": [ASK, {**TELL, "tool_calls": [{"name": "f", "arguments": "5"}]}]}, "not a JSON object"),
        ({"messages": [{**ASK, "tool_calls": [{"name": "f"}]}, TELL]}, "a user message with tool_calls"),
        ({"messages": [{**ASK, "loss": True}, TELL]}, "a user message with loss: only answers"),
        ({"messages": [ASK, {**TELL, "content": "<think>a</think>b", "reasoning": "c"}]}, "thoughts twice"),
        ({"messages": [ASK, "yes"]}, "a message that is a str"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, TELL]},
            "an image without a path, data URL or bytes",
        ),
        ({**turn(TELL), "tools": [{"title": "f"}]}, "tools that are not a list of functions with a name"),
        ({**turn(TELL), "images": ["a.png"]}, "images without a place of their own: 1 for 0"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "tool calls that are not JSON"),
        ({"instruction": "say", "output": "a", "history": [["q"]]}, "history that is not a list of"),
        ({"instruction": "say", "output": "\ud800"}, "half a character (a lone surrogate)"),
    ],
    "dpo": [
        ({**PAIR, "chosen": "c"}, "chosen and rejected are the same"),
        ({**PAIR, "rejected": ""}, "no pair of answers"),
        (turn(TELL), "no pair of answers"),
        ({**PAIR, "prompt": [ASK, TELL]}, "does not end in a user message"),
        ({**PAIR, "chosen": [ASK, TELL]}, "chosen is not one assistant message"),
        ({**PAIR, "chosen": [ASK, TELL], "rejected": [ASK, DONE]}, "chosen is not one"),
    ],
    "kto": [
        ({**turn(TELL), "label": "perhaps"}, "a judgement that is neither true nor false: 'perhaps'"),
        ({**turn(TELL), "label": None}, "no judgement: stage kto needs kto_tag (or label), true or"),
        ({"messages": [TELL], "kto_tag": True}, "an answer that is not to be learned, or without a prompt"),
        ({**PAIR, "kto_tag": True}, "a preference pair: stage dpo trains on it"),
    ],
}  # fmt: skip
GOOD = {"sft": turn(TELL), "dpo": PAIR, "kto": {**turn(TELL), "kto_tag": True}}


def test_tags_among_the_values_of_a_call_are_no_thoughts(tmp_path):
    said = json.dumps({"name": "add", "arguments": {"a": "use <think> first"}})
    call = {"type": "function", "function": json.loads(said)}
    row = turn({"role": "tool_call", "content": said}, RESULT, DONE)
    thoughtful = turn({"role": "tool_call", "content": f"hm</think>{SAID_CALL['content']}"}, RESULT, DONE)
    first, second = messages_of(read(tmp_path, row, thoughtful))
    assert first[1] == {**CALLING, "tool_calls": [call]}
    assert second[1] == TURN


@pytest.mark.parametrize("stage", REFUSED)
def test_what_would_be_learned_as_something_else_is_refused_with_the_reason(tmp_path, stage):
    rows = read(tmp_path, *(row for row, _ in REFUSED[stage]), GOOD[stage], stage=stage)
    assert [row.where.rpartition(" ")[2] for row in rows.rows] == [str(len(REFUSED[stage]) + 1)]
    for refused, (_, why) in zip(rows.refused, REFUSED[stage], strict=True):
        assert why in refused.why


def test_keys_of_messages_that_say_nothing_of_learning_are_noted(tmp_path):
    (note,) = read(tmp_path, answer("a", score=1, mask="none"), turn(TELL)).notes
    assert note.found == "keys of messages that are not trained on: mask (1 rows), score (1 rows)"
