"""Means per axis, slice and arm; contrasts of two arms with confidence interval and verdict; --fail-on.

Task, persona and judge are separate axes and never mixed. Only items that have a mark on the axis
in every arm are used. ``decide_verdict`` gives every contrast its verdict, in both directions by one rule.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, cast

from ktbridge.codes import problem
from ktbridge.errors import Problem, UsageError
from ktbridge.eval import stats
from ktbridge.eval.bench import Bench
from ktbridge.eval.results import types
from ktbridge.eval.results.types import Axis, Contrast, Numbers, Results, Role, VerdictWord

ALPHA = 0.05
FALSE_DISCOVERIES = 0.10  # the share of false names among slices that are named
OVERALL = "overall"
CONFIRMED: Final[tuple[VerdictWord, ...]] = ("improved", "dropped")
LOSSES: Final[tuple[VerdictWord, ...]] = ("dropped", "may have dropped")
NULLS: Final[tuple[VerdictWord, ...]] = ("within margin", "inconclusive")

Rows = Sequence[types.ItemRow]
Tables = dict[Axis, dict[str, dict[str, Numbers]]]


# --- the decision


def decide_verdict(
    role: Role,
    axis: Axis,
    contrast: Numbers,
    p: float,
    p_adjusted: float,
    margin: float,
    ends: tuple[float, float] = (0.0, 0.0),
) -> VerdictWord:
    """Return the verdict of a contrast: improved, dropped, may have …, within margin or inconclusive.

    A change needs an interval that excludes 0. It is improved or dropped if p is below 0.05 and
    ``p_adjusted`` agrees: of a slice at 0.10 (Benjamini-Hochberg), of a whole axis at 0.05. An
    exploratory contrast "may have" changed at most. "within margin" means: for task and judge not worse
    by ``margin`` or more (non-inferior), for the persona neither worse nor better by that much. That must be
    so of ``ends``, too, by how many clusters changed (``stats.count_ends``), and of a kind of loss which
    none of them showed (36 clusters for a margin of 0.1): a few items that happen to agree do not prove
    absence."""
    level = FALSE_DISCOVERIES if role == "slice" else ALPHA
    confirmed = role != "exploratory" and p < ALPHA and p_adjusted <= level
    if contrast["low"] > 0:
        return "improved" if confirmed else "may have improved"
    if contrast["high"] < 0:
        return "dropped" if confirmed else "may have dropped"
    kept = min(contrast["low"], ends[0]) > -margin and stats.unseen_share(contrast["clusters"]) < margin
    if kept and (axis != "persona" or max(contrast["high"], ends[1]) < margin):
        return "within margin"
    return "inconclusive"


def is_in_headline(role: Role, verdict: VerdictWord) -> bool:
    """Return whether the first line names the contrast: whole axes always, slices if they changed."""
    return role == "overall" or (role == "slice" and verdict in CONFIRMED)


def own_slices(card: types.BenchCard, axis: str) -> list[str]:
    """Return the slices that are there for ``axis``; for the judge all of them."""
    return [one["name"] for one in card["slices"] if axis in ("judge", one["primary"])]


def find_contrast(results: Results, axis: str, name: str, of: str, minus: str) -> Contrast | None:
    """Return the contrast of two arms on one axis and slice, or None."""
    for one in results["contrasts"]:
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, name, of, minus):
            return one
    return None


# --- means and contrasts


def compare_arms(card: types.BenchCard, names: Sequence[str], rows: Rows) -> tuple[Tables, list[Contrast]]:
    """Return tables (axis -> slice -> arm -> numbers) and contrasts of the arms ``names``. There is a persona
    axis only if the bench has one, a judge's only if one was used."""
    axes: list[Axis] = ["task", "persona"] if card["persona"] else ["task"]
    if any("judge" in answer for row in rows for answer in row["answers"].values()):
        axes.append("judge")
    tables: Tables = {}
    contrasts: list[Contrast] = []
    for axis in axes:
        tables[axis] = {}
        marked = [row for row in rows if all(axis in row["answers"][name] for name in names)]
        own = own_slices(card, axis)
        parts = {OVERALL: own, **{one["name"]: [one["name"]] for one in card["slices"]}}
        pairs: list[tuple[Contrast, list[float], list[str]]] = []
        for slice_, names_of in parts.items():
            group = [row for row in marked if row["slice"] in names_of]
            if not group:
                continue
            clusters = [row["cluster"] for row in group]
            marks = {arm: [row["answers"][arm][axis] for row in group] for arm in names}
            tables[axis][slice_] = {
                arm: round_interval(values, clusters, (0.0, 1.0)) for arm, values in marks.items()
            }
            # Later minus earlier: expert - base, full - base, full - expert.
            for minus, of in itertools.combinations(names, 2):
                changes = [a - b for a, b in zip(marks[of], marks[minus], strict=True)]
                main = (minus, of) == (names[0], names[-1])
                role: Role = "slice" if main and slice_ in own else "exploratory"
                if slice_ == OVERALL:
                    role = "overall" if main else "pair"
                contrast: Contrast = {
                    "axis": axis,
                    "slice": slice_,
                    "of": of,
                    "minus": minus,
                    **round_interval(changes, clusters),
                    "p": round(stats.sign_flip_p(changes, clusters), 6),
                    "mcnemar": _mcnemar(marks[of], marks[minus], clusters),
                    "p_holm": 1.0,
                    "role": role,
                    "p_adjusted": 1.0,
                    "headline": False,
                    "verdict": "inconclusive",
                    "detectable": None,
                }
                pairs.append((contrast, changes, clusters))
        _decide(pairs, card["margin"])
        contrasts += [contrast for contrast, *_ in pairs]
    return tables, contrasts


