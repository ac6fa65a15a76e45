#!/usr/bin/env python3
"""Time `ktbridge convert` and `validate`, or `merge`, beside `cp` and `cat` of the same bytes.

    scripts/bench_convert.py --dir /mnt/nvme
    scripts/bench_convert.py --repeat 9 --json run.json
    scripts/bench_convert.py --merge --dir /mnt/nvme [--layers 2] [--fused]

It makes a raw adapter of Qwen3.5-35B-A3B's size (40 layers x 256 experts, r=8: 61,440 expert
tensors in 1.26 GB, and 380 others), then lets real processes take turns: quote the ratios, not the
seconds. Each starts with its input in the page cache, no output, an idle disk, and free memory
that was touched just before: in a virtual machine the first touch of a page costs the host's time,
which falls on whoever comes first and flatters the slower (`--no-touch` leaves it so). `cp` leaves
its bytes in the page cache; `cp + sync` waits until they are on the disk, as `ktbridge convert`
does before it renames, so that is the like-for-like peer.

The floor is the manifest's SHA-256, which one core computes one block after another: 1.26 GB at the
1.6 GB/s of OpenSSL with SHA instructions are 0.78 s, beside which copying and the disk work.
Starting Python, planning and 61,820 header entries come before it, flushing and the summary after.
The input's own hashes are compared too, which keeps another core as busy. Seen on four cores of a
Xeon: cp 0.43 s, cp + sync 0.95 s, ktbridge convert 1.55 s (and as much without comparing them); on
two of them: cp 0.41 s, cp + sync 0.97 s, ktbridge convert 1.86 s (1.47 s without).

With --merge it makes a random checkpoint of a few of Qwen3-30B-A3B's layers (experts one by one, 1.2 GB a
layer) or, with --fused, of Qwen3.5-35B-A3B's, and a rank-8 adapter of every expert and attention module. The
floor, for V values of two bytes and rank r, is what `cp` does (each byte copied once from page cache to page
cache, and every page allotted and flushed), one more copy, 2 r V operations in float32 and Python's start.
For a layer of Qwen3-30B-A3B (1.28 GB, V = 0.62 G) on a core of an EPYC: cp 0.6 s, the other copy 0.16 s,
10 GFLOP at 90 GFLOP/s 0.11 s, the start 0.2 s: 1.1 s of CPU. Computing is spread over the cores. It needs
`ktbridge[train]`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from peers.driver import (
    Contestant,
    Record,
    Worker,
    compete,
    console,
    new_run,
    program,
    quartiles,
    write_run,
)
from peers.report import Row, named, show_left_out, show_machine, speed_table

from ktbridge.adapter import Tensor, write_raw_adapter

# Pages that the host has given us and that are free again when it exits (23: MADV_POPULATE_WRITE).
TOUCH = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1])).madvise(23)"
RANK = 8
VOCABULARY = 4096  # merging copies embeddings, whatever their size
Modules = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Sizes:
    """Sizes from which an adapter's tensors follow; ``modules`` gives a layer's by path, as [out, in]."""

    base_model: str
    prefix: str
    layers: int
    experts: int
    hidden: int
    inner: int
    modules: Callable[[int], Modules]


def qwen35_modules(layer: int) -> Modules:
    if layer % 4 == 3:
        return {**qwen3_modules(layer), "self_attn.q_proj": (8192, 2048)}
    return {
        "linear_attn.in_proj_qkv": (8192, 2048),
        "linear_attn.in_proj_z": (4096, 2048),
        "linear_attn.in_proj_b": (32, 2048),
        "linear_attn.in_proj_a": (32, 2048),
        "linear_attn.out_proj": (2048, 4096),
    }


def qwen3_modules(layer: int) -> Modules:
    sizes = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
    return {f"self_attn.{name}_proj": size for name, size in sizes.items()}


def qwen35_sizes(layers: int = 40, experts: int = 256) -> Sizes:
    prefix = "model.language_model.layers"
    name = "Qwen/Qwen3.5-35B-A3B"
    return Sizes(name, prefix, layers, experts, 2048, 512, qwen35_modules)


def make_adapter(directory: Path, sizes: Sizes) -> int:
    """A raw adapter with finite, non-zero values; how many pairs of modules and experts it has.

    Layers share their experts' values, which keeps memory small.
    """
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> Tensor:
        # The exponents of numbers around 1e-2: any bits but those of zero, infinity and NaN will do.
        bits = rng.integers(0x3C00, 0x3D00, shape, np.uint16) | (rng.integers(0, 2, shape) << 15)
        return Tensor(name, "BF16", shape, bits.astype(np.uint16).tobytes())

    one = {}
    for projection in ("gate", "up", "down"):
        inputs, outputs = sizes.hidden, sizes.inner
        if projection == "down":
            inputs, outputs = outputs, inputs
        one[f"{projection}_lora_a"] = tensor("", sizes.experts, RANK, inputs)
        one[f"{projection}_lora_b"] = tensor("", sizes.experts, outputs, RANK)
    expert = {
        f"layers.{layer}.experts.{name}": value
        for layer in range(sizes.layers)
        for name, value in one.items()
    }
    nonexpert, targets = {}, set()
    for layer in range(sizes.layers):
        for path, (rows, columns) in sizes.modules(layer).items():
            stem = f"base_model.model.{sizes.prefix}.{layer}.{path}"
            nonexpert[f"{stem}.lora_A.weight"] = tensor("", RANK, columns)
            nonexpert[f"{stem}.lora_B.weight"] = tensor("", rows, RANK)
            targets.add(path.rpartition(".")[2])
    write_raw_adapter(
        directory,
        expert=expert,
        nonexpert=nonexpert,
        config={"r": RANK, "lora_alpha": 16, "target_modules": sorted(targets)},
        base_model=sizes.base_model,
        rank=RANK,
        alpha=16.0,
    )
    return 6 * sizes.layers * sizes.experts + len(nonexpert)


@dataclass(frozen=True)
class Command:
    """A contestant's command, the names it is compared with, what it reads and what it writes."""

    name: str
    argv: list[str]
    peers: tuple[str, ...] = ()
    inputs: tuple[Path, ...] = ()
    outputs: tuple[Path, ...] = ()

    def prepare(self, touch: bool) -> None:
        """Inputs read into the page cache, old outputs gone, the disk idle."""
        for output in self.outputs:
            shutil.rmtree(output, ignore_errors=True)
        for path in self.inputs:
            with open(path, "rb") as file:
                while file.read(1 << 22):
                    pass
        os.sync()
        if touch:
            size = 2 * sum(path.stat().st_size for path in self.inputs)
            subprocess.run([sys.executable, "-S", "-c", TOUCH, str(size)], check=False)


