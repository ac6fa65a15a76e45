"""Scorer interface and registration, and validation of a bench's checks before any request.

A scorer is a small function from (answer, check, gold) to a ``Mark``, decorated with its required
and optional parameters::

    @scorer("min_len", required={"unit": is_unit, "n": is_count})
    def min_len(text, check, gold): ...

A check is a mapping ``{"scorer": name, ...parameters}`` in an item of a bench.
"""

from __future__ import annotations

import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.types import CheckRow
from ktbridge.server_api.replies import shorten

# Characters. Patterns may take quadratic time; no meaningful answer is this long.
LONGEST_SEARCHED = 20_000
_SECONDS = 2.0  # of a check's patterns
_LONGEST_REASON = 300  # a reason may quote the answer


class Mark(NamedTuple):
    """A mark in 0..1 and its reason. ``parsed``: whether the requested value (a number, a letter,
    a JSON value) could be parsed at all; None if there is nothing to parse."""

    value: float
    reason: str
    parsed: bool | None = None


Check = Mapping[str, Any]  # {"scorer": name, ...parameters}, as an item has it
Gold = Any  # what the scorer's predicate accepted
Predicate = Callable[[object], bool]
Score = Callable[[str, Check, Gold], Mark]


@dataclass(frozen=True)
class Scorer:
    """A scoring function, predicates on its parameters, and one on the item's gold (None if it
    uses no gold). ``some_of``: at least one of these parameters is required. ``longest``: an
    answer of more characters is marked 0 without being searched (None: any length is scored)."""

    name: str
    score: Score
    parameters: Mapping[str, Predicate]
    required: frozenset[str]
    some_of: tuple[str, ...] = ()
    gold: Predicate | None = None
    needs_persona: bool = False
    longest: int | None = None


class ScorerError(Exception):
    """A scorer raised an exception on an answer; ``str`` names the scorer and the exception."""


SCORERS: dict[str, Scorer] = {}


def scorer(
    name: str,
    *,
    required: Mapping[str, Predicate] | None = None,
    optional: Mapping[str, Predicate] | None = None,
    some_of: Sequence[str] = (),
    gold: Predicate | None = None,
    needs_persona: bool = False,
    longest: int | None = None,
) -> Callable[[Score], Score]:
    """Register the decorated function under ``name``, which must be unique."""

    def register(score: Score) -> Score:
        if name in SCORERS:
            raise ValueError(f"two scorers are named {name!r}")
        SCORERS[name] = Scorer(
            name,
            score,
            {**(required or {}), **(optional or {})},
            frozenset(required or ()),
            tuple(some_of),
            gold,
            needs_persona,
            longest,
        )
        return score

    return register


def mark(passed: bool, reason: str, parsed: bool | None = None) -> Mark:
    """A yes/no mark: 1 or 0."""
    return Mark(1.0 if passed else 0.0, reason, parsed)


def check_faults(check: object, gold: Gold) -> list[tuple[str, str]]:
    """The faults of one check of an item, as (found, expected) pairs."""
    name = check.get("scorer") if isinstance(check, Mapping) else None
    known = SCORERS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(check, Mapping):
        return [(f"the scorer {name!r}", "one of " + ", ".join(sorted(SCORERS)))]
    given = {key: value for key, value in check.items() if key != "scorer"}
    faults = [
        (f"{name} without {key!r}", "its parameters") for key in sorted(known.required - set(given))
    ]
    if known.some_of and not set(known.some_of) & set(given):
        faults.append((f"{name} without parameters", "one of " + ", ".join(known.some_of)))
    for key, value in given.items():
        if key not in known.parameters:
            faults.append(
                (f"{name} with {key!r}", "one of " + (", ".join(known.parameters) or "none"))
            )
        elif not known.parameters[key](value):
            faults.append((f"{name}: {key} = {value!r}", "a value that the scorer takes"))
    if known.gold is not None and not known.gold(gold):
        faults.append((f"gold = {gold!r}", f"a gold that {name} takes"))
    return faults


def score_task(text: str, checks: Sequence[Check], gold: Gold) -> tuple[float, list[CheckRow]]:
    """The mean mark of an item's checks (at least one), and a row ``{scorer, mark, reason}`` per check;
    with ``parsed`` if something had to be parsed. Raises ScorerError if a scorer fails."""
    rows: list[CheckRow] = []
    for check in checks:
        value, reason, parsed = _score(SCORERS[check["scorer"]], text, check, gold)
        reason = shorten(reason, _LONGEST_REASON)
        row: CheckRow = {"scorer": check["scorer"], "mark": value, "reason": reason}
        if parsed is not None:
            row["parsed"] = parsed
        rows.append(row)
    return sum(row["mark"] for row in rows) / len(rows), rows


def _score(known: Scorer, text: str, check: Check, gold: Gold) -> Mark:
    if known.longest is not None and len(text) > known.longest:
        reason = f"not searched: {len(text)} characters, more than {known.longest}"
        return mark(False, reason, False if known.name == "choice" else None)
    try:
        return known.score(text, check, gold)
    except (KtbridgeError, ImportError):  # a missing package is not the answer's fault
        raise
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        raise ScorerError(f"{known.name}: {type(error).__name__}: {what}") from error


# --- predicates on parameters and golds


@contextmanager
def time_limit(seconds: float = _SECONDS) -> Iterator[None]:
    """TimeoutError once the block has taken so many seconds of the process's CPU time.

    For patterns that a bench brings, and that an answer may make exponential. It comes as a signal, which
    ``re`` looks for while it matches. Only the main thread gets signals: in another one nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, late)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def is_words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_text(word) for word in value)


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """A finite number: not a bool, not an integer too large for a float."""
    try:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(float(value))
        )
    except OverflowError:
        return False


def is_pattern(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def is_one_of(*values: str) -> Predicate:
    return lambda value: isinstance(value, str) and value in values


def anything(value: object) -> bool:
    return True
