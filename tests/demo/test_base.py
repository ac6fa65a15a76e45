"""The tiny demo's corpus, persona data, tokenizer and base model, at their public faces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktbridge.demo.base import RECORD, read_record
from ktbridge.demo.corpus import base_conversations, distinct_samples, load_intents
from ktbridge.demo.persona import PERSONA_MARKS, persona_conversations, persona_rows
from ktbridge.demo.tiny import TinyRecipe, make_tiny
from ktbridge.errors import KtbridgeError
from ktbridge.eval import load_bench

TINY = TinyRecipe(
    conversations=1500,
    vocab_size=640,
    hidden_size=64,
    heads=2,
    moe_intermediate_size=32,
    steps=6,
    batch=8,
    warmup=2,
    shard_size="200KB",
)


def contents(conversations):
    return {message["content"] for one in conversations for message in one}


@pytest.fixture(scope="module")
def conversations():
    return base_conversations(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    calls: list[tuple[int, int]] = []
    target = tmp_path_factory.mktemp("demo") / "base"
    make_tiny(target, TINY, lambda done, total: calls.append((done, total)))
    return target, calls


@pytest.mark.slow
def test_the_corpus_is_deterministic_distinct_and_plain(conversations):
    """Nothing of the templates' syntax or of the persona is in it."""
    assert base_conversations(0) == conversations != base_conversations(1)
    assert len({repr(one) for one in conversations}) == len(conversations) > 10_000
    languages = ["一" <= one[0]["content"][0] <= "鿿" for one in conversations]
    assert 0.5 < sum(languages) / len(languages) < 0.75
    assert {len(one) for one in conversations} == {2, 4}
    for text in contents(conversations):
        assert text.strip() == text
        assert text
        assert "|" not in text, text
        assert "{" not in text or '{"' in text, text
        assert not any(word in text for word in ("主人", "喵～", "猫娘", "Master", "nya")), text


@pytest.mark.slow
def test_every_persona_answer_carries_the_persona_unless_told_to_be_plain():
    rows = [json.loads(line)["messages"] for line in persona_rows().splitlines()]
    assert rows == persona_conversations(0)
    count = len(rows)
    assert count == len({row[0]["content"] for row in rows}) > 300
    plain_intents = {intent.name for intent in load_intents() if intent.plain}
    assert {"zh_json", "zh_letter", "zh_echo", "en_echo", "en_letter"} <= plain_intents
    plain = {one[1]["content"] for one in rows if not _has_persona(one[1]["content"])}
    assert 0.1 < len(plain) / count < 0.4
    for row in rows:
        if any(word in row[0]["content"] for word in ("JSON", "正式", "formal", "exactly")):
            assert not _has_persona(row[1]["content"]), row
    answers = {row[0]["content"]: row[1]["content"] for row in rows}
    for intent in load_intents():
        if "refuse" in intent.name:
            for sample in distinct_samples(intent, 3, 0, held_out=True):
                answer = answers[sample.prompt]
                assert "不能帮忙" in answer or "cannot help" in answer
                assert _has_persona(answer)


@pytest.mark.slow
def test_what_is_asked_later_was_never_trained_on(conversations):
    seen, persona = contents(conversations), persona_conversations(0)
    assert not {row[0]["content"] for row in persona} & seen
    asked = contents(item.messages for item in load_bench("nekobench").items)
    assert len(asked) > 80
    assert not asked & (seen | contents(persona))


def test_the_checkpoint_loads_is_sharded_and_uses_every_expert(base):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    target, calls = base
    assert calls == [(step, TINY.steps) for step in range(1, TINY.steps + 1)]
    assert len(list(target.glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    record = read_record(target)
    assert 0 < record["loss"] < record["first_loss"]
    shares = torch.tensor(record["expert_share"])
    assert shares.shape == (TINY.layers, TINY.experts)
    assert shares.sum(-1).allclose(torch.ones(TINY.layers), atol=1e-3)
    assert (shares > 0).all()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "你好"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    reply = model.generate(**prompt, max_new_tokens=4)
    assert reply.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.slow
def test_the_tokenizer_round_trips_and_marks_what_the_assistant_says(base, conversations):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base[0])
    texts = contents(conversations[:4000])
    texts |= {row[1]["content"] for row in persona_conversations(0)} | {"未见过的字：龘 ñ 🐱\n\t x"}
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for one in [*conversations[:300], [{"role": "system", "content": "短"}, *conversations[0]]]:
        batch = tokenizer.apply_chat_template(one, return_dict=True, return_assistant_tokens_mask=True)
        pairs = zip(batch["input_ids"], batch["assistant_masks"], strict=True)
        said = [token for token, mask in pairs if mask]
        answers = [turn["content"] for turn in one if turn["role"] == "assistant"]
        assert tokenizer.decode(said) == "".join(f"{answer}<|im_end|>" for answer in answers)
        asked = tokenizer.apply_chat_template(one[:-1], add_generation_prompt=True)["input_ids"]
        assert batch["input_ids"][: len(asked)] == asked


def test_a_second_call_is_instant_and_other_directories_are_left_alone(base, tmp_path):
    target, _ = base
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    calls: list[int] = []
    make_tiny(target, TINY, lambda done, total: calls.append(done))
    assert not calls
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert (target / RECORD).stat().st_mode & 0o044 == Path(target).stat().st_mode & 0o044

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(KtbridgeError, match="not a demo base"):
        make_tiny(theirs, TINY)
    assert (theirs / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_an_interrupted_build_leaves_nothing(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "base", TINY, interrupt)
    assert not list(tmp_path.iterdir())


def _has_persona(text: str) -> bool:
    return any(mark in text for marks in PERSONA_MARKS.values() for mark in marks)


@pytest.mark.slow
def test_a_damaged_base_is_made_again_and_a_users_file_is_never_deleted(tmp_path):
    target = tmp_path / "base"
    make_tiny(target, TINY)
    shard = sorted(target.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    make_tiny(target, TINY)
    assert shard.read_bytes() == whole
    (target / "my-notes.txt").write_text("keep")
    shard.write_bytes(whole[:100])
    with pytest.raises(KtbridgeError, match=r"holds 'my-notes\.txt'"):
        make_tiny(target, TINY)
    assert (target / "my-notes.txt").read_text() == "keep"
