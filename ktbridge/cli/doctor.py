"""`ktbridge doctor`: what this machine can do."""

from __future__ import annotations

import sys

import click

from ktbridge.cli._app import Command

MARKS = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "problem": "[bold red]✗[/]"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(as_json: bool) -> None:
    """Show CPU, instruction sets, memory, GPUs and packages, with a remedy for what is missing.

    Exit code 1 when something is broken; what is merely not installed is no failure.
    """
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import console, emit_json
    from ktbridge.serve.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        emit_json(diagnosis.as_dict())
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        for check in diagnosis.checks:
            found = escape(check.found)
            if check.remedy:
                found += f"\n[dim]{escape(check.remedy)}[/]"
            table.add_row(MARKS[check.state], f"[bold]{check.topic}[/]", found)
        console.print(table)
    sys.exit(0 if diagnosis.ok else 1)
