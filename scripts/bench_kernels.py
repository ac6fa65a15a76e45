#!/usr/bin/env python3
"""How fast the MoE-LoRA layer is, beside its peers and the machine's own ceilings, in one run.

    scripts/bench_kernels.py --peer kt-kernel --peer torch --json run.json --plot roofline.png
    scripts/bench_kernels.py --shape 64,6,2048,1408,512 --threads 2 --accuracy --peer torch
    scripts/bench_kernels.py --shape 64,6,2048,1408,512 --threads-sweep 1,2,4,8,16
    scripts/bench_kernels.py --decode --peer torch
    scripts/bench_kernels.py --from-json run.json --plot roofline.png

Every contestant is a process with its own copy of the same seeded weights; they take turns, so quote
the ratios, not the milliseconds. peers/cases.py states the floor, peers/pool.py how turns are kept fair.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from peers import report, roofline
from peers.bench import Bench, console, stderr
from peers.cases import Shape
from peers.pool import WorkerError

PEERS_HOME = Path.home() / ".cache" / "ktbridge" / "peers"


# As many choices as experts: each expert has all tokens. Qwen3-30B-A3B's experts and DeepSeek-V3's.
DECODE_SHAPES = tuple(
    Shape(experts, experts, hidden, inner, tokens)
    for experts, hidden, inner in ((32, 2048, 768), (4, 7168, 2048))
    for tokens in (1, 2, 4, 8)
)


class ShapeType(click.ParamType):
    name = "E,K,H,I,T"

    def convert(self, value: Any, param: Any, context: Any) -> Shape:
        try:
            return value if isinstance(value, Shape) else Shape.parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


class Counts(click.ParamType):
    name = "N,N,…"

    def convert(self, value: Any, param: Any, context: Any) -> tuple[int, ...]:
        try:
            counts = value if isinstance(value, tuple) else tuple(map(int, value.split(",")))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a list of positive numbers", param, context)
        return counts


@click.command(context_settings={"max_content_width": 110})
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(["kt-kernel", "torch"]),
    help="Again for both.",
)
@click.option("--shape", "shapes", multiple=True, type=ShapeType(), help="Instead of the defaults.")
@click.option("--large", is_flag=True, help="Also the two default shapes with 8192 tokens.")
@click.option(
    "--decode", is_flag=True, help="Instead: 1, 2, 4 and 8 tokens on each of a few experts."
)
@click.option("--threads", type=click.IntRange(1), help="Default: one a physical core.")
@click.option("--threads-sweep", type=Counts(), help="Only ktbridge, one shape, by threads.")
@click.option("--rank", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--repeat", default=7, show_default=True, type=click.IntRange(1), help="Measured rounds."
)
@click.option("--isa", default="auto", show_default=True, help="ktbridge's kernels.")
@click.option(
    "--accuracy", "accurate", is_flag=True, help="Relative error against float32 autograd."
)
@click.option("--parts", is_flag=True, help="What the main loops take by themselves.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="All samples."
)
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Roofline PNG."
)
@click.option(
    "--from-json", type=click.Path(exists=True, path_type=Path), help="Show a recorded run."
)
@click.option("--peer-dir", default=PEERS_HOME, show_default=True, type=click.Path(path_type=Path))
@click.option("--peer-python", help="An interpreter for kt-kernel, instead of installing it.")
@click.option(
    "--peer-path", help="A directory that holds kt_kernel, for machines without a network."
)
def main(
    peers: tuple[str, ...], shapes: tuple[Shape, ...], json_file: Path | None, **options: Any
) -> None:
    """Measure the MoE-LoRA layer beside its peers."""
    plot_file = options.pop("plot_file")
    if options.pop("decode"):
        shapes = (*shapes, *DECODE_SHAPES)
    if options["from_json"]:
        run = json.loads(options["from_json"].read_text())
        show(run)
    else:
        try:
            bench = Bench(peers, shapes, **options)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        run = bench.run()
    if json_file:
        json_file.write_text(json.dumps(run, indent=1) + "\n")
    if plot_file and run["shapes"]:
        roofline.draw(run, plot_file)
    if run.get("failed"):
        sys.exit(1)


def show(run: dict[str, Any]) -> None:
    report.print_machine(console, run["machine"])
    for result in run["shapes"]:
        report.print_result(console, result)
    for result in run["sweep"]:
        console.print(report.sweep_table(result))
    for sentence in run["skipped"] + run["failed"]:
        console.print(sentence, markup=False, highlight=False)


if __name__ == "__main__":
    try:
        main()
    except (WorkerError, subprocess.CalledProcessError) as error:
        stderr.print(f"error: {error}", markup=False, highlight=False)
        sys.exit(1)