def round_interval(
    values: Sequence[float], clusters: Sequence[str], bounds: tuple[float, float] = (-1.0, 1.0)
) -> Numbers:
    """Return the mean with its 95 % interval; of differences, unless ``bounds`` are others."""
    found = stats.mean_interval(values, clusters, bounds=bounds)
    mean, low, high = (round(number, 6) for number in (found.mean, found.low, found.high))
    return {"mean": mean, "low": low, "high": high, "n": found.n, "clusters": found.clusters}


def _mcnemar(
    later: Sequence[float], earlier: Sequence[float], clusters: Sequence[str]
) -> types.McNemar | None:
    """Count items gained and lost, for yes/no marks of independent items; else return None."""
    if len(set(clusters)) < len(clusters) or not {*later, *earlier} <= {0, 1}:
        return None
    counts = Counter(zip(later, earlier, strict=True))
    gained, lost = counts[1, 0], counts[0, 1]
    return {"gained": gained, "lost": lost, "p": round(stats.mcnemar_p(gained, lost), 6)}


def _decide(pairs: Sequence[tuple[Contrast, Sequence[float], Sequence[str]]], margin: float) -> None:
    """Adjust p of an axis's contrasts over what belongs together, and decide the verdicts.

    Holm corrects whole axes over the pairs of arms, and slices over slices × pairs. The slices that are
    there for the axis, of the last arm minus the first, are a family of their own."""
    contrasts = [contrast for contrast, *_ in pairs]
    whole = [one for one in contrasts if one["slice"] == OVERALL]
    parts = [one for one in contrasts if one["slice"] != OVERALL]
    own = [one for one in parts if one["role"] == "slice"]
    for family in (whole, parts):
        for one, p in zip(family, stats.holm([one["p"] for one in family]), strict=True):
            one["p_holm"] = round(p, 6)
            one["p_adjusted"] = one["p"] if one["role"] == "overall" else one["p_holm"]
    for one, p in zip(own, stats.benjamini_hochberg([one["p"] for one in own]), strict=True):
        one["p_adjusted"] = round(p, 6)
    for one, changes, clusters in pairs:
        role, axis = one["role"], one["axis"]
        ends = stats.count_ends(changes, clusters)
        one["verdict"] = decide_verdict(role, axis, one, one["p"], one["p_adjusted"], margin, ends)
        one["headline"] = is_in_headline(role, one["verdict"])
        if one["verdict"] in CONFIRMED:
            continue
        # The p below which it would be confirmed, if it were the only one of its family.
        family = {"pair": whole, "slice": own, "exploratory": parts}.get(role, [one])
        level = min(ALPHA, (FALSE_DISCOVERIES if role == "slice" else ALPHA) / len(family))
        seen = stats.smallest_seen(changes, clusters, level)
        one["detectable"] = None if seen is None else round(seen, 6)


