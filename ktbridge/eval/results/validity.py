"""Problems of a run that a reader has to know before believing its numbers.

One of severity error invalidates the results: the command fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.eval.failures import AGAIN, remedies, think_only_remedy
from ktbridge.eval.report.sentences import signed, slice_title
from ktbridge.eval.results.compare import NULLS, OVERALL
from ktbridge.eval.results.rows import SCORE_ERROR
from ktbridge.eval.results.types import Results
from ktbridge.eval.rundir import NOT_RUN

# Share of an arm's items: fewer ok answers give a warning, fewer than half an error; more failed
# requests than the rest give an error.
_ENOUGH_OK = 0.95
_NEARLY_ALL = 0.9
_READABLE = 0.9
_FEW_ANSWERS = 5
_FEW_PAIRS = 8  # with fewer, short answers may be identical by chance
_REMEDIES: Mapping[str, str] = {
    NOT_RUN: AGAIN,
    "truncated": "read the cut answers, and give --max-tokens N where they lead anywhere",
    "empty": "try the model by hand: its chat template or its weights may be at fault",
    SCORE_ERROR: "see KTB828",
}


def check_validity(results: Results) -> list[Problem]:
    """Return the problems of a run; those that invalidate the results come first."""
    checks = (
        _incomplete,
        _left_out,
        _unscored,
        _unusable,
        _failed_repeats,
        _uneven,
        _identical,
        _unread,
        _noisy,
    )
    return [found for check in checks for found in check(results)]


def _incomplete(results: Results) -> Iterator[Problem]:
    """Items that were planned but never asked."""
    plan = results["plan"]
    if plan is None or not plan["missing_answers"]:
        return
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
    expected = "all of them; what follows is about a part of the bench only"
    yield problem("KTB827", "the run is incomplete", found, expected)


def _left_out(results: Results) -> Iterator[Problem]:
    for name in results["left_out"]:
        why = results["refused"].get(name, "no answer of it is stored")
        found = f"left out of the comparison: {why}"
        yield problem("KTB823", f"arm {name}", found, "answers from every arm of the run")


def _unscored(results: Results) -> Iterator[Problem]:
    """Answers on which one of our scorers failed: not the arm's fault."""
    faults: dict[str, list[str]] = {}
    for row in results["items"]:
        for arm, answer in row["answers"].items():
            for one in answer.get("repeats", [answer]):
                if one["outcome"] == SCORE_ERROR:
                    text = f"{row['id']} first: {one.get('detail', '')}"
                    faults.setdefault(arm, []).append(text)
    for arm, texts in faults.items():
        found = f"{len(texts)} answer(s) could not be scored, {texts[0]}"
        expected = "a mark for every answer; these are left out for all arms"
        yield problem("KTB828", f"arm {arm}", found, expected)


def _unusable(results: Results) -> Iterator[Problem]:
    """Arms with too few answers that can be scored."""
    asked, valid = results["asked"], results["valid"]
    for name, counts in results["outcomes"].items():
        ok, failed = counts.get("ok", 0), counts.get("http-error", 0)
        if ok >= _ENOUGH_OK * asked and not failed:
            continue
        if counts.keys() <= {"ok", NOT_RUN} and any(_incomplete(results)):
            continue  # KTB827 reports it
        errors = [
            (answer.get("status", 0), answer.get("detail", ""))
            for row in results["items"]
            if (answer := row["answers"][name])["outcome"] == "http-error"
        ]
        steps = {
            **_REMEDIES,
            "think-only": think_only_remedy(results["bench"]["sampling"]),
            "http-error": remedies(errors),
        }
        bad = {outcome: count for outcome, count in counts.items() if outcome != "ok"}
        rest = ", ".join(
            f"{count} {outcome}" + (f" ({errors[0][1]})" if outcome == "http-error" else "")
            for outcome, count in bad.items()
        )
        few = 2 * ok < asked or 2 * valid < asked
        yield problem(
            "KTB820",
            f"arm {name}",
            f"{asked - ok} of {asked} answers cannot be scored: {rest}",
            "ok answers; items missing in one arm are left out for all",
            "; ".join(dict.fromkeys(steps[outcome] for outcome in bad)),
            severity="error" if few or failed > (1 - _ENOUGH_OK) * asked else "warning",
        )


def _failed_repeats(results: Results) -> Iterator[Problem]:
    """Repeats without an answer: an item's mark is the mean of fewer repeats than were asked."""
    if results["repeat"] is None:
        return
    for name, counts in results["repeat"]["outcomes"].items():
        failed, total = counts.get("http-error", 0), sum(counts.values())
        if failed > results["outcomes"][name].get("http-error", 0):
            yield problem(
                "KTB820",
                f"arm {name}, repeats",
                f"{failed} of {total} answers failed: http-error",
                "an answer to every repeat",
                severity="error" if failed > (1 - _ENOUGH_OK) * total else "warning",
            )


def _uneven(results: Results) -> Iterator[Problem]:
    asked = results["asked"]
    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    if ok and max(ok.values()) - min(ok.values()) > (1 - _ENOUGH_OK) * asked:
        spread = ", ".join(f"{name} {count}" for name, count in ok.items())
        found = f"arms differ in how many of {asked} answers are ok: {spread}"
        expected = "about the same number; what is left may not be a fair sample"
        yield problem("KTB821", "missing answers", found, expected)


def _identical(results: Results) -> Iterator[Problem]:
    for pair in results["identical"]:
        if pair["share"] is not None and pair["share"] >= _NEARLY_ALL:
            yield problem(
                "KTB822",
                "arms " + " and ".join(pair["arms"]),
                f"{pair['share']:.0%} of {pair['n']} answers are byte-identical",
                "answers that differ, if an adapter was applied",
                severity="error" if pair["share"] == 1 and pair["n"] >= _FEW_PAIRS else "warning",
            )


def _unread(results: Results) -> Iterator[Problem]:
    """Arms whose answers could not be parsed: their marks measure format, not knowledge."""
    for name, cells in results["parse_rates"].items():
        low = [
            f"{arm} {cell['read']} of {cell['asked']}"
            for arm, cell in cells.items()
            if cell["asked"] >= _FEW_ANSWERS and cell["share"] < _READABLE
        ]
        if low:
            found = f"few answers hold the letter, number or JSON to mark: {', '.join(low)}"
            expected = f"at least {_READABLE:.0%}; an answer without one is marked 0"
            yield problem("KTB824", f"slice {slice_title(results, name)}", found, expected)


def _noisy(results: Results) -> Iterator[Problem]:
    """Headlines that are not larger than the noise floor.

    An arm's floor is that of a difference of two of its runs, so its own variance is half of the
    floor's square, and the mean of N repeats has 1/N of that.
    """
    repeat = results["repeat"]
    for one in results["contrasts"]:
        if repeat is None or one["slice"] != OVERALL or one["verdict"] in NULLS:
            continue
        noise = [repeat["noise"][name].get(one["axis"]) for name in (one["of"], one["minus"])]
        squares = sum((cell["floor"] or 0.0) ** 2 for cell in noise if cell is not None)
        floor = math.sqrt(squares / (2 * repeat["n"]))
        if abs(one["mean"]) <= floor:
            found = (
                f"{signed(one['mean'])} is no more than the noise of these repeats ({floor:.2f})"
            )
            expected = "a difference that two runs of one arm do not show"
            yield problem("KTB826", f"{one['axis']}: {one['of']} − {one['minus']}", found, expected)
