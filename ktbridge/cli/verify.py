"""`ktbridge verify`: prove from a server's logprobs that the adapter took effect."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import Command

if TYPE_CHECKING:
    from ktbridge.serve.verify import Verification

STYLES = {"applied": "bold green", "not applied": "bold red", "can't tell": "yellow"}
REFERENCES = {"base": "base", "expert": "expert", "nonexpert": "non-expert", "full": "full"}
NAMES = {"expert": "expert LoRA", "nonexpert": "non-expert LoRA"}


@click.command(cls=Command)
@click.option("--base-url", required=True, help="The server, as http://HOST:PORT/v1.")
@click.option("--model", required=True, help="The served model to judge, such as S:NAME.")
@click.option("--adapter", required=True, metavar="DIR", help="The adapter, as training wrote it.")
@click.option("--base-model", required=True, help="Base model directory.")
@click.option("--expert-model", metavar="S", help="Served model with the expert LoRA alone.")
@click.option(
    "--api-key",
    envvar="KTBRIDGE_API_KEY",
    metavar="KEY",
    help="The server's key; better set as KTBRIDGE_API_KEY, which `ps` doesn't show.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    base_url: str,
    model: str,
    adapter: str,
    base_model: str,
    expert_model: str | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Check that a served adapter took effect, each half by itself.

    Asks the server for the logprobs of fixed tokens and computes here, in float32, what base, expert
    LoRA and full adapter give. Exit code 0 only when every half that the adapter has is applied.
    """
    from ktbridge.cli._ui import emit_json, progress_bar
    from ktbridge.serve.proof import verify

    with progress_bar("computing references") as on_progress:
        result = verify(
            base_url,
            model,
            adapter,
            base_model,
            expert_model=expert_model,
            api_key=api_key,
            on_progress=on_progress,
        )
    if as_json:
        emit_json(result.as_dict())
    else:
        _print(result)
    sys.exit(0 if result.ok else 1)


def _print(result: Verification) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from ktbridge.cli._ui import console

    references = [name for name in REFERENCES if name in result.noise]
    table = Table(
        title=f"mean |Δlogprob| to each reference, {result.positions} tokens, nats",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("served model")
    for name in references:
        table.add_column(REFERENCES[name], justify="right")
    table.add_column("should be")
    for arm in result.arms:
        cells = [
            f"[bold]{arm.distances[name]:.4f}[/]"
            if name == arm.nearest
            else f"{arm.distances[name]:.4f}"
            for name in references
        ]
        verdict = REFERENCES[arm.expected] + ("" if arm.as_expected else "  (it is not)")
        style = "" if arm.as_expected else "red"
        table.add_row(escape(arm.model), *cells, verdict, style=style)
    table.add_section()
    table.add_row("noise floor", *(f"{result.noise[name]:.4f}" for name in references), style="dim")
    console.print(table)

    table = Table(box=box.SIMPLE, title=f"{escape(result.model)}: each half", title_justify="left")
    for column in ("half", "verdict"):
        table.add_column(column)
    for column in ("with it", "without", "effect", "noise", "share"):
        table.add_column(column, justify="right")
    for half in result.halves:
        numbers = (half.distance_with, half.distance_without, half.separation, half.noise)
        share = "-" if half.share is None else f"{half.share:.2f}"
        table.add_row(
            NAMES[half.half],
            f"[{STYLES[half.verdict]}]{half.verdict}[/]",
            *(f"{number:.4f}" for number in numbers),
            share,
        )
    console.print(table)
    for half in result.halves:
        console.print(f"{NAMES[half.half]}: {half.reason}", markup=False, soft_wrap=True)