# --- judged pairs, and the noise of repeats


def count_pairs(pairs: Sequence[types.JudgedPair], rows: Rows) -> list[types.PairCounts]:
    """Count judged pairs per contrast: wins, ties and losses of the later arm; ``mean`` is their balance.
    A pair on which the two orders disagree is a tie and counted as ``flipped``."""
    clusters = {row["id"]: row["cluster"] for row in rows}
    groups: dict[tuple[str, str], list[types.JudgedPair]] = {}
    for pair in pairs:
        if pair["item"] in clusters:
            groups.setdefault((pair["of"], pair["minus"]), []).append(pair)
    counted: list[types.PairCounts] = []
    for (of, minus), group in sorted(groups.items()):
        tally = Counter(pair["result"] for pair in group)
        points = [{"win": 1.0, "tie": 0.0, "loss": -1.0}[pair["result"]] for pair in group]
        names = [clusters[pair["item"]] for pair in group]
        found = round_interval(points, names)
        p = round(stats.sign_flip_p(points, names), 6)
        counted.append(
            {
                "of": of,
                "minus": minus,
                "win": tally["win"],
                "tie": tally["tie"],
                "loss": tally["loss"],
                "flipped": sum(bool(pair["flipped"]) for pair in group),
                **found,
                "p": p,
                "verdict": decide_verdict("overall", "judge", found, p, p, margin=0.0),
            }
        )
    return counted


def measure_noise(
    rows: Rows, names: Sequence[str], axes: Sequence[Axis]
) -> dict[str, dict[Axis, types.Noise]]:
    """Compare the second repeat with the first, per arm and axis: differences without a cause. ``floor`` is
    the difference of means that this noise alone exceeds in 5 of 100 runs."""
    noise: dict[str, dict[Axis, types.Noise]] = {name: {} for name in names}
    for name, axis in itertools.product(names, axes):
        repeats = [(row["cluster"], row["answers"][name]["repeats"]) for row in rows]
        both = [(where, a, b) for where, (a, b, *_) in repeats if axis in a and axis in b]
        if not both:
            continue
        clusters = [cluster for cluster, *_ in both]
        before, after = [a[axis] for _, a, _ in both], [b[axis] for *_, b in both]
        changes = [b - a for a, b in zip(before, after, strict=True)]
        floor = stats.noise_floor(before, after, clusters)
        noise[name][axis] = {
            **round_interval(changes, clusters),
            "changed": round(sum(abs(one) > 1e-12 for one in changes) / len(changes), 6),
            "floor": None if floor is None else round(floor, 6),
        }
    return noise


# --- numbers as a report writes them