def compete_as_programs(run: Record, commands: list[Command], repeat: int, touch: bool = False) -> None:
    """Let commands take turns after a round that isn't counted: all first turns are cold."""
    by_name = {command.name: command for command in commands}

    def prepare(worker: Worker) -> None:
        by_name[worker.contestant.name].prepare(touch)

    contestants: list[Contestant] = [program(one.name, one.argv) for one in commands]
    compete(run, contestants, warmups=1, repeat=repeat, prepare=prepare)
    run.setdefault("peers", {}).update({one.name: one.peers for one in commands})


def show_programs(run: Record, what: str) -> None:
    """A table of seconds, and of ``run["bytes"]`` a second."""
    show_machine(console, run["machine"])
    console.print(f"{what}, {run['bytes'] / 1e9:.2f} GB, {run['settings']['repeat']} rounds")
    rows = []
    for entry in run["contestants"]:
        middle = entry["median"]
        measured = [(peer, named(run, peer)) for peer in run["peers"][entry["name"]]]
        beside = [(peer, other["median"]["seconds"]) for peer, other in measured if other]
        more = [
            f"{run['bytes'] / middle['seconds'] / 1e9:.2f}",
            f"{middle['cpu']:.2f}",
            f"{max(entry['samples']['peak']) / 1e6:.0f}",
        ]
        rows.append(Row(entry, "seconds", beside, more))
    console.print(speed_table("seconds", rows, ["GB/s", "CPU s", "peak MB"]))
    for entry in run["contestants"]:
        for peer in run["peers"][entry["name"]]:
            if other := named(run, peer):
                wall, cpu = (paired(entry, other, what) for what in ("seconds", "cpu"))
                console.print(f"{entry['name']} / {peer}, round by round: {wall}; CPU {cpu}")
    show_left_out(console, run)


def paired(entry: Record, other: Record, what: str) -> str:
    """Median and quartiles of the ratios of two contestants within a round, whose noise is alike."""
    both = zip(entry["samples"][what], other["samples"][what], strict=True)
    ratios = [ours / theirs for ours, theirs in both]
    first, third = quartiles(ratios)
    return f"{statistics.median(ratios):.2f}x ({first:.2f} – {third:.2f})"


def commands_of(raw: Path, place: Path) -> list[Command]:
    """All of them, those that write before those that read what was written."""
    weights = tuple(sorted(raw.glob("*.safetensors")))
    files = " ".join(f"'{path}'" for path in weights)
    copy = f"mkdir '{place}/cp' && cp {files} '{place}/cp'"
    synced = f"{copy} && sync '{place}'/cp/*"
    cli = [sys.executable, "-m", "ktbridge"]
    expert, rest = place / "expert", place / "nonexpert"
    both = ["--expert-output-dir", str(expert), "--nonexpert-output-dir", str(rest)]
    convert = [*cli, "convert", str(raw), *both]
    like = ("cp", "cp + sync")
    return [
        Command("cp", ["sh", "-c", copy], (), weights, (place / "cp",)),
        Command("cp + sync", ["sh", "-c", synced], (), weights, (place / "cp",)),
        Command("ktbridge convert", convert, like, weights, (expert, rest)),
    ]


