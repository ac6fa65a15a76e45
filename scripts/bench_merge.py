#!/usr/bin/env python3
"""`ktbridge merge` beside `cp` of the same checkpoint, and its peak memory.

    scripts/bench_merge.py --dir /mnt/nvme [--layers 2] [--fused] [--repeat 3]

Makes a random checkpoint of a few of Qwen3-30B-A3B's layers (experts one by one, 1.2 GB a layer) or, with
--fused, of Qwen3.5-35B-A3B's, and a rank-8 adapter of every expert and attention module. Then `cp`, `cp` with
a flush to the disk and `ktbridge merge` take turns; each writes the whole checkpoint.

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
@click.option("--repeat", "--runs", default=3, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="All samples.")
def main(
    directory: str | None,
    layers: int,
    experts: int | None,
    fused: bool,
    repeat: int,
    json_file: Path | None,
) -> None:
    """Measure merge on a checkpoint of a few layers, beside cp."""
    run = new_run(layers=layers, experts=experts, fused=fused, repeat=repeat)
    with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=directory) as name:
        place = Path(name)
        make(place, layers, experts, fused)
        base, copy, out = (place / name for name in ("base", "copy", "out"))
        files = tuple(base.iterdir())
        run["bytes"] = sum(path.stat().st_size for path in files)
        copied = f"cp -r '{base}' '{copy}'"
        cli = [sys.executable, "-m", "ktbridge", "merge", str(place / "raw")]
        merge = [*cli, "--base-model", str(base), "--output", str(out)]
        synced = ["sh", "-c", f"{copied} && sync '{copy}'/*"]
        commands = [
            Command("cp", ["sh", "-c", copied], (), files, (copy,)),
            Command("cp + sync", synced, (), files, (copy,)),
            Command("ktbridge merge", merge, ("cp", "cp + sync"), files, (out,)),
        ]
        compete_as_programs(run, commands, repeat)
    write_run(run, json_file)
    show_programs(run, f"layers: {layers}, experts {'fused' if fused else 'one by one'}")
    sys.exit(1 if run["failed"] else 0)


if __name__ == "__main__":
    main()
