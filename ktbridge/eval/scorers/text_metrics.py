"""Texts: normal form, sentences, lengths and scripts; and the overlap of answers with references.

Implementations of "BLEU" differ by tens of points; so metrics come in three named families, and no number is
shown without its family's signature, the length ratio, and how many answers were empty or truncated.

lf         what LLaMA-Factory's predict_with_generate prints: BLEU-4 over characters, ROUGE over jieba
           tokens, x 100, rounded to 4 digits per sample, mean
seedlike   BLEU-1..4 and ROUGE over jieba tokens, the likeliest reading of published tables
std        sacrebleu's corpus BLEU and chrF, rouge-score over a Unicode tokenizer
"""

from __future__ import annotations

import logging
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version as _version
from itertools import zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.types import Family, TextCell
from ktbridge.eval.scorers.registry import Mark, Words, mark, scorer
from ktbridge.install import install_hint

if TYPE_CHECKING:
    import jieba

ROUGES = ("rouge-1", "rouge-2", "rouge-l")
# Characters of an answer that are measured: time and memory of the packages grow with the product of
# both lengths, and an endless answer matches nothing beyond this anyway.
LONGEST_MEASURED = 10_000

References = Sequence[Sequence[str]]
Scored = tuple[dict[str, float], str]  # scores by name, and the signature
Tokens = Sequence[Hashable]
Metric = Literal["rouge-1", "rouge-2", "rouge-l", "bleu-4", "chrf"]
CJK = r"\u3400-\u4dbf\u4e00-\u9fff"
_CJK_CHAR = re.compile(f"[{CJK}]")
_LETTERS = r"A-Za-zÀ-ÖØ-öø-ɏḀ-ỿ\u0300-\u036f"  # Latin ones, with accents
_LATIN_WORD = re.compile(rf"[{_LETTERS}]+(?:['’-][{_LETTERS}]+)*")
# A Latin full stop ends a sentence only before a space or the end: "3.5" and "e.g.x" do not split.
# A run of stops is matched from its first one only, else a long one would take quadratic time.
_SENTENCE_END = re.compile(r"[。！？!?…\n]+|(?<!\.)\.+(?=\s|$)")
_WORDISH = re.compile(r"[^\W_]")
_TOKEN = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")


def normalize(text: str) -> str:
    """NFKC, case-folded, white space collapsed: for comparison, not for display."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def sentences(text: str) -> list[str]:
    """The sentences of a Chinese or English text, without closing marks; empty ones dropped."""
    return [part.strip() for part in _SENTENCE_END.split(text) if _WORDISH.search(part)]


def unicode_tokens(text: str) -> list[str]:
    """Single ideographs and runs of other letters or digits, case-folded; no punctuation. rouge-score needs
    it for Chinese: its own tokenizer keeps a-z0-9 only and so drops all of it."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def count_chars(text: str) -> int:
    """Letters, ideographs and digits; punctuation, spaces and emoji are not counted."""
    return len(_WORDISH.findall(text))


def count_words(text: str) -> int:
    """Latin words plus single ideographs, the usual word count for mixed text."""
    return len(_LATIN_WORD.findall(text)) + len(_CJK_CHAR.findall(text))


def cjk_share(text: str) -> float | None:
    """Ideographs over ideographs + Latin words, or None for a text that has neither."""
    words = count_words(text)
    return len(_CJK_CHAR.findall(text)) / words if words else None


def language_of(text: str) -> str:
    """ "zh" if at least half of a text is ideographs, else "en"."""
    return "zh" if (cjk_share(text) or 0) >= 0.5 else "en"


def contains(haystack: str, needle: str) -> bool:
    """Return whether ``needle`` occurs in ``haystack``, both normalized; where it begins or ends with an
    ASCII letter or digit it stands alone ("cold" isn't in "scolded"). Ideographs have no such boundary."""
    wanted = normalize(needle)
    left = r"(?<![a-z0-9])" if re.match(r"[a-z0-9]", wanted) else ""
    right = r"(?![a-z0-9])" if re.search(r"[a-z0-9]$", wanted) else ""
    return re.search(left + re.escape(wanted) + right, normalize(haystack)) is not None


# --- overlap with references