def checks_of(place: Path) -> list[Command]:
    """`ktbridge validate` of what convert wrote, beside reading it."""
    serving = [str(place / "expert"), str(place / "nonexpert")]
    written = tuple(Path(folder) / "adapter_model.safetensors" for folder in serving)
    read = ["sh", "-c", f"cat '{written[0]}' '{written[1]}' > /dev/null"]
    check = [sys.executable, "-m", "ktbridge", "validate", *serving]
    structure = [*check, "--structure-only"]
    return [
        Command("cat", read, (), written),
        Command("validate --structure-only", structure, ("cat",), written),
        Command("validate", check, ("cat",), written),
    ]


def merge_of(place: Path, layers: int, experts: int | None, fused: bool) -> list[Command]:
    """Make a checkpoint and its adapter in ``place``; `ktbridge merge` of them beside copies."""
    from random_checkpoint import make_checkpoint

    changes = {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    changes |= {"num_experts": experts} if experts else {}
    make_checkpoint(place / "base", "qwen3.5-35b-a3b" if fused else "qwen3-30b-a3b", changes)
    if fused:
        sizes = qwen35_sizes(layers, experts or 256)
    else:
        name, count = "Qwen/Qwen3-30B-A3B", experts or 128
        sizes = Sizes(name, "model.layers", layers, count, 2048, 768, qwen3_modules)
    make_adapter(place / "raw", sizes)
    base, copy, out = (place / name for name in ("base", "copy", "out"))
    files = tuple(base.iterdir())
    copied = f"cp -r '{base}' '{copy}'"
    cli = [sys.executable, "-m", "ktbridge", "merge", str(place / "raw")]
    merge = [*cli, "--base-model", str(base), "--output", str(out)]
    like = ("cp", "cp + sync")
    synced = ["sh", "-c", f"{copied} && sync '{copy}'/*"]
    return [
        Command("cp", ["sh", "-c", copied], (), files, (copy,)),
        Command("cp + sync", synced, (), files, (copy,)),
        Command("ktbridge merge", merge, like, files, (out,)),
    ]


@click.command(context_settings={"max_content_width": 110})
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="On the disk to measure.  [default: the temporary directory]",
)
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--layers", type=click.IntRange(1), help="[default: 40; 2 with --merge]")
@click.option("--experts", type=click.IntRange(1), help="Fewer than the model has.")
@click.option("--merge", is_flag=True, help="`ktbridge merge` of a checkpoint of a few layers.")
@click.option("--fused", is_flag=True, help="With --merge: experts in fused tensors.")
@click.option("--touch/--no-touch", default=True, help="Touch free memory before each turn.")
@click.option("--no-validate", is_flag=True, help="Only the conversion.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="All samples.")
def main(
    directory: str | None,
    layers: int | None,
    experts: int | None,
    merge: bool,
    fused: bool,
    no_validate: bool,
    json_file: Path | None,
    **settings: Any,
) -> None:
    """Measure convert and validate on a big adapter, or merge, beside cp and cat."""
    run = new_run(**settings)
    if merge:
        with tempfile.TemporaryDirectory(prefix="bench-merge-", dir=directory) as name:
            commands = merge_of(Path(name), layers or 2, experts, fused)
            run["bytes"] = sum(path.stat().st_size for path in commands[0].inputs)
            compete_as_programs(run, commands, **settings)
        write_run(run, json_file)
        show_programs(run, f"layers: {layers or 2}, experts {'fused' if fused else 'one by one'}")
        sys.exit(1 if run["failed"] else 0)
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=directory) as name:
        place = Path(name)
        raw = place / "raw"
        run["tensors"] = make_adapter(raw, qwen35_sizes(layers or 40, experts or 256))
        run["bytes"] = sum(path.stat().st_size for path in raw.glob("*.safetensors"))
        told = subprocess.run(["stat", "-f", "-c", "%T", name], capture_output=True, text=True)
        run["filesystem"] = told.stdout.strip() or "unknown"
        compete_as_programs(run, commands_of(raw, place), **settings)
        if not no_validate and named(run, "ktbridge convert"):
            compete_as_programs(run, checks_of(place), **settings)
    write_run(run, json_file)
    touched = ", free memory touched" if settings["touch"] else ""
    show_programs(run, f"{run['tensors']:,} tensors on {run['filesystem']}{touched}")
    sys.exit(1 if run["failed"] else 0)


if __name__ == "__main__":
    main()
