"""Text metrics over all answers of an arm, in three named families, each with its signature.

Implementations of "BLEU" differ by tens of points; so a number is never shown without its family's
signature, the length ratio, and how many answers were empty or truncated.

lf         what LLaMA-Factory's predict_with_generate prints: BLEU-4 over characters, ROUGE over jieba
           tokens, x 100, rounded to 4 digits per sample, mean
seedlike   BLEU-1..4 and ROUGE over jieba tokens, the likeliest reading of published tables
std        sacrebleu's corpus BLEU and chrF, rouge-score over a Unicode tokenizer
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ktbridge.errors import KtbridgeError, UsageError
from ktbridge.eval.results.types import TextCell
from ktbridge.eval.scorers.overlap import rouge_l, rouge_n, sentence_bleu, unicode_tokens
from ktbridge.eval.text import cjk_share, count_chars
from ktbridge.install import install_hint

ROUGES = ("rouge-1", "rouge-2", "rouge-l")
# Characters of an answer that are measured: time and memory of the packages grow with the product of
# both lengths, and an endless answer matches nothing beyond this anyway.
LONGEST_MEASURED = 10_000


@dataclass(frozen=True)
class TextMetrics:
    """Scores in 0..100 over ``n`` answers. ``length_ratio``: characters in answers over characters in
    references (the nearest in length); ``empty`` answers count in ``n`` and score 0."""

    family: str
    scores: dict[str, float]
    signature: str
    n: int
    empty: int
    truncated: int
    length_ratio: float

    def as_dict(self) -> TextCell:
        return {
            "family": self.family,
            "scores": {name: round(value, 4) for name, value in self.scores.items()},
            "signature": self.signature,
            "n": self.n,
            "empty": self.empty,
            "truncated": self.truncated,
            "length_ratio": round(self.length_ratio, 4),
        }


def measure_texts(
    family: str,
    answers: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    truncated: int = 0,
) -> TextMetrics:
    """Measure an arm's answers against each item's references (one or several).

    With several references BLEU uses them all and ROUGE the best one. Only the first
    ``LONGEST_MEASURED`` characters of an answer are measured; the signature counts longer ones. Raises
    UsageError for an unknown family, ValueError for no answers, unequal lengths or an item without
    references, and KtbridgeError if a package that the family needs is missing.
    """
    if family not in FAMILIES:
        raise UsageError(f"there is no metric family {family!r}.", f"choose {', '.join(FAMILIES)}")
    if not answers or len(answers) != len(references) or not all(references):
        raise ValueError("answers and their references are needed, as many of one as of the other")
    cut = sum(len(answer) > LONGEST_MEASURED for answer in answers)
    scores, signature = FAMILIES[family]([one[:LONGEST_MEASURED] for one in answers], references)
    if cut:
        signature += f"|first {LONGEST_MEASURED} characters of {cut} longer answer(s)"
    lengths = [count_chars(answer) for answer in answers]
    wanted = [
        min((count_chars(one) for one in group), key=lambda size: (abs(size - mine), size))
        for mine, group in zip(lengths, references, strict=True)
    ]
    ratio = sum(lengths) / sum(wanted) if sum(wanted) else 0.0
    empty = sum(not answer.strip() for answer in answers)
    return TextMetrics(family, scores, signature, len(answers), empty, truncated, ratio)


def _lf(
    answers: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], str]:
    samples: dict[str, list[float]] = {name: [] for name in (*ROUGES, "bleu-4")}
    for answer, group in zip(answers, references, strict=True):
        for name, value in _rouges(answer, group).items():
            samples[name].append(round(100 * value, 4))
        bleu = sentence_bleu([list(one) for one in group], list(answer))
        samples["bleu-4"].append(round(100 * bleu, 4))
    signature = (
        f"lf|bleu4:chars,method3,sentence-mean|rouge:f1,{_jieba_name()}|refs:{_many(references)}"
    )
    return {name: sum(values) / len(values) for name, values in samples.items()}, signature


def _seedlike(
    answers: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], str]:
    totals = dict.fromkeys((*(f"bleu-{n}" for n in (1, 2, 3, 4)), *ROUGES), 0.0)
    for answer, group in zip(answers, references, strict=True):
        tokens, wanted = jieba_tokens(answer), [jieba_tokens(one) for one in group]
        for n in (1, 2, 3, 4):
            totals[f"bleu-{n}"] += sentence_bleu(wanted, tokens, n)
        for name, value in _rouges(answer, group).items():
            totals[name] += value
    signature = (
        f"seedlike|bleu1-4:cumulative,method3,sentence-mean,{_jieba_name()}"
        f"|rouge:f1,{_jieba_name()}|refs:{_many(references)}"
    )
    return {name: 100 * total / len(answers) for name, total in totals.items()}, signature


def _std(
    answers: Sequence[str], references: Sequence[Sequence[str]]
) -> tuple[dict[str, float], str]:
    try:
        from rouge_score import rouge_scorer
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise KtbridgeError(
            f"the metric family 'std' needs {error.name}.", install_hint("eval")
        ) from None
    share = cjk_share(" ".join(one for group in references for one in group))
    bleu = BLEU(tokenize="zh" if share is not None and share >= 0.5 else "13a")
    chrf = CHRF()
    most = max(map(len, references))
    # sacrebleu expects lists of the i-th reference of every item; None where an item has fewer.
    columns: Any = [
        [group[i] if i < len(group) else None for group in references] for i in range(most)
    ]
    scores = {
        "bleu": bleu.corpus_score(list(answers), columns).score,
        "chrf": chrf.corpus_score(list(answers), columns).score,
    }
    names = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
    rouge = rouge_scorer.RougeScorer(list(names.values()), tokenizer=_UnicodeTokenizer())
    totals = dict.fromkeys(names, 0.0)
    for answer, group in zip(answers, references, strict=True):
        found = rouge.score_multi(list(group), answer)
        for ours, theirs in names.items():
            totals[ours] += found[theirs].fmeasure
    scores |= {name: 100 * total / len(answers) for name, total in totals.items()}
    signature = (
        f"std|bleu:{bleu.get_signature()}|chrf:{chrf.get_signature()}"
        f"|rouge:rouge-score {importlib.metadata.version('rouge-score')},f1,unicode-tokens,no-stemmer"
        f"|refs:{_many(references)}"
    )
    return scores, signature


class _UnicodeTokenizer:
    """rouge-score's tokenizer protocol."""

    def tokenize(self, text: str) -> list[str]:
        return unicode_tokens(text)


