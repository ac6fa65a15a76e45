"""Overlap of two token lists: sentence BLEU and ROUGE, compatible with the usual packages.

Checked against vectors generated with those packages (tests/eval/golden).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction

from ktbridge.eval.scorers.registry import Check, Gold, Mark, is_one_of, is_words, mark, scorer
from ktbridge.eval.text import CJK

Tokens = Sequence[Hashable]
_EPSILON = 1e-8
_TOKEN = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")


def unicode_tokens(text: str) -> list[str]:
    """Single ideographs and runs of other letters or digits, case-folded; no punctuation.

    rouge-score needs this for Chinese: its own tokenizer keeps a-z0-9 only and so drops all of it.
    """
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(tokens: Tokens, n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def sentence_bleu(references: Sequence[Tokens], hypothesis: Tokens, order: int = 4) -> float:
    """BLEU of one sentence in 0..1 with nltk's smoothing method 3, weights 1/order each.

    BLEU = BP exp(sum_n log p_n / order) with clipped precisions p_n (Papineni et al. 2002); the k-th
    p_n without a match becomes 1 / (2^k (number of n-grams, at least 1)) (NIST's mteval; Chen &
    Cherry 2014, "smoothing 3"); 0 where not even one token matches. BP uses the reference that is
    closest in length, the shorter one where two are equally close.
    """
    logs, missing = 0.0, 0
    for n in range(1, order + 1):
        counts = Counter(ngrams(hypothesis, n))
        most: Counter[tuple[Hashable, ...]] = Counter()
        for reference in references:
            most |= Counter(ngrams(reference, n))
        hits, total = (counts & most).total(), max(1, counts.total())
        if hits:
            precision = Fraction(hits, total)
        elif n == 1:
            return 0.0
        else:
            missing += 1
            precision = Fraction(1, 2**missing * total)
        logs += math.log(precision)
    length = len(hypothesis)
    closest = min((len(one) for one in references), key=lambda size: (abs(size - length), size))
    brevity = 1.0 if length > closest else math.exp(1 - closest / length)
    return brevity * math.exp(logs / order)


def _f(precision: float, recall: float) -> float:
    """rouge_chinese's F1, with its epsilon: two equal texts score 0.999999995."""
    return 2 * precision * recall / (precision + recall + _EPSILON)


def rouge_n(hypothesis: Tokens, reference: Tokens, n: int) -> float:
    """F1 of the sets of n-grams, as in rouge_chinese (each n-gram counts once); 0 for none."""
    grams, wanted = set(ngrams(hypothesis, n)), set(ngrams(reference, n))
    both = len(grams & wanted)
    if not grams or not wanted:
        return 0.0
    return _f(both / len(grams), both / len(wanted))


def rouge_l(hypothesis: Tokens, reference: Tokens) -> float:
    """F1 of the longest common subsequence over the whole texts, as in rouge_chinese; 0 for none."""
    if not hypothesis or not reference:
        return 0.0
    common = longest_common(hypothesis, reference)
    return _f(common / len(hypothesis), common / len(reference))


def longest_common(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence, bit-parallel: a row of the table is one integer
    (Hyyro 2004, "Bit-parallel LCS-length computation revisited"), as wide as the shorter text."""
    if len(one) > len(other):
        one, other = other, one
    places: dict[Hashable, int] = {}
    for i, token in enumerate(one):
        places[token] = places.get(token, 0) | 1 << i
    full = (1 << len(one)) - 1
    row = full
    for token in other:
        shared = row & places.get(token, 0)
        row = ((row + shared) | (row - shared)) & full
    return len(one) - row.bit_count()


METRICS = ("rouge-1", "rouge-2", "rouge-l", "bleu-4", "chrf")


@scorer("references", required={"metric": is_one_of(*METRICS)}, gold=is_words)
def references(text: str, check: Check, gold: Gold) -> Mark:
    """The overlap with the nearest reference; gold: list of references.

    Tokens are ideographs and words (``unicode_tokens``). bleu-4 uses all references at once and is
    smoothed (method 3): unrelated texts don't score 0, so compare arms with each other, not with 0.
    These marks are for comparing arms item by item; for published numbers see ``text_metrics.py``.
    """
    metric = check["metric"]
    if metric == "chrf":
        from sacrebleu.metrics import CHRF

        value = CHRF().sentence_score(text, list(gold)).score / 100
    else:
        tokens, wanted = unicode_tokens(text), [unicode_tokens(one) for one in gold]
        if metric == "bleu-4":
            value = sentence_bleu(wanted, tokens)
        elif metric == "rouge-l":
            value = max(rouge_l(tokens, one) for one in wanted)
        else:
            value = max(rouge_n(tokens, one, int(metric[-1])) for one in wanted)
    if not text.strip():
        return mark(False, "empty")
    return Mark(min(1.0, value), f"{metric} {value:.3f} against {len(gold)} reference(s)")
