"""The report as one HTML file: no network, no external reference, every answer escaped.

The page is rendered from the results dictionary alone: the same results give the same
bytes. The template, CSS and JavaScript are in ``page/`` and are inlined; the template draws the charts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import jinja2
from markupsafe import Markup

from ktbridge.document import Block, show_direction
from ktbridge.eval.report.document import build_overview, build_report
from ktbridge.eval.report.sentences import (
    AXIS_WORDS,
    contrast_title,
    contrast_tone,
    detectable,
    interval,
    main_contrasts,
    ordered_slices,
    primary_axes,
    signed,
    slice_title,
)
from ktbridge.eval.report.words import TITLES, axis_description, report_header, terms_for
from ktbridge.eval.results.compare import LOSSES
from ktbridge.eval.results.types import AXES_SHOWN, Axis, Index, ItemRow, Results
from ktbridge.eval.text import CJK, shown_lines

_FOLDED = 8  # lines of a text that are shown before it is expanded
_HEAD, _TAIL = 16_000, 4_000  # characters kept of the start and end of a longer text
_MARKS = ("circle", "square", "diamond", "triangle")
_RADIUS = 138.0
_PAGE = Path(__file__).parent / "page"


def render_report(results: Results) -> str:
    """Return the page of a run."""
    names = [card["name"] for card in results["arms"]]
    axes = [axis for axis in AXES_SHOWN if axis in results["axes"]]
    return _render(
        build_report(results).blocks,
        results=results,
        names=names,
        axes=axes,
        titles=TITLES,
        axis_words=AXIS_WORDS,
        facts=report_header(results),
        meanings={one["name"]: one["meaning"] for one in results["bench"]["slices"]},
        terms=terms_for([*results["axes"], *["judge"] * bool(results["judge"])]),
        made_of={axis: axis_description(results, axis) for axis in axes},
        slice_title=lambda name: slice_title(results, name),
        marks={name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)},
        number={name: i % len(_MARKS) for i, name in enumerate(names)},
        slices={axis: ordered_slices(results, axis) for axis in axes},
        changes=_changes(results),
        spokes=_spokes(results),
        items=[_item(row, names, axes) for row in results["items"]],
        outcomes=sorted(
            {name for counts in results["outcomes"].values() for name in counts} - {"ok"}
        ),
    )


def render_overview(index: Index, failures: Sequence[str]) -> str:
    """Return the page of several benches: verdicts with links to the reports; ``failures`` first."""
    return _render(build_overview(index, failures), results=None, index=index)


def _render(blocks: Sequence[Block], **context: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "signed": signed,
        "interval": interval,
        "flat": _flat,
        "cut": _cut,
        "unfold": _unfold,
        "is_long": lambda text: shown_lines(text, _FOLDED) > _FOLDED,
        "anchor": lambda text: "-".join(re.findall(r"\w+", text)) or "sign",
        "detectable": detectable,
        "tone": contrast_tone,
        "across": _across,
        "reach_x": lambda spoke, value: round(250 + _RADIUS * value * spoke["cos"], 1),
        "reach_y": lambda spoke, value: round(180 + _RADIUS * value * spoke["sin"], 1),
        "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True),
    }
    blocks = [block for block in blocks if "page" in block.media]
    # Our own files must not be escaped; everything else is.
    style, script = (
        Markup((_PAGE / name).read_text("utf-8")) for name in ("report.css", "report.js")
    )
    page = environment.get_template("report.html.j2")
    return page.render(blocks=blocks, style=style, script=script, **context)


def _across(value: float, reach: float | None = None) -> float:
    """Return where a chart of changes (from −``reach`` to ``reach``) or of means (0 to 1) has a value."""
    low, high = (0.0, 1.0) if reach is None else (-reach, reach)
    return round(168 + (value - low) / (high - low) * 318, 1)


def _flat(value: object) -> str:
    """Return a value of the judge's card on one line: "first_share 0.75, n 40"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(one)}" for key, one in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_flat, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "–" if value is None else str(value)


def _cut(text: str) -> str:
    """Return ``text`` as the page shows it: only start and end of a very long one, and text direction
    marks made visible."""
    if len(text) > _HEAD + _TAIL:
        left_out = f"[… {len(text) - _HEAD - _TAIL:,} characters are in results.json …]"
        text = f"{text[:_HEAD]}\n{left_out}\n{text[-_TAIL:]}"
    return show_direction(text)


