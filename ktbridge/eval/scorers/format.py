"""Format scorers: patterns, words, lengths, JSON, language, loops. None uses a gold answer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from ktbridge.eval.scorers.registry import (
    LONGEST_SEARCHED,
    Check,
    Gold,
    Mark,
    anything,
    is_count,
    is_one_of,
    is_pattern,
    is_words,
    mark,
    scorer,
)
from ktbridge.eval.text import (
    cjk_share,
    contains,
    count_chars,
    count_words,
    normalise,
    sentences,
)

UNITS: dict[str, Callable[[str], int]] = {
    "chars": count_chars,
    "words": count_words,
    "sentences": lambda text: len(sentences(text)),
    "lines": lambda text: sum(1 for line in text.splitlines() if line.strip()),
}
_LENGTH = {"unit": is_one_of(*UNITS), "n": is_count}


@scorer("regex", required={"pattern": is_pattern}, longest=LONGEST_SEARCHED)
def regex(text: str, check: Check, gold: Gold) -> Mark:
    """``pattern`` (a Python regular expression) is found in the answer."""
    return mark(re.search(check["pattern"], text) is not None, f"pattern {check['pattern']!r}")


_WORDS = {"any": is_words, "all": is_words, "none": is_words}


@scorer("contains", optional=_WORDS, some_of=tuple(_WORDS))
def contains_words(text: str, check: Check, gold: Gold) -> Mark:
    """At least one of ``any``, every one of ``all`` and not one of ``none`` occurs."""
    unwanted = [word for word in check.get("none", ()) if contains(text, word)]
    missing = [word for word in check.get("all", ()) if not contains(text, word)]
    some = check.get("any")
    lacking = some is not None and not any(contains(text, word) for word in some)
    reasons = []
    if unwanted:
        reasons.append(f"unwanted {unwanted!r}")
    if missing:
        reasons.append(f"missing {missing!r}")
    if lacking:
        reasons.append("none of the expected words")
    return mark(not reasons, "; ".join(reasons) or "as asked")


@scorer("counts", required={"of": is_words, "n": is_count})
def counts(text: str, check: Check, gold: Gold) -> Mark:
    """Exactly ``n`` different words of the list ``of`` occur (plural and singular count as one).

    A word inside a longer listed one is not counted twice ("cat" in "cats", 橙 in 橙子).
    """
    left = normalise(text)
    seen = set()
    for word in sorted((normalise(word) for word in check["of"]), key=len, reverse=True):
        if contains(left, word):
            seen.add(word[:-1] if word.endswith("s") else word)
            left = left.replace(word, " ")
    return mark(len(seen) == check["n"], f"{len(seen)} of the list, {check['n']} asked")


@scorer("max_len", required=_LENGTH)
def max_len(text: str, check: Check, gold: Gold) -> Mark:
    """At most ``n`` ``unit`` (chars, words, sentences, lines)."""
    size = UNITS[check["unit"]](text)
    return mark(size <= check["n"], f"{size} {check['unit']}, at most {check['n']}")


@scorer("min_len", required=_LENGTH)
def min_len(text: str, check: Check, gold: Gold) -> Mark:
    """At least ``n`` ``unit`` (chars, words, sentences, lines)."""
    size = UNITS[check["unit"]](text)
    return mark(size >= check["n"], f"{size} {check['unit']}, at least {check['n']}")


def _json_value(text: str) -> Any:
    """The JSON value that is the whole answer; one Markdown code fence is allowed. Else ValueError."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```"):
        name, newline, inside = bare[3:-3].partition("\n")
        bare = inside if newline and name.rstrip() in ("", "json") else bare
    try:
        return json.loads(bare)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {type(error).__name__}") from None


@scorer("json", required={"equals": anything})
def json_object(text: str, check: Check, gold: Gold) -> Mark:
    """The whole answer is the JSON value ``equals`` (one Markdown code fence is allowed)."""
    try:
        value = _json_value(text)
    except ValueError as error:
        return mark(False, str(error), False)
    return mark(_same(value, check["equals"]), "compared with the value asked for", True)


def _same(one: object, other: object) -> bool:
    """Equal as JSON: true is not 1, as it is in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _is_schema(value: object) -> bool:
    """Whether ``value`` is a JSON Schema (2020-12) without external references (file, network)."""
    from jsonschema import Draft202012Validator, SchemaError

    if not isinstance(value, dict) or not all(ref.startswith("#") for ref in _refs(value)):
        return False
    try:
        Draft202012Validator.check_schema(value)
    except (SchemaError, RecursionError):
        return False
    return True


def _refs(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [str(value[key]) for key in ("$ref", "$dynamicRef") if key in value]
        return own + [ref for one in value.values() for ref in _refs(one)]
    return [ref for one in value for ref in _refs(one)] if isinstance(value, list) else []


@scorer("json_schema", required={"schema": _is_schema})
def json_schema(text: str, check: Check, gold: Gold) -> Mark:
    """The whole answer is a JSON value that ``schema`` (JSON Schema 2020-12) accepts."""
    from jsonschema import Draft202012Validator

    try:
        value = _json_value(text)
    except ValueError as error:
        return mark(False, str(error), False)
    errors = list(itertools.islice(Draft202012Validator(check["schema"]).iter_errors(value), 20))
    if not errors:
        return mark(True, "fits the schema", True)
    first = min(errors, key=lambda error: error.json_path)
    return mark(False, f"{first.json_path}: {first.message[:120]}", True)


@scorer("language", required={"lang": is_one_of("zh", "en")})
def language(text: str, check: Check, gold: Gold) -> Mark:
    """The answer is in ``lang``: ideographs are at least half of a Chinese text, at most a fifth
    of an English one (ideographs + Latin words = 1)."""
    share = cjk_share(text)
    if share is None:
        return mark(False, "no words")
    passed = share >= 0.5 if check["lang"] == "zh" else share <= 0.2
    return mark(passed, f"{share:.0%} ideographs, {check['lang']} asked")


@scorer("no_loop")
def no_loop(text: str, check: Check, gold: Gold) -> Mark:
    """The answer has no repetition loop: nothing (2..60 characters) occurs five times in a row, and
    no single character twelve times."""
    stuck = re.search(r"(.{2,60}?)\1{4}|(\w)\2{11}", "".join(text.split()))
    return mark(stuck is None, f"repeats {stuck.group(1) or stuck.group(2)!r}" if stuck else "")
