"""`ktbridge verify --adapter NAME=DIR …`: which adapter answers under which name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import named_directories
from ktbridge.cli.verify import STYLES, WRONG, VerifyOptions, distance_cells, new_table
from ktbridge.errors import KtbridgeError

if TYPE_CHECKING:
    from rich.table import Table

    from ktbridge.adapter import Adapter
    from ktbridge.verify.matrix import MatrixRow, SeveralVerification


def run(options: VerifyOptions, given: Sequence[str], *, reload: bool) -> None:
    """Check, print, and end with the exit code."""
    from ktbridge.cli._hub import ensure_model
    from ktbridge.cli._ui import emit_json, print_problems, print_readings, progress_bar
    from ktbridge.verify.logprobs import LogprobClient
    from ktbridge.verify.several import verify_several

    try:
        directories = named_directories(None, None, given)
    except click.BadParameter as error:
        raise click.UsageError(
            f"--adapter: {error.message} Give --model NAME with one DIR, or NAME=DIR for each."
        ) from error
    ensure_model(options.base_model)
    adapters = _open_all(directories, options)
    print_readings([adapter.reading for adapter in adapters.values()])
    with progress_bar("asking the server", "layers") as bar:
        result = verify_several(
            LogprobClient(options.server, options.api_key),
            adapters,
            options.base_model,
            reload=reload,
            repeat=options.repeat,
            logprobs_from=options.logprobs_from,
            on_progress=bar,
            on_stage=bar.describe,
        )
    if options.as_json:
        emit_json(result.as_dict())
    else:
        _print_names(result)
    print_problems(result.problems)
    if not options.as_json:
        _print_matrix(result)
    sys.exit(0 if result.ok else 1)


def _open_all(directories: dict[str, str], options: VerifyOptions) -> dict[str, Adapter]:
    """Open each adapter. Raises KtbridgeError with all that can't be opened."""
    from ktbridge.adapter import open_adapter

    adapters, failed = {}, []
    for name, directory in directories.items():
        try:
            adapters[name] = open_adapter(directory, options.from_format, options.base_model)
        except KtbridgeError as error:
            failed.append((name, error))
    if len(failed) == 1:
        raise failed[0][1]
    if failed:
        said = "; ".join(f"{name}: {error.sentence.rstrip('.')}" for name, error in failed)
        raise KtbridgeError(f"{len(failed)} adapters can't be opened: {said}.", failed[0][1].next_step)
    return adapters


def _print_names(result: SeveralVerification) -> None:
    from rich.markup import escape

    from ktbridge.cli._ui import console

    style = STYLES["applied"] if result.ok else WRONG
    console.print(f"[{style}]{escape(result.sentence)}[/]", soft_wrap=True)
    for name in result.names:
        style = STYLES.get(name.verdict, WRONG)
        text = f"{escape(name.model)}: [{style}]{name.verdict}[/] - {escape(name.reason)}"
        console.print(text, soft_wrap=True)
    console.file.flush()  # problems follow, on stderr


def _print_matrix(result: SeveralVerification) -> None:
    from ktbridge.cli._ui import console

    console.print()
    console.print(f"asked: {result.asked}", markup=False, soft_wrap=True)
    console.print(_matrix(result))


def _matrix(result: SeveralVerification) -> Table:
    from rich.markup import escape

    from ktbridge.verify.matrix import CHECK_STAGES

    title = "mean |Δlogprob| to the base and to each adapter, nats"
    table = new_table(title, "served model")
    for column in result.columns:
        table.add_column(escape(column), justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("should be")
    for stage, rows in groupby(result.rows, key=lambda row: row.stage):
        table.add_row(CHECK_STAGES[stage], style="dim")
        for row in rows:
            name = f"  {escape(row.model)}" + (", generated" if row.generated else "")
            style = "" if row.as_expected else "red"
            table.add_row(name, *_cells(row, result.columns), style=style)
        table.add_section()
    noise = (f"{result.noise[column]:.4f}" for column in result.columns)
    table.add_row("noise floor", *noise, str(result.positions), style="dim")
    if result.spread is not None:
        table.add_row("between requests", f"{result.spread:.4f}", style="dim")
    return table


def _cells(row: MatrixRow, columns: Sequence[str]) -> list[str]:
    """Distances, the nearest in bold; how many tokens; what the row should be, and whether it is."""
    from rich.markup import escape

    cells = distance_cells(row.distances, row.nearest, columns)
    should = escape(row.expected)
    if not row.as_expected:
        is_what = f"it is {escape(row.answers_as)}" if row.answers_as is not None else "it is not"
        should += f"  ({is_what})"
    return [*cells, str(row.tokens), should]
