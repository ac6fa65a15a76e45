"""`ktbridge doctor`: what this machine can do."""

from __future__ import annotations

import sys
from itertools import groupby

import click
from rich.markup import escape
from rich.table import Table

from ktbridge.cli._app import Command, json_option
from ktbridge.cli._ui import console, emit_json
from ktbridge.serve.doctor import diagnose

MARKS = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "problem": "[bold red]✗[/]"}


@click.command(cls=Command)
@click.option(
    "--engine-python",
    metavar="FILE",
    help="Interpreter of SGLang-KT's environment, if it has one of its own.",
)
@click.option("--quick", is_flag=True, help="List GPUs by nvidia-smi, without asking torch or trying them.")
@json_option()
def command(engine_python: str | None, quick: bool, as_json: bool) -> None:
    """Show CPU, instruction sets, memory, GPUs and packages, with a remedy for what is missing.

    Packages are looked up by pip's metadata and not imported. torch is asked for its GPUs in a process
    beside this one, where each is tried with what routed experts want of it (kt_experts: stream, resident).

    Exit code 1 when something is broken; what is merely not installed is no failure.
    """
    diagnosis = diagnose(engine_python, ask_torch=not quick)
    if as_json:
        emit_json(diagnosis.as_dict())
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        alike = groupby(diagnosis.checks, key=lambda each: (each.state, each.found, each.remedy))
        for (state, found, remedy), checks in alike:
            topics = ", ".join(escape(check.topic) for check in checks)
            text = escape(found) + (f"\n[dim]{escape(remedy)}[/]" if remedy else "")
            table.add_row(MARKS[state], f"[bold]{topics}[/]", text)
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():  # rich pads each line to the width
            click.echo(line.rstrip(), color=console.is_terminal)
    sys.exit(0 if diagnosis.ok else 1)
