#!/usr/bin/env python3
"""How fast `ktbridge convert` and `ktbridge validate` are, beside `cp` and `cat` of the same bytes.

    scripts/bench_convert.py --dir /mnt/nvme
    scripts/bench_convert.py --repeat 9 --json run.json --reference convert_kt_to_sglang_adapter.py

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
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LAYERS, EXPERTS, RANK, HIDDEN, INTER = 40, 256, 8, 2048, 512
FULL_ATTENTION = {"q_proj": (8192, HIDDEN), "k_proj": (512, HIDDEN), "v_proj": (512, HIDDEN)}
FULL_ATTENTION["o_proj"] = (HIDDEN, 4096)
LINEAR_ATTENTION = {
    "in_proj_qkv": (8192, HIDDEN),
    "in_proj_z": (4096, HIDDEN),
    "in_proj_b": (32, HIDDEN),
    "in_proj_a": (32, HIDDEN),
    "out_proj": (HIDDEN, 4096),
}
# A process between us and the contestant: ru_maxrss starts from what its parent held.
LAUNCH = """
import json, os, sys, time
start = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - start
result = [seconds, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024]
open(sys.argv[1], "w").write(json.dumps(result))
sys.exit(os.waitstatus_to_exitcode(status))
"""
# Pages that the host has given us and that are free again when it exits (23: MADV_POPULATE_WRITE).
TOUCH = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1])).madvise(23)"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
console = Console(highlight=False, soft_wrap=True)


def make_adapter(directory: Path, layers: int, experts: int) -> None:
    """A raw adapter with finite, non-zero values; layers share theirs, which keeps memory small."""
    import numpy as np

    from ktbridge.adapter import Tensor, write_raw_adapter

    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> Tensor:
        # The exponents of numbers around 1e-2: any bits but those of zero, infinity and NaN will do.
        bits = rng.integers(0x3C00, 0x3D00, shape, np.uint16) | (rng.integers(0, 2, shape) << 15)
        return Tensor(name, "BF16", shape, bits.astype(np.uint16).tobytes())

    one = {
        f"{projection}_lora_{half}": tensor("", experts, *shape)
        for projection in ("gate", "up", "down")
        for half, shape in zip(
            "ab",
            [(RANK, INTER), (HIDDEN, RANK)]
            if projection == "down"
            else [(RANK, HIDDEN), (INTER, RANK)],
            strict=True,
        )
    }
    expert = {
        f"layers.{n}.experts.{name}": value for n in range(layers) for name, value in one.items()
    }
    nonexpert = {}
    for layer in range(layers):
        full = layer % 4 == 3
        group = "self_attn" if full else "linear_attn"
        for module, (rows, columns) in (FULL_ATTENTION if full else LINEAR_ATTENTION).items():
            stem = f"base_model.model.model.language_model.layers.{layer}.{group}.{module}"
            nonexpert[f"{stem}.lora_A.weight"] = tensor("", RANK, columns)
            nonexpert[f"{stem}.lora_B.weight"] = tensor("", rows, RANK)
    write_raw_adapter(
        directory,
        expert=expert,
        nonexpert=nonexpert,
        config={
            "r": RANK,
            "lora_alpha": 16,
            "target_modules": sorted({*FULL_ATTENTION, *LINEAR_ATTENTION}),
        },
        base_model="Qwen/Qwen3.5-35B-A3B",
        rank=RANK,
        alpha=16.0,
    )


@dataclass
class Contestant:
    """A command, what it is compared with, and what it did."""

    name: str
    argv: list[str]
    peers: tuple[str, ...] = ()
    outputs: tuple[Path, ...] = ()
    inputs: tuple[Path, ...] = ()
    samples: list[list[float]] = field(default_factory=list)

    def median(self, column: int = 0) -> float:
        return statistics.median(sample[column] for sample in self.samples)

    def run(self, log: Path, touch: bool) -> None:
        """One turn: inputs read into the page cache, old outputs gone, the disk idle."""
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
        command = [sys.executable, "-S", "-c", LAUNCH, str(log), *self.argv]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        if done.returncode:
            raise click.ClickException(f"{self.name} failed:\n{done.stdout}{done.stderr}")
        self.samples.append(json.loads(log.read_text()))


def contestants(raw: Path, place: Path, reference: str | None) -> list[Contestant]:
    """All commands, in the order of their turns."""
    weights = tuple(sorted(raw.glob("*.safetensors")))
    files = " ".join(f"'{path}'" for path in weights)
    copy = f"mkdir '{place}/cp' && cp {files} '{place}/cp'"
    cli = [sys.executable, "-m", "ktbridge"]
    expert, rest = place / "expert", place / "nonexpert"
    serving = [str(expert), str(rest)]
    both = ["--expert-output-dir", serving[0], "--nonexpert-output-dir", serving[1]]
    written = tuple(path / "adapter_model.safetensors" for path in (expert, rest))
    rows = [
        Contestant("cp", ["sh", "-c", copy], (), (place / "cp",), weights),
        Contestant(
            "cp + sync",
            ["sh", "-c", f"{copy} && sync '{place}'/cp/*"],
            (),
            (place / "cp",),
            weights,
        ),
        Contestant(
            "ktbridge convert",
            [*cli, "convert", str(raw), *both],
            ("cp", "cp + sync"),
            (expert, rest),
            weights,
        ),
    ]
    if reference:
        theirs = place / "reference"
        base = ["--base-model-name-or-path", "Qwen/Qwen3.5-35B-A3B", "--lora-alpha", "16"]
        argv = [sys.executable, reference, str(raw), str(theirs), *base]
        rows.append(Contestant("reference", argv, ("cp", "cp + sync"), (theirs,), weights))
    read = ["sh", "-c", f"cat '{written[0]}' '{written[1]}' > /dev/null"]
    check = [*cli, "validate", *serving]
    rows += [
        Contestant("cat", read, (), (), written),
        Contestant(
            "validate --structure-only", [*check, "--structure-only"], ("cat",), (), written
        ),
        Contestant("validate", check, ("cat",), (), written),
    ]
    return rows


def summary(rows: list[Contestant]) -> list[dict[str, Any]]:
    """Medians, and ratios to each peer by name."""
    table = {row.name: row for row in rows}
    return [
        {
            "name": row.name,
            "seconds": row.median(),
            "cpu_seconds": row.median(1) + row.median(2),
            "peak_rss_bytes": int(max(sample[3] for sample in row.samples)),
            "ratios": {peer: row.median() / table[peer].median() for peer in row.peers},
            "samples": row.samples,
        }
        for row in rows
    ]


def show(run: dict[str, Any]) -> None:
    """The table that ``--json`` records."""
    console.print(
        f"{run['tensors']:,} tensors, {run['bytes'] / 1e9:.2f} GB on {run['filesystem']}, "
        f"{run['cpus']} CPUs, medians of {run['repeat']} rounds, page cache warm"
        + (", free memory touched" if run["touch"] else "")
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "seconds", "GB/s", "CPU s", "peak RSS MB", "ratio"):
        table.add_column(title, justify="right" if title else "left")
    for row in run["rows"]:
        ratios = ", ".join(f"{ratio:.2f} x {peer}" for peer, ratio in row["ratios"].items())
        table.add_row(
            row["name"],
            f"{row['seconds']:.2f}",
            f"{run['bytes'] / row['seconds'] / 1e9:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
            ratios,
        )
    console.print(table)


def filesystem(path: Path) -> str:
    """The type of the file system that holds ``path``."""
    done = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


@click.command(context_settings={"max_content_width": 110})
@click.option(
    "--dir",
    "directory",
    type=click.Path(exists=True, file_okay=False),
    help="On the disk to measure.  [default: the temporary directory]",
)
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--layers", default=LAYERS, show_default=True, type=click.IntRange(1))
@click.option("--experts", default=EXPERTS, show_default=True, type=click.IntRange(1))
@click.option(
    "--reference",
    type=click.Path(exists=True, dir_okay=False),
    help="Another converter with the reference script's command line.",
)
@click.option("--touch/--no-touch", default=True, help="Touch free memory before each turn.")
@click.option("--no-validate", is_flag=True, help="Only the conversion.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="All samples."
)
def main(
    directory: str | None,
    repeat: int,
    layers: int,
    experts: int,
    reference: str | None,
    touch: bool,
    no_validate: bool,
    json_file: Path | None,
) -> None:
    """Measure convert and validate on a big adapter, beside cp and cat."""
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=directory) as name:
        place = Path(name)
        raw = place / "raw"
        make_adapter(raw, layers, experts)
        rows = contestants(raw, place, reference)
        if no_validate:
            rows = [row for row in rows if row.name != "cat" and "validate" not in row.name]
        for row in rows:  # validate reads what convert writes, and all first turns are cold
            row.run(place / "usage.json", touch)
            row.samples.clear()
        for turn in range(repeat):
            for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
                row.run(place / "usage.json", touch)
        run = {
            "tensors": 6 * layers * experts + 380 * layers // 40,
            "bytes": sum(path.stat().st_size for path in raw.glob("*.safetensors")),
            "filesystem": filesystem(place),
            "cpus": len(os.sched_getaffinity(0)),
            "repeat": repeat,
            "touch": touch,
            "rows": summary(rows),
        }
    show(run)
    if json_file:
        json_file.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
