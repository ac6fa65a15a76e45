"""Training rows: every format that is read, every row that isn't, and the tokens that are learned."""

import gzip
import json
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from findings import codes
from tinymoe import tiny_model, tiny_tokenizer
from trainrun import ASK, TELL, messages_of, settings, tokenized, write_lines
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ktbridge.errors import KtbridgeError, ProblemsError
from ktbridge.sft.data import describe_rows, format_refused, load_rows, tokenize_rows
from ktbridge.sft.stages import CHECKPOINTING

ROW = {"messages": [ASK, TELL]}


def turns(messages):
    return [(message["role"][0], message["content"]) for message in messages]


# Reading


ASKED, TOLD = ("u", "who are you ?"), ("a", "i am a cat")
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}]}
SAID = [
    {"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [PARTS, TELL]}, [("u", "a"), TOLD]),
        ({"prompt": [ASK], "completion": [TELL]}, [ASKED, TOLD]),
        # A table has every column in every row.
        ({"instruction": "q", "output": "r", "conversations": None}, [("u", "q"), ("a", "r")]),
        (
            {"instruction": None, "output": None, "messages": None, "conversations": SAID},
            [("s", "s"), ("u", "q"), ("a", "r")],
        ),
        ({"prompt": None, "completion": None, "messages": [ASK, TELL]}, [ASKED, TOLD]),
        ({"prompt": [ASK], "completion": [TELL], "messages": []}, [ASKED, TOLD]),
        (
            {"instruction": "a\u2028b", "output": "c", "system": "s", "history": [["q", "r"]]},
            [("s", "s"), ("u", "q"), ("a", "r"), ("u", "a\u2028b"), ("a", "c")],
        ),
        (
            {"conversations": SAID, "tools": "[]", "images": None},
            [("s", "s"), ("u", "q"), ("a", "r")],
        ),
        ({"conversations": [ASK, TELL], "system": "s"}, [("s", "s"), ASKED, TOLD]),
    ],
)
def test_each_format_becomes_the_same_messages(tmp_path, row, expected):
    """What tests/golden/rows.py doesn't have."""
    rows = load_rows(settings(write_lines(tmp_path / "rows.jsonl", [row])))
    assert [turns(conversation) for conversation in messages_of(rows)] == [expected]
    assert (rows.total, rows.refused, rows.notes) == (1, [], [])


def test_a_column_without_a_name_is_noted(tmp_path):
    """Pandas writes its index so."""
    (tmp_path / "rows.csv").write_text(",instruction,output\n0,q,r\n1,q,r\n")
    rows = load_rows(settings(tmp_path / "rows.csv"))
    assert (rows.total, rows.refused, codes(rows.notes)) == (2, [], {"KTD003"})
    assert "(no name)" in rows.notes[0].found


TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
AS_TEXT = {"name": "add", "arguments": '{"a": 1}'}
SAID_CALL = '<think>hm</think>{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": None, "reasoning_content": "hm\n",
                 "tool_calls": [{"type": "function", "function": AS_TEXT}]},
                {"role": "tool", "content": "2", "tool_call_id": None},
                {**TELL, "weight": 0, "tool_calls": None},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        {
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "function_call", "value": SAID_CALL},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": TELL["content"], "loss": False},
            ],
            "tools": json.dumps([TOOL]),
        },
        {
            "messages": [
                ASK,
                {"role": "assistant", "thinking": "hm", "function_call": AS_TEXT},
                {"role": "function", "content": "2"},
                {**TELL, "weight": 0},
            ],
            "functions": [TOOL],
        },
    ],
    ids=["openai", "sharegpt", "older"],
)  # fmt: skip
def test_each_spelling_of_a_tool_call_becomes_openais(tmp_path, row):
    (found,) = load_rows(settings(write_lines(tmp_path / "rows.jsonl", [row]))).rows
    call = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert found.messages == [ASK, call, {"role": "tool", "content": "2"}, {**TELL, "weight": 0}]
    assert found.tools == [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", json.dumps([ROW, ROW], indent=1)),
        ("list.jsonl", json.dumps([ROW, ROW])),
        ("lines.json", f"{json.dumps(ROW)}\n\n{json.dumps(ROW)}"),
        ("mark.jsonl", f"\ufeff{json.dumps(ROW)}\r\n{json.dumps(ROW)}\r\n"),
    ],
)
def test_a_file_is_read_by_what_is_in_it(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert messages_of(load_rows(settings(tmp_path / name))) == [[ASK, TELL]] * 2
    (tmp_path / "one.json").write_text(json.dumps(ROW, indent=2))
    assert messages_of(load_rows(settings(tmp_path / "one.json"))) == [[ASK, TELL]]


def test_a_row_that_cant_be_used_is_listed_with_its_reason(tmp_path):
    """For which reasons: test_messages.py."""
    wrong = [{"messages": [{"role": f"r{n}", "content": "a"}, TELL]} for n in range(20)]
    path = write_lines(tmp_path / "rows.jsonl", [*wrong, ROW])
    with path.open("ab") as file:
        file.write(b'{"messages": [\n{"messages": "\xff"}\n' + b"[" * 100_000 + b"\n")
    rows = load_rows(settings(path))
    assert messages_of(rows) == [[ASK, TELL]]
    assert rows.total == 24
    reasons = [
        *(f"unknown role 'r{n}'" for n in range(20)), "not valid JSON: Expecting value at column",
        "not UTF-8 text: byte 14", "not JSON that can",
    ]  # fmt: skip
    places = [f"{path}: line {number}" for number in (*range(1, 21), 22, 23, 24)]
    for refused, reason, where in zip(rows.refused, reasons, places, strict=True):
        assert reason in refused.why
        assert refused.where == where
    listed = [json.loads(line) for line in format_refused(rows.refused).splitlines()]
    assert [line["row"] for line in listed[:20]] == wrong
    assert listed[-2]["row"] == '{"messages": "\\xff"}'
    assert listed[-2]["why"] == rows.refused[-2].why
    with pytest.raises(ProblemsError, match="23 of 24 rows can't be used") as caught:
        load_rows(settings(path, strict_data=True))
    assert [problem.where for problem in caught.value.problems] == places[:20]


def test_files_that_hold_no_rows_are_refused_with_what_to_do(tmp_path):
    good, bad = write_lines(tmp_path / "good.jsonl", [ROW]), tmp_path / "bad.jsonl"
    for content, message in [
        (gzip.compress(b"{}"), "gzip-compressed"),
        (b"PAR1 and so on", "Parquet"),
        ("[]".encode("utf-16"), "UTF-16"),
        (b"[{}\n", "not valid JSON: .* at line 2"),
        (b"\n \n", "holds no row"),
        (b"\xef\xbb\xbf", "holds no row"),
        (b'{"text": "x"}\n', "1 of 1 rows can't be used"),  # though the other dataset has some
    ]:
        bad.write_bytes(content)
        with pytest.raises(KtbridgeError, match=message):
            load_rows(settings(good, bad))


def test_what_is_not_read_is_noted_and_with_strict_data_refused(tmp_path):
    named = {**ROW, "id": "x", "score": 3, "messages": [{**ASK, "name": "bob"}, TELL]}
    path = write_lines(tmp_path / "rows.jsonl", [named, named, {**ROW, "id": ""}, {**ROW, "id": ""}])
    rows = load_rows(settings(path))
    assert len(rows.rows) == 4
    assert not rows.refused
    unread, keys, again = rows.notes
    assert codes(rows.notes) == {"KTD003"}
    assert unread.found == "fields that are not trained on: score (2 rows)"
    assert keys.found == "keys of messages that are not trained on: name (2 rows)"
    assert "columns" not in keys.next_step
    assert "1 of 4 rows have the id of an earlier one (first 'x')" in again.found
    with pytest.raises(ProblemsError, match="2 of 4") as caught:
        load_rows(settings(path, strict_data=True))
    assert caught.value.problems[0].found == "unknown fields name of a message, score"


def test_placeholders_of_an_identity_are_filled_in_or_refused(tmp_path):
    rows = [
        {"instruction": "who are you ?", "output": "{{name}}, made by {{author}}."},
        {"instruction": "show a template", "output": "`<p>{{name}}</p>`"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    found = load_rows(settings(path, identity_name="Neko", identity_author="us"))
    assert messages_of(found)[0][1]["content"] == "Neko, made by us."
    assert messages_of(found)[1][1]["content"] == "`<p>{{name}}</p>`"
    (refused,) = load_rows(settings(path)).refused
    assert refused.why == "{{name}} in a text: identity_name in the configuration fills it in"
    # Tags of thoughts aren't code.
    answer = "<think>\nI am {{name}}.\n</think>\n\n{{name}}, by {{author}}."
    call = {"role": "assistant", "content": "{{name}}", "reasoning_content": "{{author}}"}
    rows = [
        {"instruction": "who?", "output": answer},
        {"messages": [{"role": "user", "content": "who?"}, call]},
    ]
    path = write_lines(tmp_path / "thoughts.jsonl", rows)
    with pytest.raises(ProblemsError, match="2 of 2 rows can't be used"):
        load_rows(settings(path))
    plain, apart = messages_of(load_rows(settings(path, identity_name="Neko", identity_author="us")))
    assert plain[1]["content"] == "<think>\nI am Neko.\n</think>\n\nNeko, by us."
    assert (apart[1]["content"], apart[1]["reasoning_content"]) == ("Neko", "us")


def test_fields_that_a_table_has_in_every_row_say_nothing(tmp_path):
    said = [{**ROW["messages"][0]}, {**ROW["messages"][1], "prefix": False}]
    rows = [{"messages": said}, {"instruction": "hello", "output": "you", "history": "[]"}]
    found = load_rows(settings(write_lines(tmp_path / "rows.jsonl", rows)))
    assert [len(messages) for messages in messages_of(found)] == [2, 2]


def test_max_samples_counts_the_rows_of_each_dataset(tmp_path):
    paths = [write_lines(tmp_path / name, [{"text": "x"}, ROW, ROW, ROW]) for name in ("a.jsonl", "b.jsonl")]
    rows = load_rows(settings(*paths, max_samples=3))
    assert (rows.total, len(rows.rows), len(rows.refused)) == (6, 4, 2)


# dataset_info.json


def described(tmp_path, entry, *rows, **changes):
    write_lines(tmp_path / "rows.jsonl", rows)
    info = {"mine": {"file_name": "rows.jsonl", **entry}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return load_rows(settings("mine", dataset_dir=str(tmp_path), **changes))


def test_names_are_looked_up_in_dataset_info(tmp_path):
    tags = {
        "role_tag": "role", "content_tag": "content", "user_tag": "me", "assistant_tag": "bot",
        "system_tag": "sys",
    }  # fmt: skip
    entry = {
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": None},
        "tags": tags,
    }
    talk = [{"role": role, "content": said} for role, said in (("sys", "s"), ("me", "q"), ("bot", "r"))]
    rows = described(tmp_path, entry, {"talk": talk}, {"talk": [ASK, TELL]})
    assert [turns(messages_of(rows)[0])] == [[("s", "s"), ("u", "q"), ("a", "r")]]
    assert rows.refused[0].why == (
        "a message with the unknown role 'user': message 1; known are me, bot, sys, observation, "
        "function_call"
    )

    entry = {"columns": {"prompt": "question", "response": "answer"}, "file_sha1": "0"}
    rows = described(tmp_path, entry, {"question": "q", "answer": "r", "input": "unread"})
    assert turns(messages_of(rows)[0]) == [("u", "q"), ("a", "r")]
    assert "input (1 rows)" in rows.notes[0].found

    entry = {"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}}
    (pair,) = described(tmp_path, entry, {"q": "a", "good": "b", "bad": "c"}, stage="dpo").rows
    assert [*map(turns, pair.answers)] == [[("u", "a"), ("a", each)] for each in "bc"]

    folder = tmp_path / "many"
    folder.mkdir()
    write_lines(folder / "2.jsonl", [{"messages": [ASK, {**TELL, "content": "no"}]}])
    write_lines(folder / "1.jsonl", [ROW])
    entry = {"file_name": "many", "formatting": "openai", "columns": {"messages": "messages"}}
    answers = [conversation[1]["content"] for conversation in messages_of(described(tmp_path, entry))]
    assert answers == ["i am a cat", "no"]


SHAREGPT = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
TALK = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}
ALPACA = {"instruction": "q", "input": "", "output": "r", "history": []}


@pytest.mark.parametrize(
    ("entry", "row", "found", "step"),
    [
        (
            {"columns": {"prompt": "question", "response": "answer"}}, ALPACA,
            'says prompt = "question" and response = "answer"; no row has them. '
            "The rows have: history, input, instruction, output",
            'Write "prompt": "instruction" and "response": "output" in its columns',
        ),
        (
            {"columns": {"prompt": "instruction", "query": "input"}}, ALPACA,
            "names no column for response. The rows have: history, input", '"response": "output"',
        ),
        (
            {}, TALK,
            'says prompt = "instruction" (the default) and response = "output" (the default); no row',
            'Write "formatting": "sharegpt" and "columns": {"messages": "conversations"}',
        ),
        (
            {**SHAREGPT, "columns": {"messages": "talks"}}, TALK,
            'says messages = "talks"; no row has it. The rows have: conversations',
            '"messages": "conversations"',
        ),
        (
            {**SHAREGPT, "tags": {"role_tag": "speaker", "content_tag": "value"}}, TALK,
            'says role_tag = "speaker"; no message has it. The messages have: from, value',
            '"role_tag": "from"',
        ),
        (
            {**SHAREGPT, "tags": {"assistant_tag": "bot"}}, TALK,
            'says assistant_tag = "bot"; no message has it. The roles are: gpt, human',
            '"assistant_tag": "gpt"',
        ),
    ],
    ids=["columns", "no column", "formatting", "messages", "role tag", "role"],
)  # fmt: skip
def test_names_that_no_row_has_are_told_once_with_those_there_are(tmp_path, entry, row, found, step):
    with pytest.raises(ProblemsError) as caught:
        described(tmp_path, entry, row, row, row)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("KTD002", "dataset 'mine'")
    assert problem.found.startswith("dataset_info.json ")
    assert found in problem.found
    assert step in problem.next_step


def test_a_column_that_rows_can_do_without_is_a_warning_where_none_has_it(tmp_path):
    entry = {"columns": {"prompt": "instruction", "response": "output", "system": "persona"}}
    (*_, note) = described(tmp_path, entry, ALPACA, ALPACA).notes
    assert (note.code, note.severity) == ("KTD002", "warning")
    assert note.found == 'dataset_info.json says system = "persona"; no row has it'
    assert not described(tmp_path, entry, {**ALPACA, "history": None, "persona": "x"}, ALPACA).notes


def test_entries_that_cant_be_used_are_all_named_at_once(tmp_path):
    rows = {"file_name": "rows.jsonl"}
    info = {
        "hub": {"ms_hub_url": "someone/rows"},
        "odd": {"hf_hub_url": "rows", "split": 3},
        "pairs": {**rows, "ranking": True},
        "typo": {
            "file_name": "none.jsonl",
            "column": {},
            "columns": {"promt": "q"},
            "formatting": "x",
        },
        "chosen": {**rows, "num_samples": "5", "split": "test", "tags": 3},
    }
    write_lines(tmp_path / "rows.jsonl", [ROW])
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ProblemsError) as caught:
        load_rows(settings(*info, "hubb", dataset_dir=str(tmp_path)))
    assert codes(caught) == {"KTD002"}
    steps = {
        f"{problem.where.rsplit(' ')[-1]}: {problem.found}": problem.next_step
        for problem in caught.value.problems
    }
    away, unknown = (
        "hub: ms_hub_url 'someone/rows', which is not on this machine",
        "hubb: no such dataset, nor a file",
    )
    assert steps.keys() == {
        away, unknown, "pairs: ranking: true for stage: sft",
        "typo: file_name 'none.jsonl': no such file", "typo: unknown key column",
        "typo: unknown columns promt", "typo: formatting 'x'", "chosen: num_samples '5'",
        "odd: split 3", "chosen: split 'test'", "chosen: tags 3",
    }  # fmt: skip
    assert "Download it" in steps[away]
    assert steps[unknown] == "Did you mean hub?"
    with pytest.raises(ProblemsError) as caught:
        load_rows(settings("hub"))
    assert "set dataset_dir" in caught.value.problems[0].next_step


# Pairs


def said(role, content):
    return {"role": role, "content": content}


ASKED_OF_BOTH = [said("system", "s"), said("user", "q\ni")]


@pytest.mark.parametrize(
    "row",
    [
        {"system": "s", "instruction": "q", "input": "i", "chosen": "b", "rejected": "c"},
        {"system": "s", "prompt": "q\ni", "chosen": "b", "rejected": "c"},
        {
            "conversations": [SAID[0], {"from": "human", "value": "q\ni"}],
            "chosen": {"from": "gpt", "value": "b"}, "rejected": {"from": "gpt", "value": "c"},
        },
        {
            "prompt": ASKED_OF_BOTH,
            "chosen": [said("assistant", "b")], "rejected": [said("assistant", "c")],
        },
        {
            "system": "s", "prompt": "q\ni",
            "chosen": [ASKED_OF_BOTH[1], said("assistant", "b")],
            "rejected": [ASKED_OF_BOTH[1], said("assistant", "c")],
        },
    ],
)  # fmt: skip
def test_each_format_of_pairs_becomes_the_same_pair(tmp_path, row):
    rows = load_rows(settings(write_lines(tmp_path / "pairs.jsonl", [row]), stage="dpo"))
    (pair,) = rows.rows
    prompt = [("s", "s"), ("u", "q\ni")]
    assert [*map(turns, pair.answers)] == [[*prompt, ("a", "b")], [*prompt, ("a", "c")]]
    assert not rows.notes


# Tokens


def questions(*lengths):
    """Rows whose answers have so many words, behind a prompt of 10 tokens in tiny_tokenizer's template."""
    return [{"messages": [ASK, {**TELL, "content": " ".join(["meow"] * n)}]} for n in lengths]


def test_rows_are_cut_refused_and_counted(tmp_path):
    tokenizer = tiny_tokenizer()
    config = settings(write_lines(tmp_path / "rows.jsonl", questions(3, 30, 5)), cutoff_len=20)
    rows, seen = load_rows(config), []
    fitted = tokenize_rows(rows, tokenizer, config, lambda *step: seen.append(step))
    head = len(tokenizer.apply_chat_template([ASK], add_generation_prompt=True)["input_ids"])
    assert [len(ids) for ids in fitted.dataset["input_ids"]] == [head + 4, 20, head + 6]
    assert (fitted.cut, fitted.refused, seen) == (1, [], [(3, 3)])
    trained = 4 + 6 + 20 - head
    assert (fitted.tokens, fitted.trained_tokens) == (3 * head + trained, trained)
    assert describe_rows(fitted) == (
        "used 3 of 3 rows (1 cut at 20 tokens); "
        f"{fitted.trained_tokens} of {fitted.tokens} tokens are trained on"
    )

    many = settings(write_lines(tmp_path / "many.jsonl", questions(*(1 + n % 5 for n in range(300)))))
    fitted = tokenize_rows(load_rows(many), tokenizer, many, lambda *step: seen.append(step))
    assert seen[1:] == [(256, 300), (300, 300)]
    assert [len(ids) - head - 1 for ids in fitted.dataset["input_ids"]] == [1, 2, 3, 4, 5] * 60

    long = {"messages": [{**ASK, "content": "who " * 30}, TELL]}
    path = write_lines(tmp_path / "rows.jsonl", [*questions(3), long])
    fitted = tokenized(settings(path, cutoff_len=20), tokenizer)
    (refused,) = fitted.refused
    assert (refused.why, refused.where[-6:]) == ("no answer within cutoff_len=20 tokens", "line 2")
    assert fitted.used == 1
    with pytest.raises(ProblemsError, match="1 of 2 rows can't be used"):
        tokenized(settings(path, cutoff_len=20, strict_data=True), tokenizer)
    with pytest.raises(ProblemsError, match="2 of 2 rows") as caught:
        tokenized(settings(path, cutoff_len=head), tokenizer)
    assert "Raise cutoff_len" in caught.value.next_step


# What trl makes of it


def sft_trainer(tmp_path, fitted, model):
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_length=None,
        padding_free=fitted.packed, report_to="none", use_cpu=True, bf16=False,
        router_aux_loss_coef=0.0,  # the cross-entropy alone is compared
        **{CHECKPOINTING: False},
    )  # fmt: skip
    rows, tokenizer = fitted.dataset, tiny_tokenizer()
    return SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)


@torch.no_grad()
def loss_of(model, rows):
    """Mean cross-entropy over the labels of rows, each row alone in its batch."""
    losses = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        losses.append(each[labels >= 0])
    return torch.cat(losses).mean().item()


def test_trl_trains_on_the_rows_as_they_are(tmp_path):
    config = settings(write_lines(tmp_path / "rows.jsonl", [*questions(3, 30, 5)]), cutoff_len=20)
    fitted = tokenized(config, tiny_tokenizer())
    model = tiny_model().float()
    trainer = sft_trainer(tmp_path, fitted, model)
    assert trainer.train_dataset.to_dict() == fitted.dataset.to_dict()
    rows = [trainer.train_dataset[i] for i in range(2)]
    with torch.no_grad():
        loss = trainer.compute_loss(model, trainer.data_collator(rows)).item()
    assert loss == pytest.approx(loss_of(model, rows), rel=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_conversations_dont_see_each_other(tmp_path, attention):
    path = write_lines(tmp_path / "rows.jsonl", questions(3, 30, 5, 1, 2, 6))
    alone, fitted = (
        tokenized(settings(path, cutoff_len=40, neat_packing=packed), tiny_tokenizer())
        for packed in (None, True)
    )
    assert fitted.used == 6
    assert f"packed into {len(fitted.dataset)};" in describe_rows(fitted)
    assert (fitted.tokens, fitted.trained_tokens) == (alone.tokens, alone.trained_tokens)
    packed = [sum(row["seq_lengths"]) for row in fitted.dataset]
    assert len(packed) < 6
    assert max(packed) <= 40
    assert sum(packed) == fitted.tokens

    model = tiny_model().float()
    model.set_attn_implementation(attention)
    trainer = sft_trainer(tmp_path, fitted, model)
    batch = trainer.data_collator([*fitted.dataset])
    assert "attention_mask" not in batch
    ids, positions = batch["input_ids"], batch["position_ids"]
    assert ids.shape == (1, fitted.tokens)
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    assert len(starts) == 6
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        for start, end in pairwise([*starts, fitted.tokens]):
            own = model(input_ids=ids[:, start:end]).logits[0]
            torch.testing.assert_close(logits[start:end], own, atol=1e-5, rtol=1e-4)
        loss = trainer.compute_loss(model, batch).item()
    assert loss == pytest.approx(loss_of(model, [*alone.dataset]), rel=1e-4)


def test_raw_text_is_learned_whole_in_pieces(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    words = "who are you i am a cat meow nya yes no".split()
    path = write_lines(tmp_path / "texts.jsonl", [{"text": " ".join(words * 5)}, {"text": "meow"}, ROW])
    config = settings(path, stage="pt", cutoff_len=16)
    rows = load_rows(config)
    assert rows.refused[0].why.startswith("no text: stage pt trains on a field text")
    fitted = tokenize_rows(rows, tokenizer, config)
    *pieces, short = fitted.dataset["input_ids"]
    assert fitted.dataset["labels"] == fitted.dataset["input_ids"]
    ids = tokenizer(" ".join(words * 5))["input_ids"]
    ids += [tokenizer.eos_token_id] * (ids[-1] != tokenizer.eos_token_id)
    assert pieces[0] + [token for piece in pieces[1:] for token in piece[1:]] == ids
    assert all(a[-1] == b[0] and len(a) == 16 for a, b in pairwise(pieces))
    assert short[-1] == tokenizer.eos_token_id
    assert (fitted.used, fitted.cut) == (2, 0)
    assert fitted.trained_tokens == len(ids) - 1 + len(short) - 1
    entry = {"file_name": "named.jsonl", "columns": {"prompt": "title", "query": "text"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"named": entry}))
    write_lines(tmp_path / "named.jsonl", [{"title": "who", "text": "are you"}])
    named = load_rows(settings("named", stage="pt", dataset_dir=str(tmp_path)))
    assert messages_of(named) == [[{"role": "text", "content": "who\nare you"}]]
    assert fitted.tokens == sum(map(len, fitted.dataset["input_ids"]))

    packed = tokenize_rows(rows, tokenizer, settings(path, stage="pt", cutoff_len=16, packing=True))
    assert packed.packed
    assert packed.trained_tokens == fitted.trained_tokens
    assert sum(map(len, packed.dataset["input_ids"])) == fitted.tokens


def test_pairs_are_the_tokens_that_trl_makes_and_cuts(tmp_path):
    def pair(question, chosen, rejected):
        return {"prompt": question, "chosen": "meow " * chosen, "rejected": "nya " * rejected}

    taken = [pair("who", 3, 4), pair("who ?", 30, 2)]
    same = {"prompt": "who", "chosen": "meow " * 30 + "yes", "rejected": "meow " * 30 + "no"}
    path = write_lines(tmp_path / "pairs.jsonl", [*taken, pair("who " * 30, 1, 1), same])
    fitted = tokenized(settings(path, stage="dpo", cutoff_len=20), tiny_tokenizer())
    assert [refused.why for refused in fitted.refused] == [
        "no answer within cutoff_len=20 tokens",
        "chosen and rejected are the same within cutoff_len=20 tokens",
    ]
    assert (fitted.cut, fitted.used) == (1, 2)
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    texts = [{key: [said(role, row[key])] for key, role in roles.items()} for row in taken]
    trainer = DPOTrainer(
        model=tiny_model(), ref_model=tiny_model(), train_dataset=Dataset.from_list(texts),
        processing_class=tiny_tokenizer(), args=DPOConfig(
            output_dir=str(tmp_path / "out"), max_length=20, report_to="none", use_cpu=True, bf16=False,
            **{CHECKPOINTING: False},
        ),
    )  # fmt: skip
    theirs, ours = (trainer.data_collator([*each]) for each in (trainer.train_dataset, fitted.dataset))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert int(theirs["attention_mask"].sum()) == fitted.tokens
    assert int(theirs["completion_mask"].sum()) == fitted.trained_tokens