@scorer("references")
def references(text: str, gold: Words, *, metric: Metric) -> Mark:
    """The overlap with the nearest reference; gold: list of references. Only ``LONGEST_MEASURED`` characters
    are measured.

    Tokens are ``unicode_tokens``. bleu-4 uses all references at once and is smoothed (method 3): unrelated
    texts don't score 0, so compare arms with each other, not with 0. For published numbers see
    ``measure_texts``."""
    text = text[:LONGEST_MEASURED]
    if not text.strip():
        return mark(False, "empty")
    if metric == "chrf":
        from sacrebleu.metrics import CHRF

        value = CHRF().sentence_score(text, list(gold)).score / 100
    else:
        tokens, wanted = unicode_tokens(text), [unicode_tokens(one) for one in gold]
        if metric == "bleu-4":
            value = sentence_bleu(wanted, tokens)
        else:
            value = max(rouge(metric, tokens, one) for one in wanted)
    return Mark(min(1.0, value), f"{metric} {value:.3f} against {len(gold)} reference(s)")


# --- metrics over all answers


def measure_texts(
    family: Family, answers: Sequence[str], references: References, *, truncated: int = 0
) -> TextCell:
    """Measure an arm's answers against each item's references: BLEU uses them all, ROUGE the best one.

    Only the first ``LONGEST_MEASURED`` characters of an answer are measured; the signature counts longer
    ones. Raises ValueError for no answers, unequal lengths or an item without references, KtbridgeError if
    a package that the family needs is missing."""
    if not answers or len(answers) != len(references) or not all(references):
        raise ValueError("answers and their references are needed, as many of one as of the other")
    cut = sum(len(answer) > LONGEST_MEASURED for answer in answers)
    try:
        scores, signature = FAMILIES[family]([one[:LONGEST_MEASURED] for one in answers], references)
    except ImportError as error:
        raise KtbridgeError(
            f"the metric family {family!r} needs {error.name}.", install_hint("eval")
        ) from None
    several = any(len(group) > 1 for group in references)
    signature += f"|refs:{'several' if several else '1'}"
    if cut:
        signature += f"|first {LONGEST_MEASURED} characters of {cut} longer answer(s)"
    lengths = [count_chars(answer) for answer in answers]
    wanted = [
        _nearest(map(count_chars, group), mine) for mine, group in zip(lengths, references, strict=True)
    ]
    return {
        "family": family,
        "scores": {name: round(value, 4) for name, value in scores.items()},
        "signature": signature,
        "n": len(answers),
        "empty": sum(not answer.strip() for answer in answers),
        "truncated": truncated,
        "length_ratio": round(sum(lengths) / sum(wanted), 4) if sum(wanted) else 0.0,
    }


def _nearest(sizes: Iterable[int], size: int) -> int:
    return min(sizes, key=lambda one: (abs(one - size), one))


def _lf(answers: Sequence[str], references: References) -> Scored:
    samples = []
    for answer, group in zip(answers, references, strict=True):
        bleu = sentence_bleu([list(one) for one in group], list(answer))
        scores = {**_rouges(answer, group), "bleu-4": bleu}
        samples.append({name: round(100 * value, 4) for name, value in scores.items()})
    return _means(samples), f"lf|bleu4:chars,method3,sentence-mean|rouge:f1,jieba {_version('jieba')}"


def _seedlike(answers: Sequence[str], references: References) -> Scored:
    samples = []
    for answer, group in zip(answers, references, strict=True):
        tokens, wanted = jieba_tokens(answer), [jieba_tokens(one) for one in group]
        bleu = {f"bleu-{n}": sentence_bleu(wanted, tokens, n) for n in (1, 2, 3, 4)}
        samples.append({**bleu, **_rouges(answer, group)})
    made = f"jieba {_version('jieba')}"
    return _means(samples, 100), f"seedlike|bleu1-4:cumulative,method3,sentence-mean,{made}|rouge:f1,{made}"


def _means(samples: Sequence[Mapping[str, float]], scale: float = 1) -> dict[str, float]:
    return {name: scale * sum(one[name] for one in samples) / len(samples) for name in samples[0]}


