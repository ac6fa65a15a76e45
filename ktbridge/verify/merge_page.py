"""A comparison of a merged checkpoint as one HTML file: sentence, heat map of layers and experts, table.

Nothing but the standard library: the page is made where only ktbridge's own dependencies are installed. It
needs no network and no script, and everything that comes from files is escaped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from html import escape

from ktbridge.document import Block, Phrase, Sentences, Table, show_direction
from ktbridge.verify.merge_check import MatrixFinding, MergeCheck
from ktbridge.verify.merge_faults import FURTHER, NOT_APPLIED, RANKS, SCALE, SLICE
from ktbridge.verify.merge_sums import APPLIED, CHANGED, DIFFERS, ROUNDED, SAME
from ktbridge.verify.merge_verdict import MergeVerdict, build_blocks

_COLORS = {
    APPLIED: "#2f9e62", NOT_APPLIED: "#aab2bd", SAME: "#eceff3", ROUNDED: "#e3c567", SCALE: "#f08c2e",
    RANKS: "#f2b279", SLICE: "#f5cfa3", CHANGED: "#4f83cc", DIFFERS: "#4f83cc", FURTHER: "#8e5bb5",
}  # fmt: skip
_WRONG = "#d1344b"
_WIDE, _HIGH = 880, 560  # of a panel's cells, at most
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem}
body{color:#1d2430;background:#fff}
h1{font-size:1.4rem} h2{font-size:1.05rem;margin:1.6rem 0 .4rem} .strong{font-size:1.1rem;font-weight:600}
table{border-collapse:collapse;font-size:.87rem}
th,td{padding:.2rem .6rem;border-bottom:1px solid #dde2e9;text-align:right}
th.w,td.w{text-align:left} .soft{color:#5c6675} svg text{font:11px system-ui,sans-serif;fill:#5c6675}
.key{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 1rem;vertical-align:-1px}
.wide{overflow-x:auto}
"""


def render_merge_page(check: MergeCheck, verdict: MergeVerdict) -> str:
    """Return the page."""
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">']
    parts.append('<meta name="viewport" content="width=device-width,initial-scale=1">')
    parts.append(f"<title>{_text(verdict.verdict)}: {_text(check.merged.name)}</title>")
    parts.append(
        f"<style>{_STYLE}</style></head><body><h1>Is the adapter in the merged checkpoint?</h1>"
    )
    adapter = f" · adapter {check.adapter.path}" if check.adapter is not None else ""
    parts.append(
        f'<p class="soft">{_text(f"merged {check.merged} · base {check.base}{adapter}")}</p>'
    )
    first, *others = build_blocks(check, verdict)
    parts += _block(first)
    parts += _legend(check.findings)
    parts += draw_maps(check.findings)
    for block in others:
        parts += _block(block)
    for item in verdict.problems:
        parts.append(f"<p>{_text(f'{item.severity} {item.code}: {item.where}: {item.found}')}</p>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def draw_maps(findings: list[MatrixFinding]) -> Iterator[str]:
    """Yield a heat map for each projection of the experts, and one for all other modules, as SVG."""
    experts: dict[str, list[MatrixFinding]] = defaultdict(list)
    modules: list[MatrixFinding] = []
    for finding in findings:
        if finding.expert >= 0:
            experts[finding.label].append(finding)
        elif finding.layer >= 0 and (finding.has_lora or finding.verdict != SAME):
            modules.append(finding)
    for label, members in experts.items():
        columns = [str(number) for number in range(1 + max(each.expert for each in members))]
        yield f"<h2>{_text(label)}: layers down, experts across</h2>"
        yield _panel({(f.layer, f.expert): f for f in members}, columns, False)
    if modules:
        names = list(dict.fromkeys(finding.label for finding in modules))
        place = {name: number for number, name in enumerate(names)}
        yield "<h2>Other modules: layers down, modules across</h2>"
        yield _panel({(f.layer, place[f.label]): f for f in modules}, names, True)


def _panel(cells: dict[tuple[int, int], MatrixFinding], columns: list[str], named: bool) -> str:
    layers = sorted({layer for layer, _ in cells})
    wide = max(3.0, min(90.0 if named else 18.0, _WIDE / len(columns)))
    high = max(4.0, min(16.0, _HIGH / len(layers)))
    left, top = 40, 18
    width, height = left + wide * len(columns) + 4, top + high * len(layers) + 4
    parts = [
        f'<div class="wide"><svg role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.1f} {height:.1f}" xmlns="http://www.w3.org/2000/svg">'
    ]
    step = 1 if named else max(1, round(40 / wide))
    for number in range(0, len(columns), step):
        text = columns[number][-14:] if named else columns[number]
        parts.append(f'<text x="{left + wide * number:.1f}" y="12">{_text(text)}</text>')
    every = max(1, round(14 / high))
    for row, layer in enumerate(layers):
        y = top + high * row
        if row % every == 0:
            parts.append(f'<text x="4" y="{y + min(high, 11):.1f}">{layer}</text>')
        for start, end, finding in _runs(cells, layer, len(columns)):
            gap = 0.6 if high > 5 else 0
            x, across = left + wide * start, wide * (end - start)
            what = f"experts {start}-{end - 1}" if end - start > 1 else f"expert {start}"
            title = f"layer {layer}, {columns[start] if named else what}: {finding.verdict}"
            if finding.has_lora:
                title += f", k {finding.k:.3g}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{across - gap:.1f}" height="{high - gap:.1f}" '
                f'fill="{_color(finding)}" fill-opacity="{_strength(finding):.2f}">'
                f"<title>{_text(title)}</title></rect>"
            )
    return "\n".join([*parts, "</svg></div>"])