FAMILIES: dict[
    str,
    Callable[[Sequence[str], Sequence[Sequence[str]]], tuple[dict[str, float], str]],
] = {"lf": _lf, "seedlike": _seedlike, "std": _std}


def _many(references: Sequence[Sequence[str]]) -> str:
    return "1" if all(len(group) == 1 for group in references) else "several"


def _rouges(answer: str, group: Sequence[str]) -> dict[str, float]:
    tokens = _rouge_words(jieba_tokens(answer))
    wanted = [_rouge_words(jieba_tokens(one)) for one in group]
    if not any(tokens) or not any(map(any, wanted)):
        return dict.fromkeys(ROUGES, 0.0)
    wanted = [one for one in wanted if any(one)]
    return {
        "rouge-1": max(rouge_n(tokens, one, 1) for one in wanted),
        "rouge-2": max(rouge_n(tokens, one, 2) for one in wanted),
        "rouge-l": max(rouge_l(tokens, one) for one in wanted),
    }


def _rouge_words(tokens: Sequence[str]) -> list[str]:
    """The words that rouge_chinese sees in tokens joined by spaces.

    It splits sentences first (after 。！？? and at newlines) and keeps a whitespace-only sentence
    as one empty word; so white space in an answer lowers the score a little.
    """
    lines = re.sub(r"([。！？?])(?=[^”’])", r"\1\n", " ".join(tokens)).rstrip().split("\n")
    return [word for line in lines if line for word in (line.split() or [""])]


@cache
def _jieba() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its source has invalid escapes and pkg_resources
            import jieba
    except ImportError:
        raise KtbridgeError(
            "the metric families 'lf' and 'seedlike' need jieba.", install_hint("eval")
        ) from None
    jieba.setLogLevel(logging.WARNING)
    # A separate tokenizer: words that a program added to jieba's global one must not change scores.
    tokenizer = jieba.Tokenizer()
    tokenizer.initialize()
    return tokenizer


def _jieba_name() -> str:
    return f"jieba {importlib.metadata.version('jieba')}"


def jieba_tokens(text: str) -> list[str]:
    """jieba's default segmentation (accurate mode, with its hidden Markov model)."""
    return list(_jieba().cut(text))
