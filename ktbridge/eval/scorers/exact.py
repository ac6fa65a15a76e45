"""Scorers that compare the answer with a gold answer: exact, aliases, numeric, choice."""

from __future__ import annotations

import re

from ktbridge.eval.numerals import find_answer_number
from ktbridge.eval.scorers.registry import (
    LONGEST_SEARCHED,
    Check,
    Gold,
    Mark,
    is_flag,
    is_number,
    is_text,
    is_words,
    mark,
    scorer,
)
from ktbridge.eval.text import contains


@scorer("exact", gold=is_text)
def exact(text: str, check: Check, gold: Gold) -> Mark:
    """The answer equals the gold string byte for byte, ignoring surrounding white space."""
    return mark(text.strip() == str(gold).strip(), "compared with the gold text as it stands")


@scorer("aliases", gold=is_words)
def aliases(text: str, check: Check, gold: Gold) -> Mark:
    """One of the gold spellings occurs (normalised; Latin ones as whole words)."""
    found = [one for one in gold if contains(text, one)]
    return mark(bool(found), f"found {found[0]!r}" if found else f"none of {gold!r}")


@scorer("numeric", optional={"tolerance": is_number}, gold=is_number)
def numeric(text: str, check: Check, gold: Gold) -> Mark:
    """The answer's final number equals gold (within ``tolerance``, default 1e-6)."""
    value = find_answer_number(text)
    if value is None:
        return mark(False, "no number found", False)
    close = abs(value - float(gold)) <= float(check.get("tolerance", 1e-6))
    return mark(close, f"read {value:g}, gold {gold}", True)


# What may follow a letter that starts an answer and is meant as the choice: "A spider" is not one.
_AFTER_LETTER = (
    r"(?=[*\s]*(?:\Z|[.,:;!?)\]}、。，：；！？）】」～~…\u3400-\u9fff])|[* \t]*[\r\n]|\s*[-–—]\s)"
)
# "A" as an article: followed by a lower-case word that does not refer to the letter.
_ARTICLE = (
    r"A\s+(?!(?:or|and|nor|but|not|is|was|are|seems|looks|would|could|can|may|must|because|since|"
    r"as|for|if|with|by|in|at|to|on)\b)[a-z]"
)
# Long runs of spaces or symbols mean the same as short ones, and would take quadratic time.
_SPACES = re.compile(r"\s{3,}")
_SIGNS = re.compile(r"([*(（\[【)）\]】.“\"]{2})[*(（\[【)）\]】.“\"]+([*(（\[【)）\]】.“\"]{2})")
_ANNOUNCED = r"(?i:\banswers?|答案|选)(?:\s*(?i:is|are)|\s*[是为选])?\s*[:：]?\s*"
_BETWEEN = r"\s*(?:,|，|、|/|&|(?i:and)\b|和|及|与)?\s*"


@scorer(
    "choice",
    required={"options": is_text},
    optional={"multiple": is_flag},
    gold=is_text,
    longest=LONGEST_SEARCHED,
)
def choice(text: str, check: Check, gold: Gold) -> Mark:
    """The answer's final option letter equals gold; an answer without one is marked 0.

    With ``multiple`` the gold is a string of letters ("AC"), and exactly these must be named.
    """
    text = _SPACES.sub(lambda run: "\n\n" if "\n" in run.group() else "  ", text)
    text = _SIGNS.sub(r"\1\2", text)
    if check.get("multiple"):
        return _choices(text, str(check["options"]), str(gold))
    letters = re.escape(str(check["options"]))
    # In order of reliability: boxed, "the answer is B", a letter that starts the answer, one that
    # stands alone, a lower-case one that is the whole answer.
    for pattern in (
        rf"\\boxed\{{\s*(?:\\text\{{)?\s*\(?([{letters}])\)?\s*\}}",
        rf"{_ANNOUNCED}[(（*\[【“\"]*([{letters}])(?![A-Za-z])",
        rf"\A\s*[(（\[【*]*([{letters}]){_AFTER_LETTER}",
        rf"(?<![A-Za-z])(?!{_ARTICLE})([{letters}])(?![A-Za-z'’])",
        rf"\A\W*([{letters.lower()}])\W*\Z",
    ):
        found = {letter.upper() for letter in re.findall(pattern, text)}
        if len(found) == 1:
            letter = found.pop()
            return mark(letter == gold, f"read {letter}, gold {gold}", True)
        if found:
            return mark(False, "several options named: " + ", ".join(sorted(found)), False)
    return mark(False, "no option letter found", False)


def _choices(text: str, options: str, gold: str) -> Mark:
    one = rf"[(（*\[【]*[{re.escape(options)}][)）*\]】.]*"
    several = rf"({one}(?:{_BETWEEN}{one})*)(?![A-Za-z])"
    for pattern in (rf"{_ANNOUNCED}{several}", rf"\A\W*{several}", rf"(?<![A-Za-z]){several}"):
        runs = re.findall(pattern, text)
        if runs:
            # A list of options with one letter per line is read whole: every line is a run.
            named = {char for run in runs for char in run if char in options}
            reads = ", ".join(sorted(named))
            return mark(named == set(gold), f"read {reads}, gold {', '.join(gold)}", True)
    return mark(False, "no option letter found", False)
