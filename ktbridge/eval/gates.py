"""Conditions that fail a build: ``KRI-K<-0.2``, ``task:overall<-0.05``, ``low(INS)<-0.2``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.eval.bench import Bench
from ktbridge.eval.report.sentences import interval
from ktbridge.eval.results.compare import OVERALL, find_contrast
from ktbridge.eval.results.rows import has_persona
from ktbridge.eval.results.types import Results

_FORM = re.compile(
    r"\s*(?:(?P<side>low|high)\((?P<inside>[^()]+)\)|(?P<plain>[^()<>=]+))"
    r"\s*(?P<sign><=|>=|<|>)\s*(?P<value>[+-]?(?:\d+\.?\d*|\.\d+))\s*"
)
_EXAMPLE = 'write it as "KRI-K<-0.2", "task:overall<-0.05", "persona:PES<0.1" or "low(INS)<-0.2"'
_HOLDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_Thing = TypeVar("_Thing")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Gate:
    """A condition on the contrast of the last arm with the first; where it holds, the build fails.

    ``side`` is the number compared: "mean", "low" or "high" end of the interval. The report's words and
    its correction for many slices play no part. ``axis`` is '' for the slice's own. A ``slice`` that
    doesn't exist stands for those named "<slice>-…".
    """

    text: str
    slice: str
    axis: str
    side: str
    sign: str
    value: float

    def check(self, results: Results) -> Problem | None:
        """The failure, or None. A missing contrast fails too: nothing was shown.

        Raises UsageError for a slice or an axis that the results cannot have.
        """
        bench, names = results["bench"], [card["name"] for card in results["arms"]]
        slices = {one["name"]: one["primary"] for one in bench["slices"]}
        failed = []
        for axis, name in self.list_targets(bench["name"], slices, results["axes"]):
            one = (
                find_contrast(results, axis, name, names[-1], names[0]) if len(names) > 1 else None
            )
            if one is None:
                failed.append(f"{axis}:{name} was not compared")
                continue
            ends = {"mean": one["mean"], "low": one["low"], "high": one["high"]}
            if _HOLDS[self.sign](ends[self.side], self.value):
                pair = f"{names[-1]} − {names[0]}, {one['verdict']}"
                failed.append(f"{axis}:{name} {interval(one)} ({pair})")
        if not failed:
            return None
        where = f"{bench['name']}: --fail-on {self.text}"
        return problem(
            "KTB840", where, "; ".join(failed), f"not {self.side} {self.sign} {self.value:g}"
        )

    def list_targets(
        self, bench: str, slices: Mapping[str, str], axes: Sequence[str]
    ) -> list[tuple[str, str]]:
        """The (axis, slice) pairs that the condition is about in a bench with these ``axes``.

        ``slices``: the primary axis of each by name. Raises UsageError if there are none.
        """
        if self.axis and self.axis not in axes:
            judged = ", or have answers judged with --judge" if self.axis == "judge" else ""
            raise UsageError(
                f"--fail-on {self.text!r}: the results have no axis {self.axis!r}.",
                "choose from " + ", ".join(axes) + judged,
            )
        if self.slice == OVERALL:
            if not self.axis and len(axes) > 1:
                raise UsageError(
                    f"--fail-on {self.text!r} names no axis.",
                    "choose from " + ", ".join(f"{axis}:{OVERALL}" for axis in axes),
                )
            return [(self.axis or axes[0], OVERALL)]
        parts = [name for name in slices if name.startswith(f"{self.slice}-")]
        chosen = [self.slice] if self.slice in slices else parts
        if not chosen:
            raise UsageError(
                f"--fail-on {self.text!r}: the bench {bench!r} has no slice {self.slice!r}.",
                "choose from " + ", ".join([*slices, OVERALL]),
            )
        return [(self.axis or slices[name], name) for name in chosen]


def parse_gate(text: str) -> Gate:
    """Parse one --fail-on. Raises UsageError with the expected syntax."""
    found = _FORM.fullmatch(text)
    if not found:
        raise UsageError(f"--fail-on {text!r} is not a condition.", _EXAMPLE)
    axis, _, name = (found["inside"] or found["plain"]).strip().rpartition(":")
    if not name.strip():
        raise UsageError(f"--fail-on {text!r} names no slice.", _EXAMPLE)
    side = found["side"] or "mean"
    value = float(found["value"])
    return Gate(text.strip(), name.strip(), axis.strip(), side, found["sign"], value)


def refuse_unknown(gates: Sequence[Gate], benches: Sequence[Bench], *, judged: bool) -> None:
    """Before any request: raise UsageError for a gate whose slice or axis no bench will have."""
    for gate in gates:
        _try_each(benches, partial(_targets_in, gate, judged))


def _targets_in(gate: Gate, judged: bool, bench: Bench) -> list[tuple[str, str]]:
    axes = ["task", *["persona"] * has_persona(bench), *["judge"] * judged]
    return gate.list_targets(bench.name, {one.name: one.primary for one in bench.slices}, axes)


def check_gates(gates: Sequence[Gate], runs: Sequence[Results]) -> list[Problem]:
    """Check every gate on every bench that has its slice. Raises UsageError if none has."""
    return [one for gate in gates for one in _try_each(runs, gate.check) if one is not None]


def _try_each(things: Iterable[_Thing], ask: Callable[[_Thing], _Result]) -> list[_Result]:
    """The results of those that ``ask`` doesn't refuse; its first UsageError if it refuses all."""
    found: list[_Result] = []
    errors: list[UsageError] = []
    for thing in things:
        try:
            found.append(ask(thing))
        except UsageError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return found
