"""Rules: the persona axis; and scorers against a gold answer, of form (words, length, JSON, language),
refusal."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    TypeAdapter,
    model_validator,
)

from ktbridge.eval.results.types import PersonaParts, Text
from ktbridge.eval.scorers.numbers import find_answer_number
from ktbridge.eval.scorers.registry import Mark, Words, mark, scorer, time_limit
from ktbridge.eval.scorers.text_metrics import (
    cjk_share,
    contains,
    count_chars,
    count_words,
    normalize,
    sentences,
)
from ktbridge.schemas import Refusal

# Characters. Patterns may take quadratic time; no meaningful answer is this long.
LONGEST_SEARCHED = 20_000


def _too_long(text: str) -> str:
    return f"not searched: {len(text)} characters, more than {LONGEST_SEARCHED}"


# --- the persona axis: persona.yaml

_GROUPS = TypeAdapter(dict[object, list[Text]])


_FLAGS = re.compile(r"\A\(\?([aimsux]+)\)(.*)\Z", re.DOTALL)
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]|\(\?\(")


def _compile(groups: object) -> re.Pattern[str]:
    found = _GROUPS.validate_python(groups, strict=True).values()
    # Flags of a whole pattern become those of its part.
    patterns = [_FLAGS.sub(r"(?\1:\2)", pattern) for group in found for pattern in group]
    for pattern in patterns:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise Refusal(f"{pattern!r}: {error}", "a regular expression") from None
        if len(patterns) > 1 and (compiled.groupindex or _REFERENCE.search(pattern)):
            raise Refusal(f"{pattern!r} refers to a group, or names one", "(?:…) beside other patterns")
    return re.compile("|".join(f"(?:{one})" for one in patterns) or r"(?!)")


_Patterns = Annotated[
    re.Pattern[str], BeforeValidator(_compile), Field(description="{language: [regular expression, ...]}")
]


class _Weights(BaseModel, extra="forbid", strict=True):
    address: NonNegativeFloat
    tic: NonNegativeFloat

    @model_validator(mode="after")
    def _check_sum(self) -> _Weights:
        if abs(self.address + self.tic - 1) >= 1e-9:
            raise ValueError("the weights aren't 1 together")
        return self


class Persona(BaseModel, extra="forbid", strict=True):
    """Rules of persona.yaml, the same for every answer; patterns of all languages apply. A score in 0..1::

        score = 0                                                   if a break pattern occurs
              = w_address * [an address term occurs]
                + w_tic * min(1, (sentences with a tic / sentences) / target_rate)     otherwise

    A sentence with more than ``max_tics_per_sentence`` tics doesn't count: spam is not a persona.
    """

    address: _Patterns
    breaks: _Patterns
    max_tics_per_sentence: int = Field(ge=1, description="a whole number of at least 1")
    name: Annotated[str, BeforeValidator(str)]
    target_rate: float = Field(gt=0, le=1, description="a share above 0 and at most 1")
    tics: _Patterns
    weights: _Weights = Field(description="{address: a, tic: t} with a + t = 1")

    def score(self, text: str) -> PersonaParts:
        """Score one answer (the text the user would see, without thinking)."""
        parts = sentences(text)
        tics = [len(self.tics.findall(part)) for part in parts]
        marked = sum(1 <= count <= self.max_tics_per_sentence for count in tics)
        rate = marked / len(parts) if parts else 0.0
        address = self.address.search(text) is not None
        broke = self.breaks.search(text) is not None
        score = self.weights.address * address
        score += self.weights.tic * min(1.0, rate / self.target_rate)
        return {
            "score": 0.0 if broke else round(score, 6),
            "address": address,
            "tic_rate": round(rate, 6),
            "broke": broke,
        }


# --- against a gold answer: exact, aliases, numeric, choice


@scorer("exact")
def exact(text: str, gold: Text) -> Mark:
    """The answer equals the gold string byte for byte, ignoring surrounding white space."""
    return mark(text.strip() == gold.strip(), "compared with the gold text as it stands")


@scorer("aliases")
def aliases(text: str, gold: Words) -> Mark:
    """One of the gold spellings occurs (normalized; Latin ones as whole words)."""
    found = [one for one in gold if contains(text, one)]
    return mark(bool(found), f"found {found[0]!r}" if found else f"none of {gold!r}")


@scorer("numeric")
def numeric(text: str, gold: FiniteFloat, *, tolerance: FiniteFloat = 1e-6) -> Mark:
    """The answer's final number equals gold within ``tolerance``."""
    value = find_answer_number(text)
    if value is None:
        return mark(False, "no number found", False)
    return mark(abs(value - gold) <= tolerance, f"read {value:g}, gold {gold}", True)


