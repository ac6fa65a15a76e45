#!/usr/bin/env python3
"""Tokens a second and memory of a training step, beside its peers, on one checkpoint in one run.

    scripts/random_checkpoint.py deepseek-v2-lite /data/v2-lite
    scripts/bench_train.py /data/v2-lite --json run.json

The peers: `gpu`, Hugging Face and PEFT with everything on the GPU; `offload`, our placement with torch's own
operations for the experts on the CPU. peers/train_worker.py is what each runs, in a process of its own.
The first step, in which memory is touched and caches fill, is not counted. A step is --accumulation
micro-batches of one row; the offload baseline may take fewer, since its speed does not depend on it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from peers.machine import cpu_model, physical_cores
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

OURS = "ktbridge"
WORKER = Path(__file__).parent / "peers" / "train_worker.py"
console, stderr = Console(), Console(stderr=True)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run one contestant. Raises CalledProcessError when it fails; its words are on stderr then."""
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(case)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tokens = case["accumulation"] * case["length"]
    told["tokens_per_second"] = tokens / statistics.median(told["seconds"][1:])
    return {**told, "case": case}


def table(run: dict[str, Any]) -> Table:
    ours = next((told for told in run["contestants"] if told["who"] == OURS), None)
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("", "tokens/s", "ours is", "GPU GB", "CPU GB", "÷ checkpoint", "start s", "loss"):
        made.add_column(title, justify="left" if not title else "right")
    for told in run["contestants"]:
        speed = told["tokens_per_second"]
        ratio = "" if ours is None or told is ours else f"{ours['tokens_per_second'] / speed:.2f}x"
        gpu = told["gpu"]
        made.add_row(
            told["who"] + ("" if told["case"]["ahead"] else ", waiting"),
            f"{speed:,.0f}",
            ratio,
            f"{gpu['used'] / 1e9:.2f}" if gpu else "none",
            f"{told['cpu']['peak'] / 1e9:.1f}",
            f"{told['cpu']['peak'] / run['checkpoint_bytes']:.2f}",
            f"{told['load_seconds']:.0f}",
            f"{told['losses'][0]:.3f} → {told['losses'][-1]:.3f}",
        )
    return made


@click.command(context_settings={"max_content_width": 110})
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--peer", "peers", multiple=True, type=click.Choice(["offload", "gpu"]))
@click.option("--rank", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--length", default=512, show_default=True, type=click.IntRange(2), help="Tokens a row."
)
@click.option("--accumulation", default=16, show_default=True, type=click.IntRange(1))
@click.option("--offload-accumulation", default=4, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=3, show_default=True, type=click.IntRange(2))
@click.option("--no-checkpointing", is_flag=True, help="Keep activations on the GPU.")
@click.option("--no-run-ahead", is_flag=True, help="Also ours waiting for each pass.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(
    checkpoint: Path,
    peers: tuple[str, ...],
    rank: int,
    length: int,
    accumulation: int,
    offload_accumulation: int,
    steps: int,
    no_checkpointing: bool,
    no_run_ahead: bool,
    json_file: Path | None,
) -> None:
    """Train CHECKPOINT for some steps with ktbridge and with each --peer (default: both)."""
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    machine = {"cpu": cpu_model(), "cores": physical_cores()}
    run: dict[str, Any] = {"machine": machine, "checkpoint_bytes": size, "contestants": []}
    contestants = [(OURS, True), *((peer, True) for peer in peers or ("gpu", "offload"))]
    if no_run_ahead:
        contestants.insert(1, (OURS, False))
    for who, ahead in contestants:
        case = {
            "who": who,
            "ahead": ahead,
            "checkpointing": not no_checkpointing,
            "checkpoint": str(checkpoint),
            "rank": rank,
            "length": length,
            "accumulation": offload_accumulation if who == "offload" else accumulation,
            "steps": steps,
        }
        try:
            run["contestants"].append(measure(case))
        except subprocess.CalledProcessError as error:
            stderr.print(f"{who} failed (exit code {error.returncode}); see above.")
        if json_file:
            json_file.write_text(json.dumps(run, indent=1) + "\n")
    console.print(
        f"rank {rank}, rows of {length} tokens, checkpoint {size / 1e9:.1f} GB", highlight=False
    )
    console.print(table(run))
    if len(run["contestants"]) < len(contestants):
        sys.exit(1)


if __name__ == "__main__":
    main()
