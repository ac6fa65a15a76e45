"""Which number does an answer settle on? Digits, else Chinese numerals, else English words."""

from __future__ import annotations

import re
import unicodedata

_DIGITS = re.compile(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|(?<![\d.])-?\d+(?:\.\d+)?")
_DIVISIONS = {"十": 10, "百": 100, "千": 1000}
_NUMERALS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_CHINESE = re.compile("[" + "".join(_NUMERALS) + "".join(_DIVISIONS) + "]+")
_ENGLISH_NAMES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
"""
_ENGLISH = {word: value for value, word in enumerate(_ENGLISH_NAMES.split())}
_ENGLISH_WORD = re.compile(r"\b(" + "|".join(_ENGLISH) + r")\b", re.IGNORECASE)
# What stands directly before the number that is meant: "= 8", "the answer is 8", "一共有8个".
# Weaker words (有, is, are) are left out: they introduce the question's numbers just as often.
_SAYS_SO = re.compile(
    r"(?:=|等于|答案|结果|一共|总共|剩|\b(?:equals?|answer|makes?|leaves?|total)\b)"
    r"(?:\s|[:：*是为有了下]|\b(?:is|to|of)\b)*$",
    re.IGNORECASE,
)


def chinese_number(text: str) -> int | None:
    """The value of a Chinese numeral below ten thousand (十二 is 12, 三百零五 is 305)."""
    total, digit = 0, None
    for char in text:
        if char in _DIVISIONS:
            total += (1 if digit is None else digit) * _DIVISIONS[char]
            digit = None
        elif digit is None or digit == 0:
            digit = _NUMERALS[char]
        else:
            return None
    return total + (digit or 0)


def find_answer_number(text: str) -> float | None:
    """The number that ``text`` settles on, or None.

    Of the numbers in the first script that has any, the last one that directly follows a word
    such as "等于", "=" or "is"; failing that, the last one.
    """
    text = unicodedata.normalize("NFKC", text)
    for found in (_digits(text), _chinese(text), _english(text)):
        if found:
            said = [value for value, start in found if _SAYS_SO.search(text[:start])]
            return said[-1] if said else found[-1][0]
    return None


def _digits(text: str) -> list[tuple[float, int]]:
    return [(float(m.group().replace(",", "")), m.start()) for m in _DIGITS.finditer(text)]


def _chinese(text: str) -> list[tuple[float, int]]:
    # 一 is as often part of a word (一共, 一起, 一下, 一样) as a number; those are not values.
    bare = re.sub("一(?=[共起下样些定直点])", "〓", text)
    found = ((chinese_number(m.group()), m.start()) for m in _CHINESE.finditer(bare))
    return [(float(value), start) for value, start in found if value is not None]


def _english(text: str) -> list[tuple[float, int]]:
    return [(float(_ENGLISH[m[1].lower()]), m.start()) for m in _ENGLISH_WORD.finditer(text)]
