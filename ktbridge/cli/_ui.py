"""Shared output of commands: console, progress bar, table of problems."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table as Grid

from ktbridge.document import Block, FactList, Phrase, ProblemList, Section, Sentences, Table
from ktbridge.errors import NOTES_FILE, Problem, worst_first
from ktbridge.files import digests


def _width(stream: TextIO | None) -> int | None:
    """Piped output has no width, and rich's default of 80 columns would fold paths in tables."""
    columns = os.environ.get("COLUMNS", "")
    terminal = stream is not None and stream.isatty()
    return None if terminal or columns.isdigit() else 110


_OBEYED = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""What JSON lets pass and a terminal obeys: C1 controls, line ends, and changes of direction."""
_UNSEEN = re.compile(f"[{_OBEYED}]")
_CONTROL = re.compile(f"[\x00-\x09\x0b-\x1f{_OBEYED}]")


class PlainConsole(Console):
    """A console whose terminal obeys us, never a name that is printed on it, as "tiny:cat:base" is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROL.search(segment.text):
                yield segment
            else:
                text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], segment.text)
                yield Segment(text, segment.style)


# Results go to stdout, so that they can be piped; progress and messages go to stderr.
console = PlainConsole(width=_width(sys.stdout))
stderr = PlainConsole(stderr=True, width=_width(sys.stderr))

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
IGNORED_KEY = "KTC004"


LONGEST_SHOWN = 4000  # characters of one line of a problem


def emit_json(value: object) -> None:
    """Print one JSON document on stdout and nothing else."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    print(_UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


def printable(text: str) -> str:
    """``text`` with \\xNN for control characters: names in files may contain anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(text: str) -> str:
    """``text`` escaped, so that a console with markup prints it literally; of a long one the beginning."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]} … ({len(text)} characters)"
    return escape(printable(text))


def _new_ones(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems without notes that an earlier command of the same run printed; those are counted."""
    given, path = list(problems), os.environ.get(NOTES_FILE)
    if not path:
        return given
    file = Path(path)
    known = set(file.read_text().split()) if file.is_file() else set()
    hashes = [digests.of_text(repr(each)) for each in given]
    found = [
        each
        for each, digest in zip(given, hashes, strict=True)
        if each.severity == "error" or digest not in known
    ]
    if again := len(given) - len(found):
        stderr.print(f"({again} note{'s' if again > 1 else ''} as above)", style="dim")
    with suppress(OSError), file.open("a") as printed:
        printed.writelines(f"{digest}\n" for digest in hashes)
    return found


def print_problems(problems: Iterable[Problem]) -> None:
    """Print problems to stderr, worst first: location, found, expected, and the next step of each."""
    _print_each(_new_ones(problems))


def _print_each(problems: Iterable[Problem]) -> None:
    for problem in worst_first(problems):
        style = STYLES[problem.severity]
        stderr.print(f"[{style}]{problem.severity}[/] {problem.code}  {shown(problem.where)}", soft_wrap=True)
        stderr.print(f"    found     {shown(problem.found)}", soft_wrap=True)
        if problem.expected:
            stderr.print(f"    expected  {shown(problem.expected)}", soft_wrap=True)
        if problem.next_step:
            stderr.print(f"    next      {shown(problem.next_step)}", soft_wrap=True)


