#!/usr/bin/env python3
"""Train the same rows with the experts in BF16, INT8 and INT4: loss, memory and pace side by side.

    scripts/compare_storages.py run.yaml                           a configuration of `ktbridge train`
    scripts/compare_storages.py run.yaml max_steps=20 --storages bf16,int4 --json

Each storage is a run of its own, one after the other, with kt_expert_weight_format set: same rows, same
seed, same order. Adapters go to a temporary directory and are removed; quantised experts stay where
`ktbridge train` keeps them. Losses are those of the first step, which is the base model's before anything is
learned, and the mean of the last quarter of the steps; tokens/s are the median without the first step; RAM
is the process's peak, mapped experts that were read included. Needs `ktbridge[train]`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ktbridge.adapter.quantize import STORAGES
from ktbridge.cli._app import Command, terminable
from ktbridge.errors import KtbridgeError
from ktbridge.files.sizes import figures, size_text
from ktbridge.model import resolve_model
from ktbridge.sft.config import load_config
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.quantized import experts_path


def compare(config: str, overrides: tuple[str, ...], storage: str, output: Path) -> dict[str, Any]:
    """One run, in a process of its own. Raises KtbridgeError with its message where it fails."""
    asked = f"kt_config.kt_expert_weight_format={storage}"
    own = [f"output_dir={output}", "save_steps=0", "logging_steps=1", asked]
    command = [sys.executable, "-m", "ktbridge", "train", config, *overrides, *own, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise KtbridgeError(f"the run with experts in {storage} failed", "read its message above")
    result = json.loads(done.stdout)
    log = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log]
    made = load_config(config, [*overrides, asked])
    base = resolve_model(made.model_name_or_path)
    return {
        "storage": storage,
        "first_loss": losses[0],
        "last_loss": mean(losses[-max(1, len(losses) // 4) :]),
        "expert_bytes": read_shape(base, experts_path(made, base)).expert_bytes,
        "peak_rss_bytes": result["peak_rss_bytes"],
        "tokens_per_second": median(
            record["tokens_per_second"] for record in log[min(1, len(log) - 1) :]
        ),
        "steps": result["steps"],
    }


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.argument("config", type=click.Path(dir_okay=False))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--storages", default=",".join(("bf16", *STORAGES)), show_default=True, help="Which.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(config: str, overrides: tuple[str, ...], storages: str, as_json: bool) -> None:
    """Train the rows of CONFIG once with the experts in each storage, and compare."""
    found = []
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        for storage in storages.split(","):
            click.echo(f"experts in {storage} …", err=True)
            found.append(compare(config, overrides, storage, Path(scratch) / storage))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(box=SIMPLE_HEAD)
    headings = (
        "experts in",
        "first loss",
        "last loss",
        "experts",
        "peak RAM",
        "tokens/s",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for run in found:
        table.add_row(
            run["storage"],
            f"{run['first_loss']:.4f}",
            f"{run['last_loss']:.4f}",
            size_text(run["expert_bytes"]),
            size_text(run["peak_rss_bytes"]),
            figures(run["tokens_per_second"]),
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
