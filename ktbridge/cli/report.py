"""``ktbridge report``: tables and one HTML file from the stored answers of eval."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import Command, fail_on_option, json_option

if TYPE_CHECKING:
    from ktbridge.eval.results.compare import Gate
    from ktbridge.eval.results.types import Index, Results


@click.command(cls=Command, extra="eval")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@fail_on_option
@click.option("--markdown", is_flag=True, help="Print the report as Markdown on stdout.")
@json_option("Print the results as JSON on stdout.")
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
    from ktbridge.eval.results.compare import parse_gate

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

    ``asked``: the arms of this command; problems of others are named and don't fail it.
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
    from ktbridge.eval.results.build import list_runs
    from ktbridge.eval.results.compare import check_gates

    problems = check_gates(gates, list_runs(results))
    if problems:
        print_problems(problems)
        sys.exit(1)


def print_results(results: Results | Index, directory: Path) -> None:
    """Print each bench's report and its problems, and the paths of the files."""
    from ktbridge.cli._ui import print_blocks, print_problems, stderr
    from ktbridge.document import Section, Sentences
    from ktbridge.errors import Problem
    from ktbridge.eval.report.document import build_report
    from ktbridge.eval.results.build import SCHEMA

    if results["schema"] == SCHEMA:
        print_blocks(build_report(results).blocks)
        print_problems(Problem(**row) for row in results["warnings"])
    else:
        for bench in results["benches"]:
            if (found := bench["results"]) is None:
                failed = Sentences([f"not reported: {bench['error']}"], "error")
                print_blocks([Section(bench["name"], [failed])])
            else:
                print_blocks([Section(bench["name"], build_report(found).blocks)])
                print_problems(Problem(**row) for row in found["warnings"])
    for name in ("results.json", "report.html", "report.md"):
        stderr.print(f"wrote {directory / name}", soft_wrap=True, markup=False)
