"""Verdicts in words, generated from the results.

``judge_contrast`` decides the word of every contrast, in both directions by one rule. The first line
names the overall contrast of each axis, the last arm minus the first, with its interval, and the
slices that improved or dropped. Everything else stands below it and is called "may have" at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ktbridge.eval.results.cards import BenchCard
from ktbridge.eval.results.types import (
    AXES_SHOWN,
    Axis,
    Clause,
    Contrast,
    Measured,
    Numbers,
    PairCounts,
    Role,
    Verdict,
    Words,
)
from ktbridge.eval.stats import unseen_share

ALPHA = 0.05
FALSE_DISCOVERIES = 0.10  # the share of false names among slices that are named
OVERALL = "overall"
CONFIRMED: tuple[Words, ...] = ("improved", "dropped")
LOSSES: tuple[Words, ...] = ("dropped", "may have dropped")
NULLS: tuple[Words, ...] = ("within margin", "inconclusive")
AXIS_WORDS: Mapping[Axis, str] = {
    "persona": "persona",
    "task": "task quality",
    "judge": "judged quality",
}
Tone = Literal["improved", "dropped", "calm"]  # green, red, grey
# A drop counts as detectable if the smallest detectable effect is at most this (scale 0..1).
SEEN = 0.25


# --- the decision


def judge_contrast(
    role: Role, axis: Axis, contrast: Numbers, p: float, p_adjusted: float, margin: float
) -> Words:
    """The word of a contrast: improved, dropped, may have …, within margin or inconclusive.

    A change needs an interval that excludes 0. It is improved or dropped if p is below 0.05 and
    ``p_adjusted`` agrees: of a slice at 0.10 (Benjamini-Hochberg), of a whole axis at 0.05. An
    exploratory contrast "may have" changed at most. "within margin" means: for task and judge not worse
    by ``margin`` or more (non-inferior), for the persona neither worse nor better by that much. It also
    needs enough clusters that a kind of loss which none of them showed could not exceed the margin
    (36 for a margin of 0.1): a few items that happen to agree do not prove absence.
    """
    level = FALSE_DISCOVERIES if role == "slice" else ALPHA
    confirmed = role != "exploratory" and p < ALPHA and p_adjusted <= level
    if contrast["low"] > 0:
        return "improved" if confirmed else "may have improved"
    if contrast["high"] < 0:
        return "dropped" if confirmed else "may have dropped"
    kept = contrast["low"] > -margin and unseen_share(contrast["clusters"]) < margin
    if kept and (axis != "persona" or contrast["high"] < margin):
        return "within margin"
    return "inconclusive"


def role_of(card: BenchCard, names: Sequence[str], place: tuple[Axis, str, str, str]) -> Role:
    """The question that a contrast (axis, slice, of, minus) answers in a run of the arms ``names``."""
    axis, name, of, minus = place
    first = (of, minus) == (names[-1], names[0])
    if name == OVERALL:
        return "overall" if first else "pair"
    return "slice" if first and name in own_slices(card, axis) else "exploratory"


def level_of(role: Role, family: int) -> float:
    """The p below which a contrast of this role is confirmed, if it is the only one of ``family``."""
    if role == "overall":
        return ALPHA
    return min(ALPHA, FALSE_DISCOVERIES / family) if role == "slice" else ALPHA / family


def in_headline(role: Role, word: Words) -> bool:
    """Return whether the first line names the contrast: whole axes always, slices if they changed."""
    return role == "overall" or (role == "slice" and word in CONFIRMED)


def own_slices(card: BenchCard, axis: str) -> list[str]:
    """The slices that are there for ``axis``; for the judge all of them."""
    return [one["name"] for one in card["slices"] if axis in ("judge", one["primary"])]


def tone(contrast: Contrast) -> Tone:
    """The color of a contrast everywhere: green or red for what the first line calls improved or
    dropped, grey for the rest."""
    return tone_of(contrast["verdict"]) if contrast["headline"] else "calm"


def tone_of(word: Words) -> Tone:
    return word if word == "improved" or word == "dropped" else "calm"


# --- numbers and names


def signed(value: float) -> str:
    """+0.42, −0.10, 0.00 (U+2212 minus sign, no sign if the value rounds to zero)."""
    rounded = round(value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def interval(contrast: Numbers) -> str:
    """ "+0.42 [+0.30, +0.55]"."""
    low, high = _ends(contrast)
    return f"{signed(contrast['mean'])} [{low}, {high}]"


def change(contrast: Numbers) -> str:
    """ "−0.02 (95 %: −0.10 to +0.06)"."""
    low, high = _ends(contrast)
    return f"{signed(contrast['mean'])} (95 %: {low} to {high})"


def size(contrast: Numbers, p: str = "") -> str:
    """A change without its sign: "0.10 (95 %: 0.01 to 0.20)"; with p if one is given."""
    low, high = _sizes(contrast)
    return f"{abs(contrast['mean']):.2f} (95 %: {low} to {high}{p})"


def _ends(contrast: Numbers) -> list[str]:
    """Both ends of the interval; one near 0 with three digits, so that it is seen on which side it is."""
    ends = (contrast["low"], contrast["high"])
    near = [0.0005 <= abs(end) < 0.005 for end in ends]
    return [
        f"{end:+.3f}".replace("-", "−") if is_near else signed(end)
        for end, is_near in zip(ends, near, strict=True)
    ]


def _sizes(contrast: Numbers) -> list[str]:
    """Both ends of an interval that excludes 0, the smaller first and without signs."""
    ends = [end.lstrip("+−") for end in _ends(contrast)]
    return ends if contrast["low"] > 0 else ends[::-1]


def detectable(contrast: Contrast) -> str:
    """The smallest effect that would be confirmed, beside a contrast that isn't: "0.12", or "none" with
    too few items; else ''."""
    if contrast["verdict"] in CONFIRMED:
        return ""
    return "none" if contrast["detectable"] is None else f"{contrast['detectable']:.2f}"


def find(results: Measured, axis: str, name: str, of: str, minus: str) -> Contrast | None:
    """The contrast of two arms on one axis and slice, or None."""
    for one in results["contrasts"]:
        if (one["axis"], one["slice"], one["of"], one["minus"]) == (axis, name, of, minus):
            return one
    return None


def slice_title(results: Measured, name: str) -> str:
    """A slice's name and label, the same everywhere: "KRI-K (knowledge)"."""
    labels = {one["name"]: one["label"] for one in results["bench"]["slices"]}
    label = labels.get(name, name)
    return name if label == name else f"{name} ({label})"


