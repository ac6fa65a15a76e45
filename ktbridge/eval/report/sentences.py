"""Sentences about results: the first line, the headline, and what stands below them.

The first line names the overall contrast of each axis, the last arm minus the first, with its interval, and
the slices that improved or dropped. Everything else stands below it and is called "may have" at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ktbridge.document import Tone
from ktbridge.eval.results.compare import (
    CONFIRMED,
    LOSSES,
    NULLS,
    OVERALL,
    find_contrast,
    interval,
    interval_parts,
    own_slices,
)
from ktbridge.eval.results.types import (
    AXES_SHOWN,
    Axis,
    Contrast,
    Numbers,
    PairCounts,
    Results,
    Verdict,
    VerdictWord,
)

AXIS_WORDS: Mapping[Axis, str] = {"persona": "persona", "task": "task quality", "judge": "judged quality"}
# A drop counts as detectable if the smallest detectable effect is at most this (scale 0..1).
SEEN = 0.25


# --- numbers and names


def _interval_in_words(numbers: Numbers, signs: bool = True, p: str = "") -> str:
    """ "−0.02 (95 %: −0.10 to +0.06)", or without signs; with p if one is given."""
    mean, low, high = interval_parts(numbers, signs)
    return f"{mean} (95 %: {low} to {high}{p})"


def detectable(contrast: Contrast) -> str:
    """The smallest effect that would be confirmed, beside a contrast that isn't: "0.12", or "none" with
    too few items; else ''."""
    if contrast["verdict"] in CONFIRMED:
        return ""
    return "none" if contrast["detectable"] is None else f"{contrast['detectable']:.2f}"


def contrast_tone(contrast: Contrast) -> Tone:
    """The color of a contrast everywhere: green or red for what the first line calls improved or
    dropped, grey for the rest."""
    return verdict_tone(contrast["verdict"]) if contrast["headline"] else "calm"


def verdict_tone(verdict: VerdictWord) -> Tone:
    return verdict if verdict == "improved" or verdict == "dropped" else "calm"


def slice_title(results: Results, name: str) -> str:
    """A slice's name and label, the same everywhere: "KRI-K (knowledge)"."""
    labels = {one["name"]: one["label"] for one in results["bench"]["slices"]}
    label = labels.get(name, name)
    return name if label == name else f"{name} ({label})"


def ordered_slices(results: Results, axis: Axis) -> list[tuple[str, bool]]:
    """Return the slices of an axis's table, and whether each is a minor one: there for another axis. Those
    come last."""
    own = [OVERALL, *own_slices(results["bench"], axis)]
    return sorted(((name, name not in own) for name in results["tables"][axis]), key=lambda one: one[1])


def contrast_title(results: Results, contrast: Contrast) -> str:
    """A contrast's title: "task quality", "KRI-K (knowledge)", "task quality of PES (…)"."""
    axis, name = contrast["axis"], contrast["slice"]
    if name == OVERALL:
        return AXIS_WORDS[axis]
    title = slice_title(results, name)
    return title if axis == primary_axes(results).get(name) else f"{AXIS_WORDS[axis]} of {title}"


def primary_axes(results: Results) -> dict[str, str]:
    """Return the axis that each slice is there for."""
    return {one["name"]: one["primary"] for one in results["bench"]["slices"]}


# --- the first line


