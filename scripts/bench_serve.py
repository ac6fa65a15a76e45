#!/usr/bin/env python3
"""Tokens a second of the embedded engine, for one stream and for several, beside transformers' generate.

    scripts/random_checkpoint.py qwen3-30b-a3b /data/small --layers 4 --set num_experts=32
    scripts/bench_serve.py /data/small [--adapter OUTPUT/adapter] [--json run.json]

Ours answers over HTTP, as `ktbridge serve` does for anybody. The peers are transformers' own `generate`, on
the same expert kernels and on its own, in one process without a server: one prompt, and one left-padded batch
of all of them. With --adapter there are rows for each arm, and one whose streams are of all arms at once.
Prompts are random token ids of different lengths, answers are greedy; a tokens/s is all tokens that were
generated over the time from the first request to the last answer, prompts included. All take turns for
--rounds rounds after one that warms up, each with the model in its memory. Needs `ktbridge[serve]`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import click
from peers.driver import Contestant, Record, compete, console, new_run, write_run
from peers.report import Row, named, show_left_out, show_machine, speed_table

from ktbridge.cli._app import Command, terminable
from ktbridge.model import read_model_config

PEER = "generate"


def make_prompts(vocabulary: int, streams: int, length: int) -> list[list[int]]:
    """Random token ids; lengths spread over a half to one and a half of ``length``."""
    draw = random.Random(0)
    lengths = [length // 2 + length * i // max(streams - 1, 1) for i in range(streams)]
    return [[draw.randrange(10, vocabulary) for _ in range(max(one, 1))] for one in lengths]


@click.command(cls=Command)
@click.argument("model")
@click.option("--adapter", metavar="DIR", help="An adapter of any layout: measures every arm, too.")
@click.option("--streams", type=click.IntRange(2), default=8, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Default: physical cores.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="All samples.")
def main(
    model: str,
    adapter: str | None,
    streams: int,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Measure MODEL's embedded engine beside transformers' generate."""
    vocabulary = read_model_config(model).text["vocab_size"]
    case = {"model": model, "adapter": adapter, "tokens": tokens}
    run = new_run(**case, streams=streams, prompt_tokens=prompt_tokens, rounds=rounds)
    threads = run["settings"]["threads"] = threads or run["machine"]["cores"]
    case["prompts"] = make_prompts(vocabulary, streams, prompt_tokens)
    contestants = [
        Contestant(name, "peers.serve_worker", {**case, "way": way}, threads=threads)
        for name, way in (
            (PEER, "generate"),
            ("transformers", "transformers"),
            ("ktbridge", "engine"),
        )
    ]
    with terminable():
        compete(run, contestants, warmups=1, repeat=rounds)
    write_run(run, json_path)
    show(run)
    sys.exit(1 if run["failed"] else 0)


def show(run: Record) -> None:
    settings, peer = run["settings"], named(run, PEER)
    show_machine(console, run["machine"])
    streams = f"{settings['streams']} streams"
    console.print(f"{Path(settings['model']).name}, {settings['threads']} threads")
    rows = []
    for entry in run["contestants"]:
        for row in entry["median"]:
            beside = [("one stream", entry["median"]["1 stream"])]
            if peer and entry is not peer:
                alike = "1 stream" if row.startswith("1 ") else streams
                beside.append((PEER, peer["median"][alike]))
            rows.append(Row(entry, row, beside, name=f"{entry['name']}, {row}"))
    console.print(speed_table("tokens/s", rows, digits=1, largest_is_best=True))
    show_left_out(console, run)


if __name__ == "__main__":
    main()
