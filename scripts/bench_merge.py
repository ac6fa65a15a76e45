#!/usr/bin/env python3
"""`ktbridge merge` beside `cp` of the same checkpoint, and its peak memory.

    scripts/bench_merge.py --dir /mnt/nvme [--layers 2] [--fused] [--repeat 5]

Makes a random checkpoint of a few of Qwen3-30B-A3B's layers (experts one by one, 1.2 GB a layer) or, with
--fused, of Qwen3.5-35B-A3B's, and a rank-8 adapter of every expert and attention module. Then `cp`, `cp` with
a flush to the disk and `ktbridge merge` take turns; each writes the whole checkpoint, and merge flushes it
before it publishes, so `cp + sync` is its like. On a machine that others use, quote the ratios
within a round and the CPU seconds.

The floor, for V values of two bytes and rank r, is what `cp` does (each byte copied once from page cache to
page cache, and every page allotted and flushed), one more copy (out of the page cache to where it can be
changed), 2 r V operations in float32 and Python's start. For a layer of Qwen3-30B-A3B (1.28 GB, V = 0.62 G)
on a core of an EPYC: cp 0.6 s, the other copy 0.16 s, 10 GFLOP at 90 GFLOP/s 0.11 s, the start 0.2 s: 1.1 s
of CPU, and the disk's time is cp's. What is computed is spread over the cores. Seen on two idle cores: 1.14
times the seconds of cp + sync (docs/benchmarks.md).

Needs `ktbridge[train]`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from bench_convert import (
    Command,
    Modules,
    Sizes,
    compete_as_programs,
    make_adapter,
    qwen35_sizes,
    show_programs,
)
from peers.driver import new_run, write_run
from random_checkpoint import make_checkpoint

VOCABULARY = 4096  # merging copies embeddings, whatever their size


def qwen3_modules(layer: int) -> Modules:
    sizes = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
    return {f"self_attn.{name}_proj": size for name, size in sizes.items()}


def make(place: Path, layers: int, experts: int | None, fused: bool) -> None:
    """``place``/base and ``place``/raw, its adapter."""
    changes = {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    if experts:
        changes["num_experts"] = experts
    shape = "qwen3.5-35b-a3b" if fused else "qwen3-30b-a3b"
    make_checkpoint(place / "base", shape, changes)
    if fused:
        sizes = qwen35_sizes(layers, experts or 256)
    else:
        base = "Qwen/Qwen3-30B-A3B"
        sizes = Sizes(base, "model.layers", layers, experts or 128, 2048, 768, qwen3_modules)
    make_adapter(place / "raw", sizes)


@click.command(context_settings={"max_content_width": 110})
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="On the disk to measure.  [default: the temporary directory]",
)
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--experts", type=click.IntRange(8), help="Fewer than the model has.")
@click.option("--fused", is_flag=True, help="Experts in fused tensors.")
@click.option("--repeat", "--runs", default=5, show_default=True, type=click.IntRange(1))
@click.option("--touch/--no-touch", default=True, help="Touch free memory before each turn.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="All samples.")
def main(
    directory: str | None,
    layers: int,
    experts: int | None,
    fused: bool,
    repeat: int,
    touch: bool,
    json_file: Path | None,
) -> None:
    """Measure merge on a checkpoint of a few layers, beside cp."""
    run = new_run(layers=layers, experts=experts, fused=fused, repeat=repeat, touch=touch)
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=directory) as name:
        place = Path(name)
        make(place, layers, experts, fused)
        base, copy, out = (place / name for name in ("base", "copy", "out"))
        files = tuple(base.iterdir())
        run["bytes"] = sum(path.stat().st_size for path in files)
        copied = f"cp -r '{base}' '{copy}'"
        cli = [sys.executable, "-m", "ktbridge", "merge", str(place / "raw")]
        merge = [*cli, "--base-model", str(base), "--output", str(out)]
        like = ("cp", "cp + sync")
        synced = ["sh", "-c", f"{copied} && sync '{copy}'/*"]
        commands = [
            Command("cp", ["sh", "-c", copied], (), files, (copy,)),
            Command("cp + sync", synced, (), files, (copy,)),
            Command("ktbridge merge", merge, like, files, (out,)),
        ]
        compete_as_programs(run, commands, repeat, touch)
    write_run(run, json_file)
    show_programs(run, f"layers: {layers}, experts {'fused' if fused else 'one by one'}")
    sys.exit(1 if run["failed"] else 0)


if __name__ == "__main__":
    main()
