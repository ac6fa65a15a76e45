#!/usr/bin/env python3
"""A step of `ktbridge train` as a timeline: when the link and the GPU are busy, and what ran in pauses.

    scripts/timeline.py record STEP.json -- train CONFIG kt_config.kt_experts=auto
    scripts/timeline.py show STEP.json other.json --plot timeline.png

``record`` runs ktbridge with the words behind ``--`` in this process, and torch's profiler from the end of
one optimizer step to the end of the next (--step); of several processes the first one's. bench_placement.py
does so with --timeline. ``show`` prints the milliseconds in which the link is busy with transfers to the GPU,
in which the GPU computes, in which neither is, and in which processes exchange (NCCL, waiting for each other
counted in), and the longest pauses of the link with the kernels that ran in them; --plot draws them.
Needs `ktbridge[train]` and a GPU; ``show`` needs none.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from peers.driver import Record, console
from peers.report import plain_table

from ktbridge.cli._app import Command
from ktbridge.errors import KtbridgeError
from ktbridge.files.publish import write_text

Interval = tuple[float, float]
"""From and to, milliseconds since the step began."""
TO_GPU = "Memcpy HtoD"
STEP = 7
"""Recorded by default: nothing is compiled, measured or moved any more."""
PAUSES = 6
"""Number of the link's longest pauses that are told."""


def join_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what ``intervals`` cover, in order and apart from each other."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def sum_lengths(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def find_pauses(covered: Sequence[Interval], end: float) -> list[Interval]:
    """Return what of 0 to ``end`` the intervals of ``join_intervals`` leave free."""
    edges = [0.0, *(edge for interval in covered for edge in interval), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(begin, until) for begin, until in pairs if until > begin]


def sum_within(events: Iterable[tuple[str, float, float]], begin: float, end: float) -> Counter[str]:
    """Milliseconds of each name's events between ``begin`` and ``end``."""
    found: Counter[str] = Counter()
    for name, since, until in events:
        if (shared := min(end, until) - max(begin, since)) > 0:
            found[name] += shared
    return found


def summarize(events: Sequence[tuple[str, float, float]], step: float) -> Record:
    """Return the record of a step of ``step`` ms: ``events`` are names and times of kernels and copies."""
    link = join_intervals((begin, end) for name, begin, end in events if name.startswith(TO_GPU))
    kernels = [each for each in events if not each[0].startswith("Memcpy")]
    gpu = join_intervals((begin, end) for _, begin, end in kernels)
    longest = sorted(find_pauses(link, step), key=lambda pause: pause[0] - pause[1])[:PAUSES]
    return {
        "step": step,
        "link": link,
        "gpu": gpu,
        "nccl": join_intervals((begin, end) for name, begin, end in kernels if "nccl" in name),
        "kernels": sum_within(kernels, 0, step).most_common(20),
        "pauses": [
            {"from": begin, "to": end, "kernels": sum_within(kernels, begin, end).most_common(4)}
            for begin, end in sorted(longest)
        ],
    }


def device_events(events: Iterable[Any], took: float) -> list[tuple[str, float, float]]:
    """Return names and times of the profiler's kernels and copies in a step of ``took`` ms.

    The host's calls of CUDA are among ``events``, too. The step ends with the last of all.
    """
    from torch.autograd import DeviceType

    found = [(each, each.time_range) for each in events]
    last = max((times.end for _, times in found), default=0.0)  # µs
    return [
        (each.name, took - (last - times.start) / 1000, took - (last - times.end) / 1000)
        for each, times in found
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]


