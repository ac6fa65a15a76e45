"""ktbridge plan CONFIG: what a training run needs, before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ktbridge.cli._app import Command


@click.command(cls=Command)
@click.argument("config", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--no-measure", is_flag=True, help="Don't time the kernels: no tokens/s, no torch.")
@click.option("--gpu-memory", metavar="SIZE", help="Plan for a GPU of this size, as 24GB.")
@click.option("--memory", metavar="SIZE", help="Plan for a machine with this much memory, as 64GB.")
@click.option("--cores", type=click.IntRange(1, 4096), help="Plan for this many kernel threads.")
def command(
    config: str,
    overrides: tuple[str, ...],
    as_json: bool,
    no_measure: bool,
    gpu_memory: str | None,
    memory: str | None,
    cores: int | None,
) -> None:
    """Predict memory, GPU memory, disk and time of `ktbridge train CONFIG`, and what to change.

    Reads the configuration, the model's config.json, the headers of its safetensors and the rows; no
    weight is loaded. Exit code 0 when the run fits this machine (or the one described), 1 when not.
    """
    from ktbridge.cli._notes import print_notes
    from ktbridge.cli._ui import emit_json, stderr
    from ktbridge.sft.config import load_config
    from ktbridge.sft.plan import make_plan, parse_size, this_machine

    parsed = load_config(config, overrides)
    target = this_machine(
        Path(parsed.output_dir),
        gpu_memory=parse_size(gpu_memory) if gpu_memory else None,
        memory=parse_size(memory) if memory else None,
        cores=cores,
    )
    with stderr.status("Reading headers and rows, timing the kernels …"):
        plan = make_plan(parsed, target, measure=not no_measure)
    if as_json:
        emit_json(plan.as_dict())
    else:
        print_notes(parsed.notes)
        _show(plan)
    sys.exit(0 if plan.fits else 1)


def _show(plan: Any) -> None:
    from rich.table import Table

    from ktbridge.cli._ui import console, shown

    table = Table(box=None, padding=(0, 1), title_justify="left")
    table.title = f"{shown(plan.model)}: {shown(plan.model_type)} on the {plan.device}"
    for heading, justify in (("what", "left"), ("where", "left"), ("GB", "right"), ("how", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for where in ("GPU", "RAM", "page cache", "disk"):
        parts = [part for part in plan.parts if part.where == where]
        for part in sorted(parts, key=lambda part: -part.size):
            table.add_row(part.what, where, _gb(part.size), f"[dim]{shown(part.how)}[/]")
        if parts:
            table.add_row(f"[bold]{where} in all[/]", "", f"[bold]{_gb(plan.total(where))}[/]", "")
    console.print(table)
    console.print(
        f"\n{plan.steps:,} steps over {plan.rows:,} rows; the longest has {plan.longest:,} tokens, the mean "
        f"is {plan.mean_tokens:,.0f}",
        soft_wrap=True,
    )
    if plan.pace is not None:
        pace = plan.pace
        console.print(
            f"about {_figures(pace.tokens_per_second)} tokens/s, {_duration(pace.step_seconds)} a step, "
            f"{_duration(pace.seconds)} in all; experts take {pace.expert_share:.0%} of it",
            soft_wrap=True,
        )
        if pace.cold_bytes:
            console.print(
                f"the first step takes longer: {_gb(pace.cold_bytes)} GB of experts are read from disk, at "
                "its pace, unless the page cache has them",
                soft_wrap=True,
            )
        console.print(f"[dim]{shown(pace.how)}[/]", soft_wrap=True)
    for note in plan.notes:
        console.print(f"[yellow]note[/] {shown(note)}", soft_wrap=True)
    for verdict in plan.verdicts:
        style = "green" if verdict.fits else "bold red"
        console.print(f"[{style}]{shown(str(verdict))}[/]", soft_wrap=True)
    if not plan.fits and plan.advice:
        console.print("\nwhat to change, each alone:")
    for item in () if plan.fits else plan.advice:
        console.print(
            f"  {shown(item.change)}  saves {_gb(item.saves)} GB of {item.where}  "
            f"[dim]({shown(item.price)})[/]",
            soft_wrap=True,
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"


def _figures(number: float) -> str:
    """Two significant figures of small numbers: an estimate has no more."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _duration(seconds: float) -> str:
    """ "0.34 s", "45 s", "12 min", "3 h 05 min", "2 days 4 h"."""
    if seconds < 90:
        return f"{_figures(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} days {hours % 24} h"
