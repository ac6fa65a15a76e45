"""``ktbridge eval``: ask a bench's questions of each arm and score the answers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ktbridge.cli._app import Command


@click.command(cls=Command)
@click.option("--bench", required=True, help="A bench of ours (nekobench) or a folder of yours.")
@click.option(
    "--items",
    type=click.Path(path_type=Path),
    help="Your copy of the data, for a bench that comes without.",
)
@click.option(
    "--train-data",
    type=click.Path(path_type=Path),
    help="Warn of items that this file of training rows holds.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    required=True,
    metavar="NAME=MODEL@URL",
    help="What to ask; repeat it. base, expert and full are compared in this order.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The run's directory; what is stored there is not asked again.",
)
@click.option("--slices", help="Only these slices, comma-separated.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="At most this many items, spread evenly over the slices.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=900,
    show_default=True,
    help="Seconds to wait for one answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on stdout.")
def command(
    bench: str,
    items: Path | None,
    train_data: Path | None,
    arms: tuple[str, ...],
    out: Path,
    slices: str | None,
    limit: int | None,
    concurrency: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Ask a bench's questions of each arm, store the answers, and report.

    Servers are checked first: an invented adapter name must be refused, and the arms must not all
    answer alike. Answers are stored as they come, so a run that stopped, for whatever reason, goes
    on when the same command is given again. Arms may be asked in separate runs into one --out. A
    key for the servers is read from KTBRIDGE_API_KEY.

    \b
    Example:
      ktbridge eval --bench nekobench --out runs/neko \\
        --arm base=tiny:base@http://127.0.0.1:8000 \\
        --arm expert=tiny@http://127.0.0.1:8000 \\
        --arm full=tiny:neko@http://127.0.0.1:8000
    """
    from ktbridge.cli._ui import emit_json, print_problems, stderr
    from ktbridge.cli.report import print_results
    from ktbridge.errors import UsageError
    from ktbridge.eval import collect, load_bench, parse_arms, write_report
    from ktbridge.eval.contamination import find_contamination
    from ktbridge.eval.preflight import Preflight

    parsed = parse_arms(arms)
    loaded = load_bench(bench, items)
    if train_data is not None:
        print_problems(find_contamination(loaded, train_data).problems())
    chosen = tuple(name.strip() for name in slices.split(",") if name.strip()) if slices else ()
    if slices is not None and not chosen:
        raise UsageError(
            f"--slices {slices!r} names no slice.",
            "choose from " + ", ".join(one.name for one in loaded.slices),
        )

    def say_preflight(found: Preflight) -> None:
        print_problems(found.problems)
        for pair in found.identical:
            stderr.print(
                f"preflight: {' and '.join(pair['arms'])}: "
                f"{pair['share']:.0%} of {pair['n']} probe answers are byte-identical",
                markup=False,
            )

    try:
        with _progress() as on_progress:
            done = collect(
                loaded,
                parsed,
                out,
                slices=chosen,
                limit=limit,
                concurrency=concurrency,
                timeout=timeout,
                api_key=os.environ.get("KTBRIDGE_API_KEY"),
                on_preflight=say_preflight,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        stderr.print(
            f"interrupted; every answer received is in {out}. The same command goes on from there.",
            soft_wrap=True,
            markup=False,
        )
        sys.exit(130)
    stderr.print(f"asked {done.asked} questions; {done.stored} answers were stored before")
    results = write_report(out)
    if as_json:
        emit_json(results)
    else:
        print_results(results, out)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and ETA on stderr; nothing is drawn where that is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ktbridge.cli._ui import stderr

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("preflight", total=None, pace="")
        start: tuple[float, int] | None = None

        def on_progress(done: int, total: int) -> None:
            nonlocal start
            now = time.monotonic()
            if start is None:
                start = (now, done)
            pace = ""
            # Answers stored by an earlier run took no time now: they don't count for the rate.
            if done > start[1] and now > start[0]:
                rate = (done - start[1]) / (now - start[0])
                left = round((total - done) / rate)
                pace = f"{rate:.1f}/s, eta {left // 60}:{left % 60:02d}"
            bar.update(task, description="asking", completed=done, total=total, pace=pace)

        yield on_progress
