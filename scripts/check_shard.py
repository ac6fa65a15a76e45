#!/usr/bin/env python3
"""Several processes against one: losses, tokens/s and peak memory on a small random mixture-of-experts model.

    scripts/check_shard.py --dir /tmp/check-shard                             # GPUs, NCCL
    scripts/check_shard.py --dir /tmp/check-shard --processes 3 --steps 5
    scripts/check_shard.py --dir /tmp/check-shard --cpu                       # gloo alone

Makes a Qwen3-MoE checkpoint (hidden 512, 4 layers, 16 experts) with rows of unequal length in DIR/base,
unless it is there from an earlier run, then trains on them with one process, with FSDP2 and with DDP through
``accelerate launch`` and the files in examples/accelerate: the same rows in each step, so the losses are to
be the same. On GPUs where there are any (NCCL), else on the CPU (gloo). Prints two tables; ends with 1 where
a loss is off by more than --tolerance. Needs `ktbridge[train]`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from peers.driver import console
from peers.report import plain_table
from random_checkpoint import make_checkpoint
from rich.table import Table

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "accelerate"
SIZES = {
    "vocab_size": 2006, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
Runs = dict[str, list[dict[str, Any]]]


def make(base: Path, tokens: int, rows: int) -> None:
    """The checkpoint, and ``rows`` of unequal lengths, so that the ranks bring unequal numbers of tokens."""
    draw = random.Random(0)
    lengths = [draw.randint(tokens // 2, tokens) for _ in range(rows)]
    make_checkpoint(base, "qwen3_moe", SIZES, lengths)


def worker(settings: Path, out: Path) -> None:
    """One process of a run; leaves what it saw in ``out``/RANK.json."""
    from ktbridge.sft import distributed, train
    from ktbridge.sft.config import load_config

    log: list[dict[str, Any]] = []
    train.show_no_bars_of_libraries()
    config = load_config(settings)
    result = train.train(replace(config, output_dir=str(out / "raw")), on_log=log.append)
    seen = {
        "losses": [record["loss"] for record in log],
        "norms": [record["grad_norm"] for record in log],
        # The first steps start threads and fill caches.
        "tokens_per_second": [record["tokens_per_second"] for record in log][len(log) // 2 :],
        "rss": result.peak_rss_bytes,
        "gpu": result.peak_gpu_bytes,
    }
    (out / f"{distributed.world().rank}.json").write_text(json.dumps(seen))


def run(
    folder: Path, name: str, command: list[str], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """What each process of one run saw, by rank."""
    out = folder / f"{name}-{time.time_ns()}"
    out.mkdir()
    (out / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    done = subprocess.run(
        [*command, __file__, "--worker", str(out / "run.yaml"), "--dir", str(out)],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if done.returncode:
        raise KtbridgeError(f"{name} failed with exit code {done.returncode}", "see above")
    return [json.loads(path.read_text()) for path in sorted(out.glob("[0-9]*.json"))]


def differences(runs: Runs) -> dict[str, tuple[float, float]]:
    """The largest relative difference of a loss and of a gradient norm, of each run from the first one."""
    alone = next(iter(runs.values()))[0]

    def off(seen: dict[str, Any], key: str) -> float:
        return max(abs(a / b - 1) for a, b in zip(seen[key], alone[key], strict=True))

    return {name: (off(ranks[0], "losses"), off(ranks[0], "norms")) for name, ranks in runs.items()}


def loss_table(runs: Runs) -> Table:
    made = plain_table("loss by step", *runs)
    losses = [ranks[0]["losses"] for ranks in runs.values()]
    for step, values in enumerate(zip(*losses, strict=True), 1):
        made.add_row(str(step), *(f"{value:.6f}" for value in values))
    return made


def run_table(runs: Runs) -> Table:
    title = "largest difference from one process; peak memory in GiB by rank"
    made = plain_table(title, "loss", "norm", "tokens/s", "host", "GPU")
    apart = differences(runs)
    for name, ranks in runs.items():
        pace = ranks[0]["tokens_per_second"]
        memory = (", ".join(f"{seen[key] / 2**30:.2f}" for seen in ranks) for key in ("rss", "gpu"))
        off = (f"{value:.1e}" for value in apart[name])
        made.add_row(name, *off, f"{sum(pace) / len(pace):,.0f}", *memory)
    return made


FOLDER = click.Path(file_okay=False, path_type=Path)
COUNT = click.IntRange(1)
SHOWN: Any = {"show_default": True}


@click.command(cls=Command, context_settings={"max_content_width": 110})
@click.option("--dir", "folder", required=True, type=FOLDER, help="Where all is written, and left.")
@click.option("--processes", default=2, type=click.IntRange(2), **SHOWN)
@click.option("--steps", default=5, type=COUNT, **SHOWN)
@click.option("--batch", default=2, type=COUNT, help="Rows a process and step.", **SHOWN)
@click.option(
    "--tokens", default=512, type=click.IntRange(16), help="In the longest rows.", **SHOWN
)
@click.option("--float32", is_flag=True, help="Non-experts in float32.")
@click.option("--tolerance", default=2e-3, help="For losses, relative.", **SHOWN)
@click.option("--cpu", is_flag=True, help="Stay on the CPU.")
@click.option("--worker", "worker_settings", type=click.Path(path_type=Path), hidden=True)
def main(
    folder: Path,
    processes: int,
    steps: int,
    batch: int,
    tokens: int,
    float32: bool,
    tolerance: float,
    cpu: bool,
    worker_settings: Path | None,
) -> None:
    """Train a small random model with one process, FSDP2 and DDP, and compare."""
    if worker_settings:
        worker(worker_settings, folder)
        return
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base"
    if not base.exists():
        make(base, tokens, rows=batch * processes * steps)
    settings = {
        "model_name_or_path": str(base),
        "dataset": str(base / "rows.json"),
        "output_dir": "raw",
        "lora_rank": 8,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "logging_steps": 1,
        "cutoff_len": tokens,
        "save_steps": 0,
        "plot_loss": False,
        "bf16": not float32,
        "use_cpu": cpu,
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    whole = {**settings, "per_device_train_batch_size": batch * processes}
    runs = {"1 process": run(folder, "alone", [sys.executable], whole)}
    for name, file in (("FSDP2", "fsdp2"), ("DDP", "ddp")):
        command = [*launch, "--config_file", str(EXAMPLES / f"{file}.yaml")]
        command += ["--num_processes", str(processes)]
        runs[f"{processes} ranks, {name}"] = run(folder, file, command, settings)
    console.print(loss_table(runs))
    console.print(run_table(runs))
    worst = max(loss for loss, _ in differences(runs).values())
    console.print(f"largest relative difference of a loss: {worst:.1e} (tolerance {tolerance:g})")
    sys.exit(int(not worst <= tolerance))  # a NaN is off too


if __name__ == "__main__":
    main()
