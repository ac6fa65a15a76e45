"""Verdicts in words, generated from the results.

The first sentence names every loss, whatever its size and the other results: each contrast of
the last arm with the first whose interval lies below 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ktbridge.eval.results.types import Axis, Clause, Contrast, Measured, Numbers, Verdict, Words
from ktbridge.eval.stats import unseen_share

ALPHA = 0.05
OVERALL = "overall"
NULLS: tuple[Words, ...] = (
    "within margin",
    "inconclusive",
)  # shown with the smallest detectable effect
AXIS_WORDS: Mapping[Axis, str] = {
    "persona": "persona",
    "task": "task quality",
    "judge": "judged quality",
}
# A drop counts as detectable if the smallest detectable effect is at most this (scale 0..1).
SEEN = 0.25


def judge_contrast(axis: Axis, contrast: Numbers, p_holm: float, margin: float) -> Words:
    """improved / dropped / within margin / inconclusive.

    Improved and dropped need an interval that excludes 0 and a Holm-adjusted p below 0.05. "within
    margin" means: for the task axis not worse by ``margin`` or more (non-inferior), for the persona
    axis neither worse nor better by that much. It also needs enough clusters that a kind of loss
    which none of them showed could not exceed the margin (36 for a margin of 0.1): a few items that
    happen to agree do not prove absence.
    """
    significant = p_holm < ALPHA
    if significant and contrast["low"] > 0:
        return "improved"
    if significant and contrast["high"] < 0:
        return "dropped"
    kept = contrast["low"] > -margin and unseen_share(contrast["clusters"]) < margin
    if kept and (axis != "persona" or contrast["high"] < margin):
        return "within margin"
    return "inconclusive"


def signed(value: float) -> str:
    """+0.42, −0.10, 0.00 (U+2212 minus sign, no sign if the value rounds to zero)."""
    rounded = round(value, 2)
    return f"{rounded:+.2f}".replace("-", "−") if rounded else "0.00"


def interval(contrast: Numbers) -> str:
    """ "+0.42 [+0.30, +0.55]"."""
    return f"{signed(contrast['mean'])} [{signed(contrast['low'])}, {signed(contrast['high'])}]"


def detectable(contrast: Contrast) -> str:
    """The smallest detectable effect of a null result: "0.12", or "none" with too few items; else ''."""
    if contrast["verdict"] not in NULLS:
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


def is_loss(results: Measured, contrast: Contrast) -> bool:
    """Whether the whole interval lies below 0, on an axis where less is worse: less persona is a loss
    only where the persona is expected."""
    wanted = contrast["axis"] != "persona" or contrast["slice"] == OVERALL
    wanted = wanted or _primary(results).get(contrast["slice"]) == "persona"
    return bool(wanted and contrast["high"] < 0)


def verdict_words(results: Measured, contrast: Contrast) -> str:
    """The verdict as shown in tables; "↓" if the interval shows a loss and the verdict does not."""
    lost = contrast["verdict"] in NULLS and is_loss(results, contrast)
    return f"{contrast['verdict']} ↓" if lost else str(contrast["verdict"])


def summarise(results: Measured) -> Verdict:
    """The line, the headline and the sentences below it, for the last arm against the first.

    ``line`` lists each finding in a few words ("task quality ↓ 0.15 [0.04, 0.27]; persona ↑ 0.62
    [0.48, 0.75]; knowledge: inconclusive"), every loss first, and ``clauses`` are its parts;
    ``headline`` is a sentence on the axes and every loss; ``persona``, ``task`` and ``judge``
    hold the verdicts of the overall contrasts, None if there is none.
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
    if not any(one["slice"] == OVERALL for one in shown):
        text = "No item has an ok answer from every arm; nothing can be compared."
        return _verdict(text, [], text, [], {})
    clauses = _clauses(results, shown)
    return _verdict(
        f"{first} → {last}{over}: " + "; ".join(one["text"] for one in clauses),
        clauses,
        f"From {first} to {last}{over}: " + "; ".join(_sentence(results, shown)) + ".",
        _details(results, names, shown),
        {one["axis"]: one["verdict"] for one in shown if one["slice"] == OVERALL},
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
    """How many items the numbers cover, if not all that were planned."""
    plan = results.get("plan")
    total = max(results["asked"], plan["items"] if plan else 0)
    return f" over {results['valid']} of {total} items" if results["valid"] < total else ""


def _primary(results: Measured) -> dict[str, str]:
    return {one["name"]: one["primary"] for one in results["bench"]["slices"]}


def _rank(results: Measured, contrast: Contrast) -> tuple[int, int]:
    """Whole axes before slices, in the order of axes and of the bench."""
    slices = list(_primary(results))
    place = -1 if contrast["slice"] == OVERALL else slices.index(contrast["slice"])
    return place, ("persona", "task", "judge").index(contrast["axis"])


def _losses(results: Measured, shown: Iterable[Contrast]) -> list[Contrast]:
    found = [one for one in shown if is_loss(results, one)]
    return sorted(_distinct(results, found), key=lambda one: _rank(results, one))


def _distinct(results: Measured, shown: Iterable[Contrast]) -> list[Contrast]:
    """Omit a slice that is the only one of its axis: the whole axis has the same numbers."""
    primary = _primary(results)

    def is_alone(axis: str, name: str) -> bool:
        own = [one for one, its in primary.items() if axis in ("judge", its)]
        return own == [name]

    return [one for one in shown if not is_alone(one["axis"], one["slice"])]


def _clauses(results: Measured, shown: Sequence[Contrast]) -> list[Clause]:
    """Losses first; then each axis and each task slice: text, verdict, whether a loss."""
    losses = _losses(results, shown)
    primary = _primary(results)
    rest = [
        one
        for one in _distinct(results, shown)
        if one not in losses
        and (one["slice"] == OVERALL or one["axis"] == "task" == primary[one["slice"]])
    ]
    rest.sort(key=lambda one: (one["verdict"] != "improved", _rank(results, one)))
    margin = results["bench"]["margin"]
    clauses: list[Clause] = [
        {
            "text": f"{title_of(results, one)}{finding(one, margin, lost=lost, family=family)}",
            "verdict": one["verdict"],
            "loss": lost,
        }
        for lost, group in ((True, losses), (False, rest))
        for one in group
        for family in [_family(results, one)]
    ]
    pairs = _lost_pairs(results, shown[0]["of"], shown[0]["minus"])
    lost_pairs: list[Clause] = [
        {"text": text, "verdict": "dropped", "loss": True} for text in pairs
    ]
    return lost_pairs + clauses


def finding(contrast: Contrast, margin: float, *, lost: bool = False, family: int = 1) -> str:
    """The text after a contrast's title: " ↑ 0.62 [0.48, 0.75]", ": inconclusive".

    A loss (``lost``) is always an arrow and a number; "beyond margin" marks one whose interval lies
    beyond it, and p is added if it is not significant after correction for ``family`` contrasts.
    """
    mean, low, high = contrast["mean"], contrast["low"], contrast["high"]
    if lost or contrast["verdict"] == "dropped":
        text = f" ↓ {-mean:.2f} [{-high:.2f}, {-low:.2f}]"
        if high < -margin:
            text += " beyond margin"
        return text + _correction(contrast, family)
    if contrast["verdict"] == "improved":
        return f" ↑ {mean:.2f} [{low:.2f}, {high:.2f}]"
    if contrast["verdict"] == "inconclusive" and contrast["detectable"] is None:
        return f": too few items to tell (n = {contrast['n']})"
    return f": {contrast['verdict']}"


def _correction(contrast: Contrast, family: int) -> str:
    """The p of a loss shown by the interval but not by the corrected test."""
    if contrast["verdict"] == "dropped":
        return ""
    return f" (p = {contrast['p_holm']:.2f} corrected for {family} comparisons)"


def _family(results: Measured, contrast: Contrast) -> int:
    """The number of contrasts in Holm's correction: those of the axis, or those of its slices."""
    overall = contrast["slice"] == OVERALL
    return sum(
        one["axis"] == contrast["axis"] and (one["slice"] == OVERALL) == overall
        for one in results["contrasts"]
    )


_WORDS = {
    ("persona", "improved"): "persona rose by {}",
    ("persona", "dropped"): "persona fell by {}",
    ("persona", "within margin"): "persona did not rise, {}",
    ("persona", "inconclusive"): "persona did not rise beyond doubt, {}",
    ("task", "improved"): "task quality improved by {}",
    ("task", "dropped"): "task quality dropped by {}",
    ("task", "within margin"): "task quality held within the margin, {}",
    ("task", "inconclusive"): "task quality is inconclusive, {}",
    ("judge", "improved"): "judged quality improved by {}",
    ("judge", "dropped"): "judged quality dropped by {}",
    ("judge", "within margin"): "judged quality held within the margin, {}",
    ("judge", "inconclusive"): "judged quality is inconclusive, {}",
}


def _sentence(results: Measured, shown: Sequence[Contrast]) -> list[str]:
    """Sentences on every axis and on every loss in a slice; losses first."""
    losses = _losses(results, shown)
    overall = [one for one in shown if one["slice"] == OVERALL]
    overall.sort(key=lambda one: (one not in losses, _rank(results, one)))
    parts = []
    for one in overall:
        lost = one in losses
        word = "dropped" if lost else one["verdict"]
        if (one["axis"], word) == ("persona", "inconclusive") and one["mean"] <= 0:
            word = "within margin"  # "did not rise"
        text = _WORDS[one["axis"], word].format(interval(one))
        if word == "inconclusive" and one["detectable"] is None:
            text = f"{AXIS_WORDS[one['axis']]} cannot be judged from so few items, {interval(one)}"
        if lost and one["verdict"] == "within margin":
            text += ", less than the margin"
        parts.append(text + (_correction(one, _family(results, one)) if lost else ""))
    slices = [
        f"{title_of(results, one)} {interval(one)}" for one in losses if one["slice"] != OVERALL
    ]
    if slices:
        parts.insert(sum(one in losses for one in overall), "losses in " + ", ".join(slices))
    return [*_lost_pairs(results, shown[0]["of"], shown[0]["minus"]), *parts]


def _lost_pairs(results: Measured, of: str, minus: str) -> list[str]:
    """Losses in judged pairs: the balance of ``of`` against ``minus`` lies below 0."""
    return [
        f"lost to {minus} side by side, balance {interval(one)}"
        for one in results["pairs"]
        if (one["of"], one["minus"]) == (of, minus) and one["high"] < 0
    ]


def _details(results: Measured, names: list[str], shown: Sequence[Contrast]) -> list[str]:
    return [
        *_steps(results, names),
        *_slices(results, shown),
        *_others(results, shown),
        *_judged(results),
    ]


def _steps(results: Measured, names: list[str]) -> list[str]:
    """Which step brought the persona, if there is more than one."""
    if len(names) != 3:
        return []
    steps = []
    for minus, of in itertools.pairwise(names):
        contrast = find(results, "persona", OVERALL, of, minus)
        if contrast is not None:
            words = verdict_words(results, contrast)
            steps.append(f"{of} − {minus} {interval(contrast)} ({words})")
    return ["Persona by step: " + "; ".join(steps) + "."] if steps else []


def _slices(results: Measured, shown: Sequence[Contrast]) -> list[str]:
    """Slices that changed on their primary axis, and drops that could not have been detected."""
    primary = _primary(results)
    shown = sorted(shown, key=lambda one: _rank(results, one))
    own = [one for one in shown if primary.get(one["slice"]) == one["axis"]]
    dropped = [one for one in shown if one["slice"] != OVERALL and is_loss(results, one)]
    improved = [one for one in own if one["verdict"] == "improved"]
    texts = []
    for word, group in (("dropped", dropped), ("improved", improved)):
        moved = [f"{title_of(results, one)} {interval(one)}" for one in group]
        texts += [f"Slices {word}: {', '.join(moved)}."] if moved else []
    # If the interval excludes a drop, or one of the margin's size, none was missed.
    open_ = [
        one
        for one in own
        if one["low"] <= 0 and one["verdict"] != "within margin" and one not in dropped
    ]
    seen = [one for one in open_ if one["detectable"] is not None and one["detectable"] <= SEEN]
    if seen and not dropped:
        least = max(one["detectable"] or 0.0 for one in seen)
        among = ", ".join(title_of(results, one) for one in seen)
        texts.append(
            f"No slice is shown to have dropped among {among}, where a drop of {least:.2f} would have "
            "been seen in 8 of 10 runs."
        )
    unseen = [
        f"{title_of(results, one)} "
        + ("of any size" if one["detectable"] is None else f"up to {one['detectable']:.2f}")
        for one in open_
        if one not in seen
    ]
    if unseen:
        texts.append(f"A drop could have gone unseen in {', '.join(unseen)}.")
    return texts


def _others(results: Measured, shown: Sequence[Contrast]) -> list[str]:
    """Losses between other arms than the last and the first."""
    steps: dict[str, list[str]] = {}
    for one in results["contrasts"]:
        if one not in shown and is_loss(results, one):
            loss = f"{title_of(results, one)} {interval(one)}"
            steps.setdefault(f"{one['of']} − {one['minus']}", []).append(loss)
    return [f"Losses of {step}: {', '.join(losses)}." for step, losses in steps.items()]


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