def title_of(results: Measured, contrast: Contrast) -> str:
    """A contrast's title: "task quality", "KRI-K (knowledge)", "task quality of PES (…)"."""
    axis, name = contrast["axis"], contrast["slice"]
    if name == OVERALL:
        return AXIS_WORDS[axis]
    own = axis == _primary(results).get(name)
    title = slice_title(results, name)
    return title if own else f"{AXIS_WORDS[axis]} of {title}"


# --- the first line


def summarise(results: Measured) -> Verdict:
    """The line, the headline and the sentences below it, for the last arm against the first.

    ``line`` lists the findings in a few words ("task quality ↓ 0.15 [0.04, 0.27]; persona ↑ 0.62
    [0.48, 0.75]"), and ``clauses`` are its parts; ``headline`` says the same in a sentence;
    ``persona``, ``task`` and ``judge`` hold the verdicts of the overall contrasts, None if there is
    none.
    """
    names = [card["name"] for card in results["arms"]]
    over = _over(results)
    if len(names) < 2:
        means = "; ".join(
            f"{AXIS_WORDS[axis]} {table[OVERALL][names[0]]['mean']:.2f}"
            for axis, table in results["tables"].items()
            if OVERALL in table
        )
        found = f"{means}{over}" if means else "no valid answers"
        text = f"One arm ({', '.join(names) or 'none'}): {found}. Nothing to compare it with."
        return _verdict(text, [], text, [], {})
    first, last = names[0], names[-1]
    shown = [one for one in results["contrasts"] if (one["of"], one["minus"]) == (last, first)]
    overall: dict[Axis, Words] = {
        one["axis"]: one["verdict"] for one in shown if one["slice"] == OVERALL
    }
    if not overall:
        text = "No item has an ok answer from every arm; nothing can be compared."
        return _verdict(text, [], text, [], {})
    pairs = [one for one in results["pairs"] if (one["of"], one["minus"]) == (last, first)]
    said = [
        *(_said(results, one) for one in _named(results, shown)),
        *(_said_of_pair(one) for one in pairs),
    ]
    # Whole axes before slices, and losses first among each.
    said.sort(key=lambda one: (one[0], one[1]["verdict"] != "dropped", not one[1]["loss"]))
    clauses = [clause for _, clause, _ in said]
    return _verdict(
        f"{first} → {last}{over}: " + "; ".join(one["text"] for one in clauses),
        clauses,
        f"From {first} to {last}{over}: " + "; ".join(text for *_, text in said) + ".",
        _details(results, names, shown),
        overall,
    )