def _std(answers: Sequence[str], references: References) -> Scored:
    from rouge_score import rouge_scorer
    from sacrebleu.metrics import BLEU, CHRF

    chinese = language_of(" ".join(one for group in references for one in group)) == "zh"
    bleu, chrf = BLEU(tokenize="zh" if chinese else "13a"), CHRF()
    # sacrebleu expects lists of the i-th reference of every item; None where an item has fewer.
    columns: Any = list(zip_longest(*references))
    scores = {
        "bleu": bleu.corpus_score(list(answers), columns).score,
        "chrf": chrf.corpus_score(list(answers), columns).score,
    }
    names = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
    tokenizer = SimpleNamespace(tokenize=unicode_tokens)
    rouges = rouge_scorer.RougeScorer(list(names.values()), tokenizer=tokenizer)
    found = [
        rouges.score_multi(list(group), answer) for answer, group in zip(answers, references, strict=True)
    ]
    samples = [{ours: one[theirs].fmeasure for ours, theirs in names.items()} for one in found]
    scores |= _means(samples, 100)
    signature = (
        f"std|bleu:{bleu.get_signature()}|chrf:{chrf.get_signature()}"
        f"|rouge:rouge-score {_version('rouge-score')},f1,unicode-tokens,no-stemmer"
    )
    return scores, signature


FAMILIES: dict[Family, Callable[[Sequence[str], References], Scored]] = {
    "lf": _lf, "seedlike": _seedlike, "std": _std
}  # fmt: skip


def _rouges(answer: str, group: Sequence[str]) -> dict[str, float]:
    tokens, *wanted = [_rouge_words(jieba_tokens(one)) for one in (answer, *group)]
    wanted = [one for one in wanted if any(one)]
    if not any(tokens) or not wanted:
        return dict.fromkeys(ROUGES, 0.0)
    return {name: max(rouge(name, tokens, one) for one in wanted) for name in ROUGES}


def _rouge_words(tokens: Sequence[str]) -> list[str]:
    """The words that rouge_chinese sees in tokens joined by spaces. It splits sentences first (after
    。！？? and at newlines) and keeps a blank one as one empty word: white space lowers the score a
    little."""
    lines = re.sub(r"([。！？?])(?=[^”’])", r"\1\n", " ".join(tokens)).rstrip().split("\n")
    return [word for line in lines if line for word in (line.split() or [""])]


@cache
def _jieba() -> jieba.Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its source has invalid escapes and pkg_resources
        import jieba
    jieba.setLogLevel(logging.WARNING)
    # A separate tokenizer: words that a program added to jieba's global one must not change scores.
    tokenizer = jieba.Tokenizer()
    tokenizer.initialize()
    return tokenizer


def jieba_tokens(text: str) -> list[str]:
    """jieba's default segmentation (accurate mode, with its hidden Markov model)."""
    return list(_jieba().cut(text))


# --- two token lists: checked against vectors made with the usual packages (tests/eval/golden)


def ngrams(tokens: Tokens, n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def sentence_bleu(references: Sequence[Tokens], hypothesis: Tokens, order: int = 4) -> float:
    """BLEU of one sentence in 0..1 with nltk's smoothing method 3, weights 1/order each.

    sacrebleu calls that smoothing "exp" (NIST's mteval; Chen & Cherry 2014, "smoothing 3"). As in nltk, a
    text shorter than ``order`` counts as one n-gram of each length that it lacks."""
    from sacrebleu.metrics import BLEU

    hits, totals = [], []
    for n in range(1, order + 1):
        counts = Counter(ngrams(hypothesis, n))
        most: Counter[tuple[Hashable, ...]] = Counter()
        for reference in references:
            most |= Counter(ngrams(reference, n))
        hits.append((counts & most).total())
        totals.append(max(1, counts.total()))
    sizes = len(hypothesis), _nearest(map(len, references), len(hypothesis))
    bleu = BLEU.compute_bleu(hits, totals, *sizes, smooth_method="exp", max_ngram_order=order)
    return bleu.score / 100


def rouge(name: str, hypothesis: Tokens, reference: Tokens) -> float:
    """F1 as in rouge_chinese, with its epsilon: two equal texts score 0.999999995; 0 for none. rouge-1 and
    rouge-2 compare sets of n-grams, rouge-l takes the longest common subsequence of the whole texts."""
    if name == "rouge-l":
        sizes = (len(hypothesis), len(reference))
        common = longest_common(hypothesis, reference)
    else:
        grams, wanted = (set(ngrams(one, int(name[-1]))) for one in (hypothesis, reference))
        sizes, common = (len(grams), len(wanted)), len(grams & wanted)
    if not all(sizes):
        return 0.0
    precision, recall = common / sizes[0], common / sizes[1]
    return 2 * precision * recall / (precision + recall + 1e-8)


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
