"""Our BLEU and ROUGE against numbers made by nltk, rouge_chinese, rouge-score and sacrebleu."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ktbridge.eval.scorers import SCORERS, measure_texts
from ktbridge.eval.scorers.text_metrics import (
    _rouge_words,
    jieba_tokens,
    longest_common,
    rouge,
    sentence_bleu,
    unicode_tokens,
)

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("text_metrics.json").read_text())
SAMPLES = GOLDEN["samples"]


def test_sentence_bleu_is_nltks():
    assert len(SAMPLES) > 70
    for one in SAMPLES:
        chars = [list(text) for text in one["references"]]
        assert sentence_bleu(chars, list(one["answer"])) == pytest.approx(one["char_bleu_4"])
        for n, value in enumerate(one["word_bleu"], 1):
            got = sentence_bleu(one["reference_tokens"], one["tokens"], n)
            assert got == pytest.approx(value), (n, one["answer"])
    values = [one["char_bleu_4"] for one in SAMPLES]
    assert min(values) == 0
    assert max(values) == pytest.approx(1.0)


def test_rouge_is_rouge_chineses():
    for one in SAMPLES:
        said = _rouge_words(one["tokens"])
        wanted = [_rouge_words(tokens) for tokens in one["reference_tokens"]]
        for name in ("rouge-1", "rouge-2", "rouge-l"):
            got = max(rouge(name, said, tokens) for tokens in wanted)
            assert got == pytest.approx(one["rouge"][name]), (name, one["answer"])


def test_rouge_over_ascii_is_rouge_scores():
    for (answer, reference), scores in zip(GOLDEN["en"]["pairs"], GOLDEN["en"]["rouge"], strict=True):
        said, wanted = unicode_tokens(answer), unicode_tokens(reference)
        assert rouge("rouge-l", said, wanted) == pytest.approx(scores["rougeL"], abs=1e-7)


def test_the_common_subsequence_against_the_table():
    generator = random.Random(3)
    for _ in range(60):
        one, other = (generator.choices("abcd", k=generator.randrange(1, 70)) for _ in range(2))
        row = [0] * (len(other) + 1)
        for a in one:
            before = row
            row = [0]
            for j, b in enumerate(other):
                row.append(before[j] + 1 if a == b else max(before[j + 1], row[j]))
        assert longest_common(one, other) == row[-1]


def test_known_traps_are_where_they_were():
    # Two unrelated English sentences share letters; one equal character lacks longer n-grams.
    unrelated = sentence_bleu(
        [list("The meeting starts at three in the afternoon.")],
        list("Completely unrelated words here"),
    )
    assert 0.03 < unrelated < 0.2
    assert sentence_bleu([["好"]], ["好"]) == pytest.approx(64**-0.25)  # 35 of 100
    assert unicode_tokens("我用GPT-4，２次！") == ["我", "用", "gpt", "4", "2", "次"]


def test_the_lf_family_is_the_mean_of_rounded_samples():
    pytest.importorskip("jieba")
    singles = [one for one in SAMPLES if len(one["references"]) == 1]
    for one in singles:
        assert jieba_tokens(one["answer"]) == one["tokens"]
    answers, wanted = [one["answer"] for one in singles], [one["references"] for one in singles]
    lf = measure_texts("lf", answers, wanted, truncated=2)
    for name, of in (
        ("bleu-4", lambda one: one["char_bleu_4"]),
        ("rouge-l", lambda one: one["rouge"]["rouge-l"]),
    ):
        mean = sum(round(100 * of(one), 4) for one in singles) / len(singles)
        assert lf["scores"][name] == pytest.approx(mean, abs=1e-4)
    assert lf["signature"].startswith("lf|bleu4:chars,method3,sentence-mean|rouge:f1,jieba 0.")
    assert lf["signature"].endswith("refs:1")
    assert (lf["n"], lf["empty"], lf["truncated"]) == (len(singles), 0, 2)
    other = measure_texts("seedlike", answers, wanted)
    mean = sum(one["word_bleu"][1] for one in singles) / len(singles)
    assert other["scores"]["bleu-2"] == pytest.approx(100 * mean, abs=1e-4)
    assert other["signature"] != lf["signature"]
    blank = measure_texts("lf", ["", " \n"], [["好"], ["好", "行"]])
    assert set(blank["scores"].values()) == {0.0}
    assert (blank["empty"], blank["length_ratio"]) == (2, 0.0)
    assert blank["signature"].endswith("refs:several")


def test_the_std_family_is_sacrebleu_and_rouge_score():
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    for language in ("zh", "en"):
        golden = GOLDEN[language]
        answers = [pair[0] for pair in golden["pairs"]]
        found = measure_texts("std", answers, [[pair[1]] for pair in golden["pairs"]])
        assert found["scores"]["bleu"] == pytest.approx(golden["bleu"], abs=1e-4)
        assert found["scores"]["chrf"] == pytest.approx(golden["chrf"], abs=1e-4)
        assert f"|tok:{'zh' if language == 'zh' else '13a'}|" in found["signature"]
        assert "unicode-tokens" in found["signature"]
    # Its own tokenizer keeps no ideograph: everything Chinese would score 0.
    chinese = measure_texts("std", ["今天天气很好"], [["今天天气很好", "晴"]])
    assert chinese["scores"]["rouge-l"] == pytest.approx(100)
    mark = SCORERS["references"].score("今天", {"metric": "chrf"}, ["今天", "明天"])
    assert mark.value == pytest.approx(1.0)


def test_nonsense_is_refused():
    for answers, references in (([], []), (["a"], [[]]), (["a"], [["a"], ["b"]])):
        with pytest.raises(ValueError, match="references are needed"):
            measure_texts("lf", answers, references)