def _verdict(
    line: str,
    clauses: list[Clause],
    headline: str,
    details: list[str],
    overall: Mapping[Axis, Words],
) -> Verdict:
    return {
        "line": line,
        "clauses": clauses,
        "headline": headline,
        "details": details,
        "persona": overall.get("persona"),
        "task": overall.get("task"),
        "judge": overall.get("judge"),
    }


def _over(results: Measured) -> str:
    """Return how many items the numbers cover, if not all that were planned."""
    plan = results.get("plan")
    total = max(results["asked"], plan["items"] if plan else 0)
    return f" over {results['valid']} of {total} items" if results["valid"] < total else ""


def _primary(results: Measured) -> dict[str, str]:
    return {one["name"]: one["primary"] for one in results["bench"]["slices"]}


def _rank(results: Measured, contrast: Contrast) -> tuple[int, int]:
    """Whole axes before slices, in the order of axes and of the bench."""
    slices = list(_primary(results))
    place = -1 if contrast["slice"] == OVERALL else slices.index(contrast["slice"])
    return place, AXES_SHOWN.index(contrast["axis"])


def _distinct(results: Measured, shown: Iterable[Contrast]) -> list[Contrast]:
    """Omit a slice that is the only one of its axis: the whole axis has the same numbers."""
    return [one for one in shown if own_slices(results["bench"], one["axis"]) != [one["slice"]]]


def _named(results: Measured, shown: Sequence[Contrast]) -> list[Contrast]:
    named = [one for one in _distinct(results, shown) if one["headline"]]
    return sorted(named, key=lambda one: _rank(results, one))


_Said = tuple[bool, Clause, str]  # whether of a slice, clause of the line, part of the sentence


def _said(results: Measured, contrast: Contrast) -> _Said:
    title, word = title_of(results, contrast), contrast["verdict"]
    text = f"{title}{finding(contrast, results['bench']['margin'])}"
    return contrast["slice"] != OVERALL, _clause(text, word), f"{title} {in_words(contrast)}"


def _said_of_pair(pair: PairCounts) -> _Said:
    """Answers judged side by side; the size is the balance of pairs won and lost."""
    word, title = pair["verdict"], f"side by side with {pair['minus']}"
    clause = _clause(f"{title}{_brief(pair, word)}", word)
    if word == "inconclusive":
        return False, clause, f"{title} it is inconclusive, balance {change(pair)}"
    verb = {"dropped": "lost to", "improved": "won against"}.get(word)
    verb = verb or ("may have lost to" if word == "may have dropped" else "may have won against")
    p = "" if word in CONFIRMED else f", p = {pair['p']:.2g}"
    text = f"{pair['of']} {verb} {pair['minus']} side by side, by a balance of {size(pair, p)}"
    return False, clause, text


