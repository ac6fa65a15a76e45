"""How `ktbridge run` and `ktbridge demo` show the commands of a recipe while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.cli._ui import shown
from ktbridge.recipe import Item, Listener, Serving, Step

if TYPE_CHECKING:
    from rich.console import Console


class Shown(Listener):
    """Prints a heading, the purpose and the command of each step. ``before``: how many headings precede
    these; ``on_ready(url)`` is called when a server answers."""

    def __init__(
        self,
        console: Console,
        plan: Sequence[Item],
        before: int = 0,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        self._console, self._number, self._on_ready = console, 0, on_ready
        self.total = before + count(plan)

    def headline(self, title: str) -> None:
        """The next heading, numbered."""
        self._number += 1
        self._console.rule(f"[bold]{self._number}/{self.total}  {shown(title)}", align="left")

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def begins(self, step: Step, line: str) -> None:
        if step.command == "report":
            self._console.rule("[bold]Report", align="left")
        else:
            self.headline(step.title)
        self.note(step.why)
        self._console.print(f"[bold]$[/] {shown(line)}", style="cyan", soft_wrap=True)

    def keeps(self, step: Step, line: str) -> None:
        self.headline(step.title)
        self._console.print(f"[bold]#[/] {shown(line)}", style="dim", soft_wrap=True)
        self.note("kept: nothing that it depends on has changed since")

    def ready(self, step: Step, url: str, log: Path) -> None:
        self.note(f"ready at {url}; its log is {log.name}")
        if self._on_ready is not None:
            self._on_ready(url)


def count(plan: Sequence[Item]) -> int:
    """The steps of a plan that have a number: all but the report."""
    items = [len(item.asking) + 1 if isinstance(item, Serving) else 1 for item in plan]
    report = sum(isinstance(item, Step) and item.command == "report" for item in plan)
    return sum(items) - report
