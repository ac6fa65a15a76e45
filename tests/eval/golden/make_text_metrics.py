"""Renew text_metrics.json: what nltk, rouge_chinese, rouge-score and sacrebleu say of its texts.

    python -m venv /tmp/v && /tmp/v/bin/pip install nltk jieba rouge-chinese rouge-score sacrebleu
    PYTHONPATH=. /tmp/v/bin/python tests/eval/golden/make_text_metrics.py

Texts are added in text_metrics.json; the numbers are those packages' own, none is computed by us.
"""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import jieba  # noqa: E402
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # noqa: E402
from rouge_chinese import Rouge  # noqa: E402
from rouge_score.rouge_scorer import RougeScorer  # noqa: E402
from sacrebleu.metrics import BLEU, CHRF  # noqa: E402

TARGET = Path(__file__).with_name("text_metrics.json")
METHOD = SmoothingFunction().method3
PACKAGES = ("nltk", "jieba", "rouge-chinese", "rouge-score", "sacrebleu")


def rouge(answer: str, reference: str) -> dict[str, float]:
    said, wanted = " ".join(jieba.cut(answer)), " ".join(jieba.cut(reference))
    (found,) = Rouge().get_scores(said, wanted)
    return {name: found[name]["f"] for name in ("rouge-1", "rouge-2", "rouge-l")}


def sample(answer: str, references: list[str]) -> dict[str, object]:
    words, wanted = list(jieba.cut(answer)), [list(jieba.cut(one)) for one in references]
    every = [rouge(answer, one) for one in references]
    return {
        "answer": answer,
        "references": references,
        "tokens": words,
        "reference_tokens": wanted,
        "char_bleu_4": sentence_bleu(
            [list(one) for one in references], list(answer), smoothing_function=METHOD
        ),
        "word_bleu": [
            sentence_bleu(wanted, words, weights=(1 / n,) * n, smoothing_function=METHOD)
            for n in (1, 2, 3, 4)
        ],
        "rouge": {name: max(one[name] for one in every) for name in every[0]},
    }


def std(pairs: list[tuple[str, str]], tokenize: str) -> dict[str, object]:
    answers, wanted = [one for one, _ in pairs], [[other for _, other in pairs]]
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    return {
        "pairs": pairs,
        "bleu": bleu.corpus_score(answers, wanted).score,
        "chrf": chrf.corpus_score(answers, wanted).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def english_rouge(pairs: list[tuple[str, str]]) -> list[dict[str, float]]:
    """rouge-score with its own tokenizer, which serves ASCII."""
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    return [
        {name: score.fmeasure for name, score in scorer.score(other, one).items()} for one, other in pairs
    ]


if __name__ == "__main__":
    texts = json.loads(TARGET.read_text("utf-8"))
    english = texts["en"]["pairs"]
    document = {
        "made_with": {name: importlib.metadata.version(name) for name in PACKAGES},
        "samples": [sample(one["answer"], one["references"]) for one in texts["samples"]],
        "zh": std(texts["zh"]["pairs"], "zh"),
        "en": std(english, "13a") | {"rouge": english_rouge(english)},
    }
    TARGET.write_text(json.dumps(document, ensure_ascii=False, indent=0) + "\n", "utf-8")
