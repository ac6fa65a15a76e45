"""Progress of a run: rate, ETA, errors by kind, tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ktbridge.cli._ui import clock, stderr

if TYPE_CHECKING:
    from ktbridge.eval.run import Progress

_REDRAW = 0.1  # seconds; drawing must not cost more than requests
_LOGGED = 60.0  # seconds between lines if stderr is a file


class Pace:
    """Answers per second and time left, from the requests of this run only."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def __call__(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        since, before = self._start
        if done <= before or now <= since:
            return ""
        rate = (done - before) / (now - since)
        return f"{rate:.1f}/s, eta {clock((total - done) / rate)}"


def describe(progress: Progress, pace: str) -> str:
    """One line: pace, tokens so far, and failed attempts by kind, most frequent first."""
    parts = [pace] if pace else []
    if tokens := progress.prompt_tokens + progress.completion_tokens:
        parts.append(f"{short(tokens)} tokens, {short(progress.completion_tokens)} written")
    if kinds := ", ".join(f"{n} {kind}" for kind, n in progress.faults.most_common() if n):
        parts.append(f"failed attempts: {kinds}")
    return " · ".join(parts)


@contextmanager
def show_progress(label: str) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr; without a terminal, one line per minute."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    terminal = stderr.is_terminal
    with Bars(*columns, console=stderr, transient=True, disable=not terminal) as bars:
        task = bars.add_task("preflight", total=None, status="")
        pace, last = Pace(), time.monotonic()
        if not terminal:  # a slow server's first answers may take minutes
            stderr.print("preflight ...", markup=False)

        def on_progress(progress: Progress) -> None:
            nonlocal last
            now = time.monotonic()
            rate = pace(progress.done, progress.total)
            first = progress.done == progress.stored
            whole = progress.done == progress.total
            if terminal and (first or whole or now - last >= _REDRAW):
                last = now
                bars.update(
                    task,
                    description=label,
                    completed=progress.done,
                    total=progress.total,
                    status=describe(progress, rate),
                )
            elif not terminal and now - last >= _LOGGED:
                last = now
                line = f"{label}: {progress.done} of {progress.total}, {describe(progress, rate)}"
                stderr.print(line, markup=False, soft_wrap=True)

        yield on_progress


def short(count: int) -> str:
    """1234567 as "1.2 M"."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
