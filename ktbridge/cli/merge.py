"""``ktbridge merge``: an adapter into its base weights."""

from __future__ import annotations

from typing import Any

import click

from ktbridge.cli._app import Command


@click.command(cls=Command)
@click.argument("raw_dir", type=click.Path())
@click.option(
    "--base-model",
    required=True,
    metavar="DIR",
    help="The model the adapter was trained on: a directory, or org/name on the Hub.",
)
@click.option(
    "--output",
    "--output-dir",
    "--out",
    "output",
    required=True,
    metavar="DIR",
    help="Write the merged checkpoint here.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it is an earlier merge.")
@click.option(
    "--allow-other-base", is_flag=True, help="Merge into a model other than the one trained on."
)
@click.option("--dry-run", is_flag=True, help="Print which weights would change; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    raw_dir: str,
    base_model: str,
    output: str,
    overwrite: bool,
    allow_other_base: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Add the adapter in RAW_DIR (of any layout) to the weights of its base model.

    Routed experts and everything else alike, in float32, rounded once. The base model is a
    directory or org/name on the Hub; where the adapter's manifest has a fingerprint of
    the one trained on, it must be that. The output is complete or as it was before, whatever happens.
    """
    from ktbridge.adapter.merge import execute_merge, plan_merge
    from ktbridge.cli._hub import ensure_model
    from ktbridge.cli._ui import emit_json, print_problems, progress_bar, stderr
    from ktbridge.model import resolve_model
    from ktbridge.units import size_text

    ensure_model(base_model, weights=not dry_run)
    base = resolve_model(base_model)
    plan = plan_merge(
        raw_dir,
        base_model=base,
        output=output,
        overwrite=overwrite,
        allow_other_base=allow_other_base,
    )
    if dry_run:
        if as_json:
            emit_json(plan.as_dict())
        else:
            print_problems(plan.findings)
            _print_summary(plan.modules())
            stderr.print(f"dry run: nothing was written; {plan.bytes:,} bytes are needed")
        return
    with progress_bar("merging", "bytes") as on_progress:
        report = execute_merge(plan, on_progress)
    if as_json:
        emit_json(report.as_dict())
        return
    print_problems(report.findings)
    _print_summary(report.modules)
    if report.left_out:
        stderr.print(f"left out: {' '.join(report.left_out)}", soft_wrap=True, markup=False)
    share = report.changed / report.values
    stderr.print(
        f"done in {report.seconds:.2f} s: {size_text(report.bytes)} in {report.shards} shards, "
        f"{share:.1%} of the adapted values moved; {report.output} loads like its base",
        soft_wrap=True,
        markup=False,
    )


def _print_summary(modules: list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("module", "weights", "matrices", "rank", "scale", "dtype"):
        left = title in ("module", "dtype")
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    for row in modules:
        table.add_row(
            escape(row["module"]),
            f"{row['weights']:,}",
            f"{row['matrices']:,}",
            str(row["rank"]),
            f"{row['scale']:g}",
            row["dtype"],
        )
    console.print(table)