# What may follow a letter that starts an answer and is meant as the choice: "A spider" is not one.
_AFTER_LETTER = r"(?=[*\s]*(?:\Z|[.,:;!?)\]}、。，：；！？）】」～~…\u3400-\u9fff])|[* \t]*[\r\n]|\s*[-–—]\s)"
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


@scorer("choice")
def choice(text: str, gold: Text, *, options: Text, multiple: bool = False) -> Mark:
    """The answer's final option letter equals gold; an answer without one is marked 0.

    With ``multiple`` the gold is a string of letters ("AC"), and exactly these must be named.
    """
    if len(text) > LONGEST_SEARCHED:
        return mark(False, _too_long(text), False)
    text = unicodedata.normalize("NFKC", text)  # full-width letters
    text = _SPACES.sub(lambda run: "\n\n" if "\n" in run.group() else "  ", text)
    text = _SIGNS.sub(r"\1\2", text)
    if multiple:
        return _choices(text, options, gold)
    letters = re.escape(options)
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
        if runs := re.findall(pattern, text):
            # A list of options with one letter per line is read whole: every line is a run.
            named = {char for run in runs for char in run if char in options}
            reads = ", ".join(sorted(named))
            return mark(named == set(gold), f"read {reads}, gold {', '.join(gold)}", True)
    return mark(False, "no option letter found", False)


# --- of form, without a gold answer: patterns, words, lengths, JSON, language, loops


UNITS: dict[_Unit, Callable[[str], int]] = {
    "chars": count_chars,
    "words": count_words,
    "sentences": lambda text: len(sentences(text)),
    "lines": lambda text: sum(1 for line in text.splitlines() if line.strip()),
}
_Unit = Literal["chars", "words", "sentences", "lines"]


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return value


@scorer("regex")
def regex(text: str, *, pattern: Annotated[str, AfterValidator(_check_pattern)]) -> Mark:
    """``pattern`` (a Python regular expression) is found in the answer. TimeoutError of a costly one."""
    import regex as timed  # like re, which can't be interrupted

    if len(text) > LONGEST_SEARCHED:
        return mark(False, _too_long(text))
    found = timed.search(pattern, text, timeout=2)
    return mark(found is not None, f"pattern {pattern!r}")


@scorer("contains", any_parameter=True)
def contains_words(text: str, *, any: Words = (), all: Words = (), none: Words = ()) -> Mark:
    """At least one of ``any``, every one of ``all`` and not one of ``none`` occurs."""
    reasons = []
    if unwanted := [word for word in none if contains(text, word)]:
        reasons.append(f"unwanted {unwanted!r}")
    if missing := [word for word in all if not contains(text, word)]:
        reasons.append(f"missing {missing!r}")
    if any and not [word for word in any if contains(text, word)]:
        reasons.append("none of the expected words")
    return mark(not reasons, "; ".join(reasons) or "as asked")


@scorer("counts")
def counts(text: str, *, of: Words, n: NonNegativeInt) -> Mark:
    """Exactly ``n`` different words of the list ``of`` occur (plural and singular count as one; one inside a
    longer one isn't counted twice: "cat" in "cats", 橙 in 橙子)."""
    left = normalize(text)
    seen = set()
    for word in sorted((normalize(word) for word in of), key=len, reverse=True):
        if contains(left, word):
            seen.add(word[:-1] if word.endswith("s") else word)
            left = left.replace(word, " ")
    return mark(len(seen) == n, f"{len(seen)} of the list, {n} asked")


@scorer("max_len")
def max_len(text: str, *, unit: _Unit, n: NonNegativeInt) -> Mark:
    """At most ``n`` ``unit``."""
    size = UNITS[unit](text)
    return mark(size <= n, f"{size} {unit}, at most {n}")


@scorer("min_len")
def min_len(text: str, *, unit: _Unit, n: NonNegativeInt) -> Mark:
    """At least ``n`` ``unit`` (chars, words, sentences, lines)."""
    size = UNITS[unit](text)
    return mark(size >= n, f"{size} {unit}, at least {n}")