def summarize(results: Results) -> Verdict:
    """Return the line, the headline and the sentences below it, for the last arm against the first.

    ``line`` lists the contrasts in a few words ("task quality ↓ 0.15 [0.04, 0.27]; persona ↑ 0.62
    [0.48, 0.75]"), and ``clauses`` are its parts; ``headline`` says the same in a sentence;
    ``persona``, ``task`` and ``judge`` hold the verdicts of the overall contrasts, None if there is
    none.
    """
    names = [card["name"] for card in results["arms"]]
    first, last = names[0], names[-1]
    plan = results.get("plan")
    total = max(results["asked"], plan["items"] if plan else 0)
    over = f" over {results['valid']} of {total} items" if results["valid"] < total else ""
    main = main_contrasts(results)
    overall = {one["axis"]: one["verdict"] for one in main if one["slice"] == OVERALL}
    said: list[_Said] = []
    details: list[str] = []
    if overall:
        said = [_contrast_texts(results, one) for one in _distinct(results, main) if one["headline"]]
        pairs = [one for one in results["pairs"] if (one["of"], one["minus"]) == (last, first)]
        said += [_pair_texts(one) for one in pairs]
        # Whole axes before slices, and losses first among each.
        said.sort(key=lambda one: (one.of_slice, one.verdict != "dropped", one.verdict not in LOSSES))
        line = f"{first} → {last}{over}: " + "; ".join(one.clause for one in said)
        headline = f"From {first} to {last}{over}: " + "; ".join(one.sentence for one in said) + "."
        details = _list_details(results, main)
    elif len(names) > 1:
        line = headline = "No item has an ok answer from every arm; nothing can be compared."
    else:
        means = "; ".join(
            f"{AXIS_WORDS[axis]} {table[OVERALL][first]['mean']:.2f}"
            for axis, table in results["tables"].items()
            if OVERALL in table
        )
        found = f"{means}{over}" if means else "no valid answers"
        line = headline = f"One arm ({first}): {found}. Nothing to compare it with."
    return {
        "line": line,
        "clauses": [
            {"text": one.clause, "verdict": one.verdict, "loss": one.verdict in LOSSES} for one in said
        ],
        "headline": headline,
        "details": details,
        "persona": overall.get("persona"),
        "task": overall.get("task"),
        "judge": overall.get("judge"),
    }


def main_contrasts(results: Results) -> list[Contrast]:
    """Return the contrasts of the last arm minus the first: whole axes before slices, in the order of axes
    and of the bench."""
    ends = (results["arms"][-1]["name"], results["arms"][0]["name"])
    return [one for one in _ranked(results) if (one["of"], one["minus"]) == ends]


def _ranked(results: Results) -> list[Contrast]:
    slices = [OVERALL, *primary_axes(results)]
    return sorted(
        results["contrasts"], key=lambda one: (slices.index(one["slice"]), AXES_SHOWN.index(one["axis"]))
    )


def _distinct(results: Results, contrasts: Iterable[Contrast]) -> list[Contrast]:
    """Omit a slice that is the only one of its axis: the whole axis has the same numbers."""
    return [one for one in contrasts if own_slices(results["bench"], one["axis"]) != [one["slice"]]]


class _Said(NamedTuple):
    """Parts of the line and of the headline about one contrast, or about judged pairs."""

    of_slice: bool
    verdict: VerdictWord
    clause: str
    sentence: str


def _contrast_texts(results: Results, contrast: Contrast) -> _Said:
    title, verdict = contrast_title(results, contrast), contrast["verdict"]
    if verdict not in NULLS:
        p = "" if verdict in CONFIRMED else f", p = {contrast['p']:.2g}"
        words = f"{verdict} by {_interval_in_words(contrast, False, p)}"
    else:
        if contrast["axis"] == "persona" and contrast["mean"] <= 0:
            words = "did not rise"
        elif verdict == "within margin":
            words = "held within the margin"
        elif contrast["detectable"] is None:
            words = "cannot be judged from so few items"
        else:
            words = "is inconclusive"
        words += f", {_interval_in_words(contrast)}"
    clause = title + clause_text(contrast, results["bench"]["margin"])
    return _Said(contrast["slice"] != OVERALL, verdict, clause, f"{title} {words}")


def clause_text(contrast: Contrast, margin: float) -> str:
    """The text after a contrast's title in the line: " ↑ 0.62 [0.48, 0.75]", ": inconclusive, …".

    "beyond margin" marks a loss whose whole interval lies beyond it.
    """
    if contrast["verdict"] == "inconclusive" and contrast["detectable"] is None:
        return f": too few items to tell (n = {contrast['n']}), {interval(contrast)}"
    beyond = contrast["verdict"] == "dropped" and contrast["high"] < -margin
    return _brief(contrast, contrast["verdict"]) + (" beyond margin" if beyond else "")


def _brief(numbers: Numbers, verdict: VerdictWord) -> str:
    if verdict in NULLS:
        return f": {verdict}, {interval(numbers)}"
    arrow = {"improved": " ↑ ", "dropped": " ↓ "}.get(verdict, f": {verdict} by ")
    return arrow + interval(numbers, signs=False)


