"""Condensed notes on a configuration's keys: a file for another tool may cause a dozen."""

from __future__ import annotations

from collections.abc import Sequence

from ktbridge.errors import Problem

_ALIKE = "KTC004"
_LEAVE = "Leave it out"


def print_notes(notes: Sequence[Problem]) -> None:
    """Print ``config.notes`` to stderr: one line per ignored key, under one heading."""
    from ktbridge.cli._ui import STYLES, print_problems, shown, stderr

    alike = [note for note in notes if note.code == _ALIKE]
    if len(alike) < 2:
        print_problems(notes)
        return
    print_problems(note for note in notes if note.code != _ALIKE)
    path = alike[0].where.rpartition(": ")[0]
    style = STYLES["warning"]
    stderr.print(
        f"[{style}]warning[/] {_ALIKE}  {shown(path)}: {len(alike)} keys to leave out or change",
        soft_wrap=True,
    )
    keys = [note.where.rpartition(": ")[2].removeprefix("kt_config.") for note in alike]
    width = max(map(len, keys))
    for key, note in zip(keys, alike, strict=True):
        step = note.next_step.rstrip(".")
        if step.startswith(_LEAVE):  # already in the heading
            step = step.removeprefix(_LEAVE).lstrip(";:. ")
        text = f"{note.found}; {step}" if step else note.found
        stderr.print(f"    [bold]{shown(key.ljust(width))}[/]  {shown(text)}", soft_wrap=True)