def signed(value: float) -> str:
    """+0.42, −0.10, 0.00 (U+2212 minus sign, no sign if the value rounds to zero)."""
    rounded = round(value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def interval(numbers: Numbers, signs: bool = True) -> str:
    """ "+0.42 [+0.30, +0.55]", or without signs, for one that excludes 0: "0.10 [0.01, 0.20]"."""
    mean, low, high = interval_parts(numbers, signs)
    return f"{mean} [{low}, {high}]"


def interval_parts(numbers: Numbers, signs: bool) -> list[str]:
    """Mean and both ends; an end near 0 has three digits, so that it is seen on which side it is. Without
    signs the smaller end comes first."""
    ends = [
        f"{end:+.3f}".replace("-", "−") if 0.0005 <= abs(end) < 0.005 else signed(end)
        for end in (numbers["low"], numbers["high"])
    ]
    if signs:
        return [signed(numbers["mean"]), *ends]
    sizes = [end.lstrip("+−") for end in ends]
    return [f"{abs(numbers['mean']):.2f}", *(sizes if numbers["low"] > 0 else sizes[::-1])]


# --- conditions that fail a build: ``KRI-K<-0.2``, ``task:overall<-0.05``, ``low(INS)<-0.2``

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
    doesn't exist stands for those named "<slice>-…"."""

    text: str
    slice: str
    axis: str
    side: Literal["mean", "low", "high"]
    sign: str
    value: float

    def check(self, results: Results) -> Problem | None:
        """The failure, or None. A missing contrast fails too: nothing was shown.

        Raises UsageError for a slice or an axis that the results cannot have."""
        bench, names = results["bench"], [card["name"] for card in results["arms"]]
        slices = {one["name"]: one["primary"] for one in bench["slices"]}
        last, first, failed = names[-1], names[0], []
        # A judge that wasn't believed leaves no marks.
        axes = dict.fromkeys([*results["axes"], *["judge"] * (results["judge"] is not None)])
        for axis, name in self.list_targets(bench["name"], slices, list(axes)):
            one = find_contrast(results, axis, name, last, first)
            if one is None:
                failed.append(f"{axis}:{name} was not compared")
                continue
            if _HOLDS[self.sign](one[self.side], self.value):
                failed.append(f"{axis}:{name} {interval(one)} ({last} − {first}, {one['verdict']})")
        if not failed:
            return None
        where, expected = f"{bench['name']}: --fail-on {self.text}", f"{self.sign} {self.value:g}"
        return problem("KTB840", where, "; ".join(failed), f"not {self.side} {expected}")

    def list_targets(
        self, bench: str, slices: Mapping[str, str], axes: Sequence[str]
    ) -> list[tuple[str, str]]:
        """The (axis, slice) pairs that the condition is about in a bench with these ``axes``; ``slices``: the
        primary axis of each by name. Raises UsageError if there are none."""
        text = f"--fail-on {self.text!r}"
        if self.axis and self.axis not in axes:
            judged = ", or have answers judged with --judge" if self.axis == "judge" else ""
            step = "choose from " + ", ".join(axes) + judged
            raise UsageError(f"{text}: the results have no axis {self.axis!r}.", step)
        if self.slice == OVERALL:
            if not self.axis and len(axes) > 1:
                step = "choose from " + ", ".join(f"{axis}:{OVERALL}" for axis in axes)
                raise UsageError(f"{text} names no axis.", step)
            return [(self.axis or axes[0], OVERALL)]
        parts = [name for name in slices if name.startswith(f"{self.slice}-")]
        chosen = [self.slice] if self.slice in slices else parts
        if not chosen:
            step = "choose from " + ", ".join([*slices, OVERALL])
            raise UsageError(f"{text}: the bench {bench!r} has no slice {self.slice!r}.", step)
        return [(self.axis or slices[name], name) for name in chosen]


def parse_gate(text: str) -> Gate:
    """Parse one --fail-on. Raises UsageError with the expected syntax."""
    found = _FORM.fullmatch(text)
    if not found:
        raise UsageError(f"--fail-on {text!r} is not a condition.", _EXAMPLE)
    axis, _, name = (found["inside"] or found["plain"]).strip().rpartition(":")
    if not name.strip():
        raise UsageError(f"--fail-on {text!r} names no slice.", _EXAMPLE)
    side = cast("Literal['mean', 'low', 'high']", found["side"] or "mean")
    value = float(found["value"])
    return Gate(text.strip(), name.strip(), axis.strip(), side, found["sign"], value)


def refuse_unknown(gates: Sequence[Gate], benches: Sequence[Bench], *, judged: bool) -> None:
    """Before any request: raise UsageError for a gate whose slice or axis no bench will have."""

    def list_targets(gate: Gate, bench: Bench) -> list[tuple[str, str]]:
        axes = ["task", *["persona"] * bench.has_persona, *["judge"] * judged]
        return gate.list_targets(bench.name, {one.name: one.primary for one in bench.slices}, axes)

    for gate in gates:
        _try_each(list_targets, gate, benches)


def check_gates(gates: Sequence[Gate], runs: Sequence[Results]) -> list[Problem]:
    """Check every gate on every bench that has its slice. Raises UsageError if none has."""
    return [one for gate in gates for one in _try_each(Gate.check, gate, runs) if one is not None]


def _try_each(ask: Callable[[Gate, _Thing], _Result], gate: Gate, things: Iterable[_Thing]) -> list[_Result]:
    """The results of those that ``ask`` doesn't refuse; its first UsageError if it refuses all."""
    found: list[_Result] = []
    errors: list[UsageError] = []
    for thing in things:
        try:
            found.append(ask(gate, thing))
        except UsageError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return found
