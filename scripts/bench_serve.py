#!/usr/bin/env python3
"""Tokens a second of the embedded engine, for one stream and for several, beside transformers' generate.

    scripts/random_checkpoint.py qwen3-30b-a3b /data/small --layers 4 --set num_experts=32
    scripts/bench_serve.py /data/small [--adapter OUTPUT/adapter] [--json run.json]

Ours answers over HTTP, as `ktbridge serve` does for anybody. The peer is transformers' own `generate` on the
same expert kernels, in one process without a server: one prompt, and one left-padded batch of all of them.
With --adapter there are rows for each arm, and one whose streams are of all arms at once. Prompts are random
token ids of different lengths, answers are greedy; a tokens/s is all tokens that were generated over the
time from the first request to the last answer, prompts included. Each number is the best of --rounds rounds,
which take turns; the first round warms up and is not counted. Needs `ktbridge[serve]`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from peers.machine import cpu_model, physical_cores
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ktbridge.cli._app import Command, terminable
from ktbridge.errors import KtbridgeError
from ktbridge.model import read_model_config
from ktbridge.serve.chat import engine

console, stderr = Console(highlight=False), Console(stderr=True, highlight=False)
PEER = Path(__file__).parent / "peers" / "generate_worker.py"


def make_prompts(vocabulary: int, streams: int, length: int) -> list[list[int]]:
    """Random token ids; lengths spread over a half to one and a half of ``length``."""
    draw = random.Random(0)
    lengths = [length // 2 + length * i // max(streams - 1, 1) for i in range(streams)]
    return [[draw.randrange(10, vocabulary) for _ in range(max(one, 1))] for one in lengths]


def ask(url: str, key: str, model: str, prompt: list[int], tokens: int) -> int:
    """One answer over HTTP; how many tokens it has."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=3600) as response:
        return json.load(response)["usage"]["completion_tokens"]


def speed(url: str, key: str, models: list[str], prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second of all ``prompts`` at once; the i-th goes to the i-th of ``models``, in turn."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        made = [
            pool.submit(ask, url, key, models[i % len(models)], prompt, tokens)
            for i, prompt in enumerate(prompts)
        ]
        total = sum(each.result() for each in made)
        return total / (time.perf_counter() - start)


def ours(case: dict[str, Any], rounds: int) -> dict[str, float]:
    """Best tokens a second by row of the table."""
    prompts, tokens = case["prompts"], case["tokens"]
    one, best = [prompts[len(prompts) // 2]], dict[str, float]()
    with engine(case["model"], case["adapter"], case["threads"]) as child:
        url, key, listed = child.url, child.key, child.models
        rows = {"1 stream": ([listed[0]], one)}
        rows |= {f"{len(prompts)} streams, {name}": ([name], prompts) for name in listed}
        if case["adapter"]:
            rows |= {f"1 stream, {listed[1]}": ([listed[1]], one)}
            rows |= {f"{len(prompts)} streams, all arms": (listed, prompts)}
        for turn in range(rounds + 1):
            for row, (models, some) in rows.items():
                found = speed(url, key, models, some, tokens)
                stderr.print(f"ktbridge: {row}: {found:.1f} tokens/s", markup=False)
                if turn:
                    best[row] = max(best.get(row, 0), found)
    return best


def peer(case: dict[str, Any], rounds: int) -> dict[str, float]:
    command = [sys.executable, str(PEER), json.dumps(case | {"rounds": rounds})]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise KtbridgeError(
            f"the peer failed with code {done.returncode}.", "what it said is above"
        )
    return json.loads(done.stdout.splitlines()[-1])


@click.command(cls=Command)
@click.argument("model")
@click.option("--adapter", metavar="DIR", help="An adapter of any layout: measures every arm, too.")
@click.option("--streams", type=click.IntRange(2), default=8, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Default: physical cores.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Keep the numbers.")
def main(
    model: str,
    adapter: str | None,
    streams: int,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    threads: int | None,
    json_path: str | None,
) -> None:
    """Measure MODEL's embedded engine beside transformers' generate."""
    vocabulary = read_model_config(model).text["vocab_size"]
    case = {
        "model": model,
        "adapter": adapter,
        "threads": threads or physical_cores(),
        "prompts": make_prompts(vocabulary, streams, prompt_tokens),
        "tokens": tokens,
    }
    with terminable():
        found = {"generate": peer(case, rounds), "ktbridge": ours(case, rounds)}
    run = {"machine": cpu_model(), "case": case, "tokens_per_second": found}
    if json_path:
        Path(json_path).write_text(json.dumps(run, indent=1))
    show(run, streams)


def show(run: dict[str, Any], streams: int) -> None:
    case, found = run["case"], run["tokens_per_second"]
    alone, together = found["generate"]["1 stream"], found["generate"][f"{streams} streams"]
    single = found["ktbridge"]["1 stream"]
    table = Table(
        *("who", "row", "tokens/s", "to one stream", "to generate"),
        title=f"{Path(case['model']).name}, {run['machine']}, {case['threads']} threads",
        box=SIMPLE_HEAD,
    )
    table.add_row("generate", "1 stream", f"{alone:.1f}", "1.00", "1.00")
    table.add_row(
        "generate", f"batch of {streams}", f"{together:.1f}", f"{together / alone:.2f}", "1.00"
    )
    for row, value in found["ktbridge"].items():
        beside = alone if row.startswith("1 ") else together
        ratios = f"{value / single:.2f}", f"{value / beside:.2f}"
        table.add_row("ktbridge", row, f"{value:.1f}", *ratios)
    console.print(table)


if __name__ == "__main__":
    main()
