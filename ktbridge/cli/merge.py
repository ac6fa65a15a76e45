"""``ktbridge merge``: an adapter into its base weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ktbridge.adapter import open_adapter
from ktbridge.adapter.merge import execute_merge, plan_merge
from ktbridge.cli._app import (
    Command,
    base_model_option,
    dry_run_option,
    from_option,
    json_option,
    output_option,
)
from ktbridge.cli._hub import ensure_model
from ktbridge.cli._ui import console, emit_json, print_problems, print_readings, progress_bar, shown, stderr
from ktbridge.errors import KtbridgeError
from ktbridge.files.sizes import size_text
from ktbridge.model import resolve_model

if TYPE_CHECKING:
    from ktbridge.adapter import Adapter
    from ktbridge.adapter.merge import MergeReport
    from ktbridge.adapter.merge_values import Loss

_LATER = "repeat the command with --measure only where ktbridge[train] and memory for a layer are there"


@click.command(cls=Command, extra="serve")
@click.argument("raw_dir", type=click.Path(), metavar="DIR")
@from_option
@base_model_option("The model the adapter was trained on")
@output_option("output", "Write the merged checkpoint here.", required=True)
@click.option("--overwrite", is_flag=True, help="Replace the output if it is an earlier merge.")
@click.option("--allow-other-base", is_flag=True, help="Merge into a model other than the one trained on.")
@click.option(
    "--measure",
    type=click.Choice(["yes", "no", "only"]),
    default="yes",
    show_default=True,
    help="Compute what requantizing weights cost in logprobs; only: of an earlier merge in --output.",
)
@dry_run_option("Print which weights would change; write nothing.")
@json_option("Print one JSON document.")
def command(
    raw_dir: str, base_model: str, measure: str, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Add the adapter in DIR to the weights of its base model.

    The adapter may have any format that `ktbridge convert` reads. Routed experts and everything else are
    added alike, in float32, rounded once. The base model is a
    directory or org/name on the Hub; where the adapter's manifest has a fingerprint of
    the one trained on, it must be that. The output is complete or as it was before, whatever happens.

    Weights in block FP8, or in INT8 and INT4 as compressed-tensors stores them, are requantized in the
    same scheme; what that cost is printed layer by layer, and in logprobs of fixed tokens.
    """
    ensure_model(base_model, weights=not dry_run)
    base = resolve_model(base_model)
    if measure == "only":
        adapter = open_adapter(raw_dir, options["from_format"], base)
        print_readings([adapter.reading])
        found = _measure(base, resolve_model(options["output"]), adapter)
        emit_json(found) if as_json else _print_distance(found)
        return
    plan = plan_merge(raw_dir, base_model=base, **options)
    print_readings([plan.adapter.reading])
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
    distance = None
    if report.losses and measure == "yes":
        distance = _measure(base, Path(report.output), plan.adapter)
    if as_json:
        emit_json({**report.as_dict(), "distance": distance})
    else:
        _print_report(report, distance)


def _print_report(report: MergeReport, distance: dict[str, Any] | None) -> None:
    print_problems(report.findings)
    _print_summary(report.modules)
    _print_losses(report.losses)
    _print_distance(distance)
    if report.left_out:
        stderr.print(f"left out: {' '.join(report.left_out)}", soft_wrap=True, markup=False)
    share = report.changed / report.values
    shards = f"{report.shards} shard{'s' * (report.shards != 1)}"
    stderr.print(
        f"done in {report.seconds:.2f} s: {size_text(report.bytes)} in {shards}, "
        f"{share:.1%} of the adapted values moved; {report.output} loads like its base",
        soft_wrap=True,
        markup=False,
    )


def _measure(base: Path, merged: Path, adapter: Adapter) -> dict[str, Any]:
    """The logprob distances of ``ktbridge.verify.merged``, or why there are none."""
    try:
        from ktbridge.verify.merged import merge_distance

        with progress_bar("measuring logprobs", "layers") as on_progress:
            return asdict(merge_distance(base, merged, adapter, on_progress))
    except KtbridgeError as error:
        return {"not_measured": error.sentence, "next_step": _LATER}
    except ImportError as error:
        return {"not_measured": str(error), "next_step": _LATER}


def _print_losses(losses: tuple[Loss, ...]) -> None:
    if not losses:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("layer", "stored as", "weights", "relative error", "delta kept", "cosine"):
        table.add_column(title, justify="left" if title == "stored as" else "right")
    for loss in losses:
        table.add_row(
            str(loss.layer) if loss.layer >= 0 else "-",
            loss.storage,
            f"{loss.weights:,}",
            f"{loss.relative_error:.2%}",
            f"{loss.kept:.1%}",
            f"{loss.cosine:.3f}",
        )
    console.print(table)


def _print_distance(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    if "not_measured" in found:
        text = f"logprobs not measured: {found['not_measured']}\n  next  {found['next_step']}"
    else:
        text = (
            f"logprobs of {found['tokens']} tokens, mean |difference| in nats: the adapter moves the base by "
            f"{found['effect']:.4f}; the merged model is {found['lost']:.4f} from base + adapter and "
            f"{found['moved']:.4f} from the base"
        )
    stderr.print(text, soft_wrap=True, markup=False)


def _print_summary(modules: list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("module", "weights", "matrices", "rank", "scale", "dtype"):
        left = title in ("module", "dtype")
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    for row in modules:
        table.add_row(
            shown(row["module"]),
            f"{row['weights']:,}",
            f"{row['matrices']:,}",
            str(row["rank"]),
            f"{row['scale']:g}",
            row["dtype"],
        )
    console.print(table)
