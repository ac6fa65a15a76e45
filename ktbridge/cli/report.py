"""``ktbridge report``: tables and one HTML file from what eval stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ktbridge.cli._app import Command

_STYLES = {"improved": "green", "dropped": "red", "within margin": "cyan", "inconclusive": "dim"}
_AXES = {"persona": "Persona", "task": "Task quality"}


@click.command(cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on stdout.")
def command(directory: Path, as_json: bool) -> None:
    """Score what `ktbridge eval` stored in DIRECTORY and compare its arms.

    Prints tables and writes DIRECTORY/results.json and DIRECTORY/report.html, a single file that
    needs no network. Asks no server anything, so it can be repeated at will.
    """
    from ktbridge.cli._ui import emit_json
    from ktbridge.eval import write_report

    results = write_report(directory)
    if as_json:
        emit_json(results)
    else:
        print_results(results, directory)


def print_results(results: Mapping[str, Any], directory: Path) -> None:
    """The verdict, one table an axis, outcomes, warnings, and where the files are."""
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import console, print_problems, stderr
    from ktbridge.errors import Problem
    from ktbridge.eval.verdict import find, interval

    names = [card["name"] for card in results["arms"]]
    primary = {one["name"]: one["primary"] for one in results["bench"]["slices"]}
    bench = results["bench"]
    console.print()
    console.print(f"[bold]{escape(results['verdict']['headline'])}[/]")
    for text in results["verdict"]["details"]:
        console.print(escape(text))
    for axis, title in _AXES.items():
        rows = results["tables"][axis]
        if not rows:
            continue
        table = Table(title=f"{title} (0 to 1)", title_justify="left", title_style="bold")
        table.add_column("slice", no_wrap=True)
        table.add_column("n", justify="right")
        for name in names:
            table.add_column(name, justify="right")
        if len(names) > 1:
            table.add_column(f"{names[-1]} − {names[0]} \\[95 %]", justify="right")
            table.add_column("verdict")
        order = sorted(rows, key=lambda one: one != "overall" and primary[one] != axis)
        for name in order:
            cells = [f"{rows[name][arm]['mean']:.2f}" for arm in names]
            if len(names) > 1:
                contrast = find(results, axis, name, names[-1], names[0])
                verdict = contrast["verdict"]
                cells += [escape(interval(contrast)), f"[{_STYLES[verdict]}]{verdict}[/]"]
            own = name == "overall" or primary[name] == axis
            table.add_row(
                escape(name), str(rows[name][names[0]]["n"]), *cells, style="" if own else "dim"
            )
        console.print()
        console.print(table)
    console.print()
    for name, counts in results["outcomes"].items():
        parts = results["persona_parts"][name]
        console.print(
            f"{escape(name)}: "
            + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
            + f"; calls the user by the term in {_share(parts['address_rate'])} of answers, "
            f"a tic in {_share(parts['tic_rate'])} of sentences"
        )
    for pair in results["identical"]:
        if pair["share"] is not None:
            console.print(
                f"{escape(' and '.join(pair['arms']))}: {pair['share']:.0%} of {pair['n']} "
                "answers are byte-identical"
            )
    console.print(f"{bench['name']} {bench['version']}; dim rows are not what the axis is for.")
    print_problems(Problem(**one) for one in results["warnings"])
    stderr.print(f"wrote {directory / 'results.json'}", soft_wrap=True, markup=False)
    stderr.print(f"wrote {directory / 'report.html'}", soft_wrap=True, markup=False)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
