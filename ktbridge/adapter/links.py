"""Links in a directory that others made: they may lead to files of the reader's own, which nobody meant to
have read, copied or uploaded. In the Hub's cache a snapshot consists of links into its repository's blobs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from ktbridge.codes import problem
from ktbridge.errors import Problem


def leads_out(path: Path) -> Path | None:
    """Return a link's target, if it is there, and neither in its directory nor in the Hub's cache."""
    if not path.is_symlink() or not path.exists():
        return None
    target, place = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    within = [place]
    for above in place.parents:
        if above.name == "snapshots":
            within.append(above.parent / "blobs")
    return None if any(one in target.parents for one in within) else target


def check_links(paths: Iterable[Path]) -> Iterator[Problem]:
    """KTB930 for each link among ``paths`` that leads out."""
    for path in paths:
        if target := leads_out(path):
            copy = f"cp --remove-destination {shlex.quote(str(target))} {shlex.quote(str(path))}"
            step = f"if that is meant, put the file there: {copy}"
            found = f"is a link to {target}"
            yield problem("KTB930", str(path), found, "a file in its directory", next_step=step)
