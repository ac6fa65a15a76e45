"""Geometry of the report's charts: coordinates that the template renders as inline SVG."""

from __future__ import annotations

import math

from ktbridge.eval.facts import TITLES
from ktbridge.eval.results.types import Axis, Contrast, Measured
from ktbridge.eval.verdict import (
    AXIS_WORDS,
    LOSSES,
    OVERALL,
    find,
    interval,
    own_slices,
    slice_title,
    title_of,
    tone,
)

_WIDTH = 500
_LEFT, _RIGHT, _TOP = 168, 14, 8  # _LEFT: room for "KRI-K (knowledge)"
_NAME = 24  # how many characters of a name fit there
_LINE, _GAP = 13, 14
_CHANGE_ROW = 34
_RADIUS = 138.0


def _x(value: float, low: float = 0.0, high: float = 1.0, left: float = _LEFT) -> float:
    return round(left + (value - low) / (high - low) * (_WIDTH - left - _RIGHT), 1)


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def dots(results: Measured, axis: Axis) -> dict[str, object]:
    """Mean and interval of every arm: one row per slice, one line per arm, x from 0 to 1.

    Slices with this primary axis come first; the rest are drawn as ``minor``.
    """
    names = [card["name"] for card in results["arms"]]
    table = results["tables"][axis]
    own = [OVERALL, *own_slices(results["bench"], axis)]
    rows = []
    top = float(_TOP)
    for name in sorted(table, key=lambda name: name not in own):
        title = slice_title(results, name)
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
                    "title": f"{title}, {arm}: {cell['mean']:.2f} "
                    f"[{cell['low']:.2f}, {cell['high']:.2f}], n = {cell['n']}",
                }
            )
        height = _GAP + _LINE * max(2, len(names))
        rows.append(
            {
                "name": _short(title),
                "minor": name not in own,
                "overall": name == OVERALL,
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
        "title": TITLES[axis],
        "width": _WIDTH,
        "height": round(top + 24),
        "top": _TOP,
        "bottom": top,
        "ticks": [{"x": _x(value), "text": f"{value:g}"} for value in (0, 0.25, 0.5, 0.75, 1)],
        "rows": rows,
    }


def changes(results: Measured) -> dict[str, object] | None:
    """The last arm minus the first, one line per slice on its own axis, with zero and the margin; and
    task quality where it may have dropped elsewhere. None if there is nothing to compare.
    """
    names = [card["name"] for card in results["arms"]]
    if len(names) < 2:
        return None
    found = _changed(results, names[-1], names[0])
    if not found:
        return None
    ends = [abs(one[end]) for one in found for end in ("low", "high")]
    reach = math.ceil(10 * max(*ends, 2 * results["bench"]["margin"])) / 10
    left = _LEFT
    rows = [
        {
            "label": _short(title),
            "overall": one["slice"] == OVERALL,
            "tone": tone(one),
            "words": one["verdict"],
            "top": _TOP + _CHANGE_ROW * i,
            "y": _TOP + _CHANGE_ROW * (i + 0.5),
            "x": _x(one["mean"], -reach, reach, left),
            "low": _x(one["low"], -reach, reach, left),
            "high": _x(one["high"], -reach, reach, left),
            "n": one["n"],
            "title": f"{title}: {interval(one)}, {one['verdict']}, n = {one['n']}",
        }
        for i, one in enumerate(found)
        for title in [title_of(results, one)]
    ]
    bottom = _TOP + _CHANGE_ROW * len(rows)
    margin = results["bench"]["margin"]
    return {
        "of": names[-1],
        "minus": names[0],
        "width": _WIDTH,
        "height": bottom + 24,
        "row": _CHANGE_ROW,
        "top": _TOP,
        "bottom": bottom,
        "rows": rows,
        "margin": (_x(-margin, -reach, reach, left), _x(margin, -reach, reach, left)),
        "ticks": [
            {
                "x": _x(value, -reach, reach, left),
                "text": f"{value:+.2g}".replace("-", "−") if value else "0",
                "zero": value == 0,
            }
            for value in (-reach, -reach / 2, 0.0, reach / 2, reach)
        ],
    }


def _changed(results: Measured, of: str, minus: str) -> list[Contrast]:
    """The contrasts of whole axes, of each slice on its own axis, and task or judged quality where it
    may have dropped elsewhere."""
    wanted = [(axis, OVERALL) for axis in AXIS_WORDS]
    wanted += [(one["primary"], one["name"]) for one in results["bench"]["slices"]]
    own = [find(results, axis, name, of, minus) for axis, name in wanted]
    found = [one for one in own if one is not None]
    return found + [
        one
        for one in results["contrasts"]
        if (one["of"], one["minus"]) == (of, minus)
        and one not in found
        and one["axis"] != "persona"
        and one["verdict"] in LOSSES
    ]


def radar(results: Measured) -> dict[str, object] | None:
    """Every slice on its own axis, one polygon per arm; None for fewer than three slices."""
    names = [card["name"] for card in results["arms"]]
    spokes = [
        (one["name"], one["label"], results["tables"][one["primary"]][one["name"]])
        for one in results["bench"]["slices"]
        if one["name"] in results["tables"].get(one["primary"], {})
    ]
    if len(spokes) < 3:
        return None
    centre_x, centre_y = _WIDTH / 2, _RADIUS + 42

    def point(index: int, value: float) -> tuple[float, float]:
        angle = 2 * math.pi * index / len(spokes) - math.pi / 2
        reach = _RADIUS * value
        return (
            round(centre_x + reach * math.cos(angle), 1),
            round(centre_y + reach * math.sin(angle), 1),
        )

    def ring(values: list[float]) -> str:
        points = (point(i, value) for i, value in enumerate(values))
        return " ".join(f"{x},{y}" for x, y in points)

    labels = []
    for i, (name, label, _) in enumerate(spokes):
        x, y = point(i, 1.11)
        side = "middle" if abs(x - centre_x) < 12 else "start" if x > centre_x else "end"
        end_x, end_y = point(i, 1.0)
        # The name and, below it, its label: away from the centre, so that neither overlaps the chart.
        above = 8 if y > centre_y + 12 else -10 if y < centre_y - 12 else -2
        under = "" if label == name else f"({label})"
        spot = {"x": x, "y": round(y + above + (0 if under else 4), 1)}
        labels.append({"text": name, "under": under, **spot, "side": side, "to": (end_x, end_y)})
    return {
        "width": _WIDTH,
        "height": round(2 * _RADIUS + 84),
        "centre": (centre_x, centre_y),
        "rings": [ring([share] * len(spokes)) for share in (0.25, 0.5, 0.75, 1.0)],
        "labels": labels,
        "arms": [
            {
                "name": name,
                "points": ring([cells[name]["mean"] for *_, cells in spokes]),
                "marks": [point(i, cells[name]["mean"]) for i, (*_, cells) in enumerate(spokes)],
            }
            for name in names
        ],
    }