def _clause(text: str, word: Words) -> Clause:
    return {"text": text, "verdict": word, "loss": word in LOSSES}


def finding(contrast: Contrast, margin: float) -> str:
    """The text after a contrast's title in the line: " ↑ 0.62 [0.48, 0.75]", ": inconclusive, …".

    "beyond margin" marks a loss whose whole interval lies beyond it.
    """
    if contrast["verdict"] == "inconclusive" and contrast["detectable"] is None:
        return f": too few items to tell (n = {contrast['n']}), {interval(contrast)}"
    beyond = contrast["verdict"] == "dropped" and contrast["high"] < -margin
    return _brief(contrast, contrast["verdict"]) + (" beyond margin" if beyond else "")


def _brief(found: Numbers, word: Words) -> str:
    if word in NULLS:
        return f": {word}, {interval(found)}"
    arrow = {"improved": " ↑ ", "dropped": " ↓ "}.get(word, f": {word} by ")
    return arrow + _span(found)


def _span(found: Numbers) -> str:
    """A change without its sign: "0.10 [0.01, 0.20]"."""
    low, high = _sizes(found)
    return f"{abs(found['mean']):.2f} [{low}, {high}]"


def in_words(contrast: Contrast) -> str:
    """The rest of a sentence that begins with a contrast's title: "dropped by 0.10 (95 %: 0.01 to
    0.20)"."""
    word = contrast["verdict"]
    if word in CONFIRMED:
        return f"{word} by {size(contrast)}"
    if word not in NULLS:
        p = f", p = {contrast['p']:.2g}"
        return f"{word} by {size(contrast, p)}"
    if contrast["axis"] == "persona" and contrast["mean"] <= 0:
        return f"did not rise, {change(contrast)}"
    if word == "within margin":
        return f"held within the margin, {change(contrast)}"
    if contrast["detectable"] is None:
        return f"cannot be judged from so few items, {change(contrast)}"
    return f"is inconclusive, {change(contrast)}"


# --- the sentences below it


def _details(results: Measured, names: list[str], shown: Sequence[Contrast]) -> list[str]:
    return [
        *_steps(results, names),
        *_slices(results, shown),
        *_missed(results, shown),
        *_exploratory(results, names),
        *_judged(results),
    ]


def _steps(results: Measured, names: list[str]) -> list[str]:
    """Return which step brought the persona, if there is more than one."""
    if len(names) != 3:
        return []
    steps = []
    for minus, of in itertools.pairwise(names):
        contrast = find(results, "persona", OVERALL, of, minus)
        if contrast is not None:
            steps.append(f"{of} − {minus} {interval(contrast)} ({contrast['verdict']})")
    return ["Persona by step: " + "; ".join(steps) + "."] if steps else []


def by_chance(count: int) -> str:
    """Return how many of ``count`` intervals exclude 0 in one direction if nothing changed: one in 40."""
    return f"{count / 40:.1g}" if count < 40 else f"{count / 40:.0f}"


def _slices(results: Measured, shown: Sequence[Contrast]) -> list[str]:
    """Slices whose interval excludes 0, but which the correction does not confirm."""
    own = [one for one in _distinct(results, shown) if one["role"] == "slice"]
    texts = []
    for word in ("may have dropped", "may have improved"):
        found = [
            f"{title_of(results, one)} by {size(one, p)}"
            for one in sorted(own, key=lambda one: _rank(results, one))
            if one["verdict"] == word
            for p in [f", adjusted p = {one['p_adjusted']:.2g}"]
        ]
        if found:
            texts.append(
                f"{word.capitalize()}: {', '.join(found)}. Of {len(own)} slices chance alone would "
                f"put about {by_chance(len(own))} here."
            )
    return texts


