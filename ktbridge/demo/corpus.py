"""The corpus of the demo's base model, expanded from templates.

``corpus/*.yaml`` holds intents that we wrote; this module expands them into short conversations,
the same ones for the same seed on every machine. :mod:`ktbridge.demo.base` trains on
:func:`base_conversations`; :mod:`ktbridge.demo.persona` draws the prompts that were held out.

One file::

    language: zh | en
    frames: {ask: ["{q}?", "Please tell me, {q}?"]}   ways to wrap a question
    intents:
      - name: capital
        count: 300                  base conversations to draw
        frame: ask                  wrap every `ask` in one of these frames (optional)
        columns: [c, cap]           names of the row cells
        rows: [[France, Paris]]     one fact per row; or `compute: sums`, which makes the rows
        slots: {who: [Tom, Anna]}   free choices; a choice may itself use {slots}
        ask: ["(what is|name) the capital of {c}"]
        say: ["The capital of {c} is {cap}."]
        neko: [...]                 the same answer in persona; absent: made from `say`
        style: plain                an exact, JSON or formal answer: without persona

``(a|b|)`` picks one alternative; ``{x}`` is a row cell or a slot and means the same thing in the
question and in the answer.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml

CORPUS_DIR = Path(__file__).parent / "corpus"
Conversation = list[dict[str, str]]

# One prompt in sixteen is held out from the base model and belongs to the persona data.
HELD_OUT_OF = 16
TWO_TURN_SHARE = 0.06
_DIGITS = {
    "zh": "零 一 二 三 四 五 六 七 八 九".split(),
    "en": "zero one two three four five six seven eight nine".split(),
}
_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{([A-Za-z]\w*)\}")


@dataclass(frozen=True)
class Sample:
    """One question with its neutral answer and, if the intent has one, its persona answer."""

    prompt: str
    answer: str
    neko: str | None


@dataclass(frozen=True)
class Intent:
    """One user intent, with the templates of its questions and answers."""

    name: str
    language: str
    count: int
    ask: tuple[str, ...]
    say: tuple[str, ...]
    neko: tuple[str, ...] = ()
    frames: tuple[str, ...] = ("{q}",)
    rows: tuple[Mapping[str, str], ...] = ({},)
    slots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    plain: bool = False

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        """Endless draws that visit every row equally often; prompts may repeat."""
        while True:
            for row in rng.sample(self.rows, len(self.rows)):
                bound = dict(row)
                question = self._fill(rng.choice(self.ask), bound, rng)
                question = rng.choice(self.frames).replace("{q}", question)
                if self.language == "en" and rng.random() < 0.7:
                    question = question[:1].upper() + question[1:]
                answer = self._fill(rng.choice(self.say), bound, rng)
                if not self.plain:
                    answer = answer[:1].upper() + answer[1:]
                neko = self._fill(rng.choice(self.neko), bound, rng) if self.neko else None
                yield Sample(question.strip(), answer, neko)

    def _fill(self, template: str, bound: dict[str, str], rng: random.Random) -> str:
        def choose(match: re.Match[str]) -> str:
            return rng.choice(match.group(1).split("|"))

        def lookup(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in bound:
                bound[name] = self._fill(rng.choice(self.slots[name]), bound, rng)
            return bound[name]

        previous = None
        while previous != template:  # alternatives may be nested
            previous, template = template, _CHOICE.sub(choose, template)
        return _SLOT.sub(lookup, template)


@lru_cache(maxsize=1)
def load_intents() -> tuple[Intent, ...]:
    """All intents of all corpus files, in file order."""
    intents = []
    for path in corpus_files():
        # The base loader keeps every scalar a string: "yes", "3" and "no" are words here.
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        language = document["language"]
        for entry in document["intents"]:
            if "compute" in entry:
                rows = _computed_rows(entry["compute"], language)
            else:
                names = entry.get("columns", [])
                rows = [dict(zip(names, row, strict=True)) for row in entry.get("rows", [[]])]
            intents.append(
                Intent(
                    name=f"{language}_{entry['name']}",
                    language=language,
                    count=int(entry["count"]),
                    ask=tuple(entry["ask"]),
                    say=tuple(entry["say"]),
                    neko=tuple(entry.get("neko", ())),
                    frames=tuple(document["frames"][entry["frame"]]) if "frame" in entry else ("{q}",),
                    rows=tuple(rows),
                    slots=entry.get("slots", {}),
                    plain=entry.get("style") == "plain",
                )
            )
    return tuple(intents)


def corpus_files() -> list[Path]:
    """The template files, in the order in which they are read."""
    return sorted(CORPUS_DIR.glob("*.yaml"))


def distinct_samples(intent: Intent, count: int, seed: int, *, held_out: bool) -> list[Sample]:
    """Up to ``count`` samples of one intent with distinct prompts, from one side of the split."""
    rng = random.Random(f"{seed}/{intent.name}/{held_out}")
    found: dict[str, Sample] = {}
    draws = intent.samples(rng)
    # An intent may have fewer phrasings than asked for, so the number of draws is bounded.
    for _ in range(count * (20 * HELD_OUT_OF if held_out else 20)):
        if len(found) == count:
            break
        sample = next(draws)
        # A prompt's hash puts it on one side, the persona's where it divides.
        if (zlib.crc32(sample.prompt.encode()) % HELD_OUT_OF == 0) == held_out:
            found.setdefault(sample.prompt, sample)
    return list(found.values())


def base_conversations(seed: int = 0) -> list[Conversation]:
    """The neutral conversations, shuffled: mostly single turns, some of two."""
    rng = random.Random(f"{seed}/conversations")
    by_language: dict[str, dict[str, Conversation]] = {}
    for intent in load_intents():
        turns = by_language.setdefault(intent.language, {})
        for sample in distinct_samples(intent, intent.count, seed, held_out=False):
            turns.setdefault(sample.prompt, turn(sample.prompt, sample.answer))
    conversations: dict[str, Conversation] = {}
    for singles in by_language.values():
        pool = list(singles.values())
        pairs = [rng.choice(pool) + rng.choice(pool) for _ in range(int(len(pool) * TWO_TURN_SHARE))]
        for conversation in [*pool, *pairs]:
            conversations.setdefault(repr(conversation), conversation)
    shuffled = list(conversations.values())
    rng.shuffle(shuffled)
    return shuffled


def turn(prompt: str, answer: str) -> Conversation:
    """A conversation of one question and one answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _computed_rows(kind: str, language: str) -> list[dict[str, str]]:
    """Arithmetic facts: ``a``, ``b``, result ``c``, and ``A``, ``B`` in words."""
    words = _DIGITS[language]
    digits = range(10)
    facts = {
        "sums": [(a, b, a + b) for a in digits for b in digits],
        "sums_small": [(a, b, a + b) for a in digits for b in digits if a > 1 and b > 1],
        "differences": [(a, b, a - b) for a in digits for b in digits if a > b > 0],
        "differences_small": [(a, b, a - b) for a in digits for b in digits if a - 1 > b > 0],
        "pairs": [(a, b, max(a, b)) for a in digits for b in digits if a != b],
    }[kind]
    return [{"a": f"{a}", "b": f"{b}", "c": f"{c}", "A": words[a], "B": words[b]} for a, b, c in facts]
