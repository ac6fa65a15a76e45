"""The report as Markdown, short enough for a pull request: verdict, tables, warnings, run card."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ktbridge.eval.facts import TITLES, axis_description, report_header
from ktbridge.eval.results.cards import ProblemRow
from ktbridge.eval.results.types import AXES_SHOWN, Axis, IndexFile, PairCounts, Results
from ktbridge.eval.text import show_direction
from ktbridge.eval.verdict import (
    LOSSES,
    OVERALL,
    detectable,
    find,
    interval,
    own_slices,
    slice_title,
    tone,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#|~!@&$])")
_SIGNS = {"improved": "🟢", "dropped": "🔴", "calm": "⚪"}


def render_markdown(results: Results) -> str:
    """The whole text, without answers; the same results give the same bytes."""
    bench = results["bench"]
    names = [card["name"] for card in results["arms"]]
    lines = [f"## {_text(bench['name'])} {_text(bench['version'])}".rstrip(), ""]
    lines += [" · ".join(f"{name}: {_text(value)}" for name, value in report_header(results)), ""]
    errors = [one for one in results["warnings"] if one["severity"] == "error"]
    lines += [*_problems(errors), ""] if errors else []
    lines += [f"**{_text(results['verdict']['line'])}**", ""]
    if results["verdict"]["headline"] != results["verdict"]["line"]:
        lines += [_text(results["verdict"]["headline"]), ""]
    lines += [f"- {_text(one)}" for one in results["verdict"]["details"]]
    lines += [f"- {_text(one)}" for one in bench["notes"]]
    lines += ["", *_problems(one for one in results["warnings"] if one["severity"] != "error")]
    for axis in AXES_SHOWN:
        if results["tables"].get(axis):
            title = f"### {TITLES[axis]} (0 to 1): {_text(axis_description(results, axis))}"
            lines += ["", title, "", *_axis(results, axis, names)]
    if results["pairs"]:
        lines += ["", "### Judged side by side", "", *_pairs(results["pairs"])]
    lines += ["", "<details><summary>Outcomes and run card</summary>", "", *_card(results), ""]
    lines += ["</details>", ""]
    return "\n".join(lines)


def render_index_markdown(index: IndexFile, failures: Sequence[str]) -> str:
    """The verdict of every bench; ``failures`` first."""
    lines = [f"> 🛑 **error**: {_text(text)}\n>" for text in failures]
    lines += [""] if lines else []
    for one in index["benches"]:
        lines += [f"## {_text(one['name'])}", ""]
        if one["verdict"] is None:
            lines += [f"**not reported:** {_text(one['error'])}", ""]
        else:
            lines += [f"**{_text(one['verdict']['line'])}**", ""]
            lines += [_text(one["verdict"]["headline"]), ""]
            lines += [*_problems(one["warnings"] or ()), ""]
    return "\n".join(lines)


def _text(value: object) -> str:
    """``value`` on one line, escaped for Markdown and HTML."""
    text = show_direction(" ".join(str(value).split()))
    return _SPECIAL.sub(r"\\\1", text).replace("\\<", "&lt;")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return [
        "| " + " | ".join(map(_text, row)) + " |" if row is not ruler else "|" + "|".join(row) + "|"
        for row in (head, ruler, *rows)
    ]


def _problems(problems: Iterable[ProblemRow]) -> list[str]:
    lines = []
    for one in problems:
        step = f" Next: {_text(one['next_step'])}." if one["next_step"] else ""
        sign = "🛑 error " if one["severity"] == "error" else ""
        where = _text(one["where"])
        lines.append(f"> **{sign}{one['code']} {where}**: {_text(one['found'])}.{step}")
        lines.append(">")
    return lines[:-1]


def _axis(results: Results, axis: Axis, names: Sequence[str]) -> list[str]:
    own = own_slices(results["bench"], axis)
    table = results["tables"][axis]
    head = ["slice", "n", *names]
    if len(names) > 1:
        head += [f"{names[-1]} − {names[0]} [95 %]", "verdict", "detectable"]
    rows = []
    # Task or judged quality that may have dropped in a slice that is there for something else.
    lost = {
        name
        for name in table
        if (one := find(results, axis, name, names[-1], names[0]))
        and axis != "persona"
        and one["verdict"] in LOSSES
    }
    for name in (one for one in table if one == OVERALL or one in own or one in lost):
        row = [slice_title(results, name), table[name][names[0]]["n"]]
        row += [f"{table[name][arm]['mean']:.2f}" for arm in names]
        contrast = find(results, axis, name, names[-1], names[0])
        if contrast is not None:
            sign = _SIGNS[tone(contrast)]
            row += [interval(contrast), f"{sign} {contrast['verdict']}", detectable(contrast)]
        rows.append(row)
    return _table(head, rows)


def _pairs(pairs: Sequence[PairCounts]) -> list[str]:
    head = ["pair", "won", "tied", "lost", "flipped", "balance [95 %]"]
    return _table(
        head,
        [
            [
                f"{one['of']} against {one['minus']}",
                *(one[key] for key in ("win", "tie", "loss", "flipped")),
                interval(one),
            ]
            for one in pairs
        ],
    )


def _card(results: Results) -> list[str]:
    bench = results["bench"]
    rows = []
    for card in results["arms"]:
        counts = results["outcomes"][card["name"]]
        cost = results["costs"].get(card["name"])
        rows.append(
            [
                card["name"],
                ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
                (cost and cost["completion_tokens"]) or "–",
                f"{card['model']} at {card['url']}",
                card["fingerprint"][:12],
            ]
        )
    head = ["arm", "outcomes", "completion tokens", "model", "fingerprint"]
    fields = {**bench["sampling"], **({"max_tokens": n} if (n := bench["max_tokens"]) else {})}
    sampling = ", ".join(f"{key} {value}" for key, value in fields.items())
    return [
        *_table(head, rows),
        "",
        f"Bench sha256 {bench['sha256'][:12]}; sampling: {_text(sampling) or 'unknown'}; "
        f"ktbridge {results['ktbridge']}.",
    ]
