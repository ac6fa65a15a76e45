"""ktbridge plan CONFIG: what a training run needs, before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ktbridge.cli._app import Command, json_option, told_format, training_arguments
from ktbridge.cli._hub import ensure_rows, stub_on_hub
from ktbridge.cli._machine import described, machine_options
from ktbridge.cli._ui import console, emit_json, print_notes, shown, stderr, stdout_for_results
from ktbridge.errors import UsageError
from ktbridge.files.sizes import figures, size_text
from ktbridge.sft.config import load_config

if TYPE_CHECKING:
    from ktbridge.sft.plan.report import TrainingPlan


@click.command(cls=Command, extra="train")
@training_arguments
@json_option()
@click.option(
    "--no-measure", is_flag=True, help="Don't time kernels or disk: tokens/s are of assumed costs, if any."
)
@machine_options
def command(
    config: str, overrides: tuple[str, ...], from_format: str, as_json: bool, no_measure: bool, **machine: Any
) -> None:
    """Predict memory, GPU memory, disk and time of `ktbridge train CONFIG`, and what to change.

    Reads the configuration, the model's config.json, the headers of its safetensors and the rows, which
    are tokenized as for training; no weight is loaded. Without the safetensors, config.json (and the
    tokenizer's files, to count the rows) is enough; of a model on the Hub these and the safetensors' headers
    are downloaded, never weights. Exit code 0 when the run fits this machine (or the one described), 1 when
    not.
    """
    from ktbridge.sft.plan.inputs import read_plan_inputs, this_machine
    from ktbridge.sft.plan.report import make_plan

    parsed = load_config(config, (*overrides, *told_format(from_format)))
    if not parsed.do_train:
        raise UsageError(
            f"{config} trains nothing: do_train is false.",
            "`ktbridge predict CONFIG --dry-run` shows what would be answered.",
        )
    target = this_machine(Path(parsed.output_dir), described(machine))
    stub = stub_on_hub(parsed.model_name_or_path)
    ensure_rows(parsed)
    with stdout_for_results(), stderr.status("Reading headers and rows, timing the kernels …"):
        plan = make_plan(read_plan_inputs(parsed, target, not no_measure, stub))
    if as_json:
        emit_json(plan.as_dict())
    else:
        print_notes(parsed.notes, reasons=False)
        _show(plan)
    sys.exit(0 if plan.fits else 1)


def _show(plan: TrainingPlan) -> None:
    _show_sizes(plan)
    console.print(f"\nfor {plan.machine}", markup=False, soft_wrap=True)
    _show_steps(plan)
    if plan.disk_reads is not None:
        console.print(f"[yellow]{shown(str(plan.disk_reads))}[/]", soft_wrap=True)
    if len(plan.experts) > 1:
        _show_experts(plan)
    if plan.reason:
        console.print(f"taken: {shown(plan.reason)}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"[yellow]note[/] {shown(note)}", soft_wrap=True)
    for verdict in plan.verdicts:
        style = "green" if verdict.fits else "bold red"
        console.print(f"[{style}]{shown(str(verdict))}[/]", soft_wrap=True)
    if not plan.fits and plan.advice:
        console.print("\nwhat to change, each alone:")
    for item in () if plan.fits else plan.advice:
        console.print(
            f"  {shown(item.change)}  saves {size_text(item.saves)} of {item.where}  "
            f"[dim]({shown(item.price)})[/]",
            soft_wrap=True,
        )


def _show_sizes(plan: TrainingPlan) -> None:
    """Print each part's use of GPU, RAM, page cache and disk."""
    # One unit for all, so that a column is comparable: MB if every part is below 1 GB.
    unit, scale = ("GB", 1e9) if max(part.size for part in plan.parts) >= 1e9 else ("MB", 1e6)

    def sized(size: int) -> str:
        return f"{size / scale:,.2f}"

    table = Table(box=None, padding=(0, 1), title_justify="left")
    table.title = f"{shown(plan.model)}: {shown(plan.model_type)} on the {plan.device}"
    for heading, justify in (("what", "left"), ("where", "left"), (unit, "right"), ("how", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for where in ("GPU", "RAM", "page cache", "disk"):
        parts = [part for part in plan.parts if part.where == where]
        for part in sorted(parts, key=lambda part: -part.size):
            table.add_row(part.what, where, sized(part.size), f"[dim]{shown(part.how)}[/]")
        if parts:
            total = sized(plan.total(where))
            table.add_row(f"[bold]{where} in all[/]", "", f"[bold]{total}[/]", "")
    console.print(table)


def _show_steps(plan: TrainingPlan) -> None:
    """Print the number of steps and their time."""
    packed = f" packed into {plan.sequences:,}" if plan.sequences < plan.rows else ""
    if plan.sequences > plan.rows:
        packed = f" in {plan.sequences:,} sequences"
    of = f" of {plan.rows + plan.refused:,}" if plan.refused else ""
    console.print(
        f"{plan.steps:,} steps over {plan.rows:,}{of} rows{packed}; the longest has {plan.longest:,} tokens, "
        f"the mean is {plan.mean_tokens:,.0f}",
        soft_wrap=True,
    )
    if plan.pace is None:
        return
    pace = plan.pace
    console.print(
        f"about {figures(pace.tokens_per_second)} tokens/s, {_duration(pace.step_seconds)} a step, "
        f"{_duration(pace.seconds)} in all; experts take {pace.expert_share:.0%} of it",
        soft_wrap=True,
    )
    if pace.eval_seconds:
        console.print(
            f"{plan.evaluations} evaluations of {plan.held_out:,} held-out rows take "
            f"{_duration(pace.eval_seconds)} of that, if these are as long as the others",
            soft_wrap=True,
        )
    if pace.cold_bytes and plan.disk_reads is None:
        console.print(
            f"the first step takes longer: {size_text(pace.cold_bytes)} of experts are read from disk, "
            "at its pace, unless the page cache has them",
            soft_wrap=True,
        )
    console.print(f"[dim]{shown(pace.how)}[/]", soft_wrap=True)


def _show_experts(plan: TrainingPlan) -> None:
    """Devices that can compute the experts, with their speed."""
    table = Table(box=None, padding=(0, 1), title_justify="left")
    table.title = "who computes the experts (kt_experts)"
    for heading in ("", "GPU memory", "tokens a micro-batch", "tokens/s", ""):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for each in plan.experts:
        table.add_row(
            each.name,
            size_text(each.gpu) if each.gpu is not None else "-",
            f"{each.tokens_per_pass:,}" if each.tokens_per_pass else "-",
            figures(each.tokens_per_second) if each.tokens_per_second else "-",
            "taken" if each.chosen else shown(each.why),
        )
    console.print(table)


def _duration(seconds: float) -> str:
    """ "0.34 s", "45 s", "12 min", "3 h 05 min", "2 days 4 h"."""
    if seconds < 90:
        return f"{figures(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} days {hours % 24} h"
