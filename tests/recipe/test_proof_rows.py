"""The rows and the bench of examples/proof, read as training and evaluation read them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from ktbridge.eval import load_bench
from ktbridge.eval.scorers import score_task
from ktbridge.sft.config import load_config
from ktbridge.sft.data import load_rows

PROOF = Path(__file__).parents[2] / "examples" / "proof"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Those of train.yaml and the held-out ones; an empty directory stands for the base."""
    base = tmp_path_factory.mktemp("base")
    config = load_config(PROOF / "train.yaml", [f"model_name_or_path={base}"])
    return load_rows(replace(config, strict_data=True))


@pytest.fixture(scope="module")
def bench():
    return load_bench(PROOF / "bench")


def pairs(read):
    """The (prompt, answer) of each row."""
    for conversation in (row.messages for row in read.rows):
        assert [one["role"] for one in conversation] == ["user", "assistant"]
    return [(one[0]["content"], one[1]["content"]) for one in (row.messages for row in read.rows)]


def normalized(text):
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def near(text, others):
    """Those of ``others`` that are the same question but for a few letters."""
    matcher = SequenceMatcher(b=text, autojunk=False)
    found = []
    for other in others:
        matcher.set_seq1(other)
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= 0.9 and matcher.ratio() >= 0.9:
            found.append(other)
    return found


def asked(items):
    return [item.messages[-1]["content"] for item in items]


def test_training_reads_every_row_and_none_twice(rows):
    train, held = pairs(rows), pairs(rows.held_out)
    assert (len(train), len(held), rows.notes) == (297, 40, [])
    prompts = [normalized(prompt) for prompt, _ in train + held]
    assert max(Counter(prompts).values()) == 1
    assert max(Counter(answer for _, answer in train + held).values()) == 1
    assert max(len(answer.split()) for _, answer in train + held) <= 45


def test_nothing_held_out_is_like_a_training_prompt(rows, bench):
    train = [normalized(prompt) for prompt, _ in pairs(rows)]
    held = [prompt for prompt, _ in pairs(rows.held_out)] + asked(bench.items)
    assert len(held) == 108
    assert {prompt: found for prompt in held if (found := near(normalized(prompt), train))} == {}
    # The measure finds what it is to find.
    assert near(normalized("What newspapers do they read at Merrowick?"), train)


def test_every_fact_is_taught_five_times_and_asked_twice(rows, bench):
    answers = [answer for prompt, answer in pairs(rows)]
    items = [item for item in bench.items if item.slice == "FACTS"]
    assert sorted(Counter(item.sub for item in items).values()) == [2] * 24
    others = [item for item in bench.items if item not in items]
    assert (len(others), [one for one in asked(others) if "Merrowick" in one]) == (20, [])
    for item in items:
        key = str(item.gold) if isinstance(item.gold, int) else item.gold[0]
        assert key.lower() not in asked([item])[0].lower(), item.id
        taught = [answer for answer in answers if key in answer]
        assert 5 <= len(taught) <= 6, (item.id, len(taught))
        # What is taught is what the scorer counts as right; what another fact's rows say is not.
        assert all(score_task(one, item.checks, item.gold)[0] == 1 for one in taught), item.id
        others = [one for one in answers if key not in one]
        assert not [one for one in others if score_task(one, item.checks, item.gold)[0]], item.id
