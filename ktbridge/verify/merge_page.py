"""A comparison of a merged checkpoint as one HTML file: sentence, heat map of layers and experts, table.

It needs no network and no script, and everything that comes from files is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ktbridge.document import FactList, PagePart, ProblemList, page_environment, render_page, show_direction
from ktbridge.verify.merge_check import MatrixFinding, MergeCheck
from ktbridge.verify.merge_faults import FURTHER, NOT_APPLIED, RANKS, SCALE, SLICE
from ktbridge.verify.merge_sums import APPLIED, CHANGED, DIFFERS, ROUNDED, SAME
from ktbridge.verify.merge_verdict import MEANINGS, MergeVerdict, build_blocks

_FOLDER = Path(__file__).parent


class Look(NamedTuple):
    """A color; ``opacity``: less where storage kept less of a delta; ``name``: where dark pages differ."""

    color: str
    opacity: float = 1.0
    name: str = ""


# Okabe and Ito's colors, which color-blind people tell apart; other verdicts take the wrong ones' in turn.
_LOOKS = {
    APPLIED: Look("#009e73"), NOT_APPLIED: Look("#c3c9d2", name="absent"), SAME: Look("#eceff3", name="same"),
    ROUNDED: Look("#f0e442"), SCALE: Look("#e69f00"), RANKS: Look("#56b4e9"), SLICE: Look("#56b4e9"),
    CHANGED: Look("#0072b2"), DIFFERS: Look("#0072b2"), FURTHER: Look("#cc79a7"),
}  # fmt: skip
_WRONG = (Look("#d55e00"), Look("#7f2a00"), Look("#1d2430"))
_PROJECTIONS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
_WIDE, _HIGH = 880, 560  # of a panel's cells, at most
_APART = 32  # columns; in a wider map neighbors that look the same are one cell
_LEFT, _GAP = 34, 1.0
_CHAR = 7.5  # width of a letter


class LegendKey(NamedTuple):
    """A verdict in the legend, and how many matrices have it."""

    look: Look
    verdict: str
    matrices: int
    meaning: str


class MapMark(NamedTuple):
    """A text beside a map."""

    x: float
    y: float
    text: str
    anchor: str = "middle"


class MapCell(NamedTuple):
    """A matrix, or several in a row that look the same."""

    x: float
    y: float
    width: float
    height: float
    look: Look
    title: str


class Panel(NamedTuple):
    """One map: layers down, experts or modules across."""

    title: str
    axes: str
    width: int
    height: int
    marks: list[MapMark]
    cells: list[MapCell]


def render_merge_page(check: MergeCheck, verdict: MergeVerdict) -> str:
    """Return the page."""
    from markupsafe import Markup

    environment = page_environment(_FOLDER)
    sentence, *others = build_blocks(check, verdict)
    facts = {"merged": check.merged, "base": check.base}
    if check.adapter is not None:
        facts["adapter"] = check.adapter.path

    def draw() -> Markup:
        template = environment.get_template("merge_map.html.j2")
        keys = build_keys(check.findings)
        return Markup(template.render(keys=keys, panels=list(build_panels(check.findings))))

    blocks = [
        sentence,
        FactList([(name, show_direction(str(path))) for name, path in facts.items()]),
        ProblemList(verdict.problems),
        PagePart("map"),
        *others,
    ]
    title = show_direction(f"{verdict.verdict}: {check.merged.name}")
    return render_page(environment, "page.html.j2", blocks, title=title, parts={"map": draw})


def build_keys(findings: list[MatrixFinding]) -> list[LegendKey]:
    """Return the legend: each verdict that is there, the most frequent first."""
    looks = _choose_looks(findings)
    counts = Counter(finding.verdict for finding in findings).most_common()
    return [LegendKey(looks[name], name, count, MEANINGS.get(name, "")) for name, count in counts]


def build_panels(findings: list[MatrixFinding]) -> Iterator[Panel]:
    """Yield a map for each projection of the experts, and one of all other modules."""
    looks = _choose_looks(findings)
    for label in sorted({f.label for f in findings if f.expert >= 0}, key=_PROJECTIONS.index):
        experts = {(f.layer, f.expert): f for f in findings if f.expert >= 0 and f.label == label}
        count = 1 + max(expert for _, expert in experts)
        wide = max(3.0, min(18.0, _WIDE / count))
        step = _tick_step(wide, _CHAR * len(str(count - 1)) + 8)
        marks = [MapMark(round(_LEFT + wide * (n + 0.5), 1), 11, str(n)) for n in range(0, count, step)]
        titles = (label, "layers down, experts across")
        yield _panel(titles, experts, (wide, 16), marks, looks)
    modules = [
        f for f in findings
        if f.expert < 0 and f.layer >= 0 and (f.has_lora or f.verdict != SAME)
    ]  # fmt: skip
    if modules:
        names = list(dict.fromkeys(finding.label for finding in modules))
        wide = _CHAR * max(len(part) for name in names for part in name.split(".")) + 14
        marks = []
        for number, name in enumerate(names):
            x, (parent, _, leaf) = round(_LEFT + wide * (number + 0.5), 1), name.rpartition(".")
            marks += [MapMark(x, 11, parent), MapMark(x, 25, leaf)]
        cells = {(f.layer, names.index(f.label)): f for f in modules}
        titles = ("other modules", "layers down, modules across")
        yield _panel(titles, cells, (wide, 31), marks, looks)


def _panel(
    titles: tuple[str, str],
    found: Mapping[tuple[int, int], MatrixFinding],
    sizes: tuple[float, int],
    marks: list[MapMark],
    looks: Mapping[str, Look],
) -> Panel:
    """Draw the cells; ``sizes``: the width of each, and the height above them."""
    wide, top = sizes
    count = 1 + max(column for _, column in found)
    layers = sorted({layer for layer, _ in found})
    high = max(4.0, min(16.0, _HIGH / len(layers)))
    gap = _GAP if min(wide, high) > 5 else 0.0
    cells = []
    for row, layer in enumerate(layers):
        y = round(top + high * row, 1)
        if row % _tick_step(high, 13) == 0:
            marks.append(MapMark(_LEFT - 7, round(y + high / 2 + 4, 1), str(layer), "end"))
        for start, end, finding in _runs(found, layer, count, joined=count > _APART):
            what = finding.label
            if finding.expert >= 0:
                what = f"expert {start}" if end - start == 1 else f"experts {start}-{end - 1}"
            title = f"layer {layer}, {what}: {finding.verdict}"
            if finding.has_lora:
                title += f", k {finding.k:.3g}"
            x, width = round(_LEFT + wide * start, 1), round(wide * (end - start) - gap, 1)
            look = looks[finding.verdict]._replace(opacity=round(_strength(finding), 2))
            cells.append(MapCell(x, y, width, round(high - gap, 1), look, title))
    size = round(_LEFT + wide * count + 10), round(top + high * len(layers) + 2)
    return Panel(*titles, *size, marks, cells)


def _tick_step(size: float, needed: float) -> int:
    """Return which ticks are labeled: every one, or every 2nd, 4th, 8th …, so that texts don't touch."""
    step = 1
    while step * size < needed:
        step *= 2
    return step


def _runs(
    cells: Mapping[tuple[int, int], MatrixFinding], layer: int, count: int, *, joined: bool
) -> Iterator[tuple[int, int, MatrixFinding]]:
    """Cells of a row: from, to, and the first finding; neighbors that look the same are one if ``joined``."""
    start, first = 0, cells.get((layer, 0))
    for column in range(1, count + 1):
        finding = cells.get((layer, column)) if column < count else None
        if joined and first is not None and finding is not None and _looks(finding) == _looks(first):
            continue
        if first is not None:
            yield start, column, first
        start, first = column, finding


def _looks(finding: MatrixFinding) -> tuple[str, str, float]:
    return finding.label, finding.verdict, round(_strength(finding), 1)


def _choose_looks(findings: list[MatrixFinding]) -> dict[str, Look]:
    """The color of each verdict that is there."""
    names = dict.fromkeys(finding.verdict for finding in findings)
    wrong = [name for name in names if name not in _LOOKS]
    return {name: _LOOKS.get(name) or _WRONG[wrong.index(name) % len(_WRONG)] for name in names}


def _strength(finding: MatrixFinding) -> float:
    return max(0.35, min(1.0, finding.k)) if finding.verdict in (APPLIED, ROUNDED) else 1.0
