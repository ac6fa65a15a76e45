#!/usr/bin/env python3
"""Time that Python takes to start work on a GPU, alone and beside what a training run has there.

    scripts/bench_launches.py --json launches.json

Operations of torch, a kernel of ours in Triton, a chain of autograd functions and products are started while
nothing else runs, while the link is busy with transfers to the GPU, with those and gradients on their way
back, while a thread updates weights by AdamW, and with that and transfers. *Started*: until Python is done;
*done*: until the GPU is. ``loop`` is Python alone, to see how even the host's cores are.
``ktbridge.experts.gpu.placement`` has a factor from it. Needs a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import click
import torch
from peers.driver import console, new_run, write_run
from peers.report import plain_table
from peers.training import gpu_name

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.experts.gpu import operations

BYTES = 1 << 30
COPIES = 4  # of BYTES: longer than any of WORK takes
BESIDE = ("alone", "to the GPU", "both ways", "AdamW", "to the GPU, AdamW")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx, d):  # type: ignore[no-untyped-def, override]
        return d * 2


class Machine:
    """What is timed, and what it is timed beside."""

    def __init__(self) -> None:
        self._pinned = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        self._back = torch.empty(BYTES // 4, dtype=torch.uint8, pin_memory=True)
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        weights = torch.nn.Parameter(torch.zeros(60_000_000))
        weights.grad = torch.zeros_like(weights)
        self._adam = torch.optim.AdamW([weights], lr=1e-9, fused=True)
        fewer = max(1, torch.get_num_threads() // 2)  # as in training
        self._thread = ThreadPoolExecutor(1, "masters", torch.set_num_threads, (fewer,))
        self._x = torch.zeros(1024, device="cuda")
        self._few = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
        self._tokens = torch.arange(64, device="cuda")
        self._trained = torch.zeros(64, 64, device="cuda", requires_grad=True)
        self._rows = torch.zeros(8192, 2048, device="cuda", dtype=torch.bfloat16)
        self._matrix = torch.zeros(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.work: dict[str, Callable[[], object]] = {
            "loop": lambda: sum(k & 3 for k in range(150_000)),
            "torch": lambda: [self._x.add_(1) for _ in range(800)],
            "Triton": lambda: [operations.gather_rows(self._few, self._tokens, 0) for _ in range(800)],
            "autograd": self._chain,
            "products": lambda: [self._rows @ self._matrix for _ in range(300)],
        }

    def _chain(self) -> None:
        x = self._trained
        for _ in range(150):
            x = _Doubled.apply(x) * 1.5
        x.sum().backward()

    def transfer(self, beside: str) -> None:
        """Queue the transfers of one of ``BESIDE``."""
        if "GPU" in beside or beside == "both ways":
            with torch.cuda.stream(self._streams[0]):
                for _ in range(COPIES):
                    self._there.copy_(self._pinned, non_blocking=True)
        if beside == "both ways":
            with torch.cuda.stream(self._streams[1]):
                for _ in range(2 * COPIES):
                    self._back.copy_(self._there[: BYTES // 4], non_blocking=True)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Have a thread update weights meanwhile, by half of torch's threads."""
        ended = threading.Event()

        def update() -> None:
            while not ended.is_set():
                self._adam.step()

        updates = self._thread.submit(update)
        time.sleep(0.02)
        try:
            yield
        finally:
            ended.set()
            updates.result()


def time_once(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until Python is done with ``work``, and until the GPU is."""
    stream = torch.cuda.current_stream()
    stream.synchronize()
    began = time.perf_counter()
    work()
    started = time.perf_counter()
    stream.synchronize()
    return 1000 * (started - began), 1000 * (time.perf_counter() - began)


@click.command(cls=Command)
@click.option("--rounds", default=8, show_default=True, type=click.IntRange(1))
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Keep the samples.")
def main(rounds: int, path: Path | None) -> None:
    """Time starts of work on a GPU alone, and beside transfers and AdamW, by turns."""
    if not torch.cuda.is_available():
        raise KtbridgeError("there is no GPU here.", "Run this on a machine with one.")
    machine = Machine()
    for work in machine.work.values():
        work()
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {
        beside: {name: [] for name in machine.work} for beside in BESIDE
    }
    for _ in range(rounds):
        for beside in BESIDE:
            for name, work in machine.work.items():
                torch.cuda.synchronize()
                machine.transfer(beside)
                with machine.updating() if "AdamW" in beside else nullcontext():
                    samples[beside][name].append(time_once(work))
    made = plain_table("ms, started / done", *machine.work)
    for beside in BESIDE:
        cells = [
            " / ".join(f"{median(column):.1f}" for column in zip(*samples[beside][name], strict=True))
            for name in machine.work
        ]
        made.add_row(beside, *cells)
    console.print(made)
    run = new_run(rounds=rounds)
    write_run({**run, "machine": {**run["machine"], "gpu": gpu_name()}, "samples": samples}, path)


if __name__ == "__main__":
    main()
