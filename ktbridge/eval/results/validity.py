"""Problems of a run that a reader has to know before believing its numbers.

One of severity error invalidates the results: the command fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ktbridge.codes import problem
from ktbridge.errors import Problem, Severity
from ktbridge.eval.report.sentences import signed, slice_title
from ktbridge.eval.results.compare import NULLS, OVERALL
from ktbridge.eval.results.rows import SCORE_ERROR
from ktbridge.eval.results.types import Results
from ktbridge.eval.store import NOT_RUN
from ktbridge.server_api.failures import AGAIN, remedies, think_only_remedy

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
    return [*_not_asked(results), *_not_marked(results), *_not_credible(results)]


def _not_asked(results: Results) -> Iterator[Problem]:
    """Items that were planned but never asked, and arms without any answer."""
    plan = results["plan"]
    if plan is not None and plan["missing_answers"]:
        if plan["missing_items"]:
            short = [arm for arm, one in plan["arms"].items() if one["missing"]]
            whose = "every arm" if len(short) == len(plan["arms"]) else ", ".join(short)
            where = ", ".join(
                f"{slice_title(results, name)} {one['missing']}"
                for name, one in plan["slices"].items()
                if one["missing"]
            )
            missing, planned = plan["missing_items"], plan["items"]
            found = f"{missing} of {planned} planned items were not asked of {whose}: {where}"
        else:
            found = (
                f"every planned item was asked, but {plan['missing_answers']} of {plan['answers']} "
                "planned answers (repeats) were not"
            )
        expected = "all of them; what follows is about a part of the bench only"
        yield problem("KTB827", "the run is incomplete", found, expected)
    for name in results["left_out"]:
        why = results["refused"].get(name, "no answer of it is stored")
        found = f"left out of the comparison: {why}"
        yield problem("KTB823", f"arm {name}", found, "answers from every arm of the run")


def _not_marked(results: Results) -> Iterator[Problem]:
    """Answers without a mark: those on which a scorer failed, and those that aren't ok."""
    asked, valid = results["asked"], results["valid"]
    # A scorer's failure is not the arm's fault.
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

    ok = {name: counts.get("ok", 0) for name, counts in results["outcomes"].items()}
    failed = {name: counts.get("http-error", 0) for name, counts in results["outcomes"].items()}
    for name, counts in results["outcomes"].items():
        if ok[name] >= _ENOUGH_OK * asked and not failed[name]:
            continue
        if (
            counts.keys() <= {"ok", NOT_RUN}
            and results["plan"]
            and results["plan"]["missing_answers"]
        ):
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
        few = 2 * ok[name] < asked or 2 * valid < asked
        yield problem(
            "KTB820",
            f"arm {name}",
            f"{asked - ok[name]} of {asked} answers cannot be scored: {rest}",
            "ok answers; items missing in one arm are left out for all",
            "; ".join(dict.fromkeys(steps[outcome] for outcome in bad)),
            severity="error" if few or failed[name] > (1 - _ENOUGH_OK) * asked else "warning",
        )

    # An item's mark is then the mean of fewer repeats than were asked.
    for name, counts in results["repeat"]["outcomes"].items() if results["repeat"] else ():
        lost, total = counts.get("http-error", 0), sum(counts.values())
        if lost > failed[name]:
            severity: Severity = "error" if lost > (1 - _ENOUGH_OK) * total else "warning"
            found = f"{lost} of {total} answers failed: http-error"
            expected = "an answer to every repeat"
            yield problem("KTB820", f"arm {name}, repeats", found, expected, severity=severity)

    if ok and max(ok.values()) - min(ok.values()) > (1 - _ENOUGH_OK) * asked:
        spread = ", ".join(f"{name} {count}" for name, count in ok.items())
        found = f"arms differ in how many of {asked} answers are ok: {spread}"
        expected = "about the same number; what is left may not be a fair sample"
        yield problem("KTB821", "missing answers", found, expected)


def _not_credible(results: Results) -> Iterator[Problem]:
    """Arms that answer alike, marks of a format only, and headlines within the noise."""
    for pair in results["identical"]:
        if pair["share"] is not None and pair["share"] >= _NEARLY_ALL:
            whole = pair["share"] == 1 and pair["n"] >= _FEW_PAIRS
            yield problem(
                "KTB822",
                "arms " + " and ".join(pair["arms"]),
                f"{pair['share']:.0%} of {pair['n']} answers are byte-identical",
                "answers that differ, if an adapter was applied",
                severity="error" if whole else "warning",
            )

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

    # An arm's floor is that of a difference of two of its runs, so its own variance is half of the
    # floor's square, and the mean of N repeats has 1/N of that.
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
