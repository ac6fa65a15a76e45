"""Extract an answer's final number: from digits, else Chinese numerals, else English words."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable

_DIGITS = re.compile(
    r"(?P<digits>(?<![a-z\d.])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)"
    # A fraction, but not a date: 3/4 and 2 3/4, not 3/4/2024.
    r"|(?<![\d./])(?P<whole>-?\d{1,3} (?=\d))?(?P<above>-?\d+)/(?P<below>[1-9]\d*)(?![\d/]|\.\d)"
    r"|(?<!\d)(?<!\d\.)-?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)(?:e[+-]?\d+\b)?)"
    # A scale after the digits (3万, 2 hundred), but not a unit's prefix (5千克, 3千米).
    r"(?P<scale>\s*(?:[万亿]+|百(?!分)|千万|千(?![克米瓦卡]))|\s+(?:hundred|thousand|million)\b)?",
    re.IGNORECASE,
)
_SCALES = {"": 1.0, "百": 1e2, "千": 1e3, "万": 1e4, "千万": 1e7, "亿": 1e8, "万亿": 1e12}
_SCALES |= {"hundred": 1e2, "thousand": 1e3, "million": 1e6}
_MYRIADS = {"亿": 10**8, "万": 10**4}
_TOO_LARGE = 10**24  # not a plausible quantity; a model that repeats 万亿 reaches it
_LONGEST_DIGITS = 24  # in a numeral read digit by digit
_ARABIC = str.maketrans("零〇一二两三四五六七八九", "001223456789")
_NUMERAL = "[零〇一二两三四五六七八九十百千亿万]"
_CHINESE = re.compile(f"{_NUMERAL}+(?:点{_NUMERAL}+)?(?:分之{_NUMERAL}+)?")
# 一 is as often part of a word (一共, 一起, 一下, 一样) as a number; those are not values.
_NO_NUMERAL = re.compile(f"一(?=[共起下样些定直]|点(?!{_NUMERAL}))|万一|十分(?!之)|零[下上]")
# A numeral without 万 and 亿, its digits as 0-9: thousands, hundreds, tens ("" in 十五), zeros, ones.
_BELOW_MYRIAD = re.compile("(?:0*([1-9])千)?(?:0*([1-9])百)?(?:0*([1-9]?)十)?(0*)([1-9]?)")
_SMALL = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: value for value, word in enumerate(_SMALL.split())}
_WORDS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_WORDS |= {"hundred": 100, "thousand": 1000, "million": 10**6}
_WORD = "(?:" + "|".join(_WORDS) + r")\b"
# Continuations that belong to a number, although we don't add them up.
_REST = r"(?:billion|point|half|halves|dozen|thirds?|quarters?)\b"
_ENGLISH = re.compile(
    rf"\b{_WORD}(?:(?:-|[ \t]+)(?:{_WORD}|{_REST})"
    rf"|(?<=hundred)\s+and\s+{_WORD}|(?<=thousand)\s+and\s+{_WORD}"
    r"|(?<=million)\s+and\s+" + _WORD + r"|\s+and\s+a\s+(?:half|quarter)\b)*"
    r"(?P<ordinal>-(?:first|second|third|\w+th)s?\b)?",
    re.IGNORECASE,
)
# Markers directly before the final number: "= 8", "the answer is 8", "一共有8个".
# Weaker words (有, is, are) count behind "so" alone: they introduce the question's numbers just as often.
_WORD_END = rf"(?![^\W\d负{_NUMERAL[1:-1]}])"  # a number may follow without a space
_BEFORE = rf"(?:\s|[:：*是为有了下$€£¥\"'“‘(\[{{]|\\[(\[$]|\\boxed|\b(?:is|to|of|only|about){_WORD_END})*"
_SAYS_SO = re.compile(
    rf"(?:(?P<equation>=)|等于|答案|结果|一共|总共|剩|\b(?:equals?|answer|makes?|leaves?|total){_WORD_END}"
    rf"|(?P<so>\b(?:so|thus|therefore|hence))\b[^.!?\n=]{{0,80}}?\b(?:is|are|has|have|gets?|costs?|pays?){_WORD_END}"
    rf"){_BEFORE}",
    re.IGNORECASE,
)
# As GSM8K ends an answer, and as mathematics is asked for one.
_FINAL = re.compile(rf"(?:####|\\boxed\s*\{{){_BEFORE}")
# Words by which a sentence says a result that an earlier equation hasn't.
_STATES = re.compile(
    r"(?:\b(?:is|are|for|costs?|earns?|pays?|gets?|has|have|to|needs?)|[是有为得共要花])\s*[$€£¥]?\Z",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?<!\b[a-z])(?<!\bvs)[.!?](?=\s|$)|[。！？\n]", re.IGNORECASE)
_HEADS = re.compile(r"^[^\S\n]*(\d+)[.)、]", re.MULTILINE)  # numbers of a list's lines

# A sign word directly before a number; in "ten minus three" an operand precedes it instead.
_SIGN = re.compile(r"(?:(?P<zh>(?<!正)负|零下)|(?:(?P<operand>\S+)\s+)?\b(?P<en>minus|negative)\s+)$", re.I)
_NEAR = 64  # characters before a number that are searched for its sign, and for what it belongs to
# Other spellings of a number, some of which NFKC would make another one (212 of 2½, cm2 of cm²).
_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"[⁻⁰¹²³⁴-⁹]+", lambda power: "^" + unicodedata.normalize("NFKC", power[0])),
    (r"[−﹣－]|(?<![\w)])–(?=\d)", "-"),
    (r"(?<=[=:：是为])\s*-\s+(?=\d)", "-"),
    (r"(?<=\d)(?:\{,\}|\\[,!]|[\u00a0\u2009\u202f]|\\? (?=000))(?=\d{3}(?!\d))", ""),  # 1{,}234, 12 000
    (r"(?<=\d)(?=[¼-¾⅐-⅞]|\\[dt]?frac)", " "),
    (r"\\[dt]?frac(?:\{(\d+)\}\{|(\d))(\d+)\}?", r"\1\2/\3"),
    (r"(?<=\d)\s*(?:[×x*·]|\\times|\\cdot)\s*10\s*\^\s*\{?(-?\d+)\}?", r"e\1"),
    (r"(?<![\w.])([1-9]\d?)\^\{?(-?\d\d?)(?!\d)\}?", lambda found: str(float(found[1]) ** int(found[2]))),
    (r"\^\{?-?\d+\}?", ""),  # of a unit, or of a name
)


def chinese_number(text: str) -> int | None:
    """Return the value of a Chinese numeral (十二 is 12, 三百零五 is 305, 三万五 is 35000), in linear
    time; None from ``_TOO_LARGE`` on, e.g. for a model's endless 万亿万亿."""
    return _grouped(text, "亿", lambda part: _grouped(part, "万", _below_myriad))


