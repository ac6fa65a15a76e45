"""Warnings about the validity of the results. An error here makes the command fail."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.results.rows import SCORE_ERROR
from ktbridge.eval.results.types import Measured
from ktbridge.eval.rundir import NOT_RUN
from ktbridge.eval.verdict import NULLS, OVERALL, signed, slice_title
from ktbridge.server_api.failures import AGAIN, remedies, think_only_remedy

# Share of an arm's items: fewer ok answers give a warning, fewer than half an error; more failed
# requests than the rest give an error.
_ENOUGH_OK = 0.95
_NEARLY_ALL = 0.9
_READABLE = 0.9
_FEW_ANSWERS = 5
_FEW_PAIRS = 8  # with fewer, short answers may be identical by chance
_SAME_FILES = "import files in which every arm answers the same rows"
_REMEDIES: Mapping[str, str] = {
    NOT_RUN: AGAIN,
    "truncated": "read the cut answers, and give --max-tokens N where they lead anywhere",
    "empty": "try the model by hand: its chat template or its weights may be at fault",
    SCORE_ERROR: "see KTB828",
}


def warnings_of(results: Measured) -> list[Problem]:
    """The problems of a run; those that invalidate the results come first."""
    return [
        *_incomplete(results),
        *_left_out(results),
        *_scorers(results),
        *_unusable(results),
        *_failed_repeats(results),
        *_uneven(results),
        *_identical(results),
        *_unread(results),
        *_noisy(results),
    ]


def _incomplete(results: Measured) -> list[Problem]:
    """Items that were planned but never asked."""
    plan = results["plan"]
    if plan is None or not plan["missing_answers"]:
        return []
    if plan["missing_items"]:
        short = [arm for arm, one in plan["arms"].items() if one["missing"]]
        whose = "every arm" if len(short) == len(plan["arms"]) else ", ".join(short)
        where = ", ".join(
            f"{slice_title(results, name)} {one['missing']}"
            for name, one in plan["slices"].items()
            if one["missing"]
        )
        found = f"{plan['missing_items']} of {plan['items']} planned items were not asked of {whose}: {where}"
    else:
        found = (
            f"every planned item was asked, but {plan['missing_answers']} of {plan['answers']} "
            "planned answers (repeats) were not"
        )
    return [
        problem(
            "KTB827",
            "the run is incomplete",
            found,
            "all of them; what follows is about a part of the bench only",
        )
    ]


def _left_out(results: Measured) -> list[Problem]:
    return [
        problem(
            "KTB823",
            f"arm {name}",
            f"left out of the comparison: {results['refused'].get(name, 'no answer of it is stored')}",
            "answers from every arm of the run",
        )
        for name in results["left_out"]
    ]


def _scorers(results: Measured) -> list[Problem]:
    """Answers on which one of our scorers failed: not the arm's fault."""
    faults: dict[str, list[tuple[str, str]]] = {}
    for row in results["items"]:
        for arm, answer in row["answers"].items():
            for one in answer.get("repeats", [answer]):
                if one["outcome"] == SCORE_ERROR:
                    faults.setdefault(arm, []).append((row["id"], one.get("detail", "")))
    return [
        problem(
            "KTB828",
            f"arm {arm}",
            f"{len(found)} answer(s) could not be scored, {found[0][0]} first: {found[0][1]}",
            "a mark for every answer; these are left out for all arms",
        )
        for arm, found in faults.items()
    ]


def _unusable(results: Measured) -> list[Problem]:
    # Answers that another tool collected can't be asked for here.
    imported = all("files" in card["server"] for card in results["arms"])
    asked, valid = results["asked"], results["valid"]
    problems = []
    for name, counts in results["outcomes"].items():
        ok, failed = counts.get("ok", 0), counts.get("http-error", 0)
        if ok >= _ENOUGH_OK * asked and not failed:
            continue
        if set(counts) <= {"ok", NOT_RUN} and _incomplete(results):
            continue  # KTB827 reports it
        errors = [
            (answer.get("status", 0), answer.get("detail", ""))
            for row in results["items"]
            if (answer := row["answers"][name])["outcome"] == "http-error"
        ]
        steps = dict(_REMEDIES) | ({NOT_RUN: _SAME_FILES} if imported else {})
        steps["think-only"] = think_only_remedy(results["bench"]["sampling"])
        steps["http-error"] = "correct these rows" if imported else remedies(errors)
        rest = ", ".join(
            f"{count} {outcome}" + (f" ({errors[0][1]})" if outcome == "http-error" else "")
            for outcome, count in counts.items()
            if outcome != "ok"
        )
        few = 2 * ok < asked or 2 * valid < asked
        problems.append(
            problem(
                "KTB820",
                f"arm {name}",
                f"{asked - ok} of {asked} answers cannot be scored: {rest}",
                "ok answers; items missing in one arm are left out for all",
                "; ".join(dict.fromkeys(steps[one] for one in counts if one != "ok")),
                severity="error" if few or failed > (1 - _ENOUGH_OK) * asked else "warning",
            )
        )
    return problems


