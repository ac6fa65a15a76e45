"""The words for the numbers. Every sentence here is made from results, none is fixed in advance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from ktbridge.errors import Problem
from ktbridge.eval.stats import unseen_share

ALPHA = 0.05
OVERALL = "overall"
NULLS = ("within margin", "inconclusive")  # what the smallest detectable effect stands beside
_AXIS_WORDS = {"persona": "style", "judge": "judged quality"}
_ENOUGH_OK = 0.95
_NEARLY_ALL = 0.9
_READABLE = 0.9
_FEW_ANSWERS = 5
_AGAIN = "run the same command again, which asks only for what is missing"
_SAME_FILES = "import files in which every arm answers the same rows"
_REMEDIES = {
    "http-error": _AGAIN,
    "not-run": _AGAIN,
    "truncated": "read the cut answers, and raise max_tokens in the bench where they lead anywhere",
    "think-only": "switch thinking off with --extra-body, or raise max_tokens in the bench",
    "empty": "try the model by hand: its chat template or its weights may be at fault",
}


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
    if kept and (contrast["axis"] != "persona" or contrast["high"] < margin):
        return "within margin"
    return "inconclusive"


def signed(value: float) -> str:
    """+0.42, −0.10, 0.00 (a true minus sign, no sign on what rounds to nothing)."""
    rounded = round(value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def interval(contrast: Mapping[str, Any]) -> str:
    """ "+0.42 [+0.30, +0.55]"."""
    return f"{signed(contrast['mean'])} [{signed(contrast['low'])}, {signed(contrast['high'])}]"


def detectable(contrast: Mapping[str, Any]) -> str:
    """What stands beside a null: "0.12", or "none" where so few items could show nothing; else ''."""
    if contrast["verdict"] not in NULLS:
        return ""
    return "none" if contrast["detectable"] is None else f"{contrast['detectable']:.2f}"


def find(results: Mapping[str, Any], axis: str, name: str, of: str, minus: str) -> Any:
    """The contrast of two arms on one axis and slice, or None."""
    for one in results["contrasts"]:
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, name, of, minus):
            return one
    return None


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """The line, the headline and the sentences under it, for the last arm against the first.

    ``line`` names each finding in a few words ("style ↑ 0.62 [0.48, 0.75]; knowledge −
    inconclusive") and ``clauses`` are its parts; ``headline`` is a whole sentence of persona and
    task; ``persona``, ``task`` and ``judge`` hold the words of the overall contrasts, None where
    there is none.
    """
    names = [card["name"] for card in results["arms"]]
    nothing = dict.fromkeys(("persona", "task", "judge"))
    if len(names) < 2:
        means = "; ".join(
            f"{axis} {table[OVERALL][names[0]]['mean']:.2f}"
            for axis, table in results["tables"].items()
            if OVERALL in table
        )
        text = f"One arm ({names[0]}): {means or 'no valid answers'}. Nothing to compare it with."
        return {"line": text, "clauses": [], "headline": text, "details": [], **nothing}
    first, last = names[0], names[-1]
    overall = {axis: find(results, axis, OVERALL, last, first) for axis in nothing}
    clauses = [_persona_clause(overall["persona"]), _task_clause(overall["task"])]
    clauses = [text for text in clauses if text]
    if not clauses:
        text = "No item has an ok answer from every arm; nothing can be compared."
        return {"line": text, "clauses": [], "headline": text, "details": [], **nothing}
    details = [*_steps(results, names), *_slices(results, first, last), *_judged(results)]
    found = _clauses(results, first, last)
    line = f"{first} → {last}: " + "; ".join(one["text"] for one in found)
    return {
        "line": line,
        "clauses": found,
        "headline": f"From {first} to {last}: " + "; ".join(clauses) + ".",
        "details": details,
        **{axis: contrast and contrast["verdict"] for axis, contrast in overall.items()},
    }


def _clauses(results: Mapping[str, Any], first: str, last: str) -> list[dict[str, str]]:
    """The persona as a whole, each task slice by its label, and the judge: text and verdict."""
    found = [(_AXIS_WORDS["persona"], find(results, "persona", OVERALL, last, first))]
    for one in results["bench"]["slices"]:
        if one["primary"] == "task":
            found.append((one["label"], find(results, "task", one["name"], last, first)))
    found.append((_AXIS_WORDS["judge"], find(results, "judge", OVERALL, last, first)))
    margin = results["bench"]["margin"]
    return [
        {"text": f"{word} {finding(one, margin)}", "verdict": one["verdict"]}
        for word, one in found
        if one is not None
    ]


def finding(contrast: Mapping[str, Any], margin: float) -> str:
    """A contrast in an arrow and a number: "↑ 0.62 [0.48, 0.75]", "− inconclusive".

    "beyond margin" is said of a loss whose whole interval lies beyond it.
    """
    mean, low, high = contrast["mean"], contrast["low"], contrast["high"]
    if contrast["verdict"] == "improved":
        return f"↑ {mean:.2f} [{low:.2f}, {high:.2f}]"
    if contrast["verdict"] == "dropped":
        beyond = " beyond margin" if high < -margin else ""
        return f"↓ {-mean:.2f} [{-high:.2f}, {-low:.2f}]{beyond}"
    return f"− {contrast['verdict']}"


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


def _judged(results: Mapping[str, Any]) -> list[str]:
    """What the judge said of pairs, last arm against first and full against expert."""
    return [
        f"Judged side by side, {one['of']} against {one['minus']}: {one['win']} won, {one['tie']} "
        f"tied, {one['loss']} lost."
        for one in results["pairs"]
    ]


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
    # Answers that another tool collected can't be asked for here.
    imported = all("files" in card["server"] for card in results["arms"])
    remedies = _REMEDIES | ({"not-run": _SAME_FILES} if imported else {})
    asked = results["asked"]
    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    for name, counts in results["outcomes"].items():
        if ok[name] < _ENOUGH_OK * asked:
            rest = ", ".join(
                f"{n} {outcome}{_detail(results, name, outcome)}"
                for outcome, n in counts.items()
                if outcome != "ok"
            )
            problems.append(
                Problem(
                    "KTB820",
                    "error" if ok[name] == 0 else "warning",
                    f"arm {name}",
                    f"{asked - ok[name]} of {asked} answers cannot be scored: {rest}",
                    "ok answers; items missing in one arm are left out for all",
                    "; ".join(dict.fromkeys(remedies[one] for one in counts if one != "ok")),
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
                "mend what KTB820 says of the arm with fewer, else read the comparison with care",
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
    problems += [*_unread(results), *_noisy(results)]
    return [problem.as_dict() for problem in problems]


def _detail(results: Mapping[str, Any], arm: str, outcome: str) -> str:
    """The first of what failed requests say of themselves."""
    told = (row["answers"][arm] for row in results["items"])
    details = (one.get("detail") for one in told if one["outcome"] == outcome == "http-error")
    first = next(filter(None, details), "")
    return f" ({first})" if first else ""


def _unread(results: Mapping[str, Any]) -> list[Problem]:
    """Arms whose answers could not be read: their marks are about form, not about knowledge."""
    problems = []
    for name, cells in results["parse_rates"].items():
        low = {
            arm: cell
            for arm, cell in cells.items()
            if cell["asked"] >= _FEW_ANSWERS and cell["share"] < _READABLE
        }
        if low:
            told = ", ".join(f"{arm} {one['read']} of {one['asked']}" for arm, one in low.items())
            problems.append(
                Problem(
                    "KTB824",
                    "warning",
                    f"slice {name}",
                    f"few answers hold the letter, number or JSON to mark: {told}",
                    f"at least {_READABLE:.0%}; an answer without one is marked 0",
                    "look at these answers: a low score here is a failure of format first",
                )
            )
    return problems


def _noisy(results: Mapping[str, Any]) -> list[Problem]:
    """Headlines that are no larger than what noise makes of them.

    An arm's floor is that of a difference of two runs of it, so its own variance is half of the
    floor's square, and the mean of N repeats has an Nth of that.
    """
    if results["repeat"] is None:
        return []
    found = []
    for one in results["contrasts"]:
        if one["slice"] != OVERALL or one["verdict"] in NULLS:
            continue
        arms = results["repeat"]["noise"]
        floors = [arms[one[side]].get(one["axis"], {}).get("floor") for side in ("of", "minus")]
        squares = sum(floor**2 for floor in floors if floor is not None)
        floor = math.sqrt(squares / (2 * results["repeat"]["n"]))
        if abs(one["mean"]) <= floor:
            found.append(
                Problem(
                    "KTB826",
                    "warning",
                    f"{one['axis']}: {one['of']} − {one['minus']}",
                    f"{signed(one['mean'])} is no more than the noise of these repeats ({floor:.2f})",
                    "a difference that two runs of one arm do not show",
                    "ask more repeats, or a server that answers the same every time",
                )
            )
    return found
