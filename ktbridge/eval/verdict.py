"""The words for the numbers. Every sentence here is made from results, none is fixed in advance."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ktbridge.errors import Problem
from ktbridge.eval.stats import unseen_share

ALPHA = 0.05
_ENOUGH_OK = 0.95
_NEARLY_ALL = 0.9


def judge_contrast(contrast: Mapping[str, Any], margin: float) -> str:
    """improved / dropped / within margin / inconclusive.

    Improved and dropped need an interval that excludes 0 and a Holm-adjusted p below 0.05. "within
    margin" means: for the task axis not worse by ``margin`` or more (non-inferior), for the persona
    axis neither worse nor better by that much. It also needs enough clusters that a kind of loss
    which none of them showed could not exceed the margin (36 for a margin of 0.1): few items that
    happen to agree are no proof of absence.
    """
    significant = contrast["p_holm"] < ALPHA
    if significant and contrast["low"] > 0:
        return "improved"
    if significant and contrast["high"] < 0:
        return "dropped"
    kept = contrast["low"] > -margin and unseen_share(contrast["clusters"]) < margin
    if kept and (contrast["axis"] == "task" or contrast["high"] < margin):
        return "within margin"
    return "inconclusive"


def signed(value: float) -> str:
    """+0.42, −0.10, 0.00 (a true minus sign, no sign on what rounds to nothing)."""
    rounded = round(value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def interval(contrast: Mapping[str, Any]) -> str:
    """ "+0.42 [+0.30, +0.55]"."""
    return f"{signed(contrast['mean'])} [{signed(contrast['low'])}, {signed(contrast['high'])}]"


def find(results: Mapping[str, Any], axis: str, name: str, of: str, minus: str) -> Any:
    """The contrast of two arms on one axis and slice, or None."""
    for one in results["contrasts"]:
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, name, of, minus):
            return one
    return None


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """The headline and the sentences under it, for the last arm against the first."""
    names = [card["name"] for card in results["arms"]]
    if len(names) < 2:
        means = "; ".join(
            f"{axis} {table['overall'][names[0]]['mean']:.2f}"
            for axis, table in results["tables"].items()
            if "overall" in table
        )
        text = f"One arm ({names[0]}): {means or 'no valid answers'}. Nothing to compare it with."
        return {"headline": text, "details": [], "persona": None, "task": None}
    first, last = names[0], names[-1]
    persona = find(results, "persona", "overall", last, first)
    task = find(results, "task", "overall", last, first)
    clauses = [text for text in (_persona_clause(persona), _task_clause(task)) if text]
    if not clauses:
        text = "No item has an ok answer from every arm; nothing can be compared."
        return {"headline": text, "details": [], "persona": None, "task": None}
    headline = f"From {first} to {last}: " + "; ".join(clauses) + "."
    return {
        "headline": headline,
        "details": [*_steps(results, names), *_slices(results, first, last)],
        "persona": persona and persona["verdict"],
        "task": task and task["verdict"],
    }


def _persona_clause(contrast: Any) -> str:
    if contrast is None:
        return ""
    words = {
        "improved": "persona rose by",
        "dropped": "persona fell by",
        "within margin": "persona did not rise,",
        "inconclusive": "persona did not rise beyond doubt,",
    }
    if contrast["verdict"] == "inconclusive" and contrast["mean"] <= 0:
        return f"persona did not rise, {interval(contrast)}"
    return f"{words[contrast['verdict']]} {interval(contrast)}"


def _task_clause(contrast: Any) -> str:
    if contrast is None:
        return ""
    words = {
        "improved": "task quality improved by",
        "dropped": "task quality dropped by",
        "within margin": "task quality held within the margin,",
        "inconclusive": "task quality is inconclusive,",
    }
    return f"{words[contrast['verdict']]} {interval(contrast)}"


def _steps(results: Mapping[str, Any], names: list[str]) -> list[str]:
    """Which step the persona came with, when there is more than one."""
    if len(names) != 3:
        return []
    steps = []
    for minus, of in itertools.pairwise(names):
        contrast = find(results, "persona", "overall", of, minus)
        if contrast is not None:
            steps.append(f"{of} − {minus} {interval(contrast)} ({contrast['verdict']})")
    return ["Persona by step: " + "; ".join(steps) + "."] if steps else []


def _slices(results: Mapping[str, Any], first: str, last: str) -> list[str]:
    """Slices that moved on the axis that they are there for."""
    moved: dict[str, list[str]] = {"improved": [], "dropped": []}
    for one in results["bench"]["slices"]:
        contrast = find(results, one["primary"], one["name"], last, first)
        if contrast is not None and contrast["verdict"] in moved:
            moved[contrast["verdict"]].append(f"{one['name']} {interval(contrast)}")
    texts = [f"Slices {word}: {', '.join(found)}." for word, found in moved.items() if found]
    if not moved["dropped"]:
        texts.append("No slice is shown to have dropped on its own axis.")
    return texts


def warnings_of(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a reader must know before believing the numbers."""
    problems = [
        Problem(
            "KTB823",
            "warning",
            f"arm {name}",
            "no answer of it is stored; it is left out of the comparison",
            "answers from every arm of the run",
            "run the same eval again with this arm, or delete it from run.json",
        )
        for name in results["left_out"]
    ]
    asked = results["asked"]
    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    for name, counts in results["outcomes"].items():
        if ok[name] < _ENOUGH_OK * asked:
            rest = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if outcome != "ok")
            found = f"{asked - ok[name]} of {asked} answers cannot be scored: {rest}"
            problems.append(
                Problem(
                    "KTB820",
                    "error" if ok[name] == 0 else "warning",
                    f"arm {name}",
                    found,
                    "ok answers; items missing in one arm are left out for all",
                    "run the same eval again for http-error and not-run; "
                    "raise max_tokens for truncated",
                )
            )
    if ok and max(ok.values()) - min(ok.values()) > (1 - _ENOUGH_OK) * asked:
        spread = ", ".join(f"{name} {count}" for name, count in ok.items())
        problems.append(
            Problem(
                "KTB821",
                "warning",
                "missing answers",
                f"arms differ in how many of {asked} answers are ok: {spread}",
                "about the same number; what is left may not be a fair sample",
            )
        )
    for pair in results["identical"]:
        if pair["share"] is not None and pair["share"] >= _NEARLY_ALL:
            problems.append(
                Problem(
                    "KTB822",
                    "error" if pair["share"] == 1 else "warning",
                    "arms " + " and ".join(pair["arms"]),
                    f"{pair['share']:.0%} of {pair['n']} answers are byte-identical",
                    "answers that differ, if an adapter was applied",
                    "run `ktbridge verify`",
                )
            )
    return [problem.as_dict() for problem in problems]
