"""Kimi-K2: a checkpoint as it is published, with tiktoken's tokenizer, and no code of its own run."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from published import MODELS, cut
from trainrun import conversation, quiet, run_command, train, write_run

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import ProblemsError
from ktbridge.experts.load_model import SPLITS, load_tokenizer, model_class, model_config

TEXTS = (
    "Hello, world! I'll say we've 12345 HTTPServers.\n\n  Bye   ",
    "你好世界ABC中文abc，これはテストです。café Élan \u0301e ǅ",
    "def f(x):\r\n\treturn x  # 한국어 १२३४ …\n\n\n",
    "🐈‍⬛ nya~ <b>'Tis</b> THE'S the's \u00a0x",
)
CORPUS = "".join(TEXTS) * 2
RANKS = [bytes([value]) for value in range(256)]


def _learn() -> None:
    """Ranks of a small byte-level BPE, as tiktoken's files have them: later merges, higher ranks."""
    words = [
        [bytes([b]) for b in word.encode()] for word in regex.findall("|".join(SPLITS), CORPUS, regex.V1)
    ]
    for _ in range(120):
        pairs: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(word):
                pairs[left + right] = pairs.get(left + right, 0) + 1
        best = max((count, token) for token, count in pairs.items() if token not in RANKS)[1]
        RANKS.append(best)
        words = [_merged(word, {best: 0}) for word in words]


def _merged(parts: list[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """tiktoken's rule: while two neighbors are a token together, merge those of the lowest rank."""
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, i = min(found)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


_learn()
SPECIAL = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    10: "<|im_middle|>", 11: "<|tool_calls_section_begin|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def save_tokenizer(path: Path, **changes: Any) -> None:
    """The files that Kimi-K2's repository has for its tokenizer, with a small vocabulary."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(RANKS)]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    base = len(RANKS)
    settings = {
        "added_tokens_decoder": {
            str(base + i): {"content": name, "special": "tool" not in name}
            for i, name in SPECIAL.items()
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer", "model_max_length": 1000000000000000019884624838656,
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    code = "pat_str = '|'.join([" + ", ".join(f'r"""{part}"""' for part in SPLITS) + "])\n"
    (path / "tokenization_kimi.py").write_text(code + "raise SystemExit('this code was run')\n")


def test_tokens_are_those_of_tiktokens_rule(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ranks = {token: rank for rank, token in enumerate(RANKS)}
    for text in TEXTS:
        words = regex.findall("|".join(SPLITS), text, regex.V1)
        assert "".join(words) == text
        parts = [_merged([bytes([b]) for b in word.encode()], ranks) for word in words]
        expected = [ranks[part] for word in parts for part in word]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text


def test_special_tokens_and_the_chat_template(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer, base = load_tokenizer(tmp_path), len(RANKS)
    assert len(tokenizer) == base + 256
    names = {"[BOS]": 0, "<|im_end|>": 2, f"<|reserved_token_{base + 9}|>": 9, "[PAD]": 255}
    for name, number in names.items():
        assert tokenizer.convert_tokens_to_ids(name) == base + number
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("[EOS]", base + 255)
    told = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_dict=False)
    user, hello = tokenizer.encode("user"), tokenizer.encode("Hello")
    assert told == [base + 3, *user, base + 10, *hello, base + 2]
    ids = [base, base + 11, *tokenizer.encode("x"), base + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|tool_calls_section_begin|>x"


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("tiktoken.model", "IQ== 0\nno line\n", "KTC061"),
        ("tiktoken.model", "IQ== 0\nIg== 7\n", "KTC061"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "x"}}}', "KTC061"),
        ("tokenization_kimi.py", 'pat_str = r"\\s+|\\S+"', "KTC060"),
    ],
)
def test_files_that_are_damaged_or_of_another_tokenizer(tmp_path, file, text, code):
    save_tokenizer(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ProblemsError) as refused:
        load_tokenizer(tmp_path)
    assert [problem.code for problem in refused.value.problems] == [code]


@pytest.fixture
def base(tmp_path):
    """Two layers of Kimi-K2 in its names, with its tokenizer and the code that nobody is to run."""
    path = tmp_path / "kimi"
    config = cut(MODELS["Kimi-K2-Instruct"]) | {"vocab_size": len(RANKS) + 256}
    del config["quantization_config"]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    cls, known = model_class(model_config(path))
    cls(known).to(torch.bfloat16).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    (path / "configuration_deepseek.py").write_text("raise SystemExit('this code was run')\n")
    save_tokenizer(path)
    return path


@quiet
def test_it_is_trained_planned_and_read_again(base, tmp_path):
    rows = [conversation("Hello, world!", "nya~"), conversation("你好世界", "中文abc")]
    run = write_run(tmp_path, base, rows, num_train_epochs=2)
    train(run)
    adapter = read_adapter(run / "raw")
    assert adapter.expert_layers() == (1,)
    assert any(".self_attn.kv_b_proj." in key for key in adapter.nonexpert)
    assert not any(problem.severity == "error" for problem in validate_adapter([run / "raw"]).problems)
    run_command("plan", "--no-measure", run / "run.yaml")
