"""The scorer that compares with reference answers: one overlap measure as a mark in 0..1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktbridge.eval.scoring.overlap import rouge_l, rouge_n, sentence_bleu, unicode_tokens
from ktbridge.eval.scoring.registry import Mark, is_one_of, is_words, mark, scorer

METRICS = ("rouge-1", "rouge-2", "rouge-l", "bleu-4", "chrf")


@scorer("references", required={"metric": is_one_of(*METRICS)}, gold=is_words)
def references(text: str, check: Mapping[str, Any], gold: Any) -> Mark:
    """The overlap with the reference that it is nearest to; gold: list of references.

    Tokens are ideographs and words (``unicode_tokens``). bleu-4 takes all references at once and is
    smoothed (method 3): unrelated texts don't score 0, compare arms and not with 0. These marks are
    for pairing arms item by item; published numbers belong to the families of ``families.py``.
    """
    metric = check["metric"]
    if metric == "chrf":
        from sacrebleu.metrics import CHRF

        value = CHRF().sentence_score(text, list(gold)).score / 100
    else:
        said, wanted = unicode_tokens(text), [unicode_tokens(one) for one in gold]
        if metric == "bleu-4":
            value = sentence_bleu(wanted, said)
        elif metric == "rouge-l":
            value = max(rouge_l(said, one) for one in wanted)
        else:
            value = max(rouge_n(said, one, int(metric[-1])) for one in wanted)
    if not text.strip():
        return mark(False, "empty")
    return Mark(min(1.0, value), f"{metric} {value:.3f} against {len(gold)} reference(s)")
