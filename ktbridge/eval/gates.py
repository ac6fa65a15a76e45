"""Conditions that fail a build: ``KRI-K<-0.2``, ``task:overall<-0.05``, ``low(INS)<-0.2``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.eval.bench import Bench
from ktbridge.eval.report.sentences import interval
from ktbridge.eval.results.compare import OVERALL, find_contrast
from ktbridge.eval.results.rows import has_persona
from ktbridge.eval.results.types import Contrast, Results

_FORM = re.compile(
    r"\s*(?:(?P<side>low|high)\((?P<inside>[^()]+)\)|(?P<plain>[^()<>=]+))"
    r"\s*(?P<sign><=|>=|<|>)\s*(?P<value>[+-]?(?:\d+\.?\d*|\.\d+))\s*"
)
_EXAMPLE = 'write it as "KRI-K<-0.2", "task:overall<-0.05", "persona:PES<0.1" or "low(INS)<-0.2"'
_HOLDS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


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
        names = [card["name"] for card in results["arms"]]
        failed = []
        for axis, name in self._contrasts(results):
            one = (
                find_contrast(results, axis, name, names[-1], names[0]) if len(names) > 1 else None
            )
            if one is None:
                failed.append(f"{axis}:{name} was not compared")
            elif _HOLDS[self.sign](_end(one, self.side), self.value):
                pair = f"{names[-1]} − {names[0]}, {one['verdict']}"
                failed.append(f"{axis}:{name} {interval(one)} ({pair})")
        if not failed:
            return None
        return problem(
            "KTB840",
            f"{results['bench']['name']}: --fail-on {self.text}",
            "; ".join(failed),
            f"not {self.side} {self.sign} {self.value:g}",
        )

    def _contrasts(self, results: Results) -> list[tuple[str, str]]:
        self.check_axis(results["axes"])
        if self.slice == OVERALL:
            return [(self.axis or results["axes"][0], OVERALL)]
        own = {one["name"]: one["primary"] for one in results["bench"]["slices"]}
        chosen = self.choose(results["bench"]["name"], list(own))
        return [(self.axis or own[name], name) for name in chosen]

    def check_axis(self, axes: Sequence[str]) -> None:
        """Raise UsageError if the gate's axis is not among these axes, or ambiguous."""
        if self.axis and self.axis not in axes:
            judged = ", or have answers judged with --judge" if self.axis == "judge" else ""
            raise UsageError(
                f"--fail-on {self.text!r}: the results have no axis {self.axis!r}.",
                "choose from " + ", ".join(axes) + judged,
            )
        if self.slice == OVERALL and not self.axis and len(axes) > 1:
            raise UsageError(
                f"--fail-on {self.text!r} names no axis.",
                "choose from " + ", ".join(f"{axis}:{OVERALL}" for axis in axes),
            )

    def choose(self, bench: str, slices: Sequence[str]) -> list[str]:
        """The slices of a bench that the gate applies to. Raises UsageError if there are none."""
        if self.slice in (OVERALL, *slices):
            return [self.slice]
        chosen = [name for name in slices if name.startswith(f"{self.slice}-")]
        if not chosen:
            raise UsageError(
                f"--fail-on {self.text!r}: the bench {bench!r} has no slice {self.slice!r}.",
                "choose from " + ", ".join([*slices, OVERALL]),
            )
        return chosen


def _end(contrast: Contrast, side: str) -> float:
    ends = {"mean": contrast["mean"], "low": contrast["low"], "high": contrast["high"]}
    return ends[side]


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
        errors = []
        for bench in benches:
            axes = ["task", *["persona"] * has_persona(bench), *["judge"] * judged]
            try:
                gate.check_axis(axes)
                gate.choose(bench.name, [one.name for one in bench.slices])
            except UsageError as error:
                errors.append(error)
        if errors and len(errors) == len(benches):
            raise errors[0]


def check_gates(gates: Sequence[Gate], runs: Sequence[Results]) -> list[Problem]:
    """Check every gate on every bench that has its slice. Raises UsageError if none has."""
    problems = []
    for gate in gates:
        unknown = None
        known = False
        for results in runs:
            try:
                problem = gate.check(results)
            except UsageError as error:
                unknown = error
                continue
            known = True
            if problem:
                problems.append(problem)
        if unknown and not known:
            raise unknown
    return problems