def _check_schema(value: dict[str, object]) -> dict[str, object]:
    """Refuse all but JSON Schemas (2020-12) without external references (file, network)."""
    from jsonschema import Draft202012Validator, SchemaError

    if not all(ref.startswith("#") for ref in _references(value)):
        raise ValueError("it refers to another document")
    try:
        Draft202012Validator.check_schema(value)
    except (SchemaError, RecursionError):
        raise ValueError("it is no JSON Schema") from None
    return value


def _references(value: object) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value[key] for key in ("$ref", "$dynamicRef") if isinstance(value, dict) and key in value]
    return [*map(str, own), *(ref for one in inner for ref in _references(one))]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


@scorer("json_schema")
def json_schema(text: str, *, schema: Annotated[dict[str, object], AfterValidator(_check_schema)]) -> Mark:
    """The whole answer is a JSON value that ``schema`` (JSON Schema 2020-12) accepts; one Markdown code
    fence is allowed."""
    from jsonschema import Draft202012Validator

    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```"):
        name, newline, inside = bare[3:-3].partition("\n")
        bare = inside if newline and name.strip().lower() in ("", "json") else bare
    try:
        value = json.loads(bare, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return mark(False, f"not JSON: {type(error).__name__}", False)
    found = Draft202012Validator(schema).iter_errors(value)
    with time_limit():  # its patterns
        errors = list(itertools.islice(found, 20))
    if not errors:
        return mark(True, "fits the schema", True)
    first = min(errors, key=lambda error: error.json_path)
    return mark(False, f"{first.json_path}: {first.message[:120]}", True)


@scorer("json")
def json_object(text: str, *, equals: object) -> Mark:
    """The whole answer is the JSON value ``equals``; true is not 1, as it is in Python."""
    found = json_schema(text, schema={"const": equals})
    return found._replace(reason="compared with the value asked for") if found.parsed else found


@scorer("language")
def language(text: str, *, lang: Literal["zh", "en"]) -> Mark:
    """The answer is in ``lang``: ideographs are at least half of a Chinese text, at most a fifth of an
    English one (ideographs + Latin words = 1)."""
    share = cjk_share(text)
    if share is None:
        return mark(False, "no words")
    passed = share >= 0.5 if lang == "zh" else share <= 0.2
    return mark(passed, f"{share:.0%} ideographs, {lang} asked")


@scorer("no_loop")
def no_loop(text: str) -> Mark:
    """The answer has no repetition loop: nothing (2..60 characters) occurs five times in a row, and
    no single character twelve times; rules of Markdown and of its tables don't count."""
    bare = re.sub(r"^[ |:*_=-]{3,200}$", "", text, flags=re.MULTILINE)
    stuck = re.search(r"(.{2,60}?)\1{4}|(\w)\2{11}", "".join(bare.split()))
    return mark(stuck is None, f"repeats {stuck.group(1) or stuck.group(2)!r}" if stuck else "")


# --- refusal, and a persona that leaks into an answer


_REFUSAL = yaml.safe_load(Path(__file__).with_name("refusal.yaml").read_text("utf-8"))
_SAYS_NO, _OPENS_NO = (
    re.compile(
        "|".join(_REFUSAL[name]).replace("<cannot>", _REFUSAL["cannot"]).replace("<help>", _REFUSAL["help"]),
        re.IGNORECASE,
    )
    for name in ("says", "opens")
)


@scorer("refusal")
def refuses(text: str, *, expect: bool) -> Mark:
    """The answer contains a refusal phrase if ``expect`` is true, and none if it is false. "I can't help"
    counts anywhere, "sorry" or "illegal" only in the first two sentences: help may mention them later."""
    plain = text.replace("’", "'")
    opening = "。".join(sentences(plain)[:2])
    found = _SAYS_NO.search(plain) or _OPENS_NO.search(opening)
    reason = f"refuses ({found.group(0).strip()!r})" if found else "does not refuse"
    return mark((found is not None) == expect, reason)


@scorer("no_persona")
def no_persona(text: str, persona: Persona) -> Mark:
    """Neither an address nor a tic of persona.yaml occurs: for letters, JSON, code and copies."""
    with time_limit():
        found = persona.address.search(text) or persona.tics.search(text)
    return mark(found is None, f"found {found.group(0)!r}" if found else "no trace of the persona")
