"""``ktbridge report``: tables and one HTML file from the stored answers of eval."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import Command

if TYPE_CHECKING:
    from rich.table import Table

    from ktbridge.eval.gates import Gate
    from ktbridge.eval.results.types import Axis, Index, Results

_STYLES = {"improved": "green", "dropped": "red", "calm": "dim"}


@click.command(cls=Command, extra="eval")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CONDITION",
    help='Exit with 1 where it holds, e.g. "KRI-K<-0.2" or "low(task:overall)<-0.1"; repeat it.',
)
@click.option("--markdown", is_flag=True, help="Print the report as Markdown on stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on stdout.")
def command(directory: Path, fail_on: tuple[str, ...], markdown: bool, as_json: bool) -> None:
    """Score what `ktbridge eval` stored in DIR and compare its arms.

    Prints tables and writes results.json, report.html (a single file that needs no network) and
    report.md there. Asks no server anything, so it can be repeated at will. The exit code is 1 where
    the evaluation is incomplete or failed (docs/eval.md lists when), whatever its numbers are.

    A --fail-on condition is about the last arm minus the first, on the slice's own axis:
    SLICE<NUMBER, AXIS:SLICE<NUMBER, low(SLICE)<NUMBER for the interval's lower end. KRI stands for
    KRI-K and KRI-R. It compares the mean, or that end of the 95 % interval of this one slice, whatever
    the verdict is: "KRI-K<-0.2" fails on a drop that chance may have made, "high(KRI-K)<0" on one that
    chance makes in 1 of 40 runs, for each slice with such a condition.
    """
    from ktbridge.cli._ui import emit_json
    from ktbridge.errors import UsageError
    from ktbridge.eval import write_report
    from ktbridge.eval.gates import parse_gate

    if markdown and as_json:
        raise UsageError("--markdown and --json both want stdout.", "give one of them")
    gates = [parse_gate(text) for text in fail_on]
    results = write_report(directory)
    if as_json:
        emit_json(results)
    elif markdown:
        click.echo((directory / "report.md").read_text("utf-8"), nl=False)
    else:
        print_results(results, directory)
    fail_on_gates(gates, results)
    fail_on_errors(results)


def fail_on_errors(results: Results | Index, asked: Collection[str] | None = None) -> None:
    """Exit with 1 if the report marks the evaluation as failed or incomplete.

    ``asked``: the arms of this command; doubts about others are named and don't fail it.
    """
    from ktbridge.cli._ui import stderr
    from ktbridge.eval import failures

    found = failures(results, asked)
    for text in failures(results):
        if text not in found:
            line = f"not of this command's arms, and no reason for its exit code: {text}"
            stderr.print(line, soft_wrap=True, markup=False)
    if found:
        sys.exit(1)


def fail_on_gates(gates: Sequence[Gate], results: Results | Index) -> None:
    """Exit with 1, listing the conditions met. Raises UsageError for an unknown slice."""
    from ktbridge.cli._ui import print_problems
    from ktbridge.eval.gates import check_gates
    from ktbridge.eval.results.publish import runs_in

    problems = check_gates(gates, runs_in(results))
    if problems:
        print_problems(problems)
        sys.exit(1)


def print_results(results: Results | Index, directory: Path) -> None:
    """Per bench: the verdict, one table per axis, outcomes, warnings, and the files' paths."""
    from ktbridge.cli._ui import console, shown, stderr
    from ktbridge.eval.results.build import SCHEMA

    if results["schema"] == SCHEMA:
        _print_run(results)
    else:
        for one in results["benches"]:
            console.print()
            console.rule(shown(one["name"]), align="left")
            if one["results"] is None:
                console.print(f"[bold red]error:[/] not reported: {shown(one['error'])}")
            else:
                _print_run(one["results"])
    for name in ("results.json", "report.html", "report.md"):
        stderr.print(f"wrote {directory / name}", soft_wrap=True, markup=False)


