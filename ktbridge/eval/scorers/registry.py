"""Registry of scorers, and validation of a bench's checks before any request.

A scorer is a function from an answer's text to a ``Mark``. Its signature is its row of the registry: ``gold``
is the item's, ``persona`` the bench's, and what follows ``*`` are the parameters of a check. Pydantic checks
them by their types::

    @scorer("min_len")
    def min_len(text: str, *, unit: Unit, n: NonNegativeInt) -> Mark: ...

A check is a mapping ``{"scorer": name, ...parameters}`` in an item of a bench.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Annotated, NamedTuple, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from ktbridge.errors import KtbridgeError
from ktbridge.eval.results.types import CheckRow, Json, Text
from ktbridge.server_api.replies import shorten

_LONGEST_REASON = 300  # a reason may quote the answer
Words = Annotated[Sequence[Text], Field(min_length=1)]


class Mark(NamedTuple):
    """A mark in 0..1 and its reason; ``parsed`` is None unless a value had to be read from the answer."""

    value: float
    reason: str
    parsed: bool | None = None


def mark(passed: bool, reason: str, parsed: bool | None = None) -> Mark:
    """Return a yes/no mark: 1 or 0."""
    return Mark(1.0 if passed else 0.0, reason, parsed)


Scoring = Callable[..., Mark]


@dataclass(frozen=True)
class Scorer:
    """A scoring function. ``any_parameter``: at least one of its parameters is required."""

    function: Scoring
    any_parameter: bool = False

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """The parameters of a check, and whether each is required."""
        return {
            name: one.default is one.empty
            for name, one in inspect.signature(self.function).parameters.items()
            if one.kind is one.KEYWORD_ONLY
        }

    @cached_property
    def types(self) -> dict[str, TypeAdapter[object]]:
        """The types of the parameters, and of ``gold`` if it is used."""
        hints = get_type_hints(self.function, include_extras=True)
        return {name: TypeAdapter(hints[name]) for name in (*self.parameters, "gold") if name in hints}

    @property
    def needs_persona(self) -> bool:
        return "persona" in inspect.signature(self.function).parameters

    def takes(self, name: str, value: object) -> bool:
        """Return whether ``value`` is of the type of the parameter ``name``."""
        try:
            self.types[name].validate_python(value, strict=True)
        except ValidationError:
            return False
        return True

    def score(self, text: str, check: Json, gold: object) -> Mark:
        """Return the mark of an answer by a check that has no faults."""
        given = {name: value for name, value in check.items() if name != "scorer"}
        return self.function(text, **given, **({"gold": gold} if "gold" in self.types else {}))


class ScorerError(Exception):
    """A scorer raised an exception on an answer; ``str`` names the scorer and the exception."""


SCORERS: dict[str, Scorer] = {}


def scorer(name: str, any_parameter: bool = False) -> Callable[[Scoring], Scoring]:
    """Register the decorated function under ``name``, which must be unique."""

    def register(function: Scoring) -> Scoring:
        if name in SCORERS:
            raise ValueError(f"two scorers are named {name!r}")
        SCORERS[name] = Scorer(function, any_parameter)
        return function

    return register


def check_faults(check: object, gold: object) -> list[tuple[str, str]]:
    """Return the faults of one check of an item, as (found, expected) pairs."""
    name = check.get("scorer") if isinstance(check, Mapping) else None
    known = SCORERS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(check, Mapping):
        return [(f"the scorer {name!r}", "one of " + ", ".join(sorted(SCORERS)))]
    given = {key: value for key, value in check.items() if key != "scorer"}
    names = ", ".join(known.parameters) or "none"
    missing = sorted(key for key, required in known.parameters.items() if required)
    faults = [(f"{name} without {key!r}", "its parameters") for key in missing if key not in given]
    if known.any_parameter and not known.parameters.keys() & given:
        faults.append((f"{name} without parameters", f"one of {names}"))
    for key, value in given.items():
        if key not in known.parameters:
            faults.append((f"{name} with {key!r}", f"one of {names}"))
        elif not known.takes(key, value):
            faults.append((f"{name}: {key} = {value!r}", "a value that the scorer takes"))
    if "gold" in known.types and not known.takes("gold", gold):
        faults.append((f"gold = {gold!r}", f"a gold that {name} takes"))
    return faults


def score_task(text: str, checks: Sequence[Json], gold: object) -> tuple[float, list[CheckRow]]:
    """Return the mean mark of an item's checks (at least one), and a row ``{scorer, mark, reason}`` of each;
    with ``parsed`` if something had to be parsed. Raises ScorerError if a scorer fails."""
    rows: list[CheckRow] = []
    for check in checks:
        name = str(check["scorer"])
        try:
            value, reason, parsed = SCORERS[name].score(text, check, gold)
        except (KtbridgeError, ImportError):  # a missing package is not the answer's fault
            raise
        except Exception as error:
            what = " ".join(str(error).split())[:120]
            raise ScorerError(f"{name}: {type(error).__name__}: {what}") from error
        row: CheckRow = {"scorer": name, "mark": value, "reason": shorten(reason, _LONGEST_REASON)}
        if parsed is not None:
            row["parsed"] = parsed
        rows.append(row)
    return sum(row["mark"] for row in rows) / len(rows), rows


@contextmanager
def time_limit(seconds: float = 2.0) -> Iterator[None]:
    """TimeoutError once the block has taken so many seconds of CPU time: an answer may make a bench's
    pattern exponential. It is a signal, which ``re`` looks for while it matches; other threads get none,
    and no limit."""
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