def _runs(
    cells: dict[tuple[int, int], MatrixFinding], layer: int, count: int
) -> Iterator[tuple[int, int, MatrixFinding]]:
    """Neighbors in a row that look the same, as one: from, to, and the first."""
    start, first = 0, cells.get((layer, 0))
    for column in range(1, count + 1):
        finding = cells.get((layer, column)) if column < count else None
        alike = (
            first is not None
            and finding is not None
            and finding.label == first.label
            and (finding.verdict, round(_strength(finding), 1))
            == (first.verdict, round(_strength(first), 1))
        )
        if alike:
            continue
        if first is not None:
            yield start, column, first
        start, first = column, finding


def _color(finding: MatrixFinding) -> str:
    return _COLORS.get(finding.verdict, _WRONG)


def _strength(finding: MatrixFinding) -> float:
    """Paler where storage kept less of the delta."""
    return max(0.35, min(1.0, finding.k)) if finding.verdict in (APPLIED, ROUNDED) else 1.0


def _legend(findings: list[MatrixFinding]) -> Iterator[str]:
    yield "<p>"
    for name in dict.fromkeys(finding.verdict for finding in findings):
        color = _COLORS.get(name, _WRONG)
        yield f'<span class="key" style="background:{color}"></span>{_text(name)}'
    yield "</p>"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Sentences):
        for text in block.texts:
            yield f'<p class="{block.style}">{_text(text)}</p>'
    elif isinstance(block, Table):
        yield f'<h2>{_text(block.title)}</h2><p class="soft">{_text(block.note)}</p>'
        yield '<div class="wide"><table><tr>'
        of = ["w" if name in block.words else "n" for name in block.head]
        yield "".join(
            f'<th class="{c}">{_text(n)}</th>' for c, n in zip(of, block.head, strict=True)
        )
        yield "</tr>"
        for row in block.rows:
            texts = [cell.text if isinstance(cell, Phrase) else cell for cell in row.cells]
            cells = zip(of, texts, strict=True)
            joined = "".join(f'<td class="{c}">{_text(text)}</td>' for c, text in cells)
            yield f"<tr>{joined}</tr>"
        yield "</table></div>"


def _text(text: str) -> str:
    return escape(show_direction(text))
