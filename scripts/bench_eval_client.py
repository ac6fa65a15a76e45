#!/usr/bin/env python3
"""Requests a second of ktbridge eval's client, beside lm-evaluation-harness's on the same server.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install 'lm_eval[api]'
    scripts/bench_eval_client.py --peer-python /tmp/peer/bin/python [--json run.json]

The server is a process of its own on loopback that answers at once with the same completion
(peers/chat_server.py), so that the client is what is measured. Each client is one process that asks the
same prompts with --concurrency requests in flight; programs start and import before the clock does. Rounds
take turns, and a number is the median over them, with the lowest and the highest. On a busy machine the
last column, processor time, says more than the rates. Rows:

    run      what `ktbridge eval` does until the report: preflight, keys, requests, answers on disk
    client   the requests alone: the openai package's HTTP client on aiohttp, replies read by us
    openai   the requests alone through AsyncOpenAI on the same HTTP client
    peer     lm_eval's local-chat-completions, generate_until; it stores nothing
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from peers.machine import cpu_model
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError

PEERS = Path(__file__).parent / "peers"
FLOOR = 1000  # requests a second that are asked of us
SLOW = 8  # how many times fewer requests the openai row is given
console, stderr = Console(highlight=False), Console(stderr=True, highlight=False)


@contextmanager
def server() -> Iterator[str]:
    words = [sys.executable, str(PEERS / "chat_server.py")]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def measure(words: list[str], url: str, count: int, concurrency: int) -> dict[str, Any]:
    """One round of one client: requests a second, and microseconds of CPU a request."""
    # The harness is told not to look for its tasks' data.
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*words, url, str(count), str(concurrency)],
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise KtbridgeError(f"{words[-1]} failed.", done.stderr[-2000:]) from None
    if done.returncode or told["answers"] != count:
        raise KtbridgeError(f"{words[-1]} had {told['answers']} of {count} answers.")
    used = 1e6 * told["cpu"] / count
    return {"rate": count / told["seconds"], "cpu": used, "version": told.get("version", "")}


@click.command(cls=Command, help=__doc__.split("\n\n")[0])
@click.option("--peer-python", type=click.Path(path_type=Path), help="A Python with lm_eval[api].")
@click.option("--count", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--concurrency", type=click.IntRange(1, 1024), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers here."
)
def main(
    peer_python: Path | None, count: int, concurrency: int, rounds: int, json_path: Path | None
) -> None:
    ours = [sys.executable, str(PEERS / "eval_client_worker.py")]
    clients = {"run": [*ours, "run"], "client": [*ours, "client"], "openai": [*ours, "openai"]}
    if peer_python:
        clients["peer"] = [str(peer_python), str(PEERS / "lm_eval_worker.py")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    with server() as url:
        for turn in range(rounds):
            for name, words in clients.items():
                asked = max(count // SLOW, concurrency) if name == "openai" else count
                found[name].append(measure(words, url, asked, concurrency))
                told = f"round {turn + 1}, {name}: {found[name][-1]['rate']:.0f}/s"
                stderr.print(told, soft_wrap=True)
    rates = {name: [one["rate"] for one in rows] for name, rows in found.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    cpu = {name: statistics.median(one["cpu"] for one in rows) for name, rows in found.items()}
    table = Table(box=SIMPLE_HEAD)
    for heading in ("client", "requests/s", "lowest", "highest", "to peer", "CPU µs/request"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for name, values in rates.items():
        ratio = f"{median[name] / median['peer']:.2f}" if "peer" in median else "–"
        numbers = (median[name], min(values), max(values))
        used = f"{cpu[name]:.0f}"
        table.add_row(name, *(f"{number:.0f}" for number in numbers), ratio, used)
    version = found["peer"][0]["version"] if peer_python else ""
    console.print(table)
    console.print(
        f"{cpu_model()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {concurrency} in "
        f"flight, {count} requests, {rounds} rounds" + (f"; lm_eval {version}" if version else ""),
        soft_wrap=True,
    )
    if json_path:
        told = {
            "rates": rates,
            "median": median,
            "cpu_us": cpu,
            "lm_eval": version,
            "concurrency": concurrency,
        }
        json_path.write_text(json.dumps({**told, "count": count}, indent=1) + "\n", "utf-8")
    if median["run"] < FLOOR:
        stderr.print(f"run is below {FLOOR} requests a second", soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
