"""``ktbridge validate``: would an engine serve what was trained?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ktbridge.adapter import validate_adapter
from ktbridge.cli._app import Command, from_option, json_option
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._ui import console, emit_json, print_problems, printable, progress_bar, shown
from ktbridge.errors import count_problems

if TYPE_CHECKING:
    from ktbridge.adapter import ValidationReport
    from ktbridge.errors import Problem


@click.command(cls=Command)
@click.argument("dirs", nargs=-1, required=True, type=click.Path(), metavar="DIR...")
@click.option(
    "--base-model",
    metavar="DIR",
    help="Check against this model (a directory, or org/name on the Hub); config.json is enough.",
)
@click.option(
    "--engine",
    metavar="ENGINE",
    help="Apply this engine's contract: sglang-kt==0.7.2, vllm, or sglang (upstream).",
)
@from_option
@click.option("--structure-only", is_flag=True, help="Check names and shapes, don't read values.")
@click.option("--strict", is_flag=True, help="Fail on warnings as well.")
@click.option("--github", is_flag=True, help="Print the findings as annotations of a workflow's run, too.")
@json_option("Print one JSON document.")
@click.pass_context
def command(
    ctx: click.Context,
    dirs: tuple[str, ...],
    base_model: str | None,
    structure_only: bool,
    strict: bool,
    github: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check adapters of any format that `ktbridge convert` reads, singly or as one set.

    In a set, the others are compared with the raw directory, or else with the first whose layout
    covers all others: put the input of a conversion before its outputs.

    Whatever would make an engine serve something other than what was trained, or nothing at all,
    is an error, and the exit code is 1. docs/ci.md has a job that blocks a deploy by it.
    """
    import gc

    if base_model is not None:
        ensure_model(base_model, weights=False)
    # 60,000 tensors are half a million live objects: repeated garbage collection of them would take a
    # quarter of the time.
    gc.disable()
    try:
        with progress_bar("validating", "bytes") as on_progress:
            report = validate_adapter(
                dirs, base_model=base_model, structure_only=structure_only, on_progress=on_progress, **options
            )
    finally:
        gc.enable()
    if as_json:
        emit_json(report.as_dict())
    else:
        _print_summary(report)
        print_problems(report.problems)
        if github:
            for finding in report.problems:
                click.echo(_annotation(finding))
        _print_verdict(report)
    warned = any(finding.severity == "warning" for finding in report.problems)
    if not report.ok or (strict and warned):
        ctx.exit(1)


def _annotation(finding: Problem) -> str:
    """A workflow command of GitHub Actions, which ends at its line's end and escapes what would end it.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    level = {"error": "error", "warning": "warning", "info": "notice"}[finding.severity]
    lines = [f"{finding.where}: {finding.found}"]
    lines += [f"expected: {finding.expected}"] if finding.expected else []
    lines += [f"next: {finding.next_step}"] if finding.next_step else []
    text = "%0A".join(printable(line).replace("%", "%25") for line in lines)
    return f"::{level} title=ktbridge {finding.code}::{text}"


def _print_summary(report: ValidationReport) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("layout", "rank", "alpha", "experts", "non-expert", "directory"):
        table.add_column(title, justify="left" if title in ("layout", "directory") else "right",
                         overflow="fold")  # fmt: skip
    for adapter in report.adapters:
        if adapter["layout"] is None:
            table.add_row("unreadable", "", "", "", "", shown(adapter["path"]))
            continue
        experts = f"{adapter['expert_layers']} layers x {adapter['num_experts']}"
        table.add_row(
            adapter["layout"],
            shown(str(adapter["r"])[:40]),
            shown(str(adapter["lora_alpha"])[:40]),
            experts if adapter["expert_layers"] else "none",
            f"{adapter['nonexpert_tensors']:,} tensors" if adapter["nonexpert_tensors"] else "none",
            shown(adapter["path"]),
        )
    console.print(table)


def _print_verdict(report: ValidationReport) -> None:
    summary = count_problems(report.problems)
    scope = "names and shapes" if report.structure_only else "names, shapes and values"
    if report.ok:
        console.print(f"[green]ok[/]: {scope} checked{'; ' + summary if summary else ''}")
    else:
        console.print(f"[bold red]not ok[/]: {summary}")
