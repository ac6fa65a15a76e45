"""The scorer that compares with reference answers: an overlap metric as a mark in 0..1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktbridge.eval.scoring.overlap import rouge_l, rouge_n, sentence_bleu, unicode_tokens
from ktbridge.eval.scoring.registry import Mark, is_one_of, is_words, mark, scorer

METRICS = ("rouge-1", "rouge-2", "rouge-l", "bleu-4", "chrf")


@scorer("references", required={"metric": is_one_of(*METRICS)}, gold=is_words)
def references(text: str, check: Mapping[str, Any], gold: Any) -> Mark:
    """The overlap with the nearest reference; gold: list of references.

    Tokens are ideographs and words (``unicode_tokens``). bleu-4 uses all references at once and is
    smoothed (method 3): unrelated texts don't score 0, so compare arms with each other, not with 0.
    These marks are for comparing arms item by item; for published numbers see ``families.py``.
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