def _pair_texts(pair: PairCounts) -> _Said:
    """Answers judged side by side; the size is the balance of pairs won and lost."""
    verdict, title = pair["verdict"], f"side by side with {pair['minus']}"
    if verdict == "inconclusive":
        sentence = f"{title} it is inconclusive, balance {_interval_in_words(pair)}"
    else:
        verb = "lost to" if verdict in LOSSES else "won against"
        verb = verb if verdict in CONFIRMED else f"may have {verb}"
        p = "" if verdict in CONFIRMED else f", p = {pair['p']:.2g}"
        size = _interval_in_words(pair, False, p)
        sentence = f"{pair['of']} {verb} {pair['minus']} side by side, by a balance of {size}"
    return _Said(False, verdict, title + _brief(pair, verdict), sentence)


# --- the sentences below it: details.txt.j2


def _list_details(results: Results, main: Sequence[Contrast]) -> list[str]:
    """Return what may have changed, what could be missed, other arms, and a judge's counts."""
    import jinja2

    names = [card["name"] for card in results["arms"]]
    primary, judge = primary_axes(results), results["judge"]
    lost = any(one["role"] == "slice" and one["verdict"] in LOSSES for one in main)
    # If the interval excludes a drop, or one of the margin's size, none was missed.
    could_drop = [
        one
        for one in main
        if primary.get(one["slice"]) == one["axis"]
        and one["low"] <= 0
        and one["verdict"] not in ("within margin", *LOSSES)
    ]
    able = [(size, one) for one in could_drop if (size := one["detectable"]) is not None]
    seen = [one for size, one in able if size <= SEEN and one["mean"] >= 0 and not lost]
    digits = judge.get("digits", {}) if judge else {}
    steps = itertools.pairwise(names) if len(names) == 3 else ()
    found_steps = (find_contrast(results, "persona", OVERALL, of, minus) for minus, of in steps)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "title": lambda one: " ".join(contrast_title(results, one).split()),
        "interval": interval,
        "size": lambda one: interval(one, signs=False),
        "with_p": lambda one: _interval_in_words(one, False, f", adjusted p = {one['p_adjusted']:.2g}"),
        # Intervals that exclude 0 in one direction if nothing changed: one in 40.
        "by_chance": lambda count: f"{count / 40:.1g}" if count < 40 else f"{count / 40:.0f}",
    }
    text = environment.get_template("details.txt.j2").render(
        steps=[one for one in found_steps if one],
        own=[one for one in _distinct(results, main) if one["role"] == "slice"],
        seen=seen,
        missed=[one for size, one in able if size > SEEN or one["mean"] < 0],
        never=[one for one in could_drop if one["detectable"] is None],
        exploratory=list(_explore(results, names)),
        digits=[(arm, digits[arm]) for arm in names if arm in digits and digits[arm]["mean"] is not None],
        pairs=results["pairs"],
    )
    return text.split("\n")[:-1]


def _explore(
    results: Results, names: Sequence[str]
) -> Iterator[tuple[str, str, int, list[tuple[VerdictWord, list[Contrast]]]]]:
    """Yield changes that the run was not made to find, by pair of arms: (of, minus, contrasts looked at,
    those that moved by verdict), in slices on another axis than their own, and between other arms than the
    last and the first."""
    primary, distinct = primary_axes(results), _distinct(results, _ranked(results))
    pairs = [(later, earlier) for earlier, later in itertools.combinations(names, 2)]
    for of, minus in sorted(pairs, key=lambda pair: pair != (names[-1], names[0])):
        looked_at = [
            one
            for one in distinct
            if (one["of"], one["minus"]) == (of, minus)
            and one["role"] in ("pair", "exploratory")
            # A persona where it isn't wanted is neither a merit nor a loss: the tables have it.
            and (one["axis"] != "persona" or primary.get(one["slice"], "persona") == "persona")
        ]
        words: tuple[VerdictWord, ...] = (*LOSSES, "improved", "may have improved")
        moved = [(word, [one for one in looked_at if one["verdict"] == word]) for word in words]
        if any(found for _, found in moved):
            yield of, minus, len(looked_at), [(word, found) for word, found in moved if found]
