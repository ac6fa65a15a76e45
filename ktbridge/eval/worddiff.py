"""Diff of two answers: word by word in Latin scripts, character by character in Chinese."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from ktbridge.eval.text import CJK

Segments = list[tuple[bool, str]]  # (only here, text): the joined texts are the answer

_TOKENS = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|\s+|.", re.DOTALL)
_SENTENCES = re.compile(r"[^。！？!?.\n]*[。！？!?.\n]+|[^。！？!?.\n]+")
_MOST = 250_000  # token pairs; beyond that sentences are compared, so that a page stays fast
_ALIKE = 0.2


def diff_words(before: str, after: str) -> tuple[Segments, Segments] | None:
    """Both texts in segments; None if they share too little for a useful diff.

    An island of one character between two changes counts as changed: it is shared by chance.
    """
    first, second = _TOKENS.findall(before), _TOKENS.findall(after)
    if len(first) * len(second) > _MOST:
        first, second = _SENTENCES.findall(before), _SENTENCES.findall(after)
        if len(first) * len(second) > _MOST:
            return None
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    left: Segments = []
    right: Segments = []
    shared = 0
    for index, (tag, i1, i2, j1, j2) in enumerate(blocks):
        ours, theirs = "".join(first[i1:i2]), "".join(second[j1:j2])
        island = 0 < index < len(blocks) - 1 and len(ours.strip()) < 2
        changed = tag != "equal" or island
        shared += 0 if changed else len(ours)
        _add(left, changed, ours)
        _add(right, changed, theirs)
    if shared < _ALIKE * max(len(before), len(after)):
        return None
    return left, right


def _add(segments: Segments, changed: bool, text: str) -> None:
    if not text:
        return
    if segments and segments[-1][0] == changed:
        text = segments.pop()[1] + text
    segments.append((changed, text))
