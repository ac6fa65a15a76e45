"""The older completions endpoint: what verify and evaluation harnesses read logprobs from."""

from __future__ import annotations

import openai
import pytest

PROMPT = "The cat sleeps on the warm stone. 你喜欢吃苹果吗？"


def test_prompt_logprobs_by_echo(client):
    whole = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    got = whole.logprobs
    assert whole.text == PROMPT
    assert got.token_logprobs[0] is None
    assert got.top_logprobs[0] is None
    assert len(got.tokens) == len(got.token_logprobs) == len(got.text_offset)
    for token, offset in zip(got.tokens, got.text_offset, strict=True):
        assert token.startswith("bytes:") or whole.text.startswith(token, offset)
    for value, top in zip(got.token_logprobs[1:], got.top_logprobs[1:], strict=True):
        assert len(top) == 2
        assert value <= max(top.values()) <= 0


def test_token_ids_and_text_are_the_same_prompt(client, base):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(base).encode(PROMPT)
    options = {"max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    by_text = client.completions.create(model="tiny", prompt=PROMPT, **options)
    by_ids = client.completions.create(model="tiny", prompt=ids, **options)
    assert by_text.choices == by_ids.choices
    assert by_ids.usage.prompt_tokens == len(ids)
    assert len(by_ids.choices[0].logprobs.tokens) == len(ids) + 4


def test_scoring_what_was_generated_gives_the_same_logprobs(client):
    """One pass over prompt + answer agrees with the token loop and its cache."""
    options = {"model": "tiny:neko", "temperature": 0, "logprobs": 0}
    made = client.completions.create(prompt=[40, 50, 60], max_tokens=12, **options).choices[0]
    again = client.completions.create(prompt=[40, 50, 60], max_tokens=12, echo=True, **options).choices[0]
    assert again.logprobs.token_logprobs[3:] == made.logprobs.token_logprobs
    scored = client.completions.create(prompt=again.text, max_tokens=0, echo=True, **options).choices[0]
    if len(scored.logprobs.tokens) == 15:  # the text tokenizes to the tokens it came from
        expected = pytest.approx(made.logprobs.token_logprobs, abs=0.15)
        assert scored.logprobs.token_logprobs[3:] == expected


def test_stream_equals_whole(client):
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 1}
    whole = client.completions.create(max_tokens=20, **options).choices[0]
    chunks = list(client.completions.create(max_tokens=20, stream=True, **options))
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [t for p in parts for t in p.tokens] == whole.logprobs.tokens
    assert [t for p in parts for t in p.text_offset] == whole.logprobs.text_offset
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_several_prompts(client):
    """Each is answered n times as if alone, in order, with its own echo."""
    prompts, options = ["The cat", PROMPT, "x"], {"temperature": 0, "max_tokens": 6, "logprobs": 1}
    options |= {"model": "tiny:neko", "echo": True}
    alone = [client.completions.create(prompt=p, **options) for p in prompts]
    ids = [client.completions.create(prompt=[[40, 50], [60]], **options)]
    together = client.completions.create(prompt=prompts, n=2, **options)
    assert [choice.index for choice in together.choices] == list(range(6))
    expected = [one.choices[0] for one in alone for _ in range(2)]
    for got, one in zip(together.choices, expected, strict=True):
        assert got.text == one.text
        assert got.logprobs.tokens == one.logprobs.tokens
        assert got.logprobs.text_offset == one.logprobs.text_offset
        near = pytest.approx(one.logprobs.token_logprobs[1:], abs=0.1)
        assert got.logprobs.token_logprobs[1:] == near
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert together.usage.completion_tokens == 36
    assert len(ids[0].choices) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "no tokens"),
        ({"prompt": [0, 10**9]}, "vocabulary"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "no tokens"),
        ({"prompt": ["a"] * 65}, "at most 64 prompts"),
        ({"prompt": "x", "max_tokens": 0}, "echo"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": [5] * 513, "echo": True, "max_tokens": 0}, "context"),
    ],
)
def test_bad_requests(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(model="tiny", **options)


def test_values_at_their_limits(client):
    """A full context is scored; whole numbers may have a point; tiny temperatures are greedy."""

    def create(**options: object):
        return client.completions.create(model="tiny", **options)

    full = create(prompt=[5] * 512, echo=True, max_tokens=0, logprobs=0)
    assert len(full.choices[0].logprobs.token_logprobs) == 512
    usage = create(prompt=[5.0, 6], max_tokens=3.0, n=2.0, seed=1).usage  # one in some hundred ends sooner
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 6)
    texts = {
        create(prompt=PROMPT, max_tokens=8, temperature=value).choices[0].text for value in (0, 1e-300, 1e-6)
    }
    assert len(texts) == 1
