"""Make text_metrics.json: what nltk, rouge_chinese, rouge-score and sacrebleu say of some texts.

    python -m venv /tmp/v && /tmp/v/bin/pip install nltk jieba rouge-chinese rouge-score sacrebleu
    PYTHONPATH=. /tmp/v/bin/python tests/eval/golden/make_text_metrics.py

Run it again only to add texts; the numbers are those packages' own, none is computed by us.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import jieba  # noqa: E402
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu  # noqa: E402
from rouge_chinese import Rouge  # noqa: E402
from sacrebleu.metrics import BLEU, CHRF  # noqa: E402

METHOD = SmoothingFunction().method3
BY_HAND = [
    ("今天的天气真好，我们一起去公园散步吧。", "今天天气很好，我们去公园走走吧。"),
    ("好", "好"),
    ("好的", "不行"),
    (
        "主人回来啦！喵～今天辛苦了，快坐下休息一会儿吧。",
        "主人，欢迎回家！今天累不累？先休息一下吧喵。",
    ),
    ("我不知道。", "请先把鸡肉切成小块，再用盐和胡椒腌二十分钟。"),
    ("The cat sat on the mat.", "A cat was sitting on the mat."),
    ("I like green tea and rice cakes.", "I like green tea and rice cakes."),
    ("Completely unrelated words here", "The meeting starts at three in the afternoon."),
    ("第一行\n第二行", "第一行\n\n第二行"),
    ("他说：“你好！”然后走了。", "他说“你好”，就走了。"),
    ("价格是3.5元，比昨天贵了0.2元", "价格为 3.5 元，贵了 0.2 元。"),
    ("真的吗？真的！真的……", "真的吗？是真的。"),
    ("哈哈哈哈哈哈哈哈", "哈哈"),
    ("A B C D E F", "F E D C B A"),
    ("我喜欢 Python 和 C++", "我喜欢C++和Python"),
    ("二氧化碳的化学式是CO2。", "CO2是二氧化碳的化学式"),
    ("a", "b"),
    ("长江是中国最长的河流，全长约六千三百公里。", "中国最长的河是长江，长约6300公里。"),
    (" 空格 在 前后 ", "空格在前后"),
    ("问题？ 答案！\n \n 结束。", "问题？答案！结束。"),
]


def random_pairs(count: int) -> list[tuple[str, str]]:
    """Texts cut and shuffled from the ones above: partial overlaps of every degree."""
    generator = random.Random(7)
    pool = [text for pair in BY_HAND for text in pair]
    made = []
    for _ in range(count):
        one, other = generator.choice(pool), generator.choice(pool)
        cut = generator.randrange(1, len(one) + 1)
        tokens = list(jieba.cut(one[:cut] + other))
        generator.shuffle(tokens)
        made.append(("".join(tokens[: generator.randrange(1, len(tokens) + 1)]), one + other))
    return [pair for pair in made if all(text.strip() for text in pair)]


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
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    return [
        {name: score.fmeasure for name, score in scorer.score(other, one).items()}
        for one, other in pairs
    ]


def main() -> None:
    several = [
        ["今天天气很好", "今天的天气不错，去散步吧", "散步"],
        ["The cat is on the mat", "There is a cat on the mat"],
    ]
    samples = [sample(one, [other]) for one, other in BY_HAND + random_pairs(60)]
    samples += [
        sample("今天天气不错，一起去散步", several[0]),
        sample("the cat is on a mat", several[1]),
    ]
    chinese = [pair for pair in BY_HAND if "一" <= max(pair[1]) <= "鿿"]
    english = [pair for pair in BY_HAND if all(text.isascii() for text in pair)]
    packages = ("nltk", "jieba", "rouge-chinese", "rouge-score", "sacrebleu")
    document = {
        "made_with": {name: importlib.metadata.version(name) for name in packages},
        "samples": samples,
        "zh": std(chinese, "zh"),
        "en": std(english, "13a") | {"rouge": english_rouge(english)},
    }
    target = Path(__file__).with_name("text_metrics.json")
    target.write_text(json.dumps(document, ensure_ascii=False, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