def _grouped(text: str, name: str, read: Callable[[str], int | None]) -> int | None:
    """Return the value of ``text`` split at ``name`` (万, 亿) into groups, each parsed by ``read``."""
    first, *rest = text.split(name)
    size = _MYRIADS[name]
    value = read(first) if first or not rest else None
    for part in rest:
        if not value or value >= _TOO_LARGE:
            return None
        low = read(part) if part else 0
        if low is None or low >= size:
            return None
        if len(part) == 1 and low < 10:  # 三万五 is 35000
            low = low * size // 10
        value = value * size + low
    return value


def _below_myriad(text: str) -> int | None:
    """Return the value of a numeral without 万 and 亿."""
    text = text.translate(_ARABIC)
    if text.isdigit():
        # Digit by digit, like years (二〇二四); without a zero 三四 may mean "three or four".
        read = len(text) == 1 or ("0" in text and len(text) <= _LONGEST_DIGITS)
        return int(text) if read else None
    match = _BELOW_MYRIAD.fullmatch(text)
    if match is None:
        return None
    thousands, hundreds, tens, zeros, ones = match.groups()
    value = 1000 * int(thousands or 0) + 100 * int(hundreds or 0)
    if tens is not None:
        value += 10 * int(tens or 1)
    elif not zeros:  # 三百五 is 350
        return value + int(ones or 0) * (10 if hundreds else 100)
    return value + int(ones or 0)


def english_number(text: str) -> int | None:
    """Return the value of an English numeral below a billion ("twenty-four", "two hundred and five")."""
    total = part = 0
    room = 10**9  # what is added next must be smaller
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "and":
            continue
        if (value := _WORDS.get(word)) is None:
            return None
        if value > 100:
            if value >= room:
                return None
            room = value
            total, part = total + (part or 1) * value, 0
        elif value == 100:
            if part >= 100:
                return None
            part = (part or 1) * 100
        elif (value == 0 and part + total) or (part % 100 and (part % 10 or part % 100 < 20 or value >= 10)):
            return None  # only a digit follows tens, as in twenty-four
        else:
            part += value
    return total + part