def _failed_repeats(results: Measured) -> list[Problem]:
    """Repeats without an answer: an item's mark is the mean of fewer repeats than were asked."""
    problems = []
    for name, counts in (results["repeat"] or {"outcomes": {}})["outcomes"].items():
        failed, total = counts.get("http-error", 0), sum(counts.values())
        if failed > results["outcomes"][name].get("http-error", 0):
            problems.append(
                problem(
                    "KTB820",
                    f"arm {name}, repeats",
                    f"{failed} of {total} answers failed: http-error",
                    "an answer to every repeat",
                    severity="error" if failed > (1 - _ENOUGH_OK) * total else "warning",
                )
            )
    return problems


def _uneven(results: Measured) -> list[Problem]:
    asked = results["asked"]
    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    if not ok or max(ok.values()) - min(ok.values()) <= (1 - _ENOUGH_OK) * asked:
        return []
    spread = ", ".join(f"{name} {count}" for name, count in ok.items())
    return [
        problem(
            "KTB821",
            "missing answers",
            f"arms differ in how many of {asked} answers are ok: {spread}",
            "about the same number; what is left may not be a fair sample",
        )
    ]


def _identical(results: Measured) -> list[Problem]:
    return [
        problem(
            "KTB822",
            "arms " + " and ".join(pair["arms"]),
            f"{pair['share']:.0%} of {pair['n']} answers are byte-identical",
            "answers that differ, if an adapter was applied",
            severity="error" if pair["share"] == 1 and pair["n"] >= _FEW_PAIRS else "warning",
        )
        for pair in results["identical"]
        if pair["share"] is not None and pair["share"] >= _NEARLY_ALL
    ]


def _unread(results: Measured) -> list[Problem]:
    """Arms whose answers could not be parsed: their marks measure format, not knowledge."""
    problems = []
    for name, cells in results["parse_rates"].items():
        low = {
            arm: cell
            for arm, cell in cells.items()
            if cell["asked"] >= _FEW_ANSWERS and cell["share"] < _READABLE
        }
        if low:
            counts = ", ".join(f"{arm} {one['read']} of {one['asked']}" for arm, one in low.items())
            problems.append(
                problem(
                    "KTB824",
                    f"slice {slice_title(results, name)}",
                    f"few answers hold the letter, number or JSON to mark: {counts}",
                    f"at least {_READABLE:.0%}; an answer without one is marked 0",
                )
            )
    return problems


def _noisy(results: Measured) -> list[Problem]:
    """Headlines that are not larger than the noise floor.

    An arm's floor is that of a difference of two of its runs, so its own variance is half of the
    floor's square, and the mean of N repeats has 1/N of that.
    """
    if results["repeat"] is None:
        return []
    found = []
    for one in results["contrasts"]:
        if one["slice"] != OVERALL or one["verdict"] in NULLS:
            continue
        arms = results["repeat"]["noise"]
        noise = [arms[name].get(one["axis"]) for name in (one["of"], one["minus"])]
        floors = [cell["floor"] for cell in noise if cell is not None]
        squares = sum(floor**2 for floor in floors if floor is not None)
        floor = math.sqrt(squares / (2 * results["repeat"]["n"]))
        if abs(one["mean"]) <= floor:
            found.append(
                problem(
                    "KTB826",
                    f"{one['axis']}: {one['of']} − {one['minus']}",
                    f"{signed(one['mean'])} is no more than the noise of these repeats ({floor:.2f})",
                    "a difference that two runs of one arm do not show",
                )
            )
    return found
