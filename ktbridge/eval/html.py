"""The report as one HTML file: no network, no external reference, every answer escaped.

The page is drawn from the results dictionary and nothing else. Charts are inline SVG whose
geometry is computed here; the template only places it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from ktbridge.eval.verdict import interval, signed

_WIDTH = 460
_LEFT, _RIGHT, _TOP = 74, 14, 8
_LINE, _GAP = 13, 14
_MARKS = ("circle", "square", "diamond", "triangle")
_TITLES = {"persona": "Persona", "task": "Task quality"}


def render_html(results: Mapping[str, Any]) -> str:
    """The whole page as a string; the same results give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["signed"] = signed
    environment.filters["interval"] = interval
    environment.filters["pretty"] = lambda value: json.dumps(
        value, indent=1, ensure_ascii=False, sort_keys=True
    )
    names = [card["name"] for card in results["arms"]]
    return environment.get_template("report.html.j2").render(
        results=results,
        names=names,
        marks={name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)},
        number={name: i % len(_MARKS) for i, name in enumerate(names)},
        charts=[chart(results, axis) for axis in ("persona", "task")],
        cards=_cards(results, names),
        items=[_item(row, names, results) for row in results["items"]],
    )


def chart(results: Mapping[str, Any], axis: str) -> dict[str, Any]:
    """Geometry of one dot-and-interval chart: rows of slices, one line an arm, x from 0 to 1.

    Slices that the axis is primary for come first; the rest are drawn as ``minor``.
    """
    names = [card["name"] for card in results["arms"]]
    table = results["tables"][axis]
    primary = {one["name"] for one in results["bench"]["slices"] if one["primary"] == axis}
    order = sorted(table, key=lambda name: name != "overall" and name not in primary)
    rows = []
    top = float(_TOP)
    for name in order:
        lines = []
        for i, arm in enumerate(names):
            cell = table[name][arm]
            lines.append(
                {
                    "arm": arm,
                    "y": top + _GAP / 2 + _LINE * (i + 0.5),
                    "x": _x(cell["mean"]),
                    "low": _x(cell["low"]),
                    "high": _x(cell["high"]),
                    "title": f"{name}, {arm}: {cell['mean']:.2f} "
                    f"[{cell['low']:.2f}, {cell['high']:.2f}], n = {cell['n']}",
                }
            )
        height = _GAP + _LINE * len(names)
        rows.append(
            {
                "name": name,
                "minor": name != "overall" and name not in primary,
                "overall": name == "overall",
                "y": top + height / 2,
                "top": top,
                "height": height,
                "lines": lines,
                "n": table[name][names[0]]["n"],
            }
        )
        top += height
    return {
        "axis": axis,
        "title": _TITLES[axis],
        "width": _WIDTH,
        "height": round(top + 24),
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": top,
        "ticks": [{"x": _x(value), "text": f"{value:g}"} for value in (0, 0.25, 0.5, 0.75, 1)],
        "rows": rows,
    }


def _x(value: float) -> float:
    return round(_LEFT + value * (_WIDTH - _LEFT - _RIGHT), 1)


def _cards(results: Mapping[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The two headline tiles: an axis, its mean by arm, the last arm against the first."""
    cards = []
    for axis in ("persona", "task"):
        table = results["tables"][axis].get("overall")
        if table is None:
            continue
        contrasts = [
            one for one in results["contrasts"] if one["axis"] == axis and one["slice"] == "overall"
        ]
        cards.append(
            {
                "title": _TITLES[axis],
                "means": [(name, table[name]["mean"]) for name in names],
                "contrasts": contrasts,
                "slices": [
                    one["name"] for one in results["bench"]["slices"] if one["primary"] == axis
                ],
            }
        )
    return cards


def _item(row: Mapping[str, Any], names: list[str], results: Mapping[str, Any]) -> dict[str, Any]:
    """One item with what the page sorts by: the change from first to last arm on each axis."""
    first, last = row["answers"][names[0]], row["answers"][names[-1]]
    change = {
        axis: round(last[axis] - first[axis], 6) if axis in first and axis in last else 0.0
        for axis in ("task", "persona")
    }
    worst = {answer["outcome"] for answer in row["answers"].values()} - {"ok"}
    return {**row, "change": change, "faulty": bool(worst)}