def _unfold(text: str) -> str:
    """Return the label that expands a folded text."""
    if len(text) <= _HEAD + _TAIL:
        return f"show all {len(text):,} characters"
    return f"show the first {_HEAD:,} and the last {_TAIL:,} of {len(text):,} characters"


def _changes(results: Results) -> dict[str, object] | None:
    """Return the contrasts of the chart of changes, with their titles, and how far its scale reaches.

    The last arm minus the first: whole axes, each slice on its own axis, and task or judged quality where
    it may have dropped elsewhere. None if there is nothing to compare.
    """
    primary = primary_axes(results)
    main, found = main_contrasts(results), []
    found += [one for one in main if primary.get(one["slice"], one["axis"]) == one["axis"]]
    found += [
        one
        for one in main
        if one not in found and one["axis"] != "persona" and one["verdict"] in LOSSES
    ]
    if not found:
        return None
    ends = [abs(end) for one in found for end in (one["low"], one["high"])]
    reach = math.ceil(10 * max(*ends, 2 * results["bench"]["margin"])) / 10
    return {"rows": [(contrast_title(results, one), one) for one in found], "reach": reach}


def _spokes(results: Results) -> list[dict[str, object]]:
    """Return the slices of the radar, each on its own axis, with their directions; none for fewer than
    three."""
    slices = [
        one
        for one in results["bench"]["slices"]
        if one["name"] in results["tables"].get(one["primary"], {})
    ]
    angles = [2 * math.pi * i / len(slices) - math.pi / 2 for i in range(len(slices))]
    return [
        {"slice": one, "cos": math.cos(angle), "sin": math.sin(angle)}
        for one, angle in zip(slices, angles, strict=True)
        if len(slices) > 2
    ]


def _item(row: ItemRow, names: Sequence[str], axes: Sequence[Axis]) -> dict[str, object]:
    """Return an item with the page's sort and filter keys, and the marked texts of first and last arm."""
    first, last = row["answers"][names[0]], row["answers"][names[-1]]
    outcomes = {answer["outcome"] for answer in row["answers"].values()}
    marked = None
    if len(names) > 1 and "text" in first and "text" in last:
        marked = diff_words(_cut(first["text"]), _cut(last["text"]))
    several = len(row["messages"]) > 1
    return {
        **row,
        "prompt": "\n\n".join(
            (f"{one['role']}: " if several else "") + one["content"] for one in row["messages"]
        ),
        "change": {
            axis: round(last[axis] - first[axis], 6) if axis in first and axis in last else 0.0
            for axis in axes
        },
        "outcomes": " ".join(sorted(outcomes)),
        "faulty": outcomes != {"ok"},
        "marked": {} if marked is None else {names[0]: marked[0], names[-1]: marked[1]},
    }


# --- differences of answers

Segments = list[tuple[bool, str]]  # (only here, text): the joined texts are the answer
_TOKENS = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|\s+|.", re.DOTALL)
_SENTENCES = re.compile(r"[^。！？!?.\n]*[。！？!?.\n]+|[^。！？!?.\n]+")
_MOST = 250_000  # token pairs; beyond that sentences are compared, so that a page stays fast
_ALIKE = 0.2


def diff_words(before: str, after: str) -> tuple[Segments, Segments] | None:
    """Both texts in segments; None if they share too little for a useful diff.

    An island of one character between two changes counts as changed: it is shared by chance.
    """
    first, second = _TOKENS.findall(before), _TOKENS.findall(after)
    if len(first) * len(second) > _MOST:
        first, second = _SENTENCES.findall(before), _SENTENCES.findall(after)
        if len(first) * len(second) > _MOST:
            return None
    blocks = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    left: Segments = []
    right: Segments = []
    for index, (tag, i1, i2, j1, j2) in enumerate(blocks):
        ours, theirs = "".join(first[i1:i2]), "".join(second[j1:j2])
        island = 0 < index < len(blocks) - 1 and len(ours.strip()) < 2
        left.append((tag != "equal" or island, ours))
        right.append((tag != "equal" or island, theirs))
    shared = sum(len(text) for changed, text in left if not changed)
    return (
        (_joined(left), _joined(right)) if shared >= _ALIKE * max(len(before), len(after)) else None
    )


def _joined(segments: Segments) -> Segments:
    """Neighbours of a kind as one segment, without empty ones."""
    kinds = itertools.groupby((one for one in segments if one[1]), key=lambda one: one[0])
    return [(changed, "".join(text for _, text in group)) for changed, group in kinds]