def find_answer_number(text: str) -> float | None:
    """Return the final number of ``text``, or None, of those in the first script that has any.

    The last one in ``\\boxed{}`` or behind ``####``; else the last one behind a word such as "等于" or
    "answer", or behind "=" unless later sentences state another one alone; otherwise the last one.
    """
    for spelling, plain in _SPELLINGS:
        text = re.sub(spelling, plain, text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    found = next(filter(None, (read(text) for read in (_digits, _chinese, _english))), None)
    return _last_told(text, found) if found else None


def _last_told(text: str, found: list[tuple[float, int]]) -> float:
    """Return the value of ``found``, values and their places in ``text``, that it ends with."""
    final = {match.end() for match in _FINAL.finditer(text)}
    if answers := [value for value, at in found if at in final]:
        return answers[-1]
    said = {match.end(): match for match in _SAYS_SO.finditer(text)}
    announced = [(value, at, said[at]) for value, at in found if at in said]
    if all(match["so"] for _, _, match in announced):  # of nothing that was computed before
        return found[-1][0]
    last, at, match = announced[-1]
    if not (match["equation"] or match["so"]):
        return last
    stop = _SENTENCE.search(text, at)
    end = stop.end() if stop else len(text)
    heads = {head.start(1) for head in _HEADS.finditer(text)}
    later = [(value, place) for value, place in found if place >= end and place not in heads]
    stated = [value for value, place in later if _STATES.search(text, max(0, place - _NEAR), place)]
    return last if not stated or last in (value for value, _ in later) else stated[-1]


def _signed(text: str, value: float, start: int) -> tuple[float, int]:
    """Return the value with a preceding sign word (minus three, 负三, 零下3度) applied, and its start."""
    near = value >= 0 and not text[start - 1 : start].strip("负下 \t\n")
    sign = _SIGN.search(text, max(0, start - _NEAR), start) if near else None
    if sign is None:
        return value, start
    if sign["zh"]:
        return -value, sign.start("zh")
    before = (sign["operand"] or "").strip("(*\"'").lower()
    number = before[-1:].isdigit() or before.split("-")[-1] in _WORDS
    less = sign["en"].lower() == "minus" and (number or len(before) == 1 or before.endswith(")"))
    return (value, start) if less else (-value, sign.start("en"))


def _digits(text: str) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    scaled_end = -1
    for match in _DIGITS.finditer(text):
        scale = match["scale"] or ""
        size = _SCALES.get(scale.strip().lower(), math.nan)
        if match["below"]:
            value, whole = float(match["above"]) / float(match["below"]), float(match["whole"] or 0)
            value = whole + math.copysign(value, whole) if whole else value
        else:
            value = float(match["digits"].replace(",", "")) * size
        if not math.isfinite(value):  # hundreds of digits, or an unknown scale: not a plausible answer
            continue
        if match.start() == scaled_end and value >= 0:  # 3万5千
            whole, start = found[-1]
            found[-1] = (whole - value if whole < 0 else whole + value, start)
        else:
            found.append(_signed(text, value, match.start()))
        scaled_end = match.end() if scale else -1
    # Digits behind a letter are a unit's or a name's (cm2, H2O), where there are others.
    return [each for each in found if not re.match("[A-Za-z]", text[each[1] - 1 : each[1]])] or found


def _chinese(text: str) -> list[tuple[float, int]]:
    bare = _NO_NUMERAL.sub(lambda match: "〓" * len(match.group()), text)
    found = ((_chinese_value(m.group()), m.start()) for m in _CHINESE.finditer(bare))
    return [_signed(text, value, start) for value, start in found if value is not None]


def _chinese_value(text: str) -> float | None:
    """Return the value of a numeral that may be a decimal (三点五) or a fraction (三分之一)."""
    below, fraction, above = text.partition("分之")
    if fraction:
        if below == "百":  # a percentage is read like "20 %"
            return _chinese_value(above)
        bottom, top = _chinese_value(below), _chinese_value(above)
        return top / bottom if top is not None and bottom else None
    whole, point, decimals = text.partition("点")
    value = chinese_number(whole)
    if value is None or not point:
        return None if value is None else float(value)
    digits = decimals.translate(_ARABIC)
    return float(f"{value}.{digits}") if digits.isdigit() else None


def _english(text: str) -> list[tuple[float, int]]:
    found = []
    for match in _ENGLISH.finditer(text):
        value = None if match["ordinal"] else english_number(match.group())
        if value is not None:
            found.append(_signed(text, float(value), match.start()))
    return found