def _print_run(results: Results) -> None:
    from ktbridge.cli._ui import console, print_problems, shown
    from ktbridge.errors import Problem
    from ktbridge.eval.facts import report_header
    from ktbridge.eval.results.types import AXES_SHOWN

    bench, verdict = results["bench"], results["verdict"]
    problems = [Problem(**one) for one in results["warnings"]]
    console.print()
    for name, value in report_header(results):
        console.print(f"[dim]{name.lower():<8}[/] {shown(value)}")
    for one in problems:
        if one.severity == "error":
            console.print(f"[bold red]error {one.code}: {shown(one.where)}: {shown(one.found)}[/]")
    console.print(f"[bold]{shown(verdict['line'])}[/]")
    if verdict["headline"] != verdict["line"]:
        console.print(shown(verdict["headline"]))
    for text in verdict["details"]:
        console.print(shown(text))
    for axis in AXES_SHOWN:
        if results["tables"].get(axis):
            console.print()
            console.print(_table(results, axis))
    console.print()
    for name, counts in results["outcomes"].items():
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        if parts := results["persona_parts"].get(name):
            summary += (
                f"; a term of address in {_share(parts['address_rate'])} of answers, "
                f"a tic in {_share(parts['tic_rate'])} of sentences"
            )
        console.print(f"{shown(name)}: {summary}")
    if results["valid"] < results["asked"]:
        counted = (
            f"{results['valid']} of {results['asked']} items asked have an ok answer from every arm"
        )
        console.print(f"{counted}; the others are left out.", markup=False)
    for text in _noise(results):
        console.print(text, markup=False)
    for pair in results["identical"]:
        if pair["share"] is not None:
            console.print(
                f"{shown(' and '.join(pair['arms']))}: {pair['share']:.0%} of {pair['n']} "
                "answers are byte-identical"
            )
    for text in bench["notes"]:
        console.print(shown(text))
    console.print(
        "Grey rows: slices that are not meant for this score. detectable: the smallest change that would "
        "be called improved or dropped in 8 of 10 runs. may have …: the interval excludes 0, as one in 40 "
        "does by chance in each direction.",
        markup=False,
    )
    print_problems(problems)


def _table(results: Results, axis: Axis) -> Table:
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import shown
    from ktbridge.eval.facts import TITLES, axis_description
    from ktbridge.eval.verdict import (
        OVERALL,
        detectable,
        find,
        interval,
        own_slices,
        slice_title,
        tone,
    )

    names = [card["name"] for card in results["arms"]]
    own = [OVERALL, *own_slices(results["bench"], axis)]
    rows = results["tables"][axis]
    title = f"[bold]{TITLES[axis]}[/] (0 to 1): {escape(axis_description(results, axis))}"
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("slice", min_width=max(map(len, rows)))
    table.add_column("n", justify="right")
    for name in names:
        table.add_column(escape(name), justify="right")
    if len(names) > 1:
        table.add_column(escape(f"{names[-1]} − {names[0]} [95 %]"), justify="right")
        table.add_column("verdict")
        table.add_column("detectable", justify="right")
    for name in sorted(rows, key=lambda one: one not in own):
        cells = [f"{rows[name][arm]['mean']:.2f}" for arm in names]
        contrast = find(results, axis, name, names[-1], names[0])
        if contrast is not None:
            style = _STYLES[tone(contrast)]
            words = f"[{style}]{contrast['verdict']}[/]"
            cells += [escape(interval(contrast)), words, detectable(contrast)]
        count = str(rows[name][names[0]]["n"])
        style = "" if name in own else "dim"
        table.add_row(shown(slice_title(results, name)), count, *cells, style=style)
    return table


def _noise(results: Results) -> list[str]:
    """Changes between repeated runs, one line per arm."""
    if results["repeat"] is None:
        return []
    lines = []
    for arm, axes in results["repeat"]["noise"].items():
        changed = " and ".join(f"{one['changed']:.0%} of its {axis}" for axis, one in axes.items())
        floors = [f"{one['floor']:.2f} ({axis})" for axis, one in axes.items() if one["floor"]]
        reach = f"; noise alone reaches {' and '.join(floors)}" if floors else ""
        if changed:
            lines.append(f"{arm}: asked again, {changed} marks changed{reach}")
    return lines


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