class Recorder:
    """Profiles from the end of step ``step`` - 1 to the end of ``step``, counted by the optimizer."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._path, self._step, self._done = path, step, 0
        self.recorded = False
        self._optimizer: object = None
        self._profile = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self._began = 0.0

    def __call__(self, optimizer: object, *_: object) -> None:
        import torch

        if optimizer is not self._optimizer:  # after those with which steps are timed in advance
            self._optimizer, self._done = optimizer, 0
        self._done += 1
        if self._done == self._step - 1:
            torch.cuda.synchronize()
            self._profile.start()
            self._began = time.perf_counter()
        elif self._done == self._step:
            from ktbridge.experts.gpu.timing import detach_profiler

            torch.cuda.synchronize()
            took = 1000 * (time.perf_counter() - self._began)
            self._profile.stop()
            self._write(took)
            detach_profiler(torch.device("cuda"))  # the steps behind it are as those before

    def _write(self, took: float) -> None:
        events = device_events(self._profile.events(), took)
        write_text(self._path, json.dumps(summarize(events, took)) + "\n")
        self.recorded = True


def read_step(path: Path) -> Record:
    """Read what ``summarize`` made. Raises KtbridgeError where a file holds something else."""
    try:
        step: Record = json.loads(path.read_text())
        if {"step", "link", "gpu", "nccl", "pauses"} <= step.keys():
            return step
    except (ValueError, AttributeError):
        pass
    raise KtbridgeError(f"{path} is no recorded step.", "Give files of `timeline.py record`.")


def draw(told: dict[str, Record], path: Path) -> None:
    """A strip for each recorded step: link above GPU."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 1.3 * len(told)), layout="constrained")
    for place, (name, step) in enumerate(told.items()):
        axes = figure.add_subplot(len(told), 1, place + 1)
        for row, (key, color) in enumerate((("gpu", "tab:orange"), ("link", "tab:blue"))):
            bars = [(begin, end - begin) for begin, end in step[key]]
            axes.broken_barh(bars, (row + 0.1, 0.8), color=color)
        axes.set(yticks=(0.5, 1.5), yticklabels=("GPU", "link"), xlim=(0, step["step"]))
        axes.set_title(f"{name}: a step of {step['step']:,.0f} ms", fontsize=9, loc="left")
    axes.set_xlabel("ms")
    figure.savefig(path, dpi=150)


@click.group()
def main() -> None:
    """Record and show a step of `ktbridge train`."""


FILE: Any = click.Path(dir_okay=False, path_type=Path)


@main.command(cls=Command)
@click.argument("path", metavar="STEP.json", type=FILE)
@click.option("--step", default=STEP, show_default=True, type=click.IntRange(2))
@click.argument("words", nargs=-1, required=True)
def record(path: Path, step: int, words: tuple[str, ...]) -> None:
    """Run `ktbridge WORDS` and record one step of it."""
    import ktbridge.sft  # before torch: it lets OpenMP's idle threads sleep

    # isort: split
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ktbridge.cli import main as ktbridge

    recorder, first = Recorder(path.resolve(), step), os.environ.get("RANK", "0") == "0"
    if first:
        register_optimizer_step_post_hook(recorder)
    try:
        ktbridge(list(words), prog_name="ktbridge")
    except SystemExit as ended:
        if ended.code or recorder.recorded or not first:
            raise
    raise KtbridgeError(
        f"the run ended before its step {step}: nothing was recorded in {path}.",
        "Lower --step, or give the run more steps.",
    )


@main.command(cls=Command)
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--plot", type=FILE, help="Draw them.")
def show(paths: tuple[Path, ...], plot: Path | None) -> None:
    """Show recorded steps."""
    told = {path.stem: read_step(path) for path in paths}
    made = plain_table("ms", "step", "link busy", "GPU busy", "neither", "NCCL")
    for name, step in told.items():
        both = join_intervals([tuple(each) for each in (*step["link"], *step["gpu"])])
        times = (
            step["step"],
            sum_lengths(step["link"]),
            sum_lengths(step["gpu"]),
            step["step"] - sum_lengths(both),
            sum_lengths(step["nccl"]),
        )
        made.add_row(name, *(f"{time:,.0f}" for time in times))
    console.print(made)
    for name, step in told.items():
        console.print(f"{name}: the link's longest pauses", markup=False)
        for pause in step["pauses"]:
            begin, end = pause["from"], pause["to"]
            ran = ", ".join(f"{kernel[:60]} {took:,.1f}" for kernel, took in pause["kernels"])
            line = f"  {begin:,.0f} to {end:,.0f} ({end - begin:,.0f}): {ran or 'no kernel'}"
            console.print(line, markup=False, soft_wrap=True)
    if plot:
        draw(told, plot)


if __name__ == "__main__":
    main()
