#!/usr/bin/env python3
"""Requests a second of `ktbridge eval`'s asking loop beside lm-evaluation-harness's client, on one server.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install 'lm_eval[api]'
    scripts/bench_eval_client.py --peer-python /tmp/peer/bin/python [--json run.json]

The server is a process of its own on loopback that answers at once with the same completion
(peers/chat_server.py), so that the client is what is measured. Each client is a process that asks the same
prompts with --concurrency requests in flight, once a round; they take turns. On a busy machine processor
time says more than the rates. Clients:

    ktbridge eval    what the command does until the report: preflight, keys, requests, answers on disk
    requests alone   the same without all but the requests
    lm-eval          local-chat-completions, generate_until; it stores nothing
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from peers.driver import SCRIPTS, Contestant, Record, compete, console, new_run, say, write_run
from peers.report import Row, named, show_left_out, show_machine, speed_table

from ktbridge.cli._app import Command

OURS, PEER = "ktbridge eval", "lm-eval"
WAYS = {OURS: "eval", "requests alone": "client", PEER: "lm-eval"}
FLOOR = 600  # requests a second that are asked of us


@contextmanager
def server() -> Iterator[str]:
    words = [sys.executable, str(SCRIPTS / "peers" / "chat_server.py")]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


@click.command(cls=Command, help=__doc__.split("\n\n")[0])
@click.option("--peer-python", type=click.Path(path_type=Path), help="A Python with lm_eval[api].")
@click.option("--count", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--concurrency", type=click.IntRange(1, 1024), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="All samples.")
def main(
    peer_python: Path | None, count: int, concurrency: int, rounds: int, json_path: Path | None
) -> None:
    run = new_run(count=count, concurrency=concurrency, rounds=rounds)
    ways = WAYS.copy()
    if peer_python is None:
        del ways[PEER]
        say(f"{PEER} is left out: --peer-python names no interpreter that has it.", run["skipped"])
    with server() as url:
        spec = {"url": url, "count": count, "concurrency": concurrency}
        contestants = [
            Contestant(
                name,
                "peers.eval_client_worker",
                {**spec, "way": way},
                python=str(peer_python) if name == PEER else sys.executable,
            )
            for name, way in ways.items()
        ]
        compete(run, contestants, warmups=1, repeat=rounds)
    write_run(run, json_path)
    show(run)
    ours = named(run, OURS)
    if ours is not None and max(ours["samples"]["rate"]) < FLOOR:
        say(f"{OURS} is below {FLOOR} requests a second")
    sys.exit(1 if run["failed"] or ours is None else 0)


def show(run: Record) -> None:
    settings, peer = run["settings"], named(run, PEER)
    show_machine(console, run["machine"])
    console.print(
        f"{settings['concurrency']} in flight, {settings['count']} requests, "
        f"{settings['rounds']} rounds" + (f"; lm_eval {peer['version']}" if peer else "")
    )
    beside = [(PEER, peer["median"]["rate"])] if peer else []
    rows = (
        Row(entry, "rate", beside, [f"{entry['median']['cpu_us']:.0f}"])
        for entry in run["contestants"]
    )
    title = "CPU µs/request"
    console.print(speed_table("requests/s", rows, [title], digits=0, largest_is_best=True))
    show_left_out(console, run)


if __name__ == "__main__":
    main()
