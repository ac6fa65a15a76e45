"""The report as one HTML file: no network, no external reference, every answer escaped.

The page is rendered from the results dictionary alone: the same results give the same
bytes. Geometry comes from ``charts``, differences of answers from ``diff_words``; the templates,
CSS and JavaScript are in ``page/`` and are inlined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import jinja2
from markupsafe import Markup

from ktbridge.eval.charts import changes, dots, radar
from ktbridge.eval.facts import TITLES, axis_description, report_header, terms_for
from ktbridge.eval.results.types import AXES_SHOWN, Axis, IndexFile, ItemRow, Results
from ktbridge.eval.text import CJK, show_direction, shown_lines
from ktbridge.eval.verdict import (
    AXIS_WORDS,
    OVERALL,
    detectable,
    interval,
    own_slices,
    signed,
    slice_title,
    tone,
    tone_of,
)

_FOLDED = 8  # lines of a text that are shown before it is expanded
_HEAD, _TAIL = 16_000, 4_000  # characters kept of the start and end of a longer text
_MARKS = ("circle", "square", "diamond", "triangle")
_PAGE = Path(__file__).parent / "page"


def render_html(results: Results) -> str:
    """The whole page as a string."""
    names = [card["name"] for card in results["arms"]]
    axes = [axis for axis in AXES_SHOWN if axis in results["axes"]]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
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
            charts=[dots(results, axis) for axis in axes],
            changes=changes(results),
            radar=radar(results),
            bars=_bars(results),
            cards=_cards(results, names, axes),
            items=[_item(row, names, axes) for row in results["items"]],
            outcomes=sorted(
                {outcome for counts in results["outcomes"].values() for outcome in counts} - {"ok"}
            ),
        )
    )


def render_index(index: IndexFile, failures: Sequence[str]) -> str:
    """The index page of several benches: verdicts with links to the reports; ``failures`` first."""
    return _environment().get_template("index.html.j2").render(index=index, failures=failures)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["signed"] = signed
    environment.filters["interval"] = interval
    environment.filters["flat"] = _flat
    environment.filters["cut"] = cut
    environment.filters["unfold"] = _unfold
    environment.filters["is_long"] = lambda text: shown_lines(text, _FOLDED) > _FOLDED
    environment.filters["anchor"] = lambda text: "-".join(re.findall(r"\w+", text)) or "sign"
    environment.filters["detectable"] = detectable
    environment.filters["tone"] = tone
    environment.filters["tone_of"] = tone_of
    environment.filters["pretty"] = lambda value: json.dumps(
        value, indent=1, ensure_ascii=False, sort_keys=True
    )
    # Our own files must not be escaped; everything else is.
    environment.globals["style"] = Markup((_PAGE / "report.css").read_text("utf-8"))
    environment.globals["script"] = Markup((_PAGE / "report.js").read_text("utf-8"))
    return environment


def _flat(value: object) -> str:
    """A value of the judge's card on one line: "first_share 0.75, n 40"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat(one)}" for key, one in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_flat, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "–" if value is None else str(value)


def cut(text: str) -> str:
    """``text`` as the page shows it: only start and end of a very long one, and text direction marks
    made visible."""
    if len(text) > _HEAD + _TAIL:
        left_out = f"[… {len(text) - _HEAD - _TAIL:,} characters are in results.json …]"
        text = f"{text[:_HEAD]}\n{left_out}\n{text[-_TAIL:]}"
    return show_direction(text)


def _unfold(text: str) -> str:
    """The label that expands a folded text."""
    if len(text) <= _HEAD + _TAIL:
        return f"show all {len(text):,} characters"
    return f"show the first {_HEAD:,} and the last {_TAIL:,} of {len(text):,} characters"


def _bars(results: Results) -> list[dict[str, object]]:
    """Each arm's outcomes, as shares of the items asked."""
    asked = results["asked"]
    return [
        {
            "arm": name,
            "parts": [
                {"outcome": outcome, "count": count, "percent": round(100 * count / asked, 3)}
                for outcome, count in counts.items()
            ],
        }
        for name, counts in results["outcomes"].items()
    ]


def _cards(results: Results, names: list[str], axes: list[Axis]) -> list[dict[str, object]]:
    """The headline tiles: one per axis, with its mean per arm and the overall contrasts."""
    cards: list[dict[str, object]] = []
    for axis in axes:
        table = results["tables"][axis].get(OVERALL)
        if table is None:
            continue
        slices = [
            slice_title(results, name)
            for name in own_slices(results["bench"], axis)
            if name in results["tables"][axis]
        ]
        cards.append(
            {
                "title": TITLES[axis],
                "made_of": axis_description(results, axis),
                "means": [(name, table[name]["mean"]) for name in names],
                "contrasts": [
                    one
                    for one in results["contrasts"]
                    if one["axis"] == axis and one["slice"] == OVERALL
                ],
                "slices": slices,
            }
        )
    return cards


def _item(row: ItemRow, names: list[str], axes: list[Axis]) -> dict[str, object]:
    """One item with the page's sort and filter keys, and the diffed texts of first and last arm."""
    first, last = row["answers"][names[0]], row["answers"][names[-1]]
    change = {
        axis: round(last[axis] - first[axis], 6) if axis in first and axis in last else 0.0
        for axis in axes
    }
    outcomes = {answer["outcome"] for answer in row["answers"].values()}
    marked = None
    if len(names) > 1 and "text" in first and "text" in last:
        marked = diff_words(cut(first["text"]), cut(last["text"]))
    several = len(row["messages"]) > 1
    prompt = "\n\n".join(
        (f"{one['role']}: " if several else "") + one["content"] for one in row["messages"]
    )
    return {
        **row,
        "prompt": prompt,
        "change": change,
        "outcomes": " ".join(sorted(outcomes)),
        "faulty": outcomes != {"ok"},
        "marked": {} if marked is None else {names[0]: marked[0], names[-1]: marked[1]},
    }


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
    shared = 0
    for index, (tag, i1, i2, j1, j2) in enumerate(blocks):
        ours, theirs = "".join(first[i1:i2]), "".join(second[j1:j2])
        island = 0 < index < len(blocks) - 1 and len(ours.strip()) < 2
        changed = tag != "equal" or island
        shared += 0 if changed else len(ours)
        _add(left, changed, ours)
        _add(right, changed, theirs)
    if shared < _ALIKE * max(len(before), len(after)):
        return None
    return left, right


def _add(segments: Segments, changed: bool, text: str) -> None:
    if not text:
        return
    if segments and segments[-1][0] == changed:
        text = segments.pop()[1] + text
    segments.append((changed, text))