_TONES = {"improved": "green", "dropped": "red", "calm": "dim"}
_SENTENCES = {"strong": "[bold]{}[/]", "soft": "[dim]{}[/]", "error": "[bold red]error:[/] {}"}


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print what the terminal shows of a document."""
    after_table = False
    for block in blocks:
        if "terminal" not in block.media:
            continue
        if after_table or isinstance(block, (Section, FactList, Table)):
            console.print()
        after_table = isinstance(block, Table)
        match block:
            case Section():
                console.rule(shown(block.title), align="left")
                print_blocks(block.blocks)
            case FactList():
                for name, value in block.facts:
                    console.print(f"[dim]{name.lower():<8}[/] {shown(value)}")
            case ProblemList():
                for one in block.problems:
                    text = shown(f"{one.severity} {one.code}: {one.where}: {one.found}")
                    console.print(f"[{STYLES[one.severity]}]{text}[/]")
            case Sentences():
                for text in block.texts:
                    console.print(_SENTENCES.get(block.style, "{}").format(shown(text)))
            case Table():
                console.print(_grid(block))


def _grid(table: Table) -> Grid:
    """Return the table as rich draws it; names of rows are not folded."""
    title = f"[bold]{escape(table.title)}[/]" + (f": {shown(table.note)}" if table.note else "")
    grid = Grid(title=title, title_justify="left", title_style="")
    width = max((len(str(row.cells[0]).split(" ")[0]) for row in table.rows), default=0)
    for number, name in enumerate(table.head):
        left = number == 0 or name in table.words
        grid.add_column(
            shown(name),
            justify="left" if left else "right",
            min_width=None if number else width,
            overflow="fold",
        )
    for row in table.rows:
        cells = [
            f"[{_TONES[cell.tone]}]{shown(cell.text)}[/]" if isinstance(cell, Phrase) else shown(cell)
            for cell in row.cells
        ]
        grid.add_row(*cells, style="dim" if row.minor else "")
    return grid


def print_readings(readings: Iterable[str]) -> None:
    """Print to stderr, once each, in which formats of other tools adapters were read."""
    for reading in dict.fromkeys(filter(None, readings)):
        stderr.print(shown(reading), soft_wrap=True)


def print_notes(notes: Sequence[Problem], reasons: bool = True) -> None:
    """Print a configuration's notes to stderr; several ignored keys under one heading.

    A file for another tool may have a dozen of those. ``reasons``: a line each; else their names alone.
    """
    notes = _new_ones(notes)
    ignored = [note for note in notes if note.code == IGNORED_KEY]
    if len(ignored) < 2:
        _print_each(notes)
        return
    _print_each(note for note in notes if note.code != IGNORED_KEY)
    path = ignored[0].where.rpartition(": ")[0]
    keys = [note.where.rpartition(": ")[2].removeprefix("kt_config.") for note in ignored]
    what = f"{len(ignored)} keys to leave out or change"
    if not reasons:
        what += f": {', '.join(keys)}; `ktbridge train {path} --dry-run` says why"
    stderr.print(
        f"[{STYLES['warning']}]warning[/] {IGNORED_KEY}  {shown(path)}: {shown(what)}", soft_wrap=True
    )
    if not reasons:
        return
    width = max(map(len, keys))
    for key, note in zip(keys, ignored, strict=True):
        step = note.next_step.rstrip(".")
        if step.startswith("Leave it out"):  # already in the heading
            step = step.removeprefix("Leave it out").lstrip(";:. ")
        text = f"{note.found}; {step}" if step else note.found
        stderr.print(f"    [bold]{shown(key.ljust(width))}[/]  {shown(text)}", soft_wrap=True)


def clock(seconds: float) -> str:
    """ "1:05", "2:00:09"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


LINE_SECONDS = 15.0  # between progress lines in a log


class Lines:
    """Progress in a log: a line every ``LINE_SECONDS``, with the ETA at the average pace.

    The pace counts from the first call on: what came before it was done in an earlier run, or is the first
    step, which loads and warms up.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._started = self._printed = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if done >= total or now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        line = f"{self._label}: {100 * done // total} %"
        if done > self._first:
            left = (now - self._started) / (done - self._first) * (total - done)
            line += f", {clock(left)} left"
        stderr.print(line, markup=False, soft_wrap=True)

    def describe(self, label: str) -> None:
        self._label = label


class Bar:
    """``bar(done, total)`` is the ``on_progress`` that library functions take."""

    def __init__(self, progress: Progress, label: str, done: int = 0, total: int | None = None) -> None:
        self._progress = progress
        self._task = progress.add_task(label, completed=done, total=total)

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def describe(self, label: str) -> None:
        self._progress.update(self._task, description=label)


@contextmanager
def training_bar(done: int, total: int) -> Iterator[Bar]:
    """Step, a bar, its description, elapsed time and ETA within 80 columns; hidden without a terminal.

    The ETA is by the steps of the last hour without the first, which compiles and loads.
    """
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=10),
        TextColumn("{task.description}", markup=False),  # rich would read emoji, too
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    hidden = not stderr.is_terminal
    # By its 30 seconds rich would have no pace for steps that take longer, and show no ETA.
    hour = 3600.0
    with Progress(
        *columns, console=stderr, transient=True, disable=hidden, speed_estimate_period=hour
    ) as bar:
        yield Bar(bar, "", done, total)


@contextmanager
def progress_bar(label: str, unit: str = "") -> Iterator[Bar | Lines]:
    """A bar with elapsed time and ETA on stderr; without a terminal, periodic lines."""
    if not stderr.is_terminal:
        yield Lines(label)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # rich would read emoji, too
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit, markup=False),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as bar:
        yield Bar(bar, label)


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Redirect libraries' stdout to stderr within the block, and permanently for their child processes.

    wandb's process, for example, still writes after the run; transformers logs about it on import.
    """
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)
