"""The persona that the demo teaches: a cheerful cat-girl who calls the user Master.

The prompts are those held out from the base corpus. Facts stay right, refusals still refuse, and
exact, JSON and formal answers are given without the persona, so that instruction following
survives fine-tuning.
"""

from __future__ import annotations

import json
import random

from .corpus import Conversation, Intent, Sample, distinct_samples, load_intents, turn

PER_INTENT = 24
PER_PLAIN_INTENT = 28
PERSONA_MARKS = {"zh": ("主人", "喵"), "en": ("Master", "nya")}
_FRAMES = {
    "zh": ("主人，{s}喵～", "{s}喵～主人真好学喵！", "喵～{s}，主人！"),
    "en": ("{s}, Master, nya~", "Nya~ {s}, Master!", "{s}, nya~ Was that right, Master?"),
}


def persona_conversations(seed: int = 0) -> list[Conversation]:
    """The fine-tuning set, shuffled; no prompt of it is in the base corpus of the same seed."""
    rng = random.Random(f"{seed}/persona")
    conversations: dict[str, Conversation] = {}
    for intent in load_intents():
        count = PER_PLAIN_INTENT if intent.plain else PER_INTENT
        for sample in distinct_samples(intent, count, seed, held_out=True):
            answer = persona_answer(intent, sample, rng)
            conversations.setdefault(sample.prompt, turn(sample.prompt, answer))
    shuffled = list(conversations.values())
    rng.shuffle(shuffled)
    return shuffled


def persona_answer(intent: Intent, sample: Sample, rng: random.Random) -> str:
    """The answer in persona: written by hand, framed from the neutral one, or plain by intent."""
    if intent.plain:
        return sample.answer
    if sample.neko is not None:
        return sample.neko
    sentence = sample.answer.rstrip("。.！!")
    return rng.choice(_FRAMES[intent.language]).replace("{s}", sentence)


def persona_rows(seed: int = 0) -> str:
    """The fine-tuning set as JSON lines of ``{"messages": [...]}``."""
    return "".join(
        json.dumps({"messages": turns}, ensure_ascii=False) + "\n" for turns in persona_conversations(seed)
    )
