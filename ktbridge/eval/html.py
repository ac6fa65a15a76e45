"""The report as one HTML file: no network, no external reference, every answer escaped.

The page is drawn from the results dictionary and nothing else: the same results give the same
bytes. Geometry comes from ``charts``, differences of answers from ``worddiff``; the templates and
the page's own style and script are in ``page/`` and end up inside the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ktbridge.eval.charts import TITLES, changes, dots, radar
from ktbridge.eval.verdict import OVERALL, detectable, interval, signed
from ktbridge.eval.worddiff import diff_words

_MARKS = ("circle", "square", "diamond", "triangle")
_PAGE = Path(__file__).parent / "page"


def render_html(results: Mapping[str, Any]) -> str:
    """The whole page as a string."""
    names = [card["name"] for card in results["arms"]]
    axes = [axis for axis in ("persona", "task", "judge") if axis in results["axes"]]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            results=results,
            names=names,
            axes=axes,
            titles=TITLES,
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


def render_index(index: Mapping[str, Any]) -> str:
    """The page over several benches: every verdict, with a link to its report."""
    return _environment().get_template("index.html.j2").render(index=index)


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
    environment.filters["detectable"] = detectable
    environment.filters["pretty"] = lambda value: json.dumps(
        value, indent=1, ensure_ascii=False, sort_keys=True
    )
    # Our own files, which must not be escaped; everything else is.
    environment.globals["style"] = Markup((_PAGE / "report.css").read_text("utf-8"))
    environment.globals["script"] = Markup((_PAGE / "report.js").read_text("utf-8"))
    return environment


def _flat(value: Any) -> str:
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


def _bars(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each arm answered with, as shares of the items asked."""
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


def _cards(results: Mapping[str, Any], names: list[str], axes: list[str]) -> list[dict[str, Any]]:
    """The headline tiles: an axis, its mean by arm, and the overall contrasts."""
    cards = []
    for axis in axes:
        table = results["tables"][axis].get(OVERALL)
        if table is None:
            continue
        slices = [
            one["name"]
            for one in results["bench"]["slices"]
            if axis in ("judge", one["primary"]) and one["name"] in results["tables"][axis]
        ]
        cards.append(
            {
                "title": TITLES[axis],
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


def _item(row: Mapping[str, Any], names: list[str], axes: list[str]) -> dict[str, Any]:
    """One item with what the page sorts and filters by, and the marked texts of both ends."""
    first, last = row["answers"][names[0]], row["answers"][names[-1]]
    change = {
        axis: round(last[axis] - first[axis], 6) if axis in first and axis in last else 0.0
        for axis in axes
    }
    outcomes = {answer["outcome"] for answer in row["answers"].values()}
    marked = None
    if len(names) > 1 and "text" in first and "text" in last:
        marked = diff_words(first["text"], last["text"])
    return {
        **row,
        "change": change,
        "outcomes": " ".join(sorted(outcomes)),
        "faulty": outcomes != {"ok"},
        "marked": {} if marked is None else {names[0]: marked[0], names[-1]: marked[1]},
    }
