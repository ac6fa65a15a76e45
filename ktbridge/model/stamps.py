"""Detect whether a file changed since it was first read: size, modification time, inode."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Stamp(NamedTuple):
    """A file as it was at one moment. Writing to it changes the time, replacing it the inode."""

    size: int
    mtime_ns: int
    inode: int


Stamps = dict[Path, "Stamp | None"]
"""Stamps of files; None for a missing one."""


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file from its stat result."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file now, links followed; None if it is missing."""
    try:
        return stamp_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_stamps(paths: Iterable[Path]) -> Stamps:
    """The stamps of files now."""
    return {path: stamp(path) for path in paths}


def difference(before: Stamp | None, now: Stamp | None) -> str | None:
    """Return what happened to a file between two stamps, as a phrase; None if nothing changed."""
    if before == now:
        return None
    if before is None:
        return "appeared"
    if now is None:
        return "was removed"
    if now.inode != before.inode:
        return "was replaced by another file"
    if now.size != before.size:
        return f"went from {before.size} to {now.size} bytes"
    return "was written to"
