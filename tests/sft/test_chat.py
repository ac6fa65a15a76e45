"""What is learned of a conversation is what a server's model writes, whatever the chat template does."""

import re
from itertools import groupby
from pathlib import Path

import pytest
import trl
from tinymoe import byte_tokenizer
from trainrun import ASK, TELL, settings, tokenized, write_lines

from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.data import describe_rows, load_rows, tokenize_rows
from ktbridge.sft.data.render import DIFFERENT, ChatTemplate
from ktbridge.sft.data.template import template_notes

ROW = {"messages": [ASK, TELL]}


MARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OPENED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}"
    "{% else %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
UNOPENED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ ' bot ' + m.content | trim + eos_token + '\\n' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
# As Mixtral, OLMoE, ERNIE 4.5 and MiniMax-M2 have them, without what is for tools.
MIXTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ ' [INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
OLMOE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\n' if not (loop.last and m.role == 'assistant') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ERNIE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
MINIMAX = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{{ ']~!b[' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ']~b]ai\n' }}"
    "{% set parts = m.content.split('</think>') %}"
    "{% if parts | length > 1 and loop.index0 > last.user %}"
    "{{ '<think>' + parts[0].split('<think>')[-1] + '</think>\n\n' }}{% endif %}"
    "{{ parts[-1].strip() }}{% else %}{{ ']~b]' + m.role + '\n' + m.content }}{% endif %}"
    "{{ '[e~[\n' }}{% endfor %}{% if add_generation_prompt %}{{ ']~b]ai\n<think>' }}{% endif %}"
)
# As DeepSeek-V3.1 has it, without what is for tools.
DEEPSEEK_V31 = (
    "{{ bos_token }}{% set thinking = thinking is defined and thinking %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜></think>' + m.content.split('</think>')[-1] }}"
    "{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
SHIPPED = Path(trl.__file__).with_name("chat_templates")
"""The published models' own templates, as trl has them to compare with."""
PUBLISHED = (
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6",
    "deepseekv3", "deepseek_r1_distill", "glm4moe", "gptoss", "llama3", "gemma", "phi3", "cohere2",
    "nemotron_3_nano",
)  # fmt: skip
WITH_TOOLS = ("llama3_1",)
TEMPLATES = {
    "marked": MARKED, "opened": OPENED, "unopened": UNOPENED, "mixtral": MIXTRAL, "olmoe": OLMOE,
    "ernie": ERNIE, "minimax": MINIMAX, "deepseek_v31": DEEPSEEK_V31,
} | {name: (SHIPPED / f"{name}.jinja").read_text() for name in (*PUBLISHED, *WITH_TOOLS)}  # fmt: skip
_SPECIAL = re.compile(r"</?think>|<[|｜][^<>{}' ]+[|｜]>|<(?:start|end)_of_turn>|<\|?(?:user|end)\|?>|\[e~\[")


def tokenizer_for(name, *more):
    template = TEMPLATES[name]
    special = dict.fromkeys(_SPECIAL.findall(template))
    special.pop("<think>", None), special.pop("</think>", None)
    special |= dict.fromkeys(more)
    tokenizer = byte_tokenizer(template, *special, "[e~[" if name == "minimax" else "<end>")
    tokenizer.bos_token = "<begin>"
    return tokenizer


def learn(tmp_path, tokenizer, *rows, **changes):
    """Rows as tokens, of which those that are learned are shown by ``learned``."""
    return tokenized(settings(write_lines(tmp_path / "rows.jsonl", rows), **changes), tokenizer)


def answers(tmp_path, tokenizer, *rows, **changes):
    return learned(learn(tmp_path, tokenizer, *rows, **changes), tokenizer)


def learned(fitted, tokenizer):
    """(what stands before it, what is learned) for each stretch of learned tokens, in order."""
    found = []
    for row in fitted.dataset:
        place = 0
        for yes, group in groupby(row["labels"], key=lambda label: label != -100):
            size = len(list(group))
            if yes:
                before = tokenizer.decode(row["input_ids"][:place])
                found.append((before, tokenizer.decode(row["input_ids"][place : place + size])))
            place += size
    return found


def served(tokenizer, messages, **asked):
    """A server's prompt for the last message and the conversation with it, by the tokenizer itself."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False, **asked)
    return prompt, tokenizer.apply_chat_template(messages, tokenize=False, **asked)


def conversation(*answers):
    """Questions and these answers. Some templates take no system message, so there is none."""
    messages = []
    for number, answer in enumerate(answers):
        messages.append({"role": "user", "content": f"Assistant: e? {number} 🐱"})
        messages.append({"role": "assistant", "content": answer})
    return messages


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - set(WITH_TOOLS)))
def test_each_answer_is_learned_behind_the_prompt_that_a_server_sends(tmp_path, name):
    messages = conversation("one 🐱", "e", "three <b>")
    tokenizer = tokenizer_for(name)
    fitted = learn(tmp_path, tokenizer, {"messages": messages})
    found = learned(fitted, tokenizer)
    assert len(found) == 3
    missing = set()
    for turn, (before, answer) in enumerate(found):
        prompt, whole = served(tokenizer, messages[: 2 * turn + 2])
        assert whole.startswith(before)
        if name not in ("marked", "unopened", "mixtral"):  # these don't open answers
            # as much of the prompt as the conversation goes on from
            assert prompt.startswith(before)
            assert not whole.startswith(prompt[: len(before) + 1]) or before == prompt
            missing.add(prompt[len(before) :])
        # A stop token may be missing that the next message brings, or follow that no server asks for.
        text, extra = before + answer, "<|user|>" if name == "glm4moe" else ""
        assert text.removesuffix(extra) == whole.removesuffix("<end>" * (name == "phi3")).rstrip()
        assert messages[2 * turn + 1]["content"] in answer
    # A part of the prompt that these answers don't go on from is never silent.
    notes = {note.code: note for note in fitted.notes}
    assert ("KTD007" in notes) == any(part.strip() for part in missing)
    rewrites = len(fitted.dataset) > 1
    assert ("KTD005" in notes) == rewrites
    assert rewrites == (name in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "gptoss"))
    assert sum(map(len, (answer.encode() for _, answer in found))) >= fitted.trained_tokens
    if name == "marked":  # then transformers gives the same masks
        own = {"return_dict": True, "return_assistant_tokens_mask": True}
        masks = tokenizer.apply_chat_template(messages, **own)["assistant_masks"]
        assert masks == [int(label != -100) for label in fitted.dataset[0]["labels"]]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
@pytest.mark.parametrize("end", ["", "\n", " "])
def test_the_stop_is_learned_behind_an_answer_that_ends_in_a_token(tmp_path, name, end):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' + end
    tokenizer = tokenizer_for(name, "<tool_call>", "</tool_call>")
    found = [answer for _, answer in answers(tmp_path, tokenizer, {"messages": conversation(call, call)})]
    assert len(found) == 2
    assert all(call.strip() in answer and answer.endswith("<|im_end|>") for answer in found)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("qwen3", "<think>\n"),
        ("qwen3_5_think", ""),
        ("qwen2_5", "<think>\n"),
        ("deepseek_r1_distill", ""),
        ("deepseekv3", ""),
        ("minimax", "\n"),
    ],
)
def test_thoughts_are_learned_where_the_model_writes_them_and_gone_from_history(tmp_path, name, head):
    parts = ["hm\n</think>\n\none", "ha\n</think>\n\ntwo"]
    messages = conversation(*(f"<think>\n{part}" for part in parts))
    tokenizer = tokenizer_for(name)
    found = answers(tmp_path, tokenizer, {"messages": messages})
    assert len(found) == 2
    for turn, (before, answer) in enumerate(found):
        prompt, _ = served(tokenizer, messages[: 2 * turn + 2])
        assert before == prompt
        assert answer.startswith(head + parts[turn])
        assert "</think>" not in answer.removeprefix(head + parts[turn])
    assert ("hm" in found[1][0]) == (name == "qwen2_5")


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Added tokens of Qwen3's and GLM's own tokenizers."""


def calling(*thoughts):
    """A question, a call of the tool, its result and the answer; then a question and its answer."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ]
    answers = [message for message in messages if message["role"] == "assistant"]
    for message, thought in zip(answers, thoughts, strict=False):
        message["reasoning_content"] = thought
    return messages


THOUGHTFUL = ("ask the tool", "wet", "polite")


@pytest.mark.parametrize(
    ("name", "thoughts"),
    [
        *((name, THOUGHTFUL) for name in ("qwen3", "glm4moe", "qwen3_5_think", "nemotron_3_nano")),
        *((name, ()) for name in ("qwen3", "glm4moe", "qwen3_5_think", "qwen2_5", "llama3_1")),
        *((name, ()) for name in ("qwen3_instruct_2507", "qwen3_vl", "gptoss")),
    ],
)
def test_a_tool_call_is_learned_as_it_is_served_and_its_result_is_not(tmp_path, name, thoughts):
    """And a prediction is asked and compared so."""
    messages, tokenizer = calling(*thoughts), tokenizer_for(name, *TAGS)
    row = {"messages": messages, "tools": TOOLS}
    stops = ("<|observation|>", "<|user|>", "<|user|>") if name == "glm4moe" else ("", "", "")
    found = zip(answers(tmp_path, tokenizer, row), (1, 3, 5), stops, strict=True)
    for (before, answer), place, stop in found:
        prompt, whole = served(tokenizer, messages[: place + 1], tools=TOOLS)
        assert before == prompt
        assert before + answer == whole.rstrip() + stop
    prompt, whole = served(tokenizer, messages[:2], tools=TOOLS)
    chat = ChatTemplate(tokenizer)
    asked, label = chat.write_prompt_and_answer(messages[:2], TOOLS)
    assert asked == prompt
    if name in ("qwen3", "glm4moe", "qwen2_5") and not thoughts:
        assert label == whole.removeprefix(prompt).strip().removesuffix("<|im_end|>")
        assert chat.write_prompt_and_answer(messages, TOOLS)[1] == "Welcome."

    if name == "nemotron_3_nano":  # writes calls differently in history
        return
    (row,) = learn(tmp_path, tokenizer, row, split_turns=False).dataset
    text = served(tokenizer, messages, tools=TOOLS)[1].rstrip() + stops[2]
    assert tokenizer.decode(row["input_ids"]).rstrip() == text


HM, EMPTY = "<think>\nhm\n</think>\n\n", "<think>\n\n</think>\n\n"
OPEN, GLM = "<think>\n", "\n<think></think>"


@pytest.mark.parametrize(
    ("name", "thinking", "ends"),
    [
        # What the prompt ends in and what is learned, with thoughts and then without.
        ("qwen3", None, [("", f"{HM}yes"), ("", f"{EMPTY}yes")]),
        ("qwen3", True, [("", f"{HM}yes"), ("", f"{EMPTY}yes")]),
        ("qwen3", False, [(EMPTY, "yes"), (EMPTY, "yes")]),
        ("qwen3", "auto", [("", f"{HM}yes"), (EMPTY, "yes")]),
        ("glm4moe", None, [("", "\n<think>hm</think>\nyes"), ("", f"{GLM}\nyes")]),
        ("glm4moe", False, [(GLM, "\nyes"), (GLM, "\nyes")]),
        ("glm4moe", "auto", [("", "\n<think>hm</think>\nyes"), (GLM, "\nyes")]),
        ("qwen3_5_think", None, [(OPEN, "hm\n</think>\n\nyes"), (OPEN, "\n</think>\n\nyes")]),
        ("qwen3_5_think", "auto", [(OPEN, "hm\n</think>\n\nyes"), (EMPTY, "yes")]),
        ("qwen3_5_nothink", "auto", [(OPEN, "hm\n</think>\n\nyes"), (EMPTY, "yes")]),
        ("deepseek_v31", True, [("<think>", "hm\n</think>\n\nyes"), ("<think>", "</think>yes")]),
        ("deepseek_v31", False, [("</think>", "yes"), ("</think>", "yes")]),
        ("deepseek_v31", "auto", [("<think>", "hm\n</think>\n\nyes"), ("</think>", "yes")]),
    ],
)
@pytest.mark.parametrize("field", [True, False], ids=["field", "content"])
def test_thinking_is_asked_for_as_the_configuration_says(tmp_path, name, thinking, ends, field):
    ask, answer = {"role": "user", "content": "Well?"}, {"role": "assistant", "content": "yes"}
    own = {"reasoning_content": "hm"} if field else {"content": f"{HM}yes"}
    rows = [{"messages": [ask, each]} for each in ({**answer, **own}, answer)]
    tokenizer = tokenizer_for(name, *TAGS)
    fitted = learn(tmp_path, tokenizer, *rows, enable_thinking=thinking)
    stop = {"glm4moe": "<|user|>", "deepseek_v31": DEEPSEEK[-1]}.get(name, "<|im_end|>")
    found = learned(fitted, tokenizer)
    for (before, text), (end, expected), has in zip(found, ends, (True, False), strict=True):
        asked = has if thinking == "auto" else thinking
        told = {} if asked is None else {"enable_thinking": asked, "thinking": asked}
        prompt = served(tokenizer, [ask, answer], **told)[0]
        assert before == prompt
        assert prompt.endswith(end)
        assert text == expected + stop
    counted = "1 with thoughts and 1 without" in describe_rows(fitted)
    assert counted == (thinking is not False)
    codes = {note.code for note in fitted.notes}
    assert ("KTD020" in codes) == (thinking is False)
    assert "KTD021" not in codes


@pytest.mark.parametrize("thinking", [None, True, False, "auto"])
@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "deepseekv3", "minimax", "gptoss", "qwen2_5"],
)
def test_thoughts_whose_block_the_prompt_opens_are_those_of_a_whole_block(tmp_path, name, thinking):
    """In training rows and in labels of predictions; with thinking off they are taken out of both."""
    tokenizer, found = tokenizer_for(name, *TAGS), []
    for content in (f"{HM}yes", "hm\n</think>\n\nyes"):
        row = {"messages": [ASK, {**TELL, "content": content}]}
        path = write_lines(tmp_path / "rows.jsonl", [row])
        rows = load_rows(config := settings(path, enable_thinking=thinking))
        own = learned(tokenize_rows(rows, tokenizer, config), tokenizer)
        chat = ChatTemplate(tokenizer, thinking)
        found.append((own, chat.write_prompt_and_answer(rows.rows[0].messages)))
    assert found[0] == found[1]
    ((before, answer),), _ = found[0]
    assert ("hm" in answer) == (thinking is not False)
    assert "hm" not in before
    assert "yes" in answer


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "gptoss", "nemotron_3_nano"]
)
def test_a_split_turn_is_the_tokens_of_one_message(tmp_path, name, stage):
    tokenizer, found = tokenizer_for(name, *TAGS), []
    ask, call = calling()[:2]
    thinking = {"role": "assistant", "content": f"{HM}"}
    for turn in ([{**call, "reasoning_content": "hm"}], [thinking, call]):
        row = {"messages": [ask, *turn], **({"kto_tag": True} if stage == "kto" else {})}
        if stage == "dpo":
            row = {"prompt": [ask], "chosen": turn, "rejected": [TELL]}
        found.append(learn(tmp_path, tokenizer, {**row, "tools": TOOLS}, stage=stage).dataset.to_dict())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("qwen3", [ASK, {**TELL, "content": "Write `<think>` and `</think>`."}]),
        ("minimax", [ASK, {**TELL, "content": f"{HM}Write `</think>`."}]),
        ("llama3_1", [ASK, {**TELL, "tool_calls": calling()[1]["tool_calls"]}]),
        ("llama3_1", [ASK, {**TELL, "content": f"{HM}"}, calling()[1]]),
    ],
)
def test_words_that_a_template_drops_are_refused(tmp_path, name, messages):
    with pytest.raises(ProblemsError, match="leaves a part of the answer out"):
        learn(tmp_path, tokenizer_for(name, *TAGS), {"messages": messages})


@pytest.mark.parametrize(
    ("name", "header"),
    [("qwen3", "<|im_start|>assistant"), ("qwen3_5_think", "<|im_start|>assistant"),
     ("glm4moe", "<|assistant|>"), ("gptoss", "<|start|>assistant")],
)  # fmt: skip
def test_texts_that_the_template_has_written_already_are_refused(tmp_path, name, header):
    tokenizer = tokenizer_for(name)
    user, told = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    prompt = {"prompt": f"{tokenizer.eos_token}user\nHi\n{header}\n", "completion": "Hello"}
    pasted = {"messages": [user, {**told, "content": f"Hello{tokenizer.eos_token}\n{header}\nagain"}]}
    result = {"role": "tool", "content": header}  # a page about templates: a server gives it, too
    called = [user, {"role": "assistant", "function_call": {"name": "read", "arguments": "{}"}}, result, told]
    talk = {"messages": called, "functions": [{"name": "read", "description": "Read a page."}]}
    fitted = learn(tmp_path, tokenizer, prompt, pasted, talk, allow_refused_rows=True)
    assert [item.why for item in fitted.refused] == 2 * [
        f"text with {header}: the chat template would write that twice"
    ]


def test_thoughts_that_are_never_written_are_refused_with_what_to_set(tmp_path):
    row = {"messages": [ASK, {**TELL, "reasoning_content": "hm"}]}
    with pytest.raises(ProblemsError, match="out: with enable_thinking: true it opens thoughts"):
        learn(tmp_path, tokenizer_for("deepseek_v31", *TAGS), row)
    tokenizer = tokenizer_for("qwen2_5")
    fitted = learn(tmp_path, tokenizer, row, enable_thinking=True)
    assert "KTD021" in {note.code for note in fitted.notes}
    ((_, answer),) = learned(fitted, tokenizer)
    assert answer == f"{HM}i am a cat<|im_end|>"


def test_a_conversation_of_which_no_answer_is_learned_is_refused(tmp_path):
    silent = {"messages": [ASK, {**TELL, "weight": 0}]}
    (refused,) = learn(tmp_path, tokenizer_for("qwen3"), silent, ROW).refused
    assert refused.why == "no answer is learned: the weight of each is 0"


def test_tools_that_a_template_cant_write_are_refused_with_a_sentence(tmp_path):
    two = calling()
    two[1] = {**two[1], "tool_calls": two[1]["tool_calls"] * 2}
    rows = [
        ({**ROW, "tools": TOOLS}, "deepseekv3", "the chat template has no place for tools"),
        ({"messages": calling()}, "olmoe", "leaves tool calls, or their results, out"),
        ({"messages": two}, "llama3_1", "only supports single tool-calls"),
        ({"messages": two, "tools": TOOLS}, "gptoss", "leaves tool calls, or their results, out"),
    ]
    for row, name, why in rows:
        with pytest.raises(ProblemsError, match=why):
            learn(tmp_path, tokenizer_for(name), row)


def test_an_answer_stands_behind_the_calls_as_the_server_has_them(tmp_path):
    """gpt-oss's template drops the thoughts of calls once the final answer is there."""
    messages, tokenizer = calling(*THOUGHTFUL)[:4], tokenizer_for("gptoss")
    row = {"messages": messages, "tools": TOOLS}
    (_, call), (before, answer) = answers(tmp_path, tokenizer, row)
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
    assert before == served(tokenizer, messages, tools=TOOLS)[0]
    assert "ask the tool" in before
    assert call.startswith("<|channel|>analysis<|message|>ask the tool<|end|>")
    assert answer == (
        "<|channel|>analysis<|message|>wet<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    )


def test_arguments_are_text_where_the_template_joins_them_to_text(tmp_path):
    ask, call, result, *_ = calling()
    row = {"messages": [ask, call, result, call]}
    (_, answer), again = answers(tmp_path, tokenizer_for("deepseekv3"), row)
    assert again
    assert 'weather\n```json\n{"city": "Köln"}\n```' in answer
    assert answer.endswith("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")


@pytest.mark.parametrize(("split", "sequences", "severity"), [(True, 7, "info"), (False, 4, "warning")])
def test_one_sequence_a_conversation_is_a_choice_and_said_with_the_number_of_rows(
    tmp_path, split, sequences, severity
):
    rows = [{"messages": conversation("one", "two")}] * 3 + [{"messages": conversation("one")}]
    tokenizer = tokenizer_for("qwen3")
    fitted = learn(tmp_path, tokenizer, *rows, split_turns=split)
    assert len(fitted.dataset) == sequences
    note = next(note for note in fitted.notes if note.code == "KTD005")
    assert (note.severity, "3 of 4" in note.found) == (severity, True)
    if split:
        assert "used 4 of 4 rows, in 7 sequences" in describe_rows(fitted)
    else:
        first, second = (answer for _, answer in learned(fitted, tokenizer)[:2])
        assert (first, second) == ("one<|im_end|>", f"{EMPTY}two<|im_end|>")


def test_a_template_that_hides_the_answer_or_refuses_the_row_is_a_reason(tmp_path):
    row = {"messages": [{"role": "system", "content": "s"}, *ROW["messages"]]}
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    fitted = learn(tmp_path, byte_tokenizer(refusing + MARKED, "<end>"), ROW, row)
    assert (fitted.used, fitted.total) == (1, 2)
    (refused,) = fitted.refused
    assert refused.why == "the chat template refuses the conversation: no system"
    assert (refused.row, refused.where[-6:]) == (row, "line 2")
    assert describe_rows(fitted).startswith(
        "used 1 of 2 rows (1 refused: 1 the chat template refuses the conversation);"
    )
    shouting = byte_tokenizer(OPENED.replace("m.content +", "m.content | upper +"), "<end>")
    assert learn(tmp_path, shouting, ROW, row).used == 2
    forgetful = byte_tokenizer(OPENED.replace("messages %}", "messages[-2:] %}"), "<end>")
    fitted = learn(tmp_path, forgetful, {"messages": [ASK, TELL, ASK, TELL]}, ROW)
    assert (fitted.refused[0].why, fitted.used) == (DIFFERENT, 1)

    endless = byte_tokenizer(MARKED.replace(" + eos_token", ""), "<end>")
    (note,) = learn(tmp_path, endless, ROW).notes
    assert "answers end in 't', so that the model does not learn to stop" in note.found
    endless.chat_template = None
    with pytest.raises(KtbridgeError, match="no chat template"):
        learn(tmp_path, endless, ROW)


@pytest.mark.parametrize(
    ("name", "own", "difference"),
    [
        ("qwen3", "qwen3", None),
        ("qwen3", "qwen3_5_think", None),
        ("qwen3_nothink", "qwen3_instruct_2507", None),
        ("qwen3_vl_nothink", "qwen3_vl", None),
        ("qwen", "qwen2_5", None),
        ("deepseek3", "deepseekv3", None),
        ("llama3", "llama3", None),
        ("qwen3_nothink", "qwen3", ("A model.<|im_end|>", "<think>")),
        ("qwen3", "qwen3_instruct_2507", ("<think>", "A model.<|im_end|>")),
        ("mistral", "mixtral", ("[INST] Hi.[/INST] Hello.", " [INST] Hi. [/INST] Hello.")),
    ],
)  # fmt: skip
def test_a_template_of_llama_factory_is_noted_where_it_differs(name, own, difference):
    tokenizer = tokenizer_for(own)
    if own == "deepseekv3":
        tokenizer.eos_token = "<｜end▁of▁sentence｜>"
    notes = template_notes(name, tokenizer)
    assert [note.code for note in notes] == ([] if difference is None else ["KTC036"])
    if difference:
        assert difference[0] in notes[0].found
        assert difference[1] in notes[0].expected


def test_a_template_that_isnt_known_is_told_with_names_like_it():
    tokenizer = tokenizer_for("qwen3")
    (note,) = template_notes("qwen3_nothnk", tokenizer)
    assert (note.code, note.severity) == ("KTC037", "info")
    assert note.expected.startswith("qwen3_nothink")
    assert template_notes(None, tokenizer) == []


@pytest.mark.parametrize(
    ("name", "stop", "other"),
    [("qwen3", "<|im_end|>", "<|im_end|>"), ("glm4moe", "<|observation|>", "<|user|>")],
)
@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_compared_answers_with_calls_and_thoughts_are_what_a_server_gets(tmp_path, name, stop, other, stage):
    """The prompt with tools and results as it is asked, and behind it each answer with its stop."""
    tokenizer, (*prompt, call) = tokenizer_for(name, *TAGS), calling()[:2]
    call = {**call, "reasoning_content": "ask the tool"}
    told = {"role": "assistant", "content": "It rains."}
    pair = {"prompt": prompt, "chosen": [call], "rejected": [told]}
    row = pair if stage == "dpo" else {"messages": [*prompt, call], "kto_tag": True}
    fitted = learn(tmp_path, tokenizer, {**row, "tools": TOOLS}, stage=stage)
    (found,) = fitted.dataset
    asked, whole = served(tokenizer, [*prompt, call], tools=TOOLS)
    assert tokenizer.decode(found["prompt_ids"]) == asked
    good = tokenizer.decode(found["completion_ids" if stage == "kto" else "chosen_ids"])
    assert good == whole.removeprefix(asked).rstrip().removesuffix(stop) + stop
    assert "ask the tool" in good
    assert (fitted.with_thoughts, fitted.judged) == (1, (stage == "kto", 0))
    if stage == "dpo":
        assert tokenizer.decode(found["rejected_ids"]).endswith(f"It rains.{other}")
    (shown, *_) = fitted.preview.values()
    assert "".join(text for text, _ in shown) == asked + good


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_no_token_holds_the_end_of_a_prompt_and_the_beginning_of_an_answer(tmp_path, stage):
    """Qwen3.5 without thoughts: its byte-level BPE has a token of two line breaks, as Qwen's own."""
    special = ("<|im_start|>", "<think>", "</think>", "<|im_end|>")
    template = (SHIPPED / "qwen3_5_think.jinja").read_text()
    tokenizer = byte_tokenizer(template, *special, merges=[("Ċ", "Ċ")])
    pair = {"prompt": [ASK], "chosen": [TELL], "rejected": [{**TELL, "content": "No."}]}
    row = ROW if stage == "sft" else pair
    found = tokenized(settings(write_lines(tmp_path / "rows.jsonl", [row]), stage=stage), tokenizer)
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, return_dict=False)
    sequence = found.dataset[0]
    ids = sequence["input_ids"] if stage == "sft" else sequence["prompt_ids"] + sequence["chosen_ids"]
    assert tokenizer.convert_ids_to_tokens(prompt)[-2:] == ["<think>", "Ċ"]
    assert list(ids[: len(prompt)]) == prompt
    assert tokenizer.convert_ids_to_tokens(ids[len(prompt) :])[:2] == ["Ċ", "</think>"]
    if stage == "sft":
        assert [label != -100 for label in sequence["labels"]].index(True) == len(prompt)
    else:
        assert list(sequence["prompt_ids"]) == prompt