def _exploratory(results: Measured, names: list[str]) -> list[str]:
    """Changes that the run was not made to find, by pair of arms: in slices on another axis than their
    own, and between other arms than the last and the first."""
    primary = _primary(results)
    pairs = [(names[-1], names[0])]
    pairs += [(b, a) for a, b in itertools.combinations(names, 2) if (b, a) != pairs[0]]
    texts = []
    for of, minus in pairs:
        looked_at = [
            one
            for one in _distinct(results, results["contrasts"])
            if (one["of"], one["minus"]) == (of, minus)
            and one["role"] in ("pair", "exploratory")
            # A persona where it isn't wanted is neither a merit nor a loss: the tables have it.
            and (one["axis"] != "persona" or primary.get(one["slice"], "persona") == "persona")
        ]
        looked_at.sort(key=lambda one: _rank(results, one))
        found = [
            f"{word}: {', '.join(moved)}"
            for word in (*LOSSES, "improved", "may have improved")
            if (moved := [_moved(results, one) for one in looked_at if one["verdict"] == word])
        ]
        if found:
            texts.append(
                f"Exploratory, {of} − {minus}: {'; '.join(found)}. Of {len(looked_at)} contrasts "
                f"chance alone would put about {by_chance(len(looked_at))} here in each direction."
            )
    return texts


def _moved(results: Measured, contrast: Contrast) -> str:
    return f"{title_of(results, contrast)} by {_span(contrast)}"


def _missed(results: Measured, shown: Sequence[Contrast]) -> list[str]:
    """Slices in which a drop would have been seen, and those in which it could be missed."""
    shown = sorted(shown, key=lambda one: _rank(results, one))
    primary = _primary(results)
    own = [one for one in shown if primary.get(one["slice"]) == one["axis"]]
    lost = [one for one in shown if one["role"] == "slice" and one["verdict"] in LOSSES]
    # If the interval excludes a drop, or one of the margin's size, none was missed.
    open_ = [
        one
        for one in own
        if one["low"] <= 0 and one["verdict"] != "within margin" and one not in lost
    ]
    seen = [one for one in open_ if one["detectable"] is not None and one["detectable"] <= SEEN]
    texts = []
    if seen and not lost:
        least = max(one["detectable"] or 0.0 for one in seen)
        among = ", ".join(title_of(results, one) for one in seen)
        texts.append(
            f"No drop was seen in {among}, where one of {least:.2f} shows in 8 of 10 runs."
        )
    sizes = [
        f"{one['detectable']:.2f} in {title_of(results, one)}"
        for one in open_
        if one not in seen and one["detectable"] is not None
    ]
    never = [title_of(results, one) for one in open_ if one["detectable"] is None]
    missed = [f"of up to {', '.join(sizes)}"] * bool(sizes)
    missed += [f"of any size in {', '.join(never)}"] * bool(never)
    if missed:
        texts.append(f"Too few items: a real drop {', or '.join(missed)} could be missed.")
    return texts


def _judged(results: Measured) -> list[str]:
    """The judge's means on the public scale, and its pair verdicts, last arm against first and full
    against expert."""
    judge = results["judge"]
    digits = judge.get("digits", {}) if judge is not None else {}
    means = ", ".join(
        f"{arm} {one['mean']:.2f} ({one['answers']} answers, {one['unread']} without a digit)"
        for arm in (card["name"] for card in results["arms"])
        if (one := digits.get(arm)) and one["mean"] is not None
    )
    return [f"On the public scale from 0 to 5: {means}."] * bool(means) + [
        f"Judged side by side, {one['of']} against {one['minus']}: {one['win']} won, {one['tie']} "
        f"tied, {one['loss']} lost."
        for one in results["pairs"]
    ]
