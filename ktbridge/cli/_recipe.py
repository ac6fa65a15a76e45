"""Commands of a recipe as `ktbridge run` and `ktbridge demo` show them while they run."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ktbridge.cli._app import terminable
from ktbridge.cli._ui import shown
from ktbridge.recipe import RunListener, Step
from ktbridge.recipe.plan import URL

if TYPE_CHECKING:
    from rich.console import Console

WHY = {
    "train": "Routed experts on our C++ kernels or the GPU, attention by PEFT, the trainer of trl.",
    "convert": "What training left becomes the directories that engines load.",
    "validate": "What an engine would load without complaint and compute wrongly is an error here.",
    "serve": "An OpenAI-compatible server in a process of its own.",
    "verify": "Served logprobs against references computed without our kernels: did each half take effect?",
    "eval": "The same questions with and without the adapter, scored alike.",
    "report": "Its tables; report.html and results.json have every answer.",
}


@contextmanager
def resumable() -> Iterator[None]:
    """Run steps; SIGTERM and a lost terminal end them like Ctrl-C, whose message says how to go on."""
    with terminable():
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
        try:
            yield
        except KeyboardInterrupt as stop:
            stop.args = ("what is finished is kept; the same command goes on from there",)
            raise


def print_commands(directory: Path, lines: Sequence[tuple[str, bool]]) -> None:
    """Print the commands that would be run in ``directory``, and those whose results are kept."""
    click.echo(f"$ cd {shlex.quote(str(directory))}")
    for line, kept in lines:
        click.echo(f"# kept: {line}" if kept else f"$ {line}")
    if any(URL in line for line, kept in lines if not kept):
        click.echo(f"# {URL}: the address that `ktbridge serve` prints when it is ready")


class StepPrinter(RunListener):
    """Prints a heading, the purpose and the command of each step. ``before``: how many headings precede
    these; ``on_ready(url)`` is called when a server answers."""

    def __init__(
        self,
        console: Console,
        plan: Sequence[Step],
        before: int = 0,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        self._console, self._number, self._on_ready = console, 0, on_ready
        self.total = before + sum(step.command != "report" for step in plan)

    def headline(self, title: str) -> None:
        """The next heading, numbered."""
        self._number += 1
        self._console.rule(f"[bold]{self._number}/{self.total}  {shown(title)}", align="left")

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def step_started(self, step: Step, line: str) -> None:
        if step.command == "report":
            self._console.rule("[bold]Report", align="left")
        else:
            self.headline(_title(step))
        self.note(WHY[step.command])
        self._console.print(f"[bold]$[/] {shown(line)}", style="cyan", soft_wrap=True)

    def step_kept(self, step: Step, line: str) -> None:
        self.headline(_title(step))
        self._console.print(f"[bold]#[/] {shown(line)}", style="dim", soft_wrap=True)
        self.note("kept: nothing that it depends on has changed since")

    def server_ready(self, step: Step, url: str, log: Path) -> None:
        self.note(f"ready at {url}; its log is {log.name}")
        if self._on_ready is not None:
            self._on_ready(url)


def _title(step: Step) -> str:
    """The command and, in a sweep, the run."""
    return f"{step.command.capitalize()} {step.run}".rstrip()
